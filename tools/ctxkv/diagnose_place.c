// SPDX-License-Identifier: Apache-2.0
// The placement stage with its faults, and the comparison of a whole cache with a prediction.
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "diagnose.h"

static int64_t slot_of(const dg_call *call, const dg_place *p, int64_t layer, int64_t row) {
    const io_context *context = &call->context;
    if (row < 0 || row >= context->slot_rows) return -1;
    int64_t list = context->slot_lists > 1 && !p->first_slots ? layer : 0;
    int64_t slot = context->slots[list * context->slot_rows + row];
    int64_t capacity = call->blocks * call->block_size;
    if (slot >= 0) return slot > INT64_MAX - 1 ? -1 : slot + p->shift;
    if (p->wrap_padding) return slot >= -capacity ? slot + capacity : -1;
    return p->shift_padding ? slot + p->shift : -1;
}

static int64_t cell_at(const dg_call *call, const dg_place *p, int64_t slot, int64_t h) {
    int64_t size = p->block_size ? p->block_size : call->block_size, cell;
    if (slot < 0) return -1;
    int64_t block = slot / size, offset = slot % size;
    if (block > call->cells) return -1;
    if (p->row_major) {
        cell = (block * call->block_size + offset) * call->H + h;
    } else if (p->shape) {
        cell = (block * call->H + h) * size + offset;
    } else {
        if (block >= call->blocks) return -1;
        cell = (block * call->H + h) * call->block_size + offset;
    }
    return cell < call->cells ? cell : -1;
}

int64_t dg_cell(const dg_call *call, const dg_place *p, int64_t layer, int64_t row, int64_t h) {
    return cell_at(call, p, slot_of(call, p, layer, row), h);
}

int64_t dg_neighbour(
    const dg_call *call, const dg_place *p, int64_t layer, int64_t row, int64_t h, int i) {
    int64_t own = slot_of(call, p, layer, row);
    if (own < 0) return -1;
    int64_t slot = i == 0   ? own + 1
                   : i == 1 ? own - 1
                            : slot_of(call, p, layer, i == 2 ? row + 1 : row - 1);
    return cell_at(call, p, slot, h);
}

int64_t dg_intruder(const dg_call *call, int64_t layer, int64_t row, int i) {
    const dg_place plain = {0};
    int64_t own = slot_of(call, &plain, layer, row);
    if (i >= 2) return i == 2 ? row - 1 : row + 1 < call->T ? row + 1 : -1;
    for (int64_t t = 0; t < call->context.slot_rows; ++t) {
        if (slot_of(call, &plain, layer, t) == own + (i ? 1 : -1)) return t;
    }
    return -1;
}

// ---- comparison ------------------------------------------------------------------------------
typedef struct map {
    const dg_call *call;
    const dg_params *p;
    const dg_content *content;
    int64_t layer;
    int64_t *head;  // [cells] the last writer of a cell, as row*H + head; -1: none
    int64_t *next;  // [T*H] the writer before
    uint8_t *owned; // [places] a row of the chain without a fault goes there
} map;

static int64_t place_of(const dg_call *call, int64_t cell) {
    int64_t size = call->block_size;
    return cell / (call->H * size) * size + cell % size;
}

static bool same(const map *m, int64_t row, int64_t h, int64_t cell) {
    const uint16_t *want = dg_content_cell(m->call, m->content, m->layer, row, h);
    size_t bytes = (size_t)m->call->dim * 4;
    return cell >= 0 && !memcmp(want, dg_recorded(m->call, m->layer, cell), bytes);
}

static bool same_row(const map *m, int64_t row, int neighbour) {
    const dg_call *call = m->call;
    for (int64_t h = 0; h < call->H; ++h) {
        int64_t cell = neighbour < 0
                           ? dg_cell(call, &m->p->place, m->layer, row, h)
                           : dg_neighbour(call, &m->p->place, m->layer, row, h, neighbour);
        if (!same(m, row, h, cell)) return false;
    }
    return true;
}

static bool stale_row(const map *m, int64_t row) {
    for (int64_t h = 0; h < m->call->H; ++h) {
        int64_t cell = dg_cell(m->call, &m->p->place, m->layer, row, h);
        if (cell < 0 || !dg_untouched(m->call, m->layer, cell)) return false;
    }
    return true;
}

static void write_row(map *m, int64_t row, int neighbour) {
    const dg_call *call = m->call;
    for (int64_t h = 0; h < call->H; ++h) {
        int64_t cell = neighbour < 0
                           ? dg_cell(call, &m->p->place, m->layer, row, h)
                           : dg_neighbour(call, &m->p->place, m->layer, row, h, neighbour);
        if (cell < 0) continue;
        int64_t writer = row * call->H + h;
        // A moved row replaces whom it falls upon.
        m->next[writer] = neighbour < 0 ? m->head[cell] : -1;
        m->head[cell] = writer;
    }
}

// A row that is not where it belongs is looked for in the neighbours' places.
static int moved_to(const map *m, int64_t row) {
    if (!m->p->place.neighbour || same_row(m, row, -1)) return -1;
    for (int i = 0; i < DG_NEIGHBOURS; ++i) {
        if (same_row(m, row, i)) return i;
    }
    return -1;
}

static void fill_map(map *m) {
    const dg_call *call = m->call;
    memset(m->head, -1, (size_t)call->cells * sizeof *m->head);
    memset(m->owned, 0, (size_t)(call->blocks * call->block_size));
    for (int pass = 0; pass < 2; ++pass) {
        for (int64_t t = 0; t < call->T; ++t) {
            if (!pass) {
                int64_t cell = dg_cell(call, &call->base.place, m->layer, t, 0);
                if (cell >= 0) m->owned[place_of(call, cell)] = 1;
            }
            if (!m->content->computed[m->layer * call->T + t]) continue;
            if (m->p->place.stale && stale_row(m, t)) continue;
            int to = moved_to(m, t);
            if ((to >= 0) == (pass == 1)) write_row(m, t, to);
        }
    }
}

static uint16_t word(const void *data, int64_t i) {
    uint16_t value;
    memcpy(&value, (const char *)data + 2 * i, sizeof value);
    return value;
}

static uint16_t before_word(const dg_call *call, int64_t layer, int64_t cell, int64_t i) {
    if (!call->before) return call->fill;
    return word(call->before[layer], cell * 2 * call->dim + i);
}

static void note(const map *m, int64_t cell, int64_t writer, dg_match *match) {
    const dg_call *call = m->call;
    const uint8_t *recorded = dg_recorded(call, m->layer, cell);
    int64_t row = writer < 0 ? -1 : writer / call->H;
    const uint16_t *want =
        row < 0 ? NULL : dg_content_cell(call, m->content, m->layer, row, writer % call->H);
    for (int64_t i = 0; i < 2 * call->dim; ++i) {
        uint16_t got = word(recorded, i);
        uint16_t expected = want ? want[i] : before_word(call, m->layer, cell, i);
        if (got == expected) continue;
        ++match->elements;
        if (match->differs) continue;
        match->differs = true;
        match->first = (dg_spot){m->layer, cell, row, i, got, expected};
    }
}

// 1: the cell holds what is predicted, 0: not, -1: nothing is known about it.
static int cell_holds(const map *m, int64_t cell) {
    const dg_call *call = m->call;
    int64_t writer = m->head[cell];
    if (writer < 0) {
        if (!call->before && !call->fill_known) return -1;
        return dg_untouched(call, m->layer, cell);
    }
    for (; writer >= 0; writer = m->next[writer]) {
        if (same(m, writer / call->H, writer % call->H, cell)) return 1;
    }
    return 0;
}

static void compare_layer(map *m, dg_match *match) {
    const dg_call *call = m->call;
    fill_map(m);
    for (int64_t place = 0; place < call->blocks * call->block_size; ++place) {
        int64_t block = place / call->block_size, offset = place % call->block_size;
        bool counted = m->owned[place], known = false, holds = true;
        for (int64_t h = 0; h < call->H; ++h) {
            int64_t cell = (block * call->H + h) * call->block_size + offset;
            int state = cell_holds(m, cell);
            known |= state >= 0;
            counted |= m->head[cell] >= 0 || state == 0;
            if (state) continue;
            holds = false;
            note(m, cell, m->head[cell], match);
        }
        if (!counted || !known) continue;
        ++match->places;
        match->matched += holds;
    }
}

bool dg_compare(
    const dg_call *call, const dg_params *p, const dg_content *content, dg_match *match) {
    map m = {.call = call, .p = p, .content = content};
    *match = (dg_match){0};
    m.head = malloc((size_t)(call->cells + 1) * sizeof *m.head);
    m.next = malloc((size_t)(call->T * call->H + 1) * sizeof *m.next);
    m.owned = malloc((size_t)(call->blocks * call->block_size + 1));
    bool ok = m.head && m.next && m.owned;
    for (m.layer = 0; ok && m.layer < call->L; ++m.layer) compare_layer(&m, match);
    free(m.head);
    free(m.next);
    free(m.owned);
    if (!ok) cli_fail("out of memory for the comparison");
    return ok;
}
