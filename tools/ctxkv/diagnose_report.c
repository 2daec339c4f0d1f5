// SPDX-License-Identifier: Apache-2.0
// Where the recorded caches differ from the chain without a fault: counts, first places, a grid.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "diagnose.h"

#define SOUGHT 1024 // rows of a layer that are looked for in other places

typedef struct survey {
    const dg_call *call;
    const dg_result *result;
    dg_report *report;
    int64_t layer;
    uint8_t *named;   // [places]
    uint8_t *seen[2]; // K, V: [H + dim] heads and columns that differ
} survey;

static uint16_t word(const void *data, int64_t i) {
    uint16_t value;
    memcpy(&value, (const char *)data + 2 * i, sizeof value);
    return value;
}

// Values in their order; the distance of two is a count of representable values.
static int64_t ordered(const dg_call *call, uint16_t bits) {
    int sign = dg_digits(call) == 2 ? 0x80 : 0x8000;
    int64_t magnitude = bits & (sign - 1);
    return bits & sign ? -magnitude : magnitude;
}

static int64_t cell_of_place(const dg_call *call, int64_t place, int64_t h) {
    return (place / call->block_size * call->H + h) * call->block_size + place % call->block_size;
}

static int64_t place_of(const dg_call *call, int64_t cell) {
    return cell / (call->H * call->block_size) * call->block_size + cell % call->block_size;
}

static bool row_at(const survey *s, int64_t row, int64_t place) {
    const dg_call *call = s->call;
    for (int64_t h = 0; h < call->H; ++h) {
        const uint16_t *want = dg_content_cell(call, &s->result->base, s->layer, row, h);
        const uint8_t *got = dg_recorded(call, s->layer, cell_of_place(call, place, h));
        if (memcmp(want, got, (size_t)call->dim * 4)) return false;
    }
    return true;
}

static bool untouched(const survey *s, int64_t place) {
    for (int64_t h = 0; h < s->call->H; ++h) {
        if (!dg_untouched(s->call, s->layer, cell_of_place(s->call, place, h))) return false;
    }
    return true;
}

static void compare_head(survey *s, int64_t row, int64_t h, int part, bool counted) {
    const dg_call *call = s->call;
    const dg_place *place = &call->base.place;
    int64_t cell = dg_cell(call, place, s->layer, row, h), dim = call->dim;
    const uint16_t *want = dg_content_cell(call, &s->result->base, s->layer, row, h) + part * dim;
    const uint8_t *got = dg_recorded(call, s->layer, cell) + part * dim * 2;
    dg_part *to = &s->report->layers[s->layer].part[part];
    int32_t count = 0;
    for (int64_t i = 0; i < dim; ++i) {
        uint16_t recorded = word(got, i);
        if (recorded == want[i]) continue;
        ++count;
        if (!counted) continue;
        if (!to->elements++)
            to->first = (dg_spot){s->layer, cell, row, part * dim + i, recorded, want[i]};
        int64_t ulp = llabs(ordered(call, recorded) - ordered(call, want[i]));
        if (ulp > to->max_ulp) to->max_ulp = ulp;
        to->heads += !s->seen[part][h];
        to->columns += !s->seen[part][call->H + i];
        s->seen[part][h] = s->seen[part][call->H + i] = 1;
    }
    s->report->grid[part][(s->layer * call->H + h) * call->T + row] = count;
}

static void seek(survey *s, dg_layer *to, int64_t row, int64_t own) {
    for (int64_t place = 0; place < s->call->blocks * s->call->block_size; ++place) {
        if (place == own || !row_at(s, row, place)) continue;
        if (!to->elsewhere++) to->elsewhere_row = row, to->elsewhere_place = place;
        return;
    }
}

static void survey_row(survey *s, int64_t row, int64_t *sought) {
    const dg_call *call = s->call;
    dg_layer *to = &s->report->layers[s->layer];
    int64_t cell = dg_cell(call, &call->base.place, s->layer, row, 0);
    if (cell < 0 || !s->result->base.computed[s->layer * call->T + row]) return;
    int64_t place = place_of(call, cell), before = to->elsewhere;
    s->named[place] = 1;
    ++to->stored;
    bool missing = false;
    if (!row_at(s, row, place)) {
        if (++*sought <= SOUGHT) seek(s, to, row, place);
        missing = untouched(s, place);
        if (missing && !to->missing++) to->missing_row = row;
    }
    // A row that is somewhere else, or nowhere, says nothing about the stages before.
    bool counted = !missing && to->elsewhere == before;
    for (int part = 0; part < 2; ++part) {
        int64_t elements = to->part[part].elements;
        for (int64_t h = 0; h < call->H; ++h) compare_head(s, row, h, part, counted);
        to->part[part].rows += to->part[part].elements > elements;
    }
}

static void survey_unnamed(survey *s) {
    const dg_call *call = s->call;
    dg_layer *to = &s->report->layers[s->layer];
    if (!call->before && !call->fill_known) return;
    for (int64_t place = 0; place < call->blocks * call->block_size; ++place) {
        if (s->named[place] || untouched(s, place)) continue;
        if (to->unnamed++) continue;
        for (int64_t h = 0; h < call->H; ++h) {
            int64_t cell = cell_of_place(call, place, h);
            for (int64_t i = 0; i < 2 * call->dim; ++i) {
                uint16_t recorded = word(dg_recorded(call, s->layer, cell), i);
                uint16_t expected = call->fill;
                if (call->before) expected = word(call->before[s->layer], cell * 2 * call->dim + i);
                if (recorded == expected) continue;
                to->unnamed_first = (dg_spot){s->layer, cell, -1, i, recorded, expected};
                i = 2 * call->dim, h = call->H;
            }
        }
    }
}

// "layers 1 to 4", "layer 2", "layers 0, 2, 3".
static void layer_names(const dg_report *report, int64_t L, int part, char *to, size_t size) {
    int64_t count = 0, first = -1, last = -1;
    for (int64_t l = 0; l < L; ++l) {
        if (!report->layers[l].part[part].elements) continue;
        if (first < 0) first = l;
        last = l;
        ++count;
    }
    if (count == 1) {
        snprintf(to, size, "layer %" PRId64, first);
    } else if (count == last - first + 1) {
        snprintf(to, size, "layers %" PRId64 " to %" PRId64, first, last);
    } else {
        snprintf(to, size, "%" PRId64 " layers from layer %" PRId64 " on", count, first);
    }
}

static void tell_start(const dg_call *call, dg_report *report) {
    int64_t elements[2] = {0}, placed = 0;
    char *to = report->starts, layers[64] = "";
    size_t size = sizeof report->starts;
    for (int64_t l = 0; l < call->L; ++l) {
        const dg_layer *layer = &report->layers[l];
        for (int part = 0; part < 2; ++part) elements[part] += layer->part[part].elements;
        placed += layer->missing + layer->elsewhere + layer->unnamed;
    }
    layer_names(report, call->L, elements[1] ? 1 : 0, layers, sizeof layers);
    const char *also = placed ? "; the placement differs, too" : "";
    if (elements[1] && elements[0]) {
        snprintf(
            to, size, "%s: V differs already, in %s%s",
            call->kind == CTXKV_CACHE_BF16
                ? "in the norms or the projection"
                : "in the norms, the projection or the conversion to the cache's type",
            layers, also);
    } else if (elements[0]) {
        snprintf(
            to, size,
            "in the K weights, the K norm or RoPE: K differs in %s, V, and with it the norms, "
            "nowhere%s",
            layers, also);
    } else if (elements[1]) {
        snprintf(
            to, size,
            "in the V weights, V's norm or scale, or V's way to the cache: V differs in %s, K "
            "nowhere%s",
            layers, also);
    } else if (placed) {
        snprintf(to, size, "in the placement: the rows that were written have the right bits");
    }
}

bool dg_report_make(const dg_call *call, const dg_result *result, dg_report *report) {
    survey s = {.call = call, .result = result, .report = report};
    size_t cells = (size_t)(call->L * call->H * call->T), marks = (size_t)(call->H + call->dim);
    *report = (dg_report){0};
    report->layers = calloc((size_t)call->L, sizeof *report->layers);
    s.named = malloc((size_t)(call->blocks * call->block_size) + 1);
    bool ok = report->layers && s.named;
    for (int part = 0; part < 2; ++part) {
        report->grid[part] = malloc((cells + 1) * sizeof *report->grid[part]);
        s.seen[part] = malloc(marks);
        ok = ok && report->grid[part] && s.seen[part];
        if (ok) memset(report->grid[part], -1, cells * sizeof *report->grid[part]);
    }
    for (s.layer = 0; ok && s.layer < call->L; ++s.layer) {
        int64_t sought = 0;
        memset(s.named, 0, (size_t)(call->blocks * call->block_size));
        for (int part = 0; part < 2; ++part) memset(s.seen[part], 0, marks);
        for (int64_t t = 0; t < call->T; ++t) survey_row(&s, t, &sought);
        survey_unnamed(&s);
    }
    if (ok) tell_start(call, report);
    free(s.named);
    free(s.seen[0]);
    free(s.seen[1]);
    if (!ok) cli_fail("out of memory for the report");
    return ok;
}

void dg_report_free(dg_report *report) {
    free(report->layers);
    free(report->grid[0]);
    free(report->grid[1]);
    *report = (dg_report){0};
}
