// SPDX-License-Identifier: Apache-2.0
// One thread's scratch, and its memo: hypotheses share every stage that they do not change.
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "diagnose.h"

#define NORMED 512  // rows remembered
#define UNITS 65536 // groups of DG_UNIT columns remembered
#define TABLES 1024 // rotary rows remembered

typedef struct normed_key {
    dg_norms norms;
    int32_t layer, row, used, zero;
} normed_key;

typedef struct unit_key {
    dg_norms norms;
    dg_project project;
    int32_t layer, row, part, head, first, used;
} unit_key;

typedef struct table_key {
    int64_t position;
    float theta;
    int32_t table, layer, round, rotary, spread, used, zero;
} table_key;

struct dg_worker {
    const dg_call *call;
    dg_scratch scratch;
    normed_key *normed_keys;
    uint16_t *normed; // [NORMED][D]
    unit_key *unit_keys;
    uint16_t *units; // [UNITS][DG_UNIT]
    table_key *table_keys;
    float *tables; // [TABLES][dim]
};

dg_worker *dg_worker_make(const dg_call *call) {
    dg_worker *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    size_t D = (size_t)call->D, dim = (size_t)call->dim;
    w->call = call;
    w->scratch.hidden = malloc(D * sizeof(float));
    w->scratch.values = malloc(D * sizeof(float));
    w->scratch.weights = malloc(dim * D * sizeof(uint16_t));
    w->scratch.tier = aligned_alloc(64, CTXKV__PROJECTION_SCRATCH);
    w->normed_keys = calloc(NORMED, sizeof *w->normed_keys);
    w->normed = malloc(NORMED * D * sizeof *w->normed);
    w->unit_keys = calloc(UNITS, sizeof *w->unit_keys);
    w->units = malloc((size_t)UNITS * DG_UNIT * sizeof *w->units);
    w->table_keys = calloc(TABLES, sizeof *w->table_keys);
    w->tables = malloc(TABLES * dim * sizeof *w->tables);
    if (w->scratch.hidden && w->scratch.values && w->scratch.weights && w->scratch.tier &&
        w->normed_keys && w->normed && w->unit_keys && w->units && w->table_keys && w->tables) {
        return w;
    }
    dg_worker_free(w);
    return NULL;
}

void dg_worker_free(dg_worker *w) {
    if (!w) return;
    free(w->scratch.hidden);
    free(w->scratch.values);
    free(w->scratch.weights);
    free(w->scratch.tier);
    free(w->normed_keys);
    free(w->normed);
    free(w->unit_keys);
    free(w->units);
    free(w->table_keys);
    free(w->tables);
    free(w);
}

dg_scratch *dg_worker_scratch(dg_worker *w) {
    return &w->scratch;
}

const dg_call *dg_worker_call(const dg_worker *w) {
    return w->call;
}

static size_t hash(const void *key, size_t size) {
    const uint32_t *words = key;
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < size / 4; ++i) h = (h ^ words[i]) * 1099511628211u;
    return (size_t)(h ^ h >> 29);
}

const uint16_t *dg_memo_normed(dg_worker *w, const dg_norms *p, int64_t layer, int64_t row) {
    if (!p->layer.present) layer = 0;
    normed_key key = {*p, (int32_t)layer, (int32_t)row, 1, 0};
    size_t slot = hash(&key, sizeof key) % NORMED;
    uint16_t *to = w->normed + slot * (size_t)w->call->D;
    if (!memcmp(&w->normed_keys[slot], &key, sizeof key)) return to;
    dg_normed(w, p, layer, row, to);
    w->normed_keys[slot] = key;
    return to;
}

const uint16_t *dg_memo_unit(
    dg_worker *w, const dg_params *p, int64_t layer, int64_t row, int part, int64_t h,
    int64_t first) {
    unit_key key = {p->norms, p->project, (int32_t)layer, (int32_t)row,
                    part,     (int32_t)h, (int32_t)first, 1};
    size_t slot = hash(&key, sizeof key) % UNITS;
    uint16_t *to = w->units + slot * DG_UNIT;
    if (!memcmp(&w->unit_keys[slot], &key, sizeof key)) return to;
    const uint16_t *x = dg_memo_normed(w, &p->norms, layer, row);
    dg_project_rows(w, &p->project, layer, part, h, first, DG_UNIT, x, 1, to, DG_UNIT);
    w->unit_keys[slot] = key;
    return to;
}

float *dg_worker_table(
    dg_worker *w, const dg_key *p, int64_t layer, int64_t position, bool *filled) {
    if (p->table != DG_TABLE_GIVEN || w->call->context.table_lists == 1) layer = 0;
    table_key key = {position,  p->theta, p->table, (int32_t)layer, p->table_round, p->rotary,
                     p->spread, 1,        0};
    size_t slot = hash(&key, sizeof key) % TABLES;
    *filled = !memcmp(&w->table_keys[slot], &key, sizeof key);
    w->table_keys[slot] = key;
    return w->tables + slot * (size_t)w->call->dim;
}

typedef struct each {
    dg_worker **workers;
    dg_work work;
    void *user;
    int64_t count;
    atomic_llong next;
} each;

static void take(void *user, int64_t index) {
    each *shared = user;
    for (;;) {
        int64_t i = atomic_fetch_add(&shared->next, 1);
        if (i >= shared->count) return;
        shared->work(shared->workers[index], shared->user, i);
    }
}

void dg_each(const dg_call *call, dg_worker **workers, int64_t count, dg_work work, void *user) {
    each shared = {workers, work, user, count, 0};
    cli_parallel(call->threads, call->threads, take, &shared);
}
