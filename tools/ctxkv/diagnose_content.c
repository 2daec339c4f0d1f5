// SPDX-License-Identifier: Apache-2.0
// What the chain gives under some parameters: for all rows, or for one cell at a time.
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "diagnose.h"

#define CHUNK 128 // rows normed at a time

typedef struct making {
    const dg_call *call;
    const dg_params *p;
    dg_content *content;
    uint16_t *x; // [CHUNK][D]
    int64_t layer, first, rows;
} making;

static uint16_t *projected_at(const making *m, int64_t l, int64_t t, int64_t h) {
    const dg_call *call = m->call;
    return m->content->projected + (((l * call->T + t) * call->H + h) * 2) * call->dim;
}

static void norm_work(dg_worker *w, void *user, int64_t index) {
    making *m = user;
    dg_normed(w, &m->p->norms, m->layer, m->first + index, m->x + index * m->call->D);
}

static void project_work(dg_worker *w, void *user, int64_t index) {
    making *m = user;
    int part = (int)(index % 2);
    int64_t h = index / 2, dim = m->call->dim;
    if (part && m->p->value.source != DG_V_PROJECTED) return;
    uint16_t *out = projected_at(m, m->layer, m->first, h) + part * dim;
    dg_project_rows(
        w, &m->p->project, m->layer, part, h, 0, dim, m->x, m->rows, out, m->call->H * 2 * dim);
}

static bool project(making *m, dg_worker **workers) {
    const dg_call *call = m->call;
    size_t bytes = (size_t)(call->L * call->T * call->H * 2 * call->dim) * 2;
    m->content->projected = malloc(bytes + 1);
    m->x = malloc((size_t)(CHUNK * call->D) * sizeof *m->x);
    if (!m->content->projected || !m->x) return false;
    for (m->first = 0; m->first < call->T; m->first += CHUNK) {
        m->rows = call->T - m->first < CHUNK ? call->T - m->first : CHUNK;
        for (m->layer = 0; m->layer < call->L; ++m->layer) {
            if (!m->layer || m->p->norms.layer.present)
                dg_each(call, workers, m->rows, norm_work, m);
            dg_each(call, workers, call->H * 2, project_work, m);
        }
    }
    return true;
}

// ---- positions of another order: found by trying every row's position for each row -------------
static bool position_fits(
    dg_worker *w, making *m, int64_t layer, int64_t row, int64_t cell, int64_t position) {
    const dg_call *call = m->call;
    uint16_t key[CTXKV__MAX_HEAD_DIM];
    const uint16_t *in = projected_at(m, layer, row, 0);
    if (!dg_finish_key(w, m->p, layer, position, in, key)) return false;
    const uint8_t *recorded = dg_recorded(call, layer, cell);
    if (m->p->store.swapped) recorded += call->dim * 2;
    return !memcmp(recorded, key, (size_t)call->dim * 2);
}

static void order_work(dg_worker *w, void *user, int64_t row) {
    making *m = user;
    const dg_call *call = m->call;
    int64_t own = dg_position(call, &m->p->key, row), cell = -1, layer = 0;
    m->content->positions[row] = own;
    for (; layer < call->L && cell < 0; ++layer) cell = dg_cell(call, &m->p->place, layer, row, 0);
    if (cell < 0 || position_fits(w, m, --layer, row, cell, own)) return;
    for (int64_t t = 0; t < call->T; ++t) {
        int64_t position = dg_position(call, &m->p->key, t);
        if (!position_fits(w, m, layer, row, cell, position)) continue;
        m->content->positions[row] = position;
        return;
    }
}

static void finish_work(dg_worker *w, void *user, int64_t index) {
    making *m = user;
    const dg_call *call = m->call;
    const dg_params *p = m->p;
    int64_t l = index / call->T, t = index % call->T, dim = call->dim;
    int64_t position =
        m->content->positions ? m->content->positions[t] : dg_position(call, &p->key, t);
    bool swapped = p->store.swapped, own = p->value.source == DG_V_PROJECTED;
    uint8_t *computed = &m->content->computed[index];
    *computed = 1;
    for (int64_t h = 0; h < call->H && *computed; ++h) {
        uint16_t *cell = m->content->cells + (index * call->H + h) * 2 * dim;
        const uint16_t *in = projected_at(m, l, t, h);
        *computed =
            dg_finish_key(w, p, l, position, in, cell + (swapped ? dim : 0)) &&
            dg_finish_value(w, p, l, position, own ? in + dim : in, cell + (swapped ? 0 : dim));
    }
}

bool dg_content_make(
    const dg_call *call, dg_worker **workers, const dg_params *p, const dg_content *base,
    dg_content *content) {
    making m = {.call = call, .p = p, .content = content};
    size_t rows = (size_t)(call->L * call->T);
    *content = (dg_content){0};
    content->cells = malloc(rows * (size_t)(call->H * 2 * call->dim) * 2 + 1);
    content->computed = calloc(rows + 1, 1);
    bool projected = p->value.source == DG_V_PROJECTED;
    bool same = base && !memcmp(&p->norms, &call->base.norms, sizeof p->norms) &&
                !memcmp(&p->project, &call->base.project, sizeof p->project) &&
                (!projected || call->base.value.source == DG_V_PROJECTED);
    bool ok = content->cells && content->computed;
    if (same) {
        content->projected = base->projected;
        content->shared = true;
    }
    ok = ok && (same || project(&m, workers));
    if (ok && p->key.other_order) {
        content->positions = calloc((size_t)call->T + 1, sizeof *content->positions);
        ok = content->positions != NULL;
        if (ok) dg_each(call, workers, call->T, order_work, &m);
    }
    if (ok) dg_each(call, workers, (int64_t)rows, finish_work, &m);
    free(m.x);
    if (ok) return true;
    dg_content_free(content);
    cli_fail("out of memory for %zu rows", rows);
    return false;
}

void dg_content_free(dg_content *content) {
    if (!content->shared) free(content->projected);
    free(content->cells);
    free(content->computed);
    free(content->positions);
    *content = (dg_content){0};
}

const uint16_t *dg_content_cell(
    const dg_call *call, const dg_content *content, int64_t layer, int64_t row, int64_t h) {
    return content->cells + ((layer * call->T + row) * call->H + h) * 2 * call->dim;
}

// ---- one cell ----------------------------------------------------------------------------------
static bool columns_fit(
    dg_worker *w, const dg_params *p, const dg_probe *probe, const uint8_t *recorded) {
    const dg_call *call = dg_worker_call(w);
    int part = p->value.source == DG_V_PROJECTED;
    for (int64_t first = 0; first < call->dim; first += DG_UNIT) {
        uint16_t unit[DG_UNIT];
        const uint16_t *in = dg_memo_unit(w, p, probe->layer, probe->row, part, probe->head, first);
        dg_finish_columns(call, p, probe->layer, in, DG_UNIT, unit);
        if (memcmp(unit, recorded + first * 2, sizeof unit)) return false;
    }
    return true;
}

// A head of K, or of a V that is made of all its columns or of K at its position.
static bool head_fits(
    dg_worker *w, const dg_params *p, const dg_probe *probe, int part, const uint8_t *recorded) {
    const dg_call *call = dg_worker_call(w);
    uint16_t in[CTXKV__MAX_HEAD_DIM], out[CTXKV__MAX_HEAD_DIM];
    int from = part && p->value.source == DG_V_PROJECTED;
    for (int64_t first = 0; first < call->dim; first += DG_UNIT) {
        memcpy(
            in + first, dg_memo_unit(w, p, probe->layer, probe->row, from, probe->head, first),
            DG_UNIT * 2);
    }
    int64_t tries = p->key.other_order ? call->T : 1;
    for (int64_t i = 0; i < tries; ++i) {
        int64_t position = dg_position(call, &p->key, p->key.other_order ? i : probe->row);
        bool made = part ? dg_finish_value(w, p, probe->layer, position, in, out)
                         : dg_finish_key(w, p, probe->layer, position, in, out);
        if (!made) {
            if (tries == 1) return true; // not written: nothing to hold against it
            continue;
        }
        if (!memcmp(out, recorded, (size_t)call->dim * 2)) return true;
    }
    return false;
}

// Whether the row and head of the probe could be what lies in the cell.
static bool fits(dg_worker *w, const dg_params *p, const dg_probe *probe, int64_t cell) {
    const dg_call *call = dg_worker_call(w);
    if (cell < 0) return false;
    const uint8_t *recorded = dg_recorded(call, probe->layer, cell) + probe->part * call->dim * 2;
    int part = p->store.swapped ? 1 - probe->part : probe->part;
    if (part && dg_value_alone(&p->value)) return columns_fit(w, p, probe, recorded);
    return head_fits(w, p, probe, part, recorded);
}

static bool row_untouched(const dg_call *call, const dg_params *p, const dg_probe *probe) {
    for (int64_t h = 0; h < call->H; ++h) {
        int64_t cell = dg_cell(call, &p->place, probe->layer, probe->row, h);
        if (cell < 0 || !dg_untouched(call, probe->layer, cell)) return false;
    }
    return true;
}

static bool moved(dg_worker *w, const dg_params *p, const dg_probe *probe, int64_t cell) {
    const dg_call *call = dg_worker_call(w);
    for (int i = 0; i < DG_NEIGHBOURS; ++i) {
        int64_t to = dg_neighbour(call, &p->place, probe->layer, probe->row, probe->head, i);
        if (fits(w, p, probe, to)) return true;
        int64_t row = dg_intruder(call, probe->layer, probe->row, i);
        dg_probe other = *probe;
        other.row = row;
        if (row >= 0 && fits(w, p, &other, cell)) return true;
    }
    return false;
}

static bool shared_cell(
    const dg_call *call, const dg_params *p, const dg_probe *probe, int64_t cell) {
    for (int64_t t = 0; t < call->T; ++t) {
        for (int64_t h = 0; h < call->H; ++h) {
            if (t == probe->row && h == probe->head) continue;
            if (dg_cell(call, &p->place, probe->layer, t, h) == cell) return true;
        }
    }
    return false;
}

static bool goes_to(const dg_call *call, const dg_place *p, int64_t l, int64_t t, int64_t cell) {
    for (int64_t h = 0; h < call->H; ++h) {
        if (dg_cell(call, p, l, t, h) == cell) return true;
        for (int i = 0; i < DG_NEIGHBOURS && p->neighbour; ++i) {
            if (dg_neighbour(call, p, l, t, h, i) == cell) return true;
        }
    }
    return false;
}

// Whether what lies in the row's right place was written there by some row, where it was written.
static bool place_explained(const dg_call *call, const dg_params *p, const dg_probe *probe) {
    const dg_place *right = &call->base.place;
    int64_t cell = dg_cell(call, right, probe->layer, probe->row, probe->head);
    if (!memcmp(&p->place, right, sizeof *right) || cell < 0) return true;
    if ((!call->before && !call->fill_known) || dg_untouched(call, probe->layer, cell)) return true;
    if (dg_cell(call, &p->place, probe->layer, probe->row, probe->head) == cell) return true;
    for (int64_t t = 0; t < call->T; ++t) {
        if (goes_to(call, &p->place, probe->layer, t, cell)) return true;
    }
    return false;
}

bool dg_probe_holds(dg_worker *w, const dg_params *p, const dg_probe *probe) {
    const dg_call *call = dg_worker_call(w);
    int64_t cell = dg_cell(call, &p->place, probe->layer, probe->row, probe->head);
    if (!place_explained(call, p, probe)) return false;
    if (cell < 0 || fits(w, p, probe, cell)) return true;
    if (p->place.stale && row_untouched(call, p, probe)) return true;
    if (p->place.neighbour && moved(w, p, probe, cell)) return true;
    return shared_cell(call, p, probe, cell);
}

bool dg_strays_explained(const dg_call *call, const dg_params *p, const dg_strays *strays) {
    bool plain = !memcmp(&p->place, &call->base.place, sizeof p->place);
    if (plain) return !strays->count;
    for (int i = 0; i < strays->count; ++i) {
        int64_t t = 0;
        while (t < call->T && !goes_to(call, &p->place, strays->layer[i], t, strays->cell[i])) ++t;
        if (t == call->T) return false;
    }
    return true;
}
