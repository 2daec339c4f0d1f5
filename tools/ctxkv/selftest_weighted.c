// SPDX-License-Identifier: Apache-2.0
// The golden cases of the Qwen3 kind: weighted_norms.csv, weighted_store.csv, weighted_chain.csv.
#include <string.h>

#include "generator.h"
#include "selftest.h"

typedef struct weighted_case {
    cli_tensor x, weight, normed, weights, kv, k_norm, positions, table, slots[ST_MAX_LAYERS];
    const DLTensor *weight_list[1], *lists[ST_MAX_LAYERS];
    cli_caches caches;
    ctxkv_norms_desc norms;
    ctxkv_projection_desc projection;
    ctxkv_store_desc store;
} weighted_case;

static void finish(selftest *st, const char *table, size_t done, size_t total) {
    char label[48];
    snprintf(label, sizeof label, "%s %s", st->label, table);
    cli_place_reset(&st->place);
    cli_place_reset(&st->host);
    cli_progress(label, done, total);
}

static bool make_norms(selftest *st, const st_row *row, weighted_case *it) {
    uint64_t seed = (uint64_t)row->seed;
    uint16_t *x = st_bf16(st, (size_t)(row->T * row->D), seed, 1.0f);
    if (!x || !st_input(st, &it->x, x, CLI_BF16, 2, (int64_t[]){row->T, row->D}) ||
        !st_gain(st, &it->weight, 'b', 1, &row->D, seed + 1, 0.0f) ||
        !st_output(st, &it->normed, CLI_BF16, 3, (int64_t[]){1, row->T, row->D})) {
        return false;
    }
    ctxkv_norms_desc_init(&it->norms);
    it->norms.hidden_size = row->D;
    it->norms.num_layers = row->L;
    it->norms.hidden = (ctxkv_norm){CTXKV_NORM_RMS, row->eps, 0.0f, 0};
    it->norms.layer = (ctxkv_norm){CTXKV_NORM_ABSENT, 0.0f, 0.0f, 0};
    it->norms.hidden_weight = &it->weight.tensor;
    return true;
}

static void check_norms(selftest *st, const st_row *row, weighted_case *it) {
    ctxkv_norms *plan = NULL;
    uint32_t crc;
    bool ok = !ctxkv_norms_create(st->place.device, &it->norms, &plan) &&
              !ctxkv_norms_run(plan, &it->x.tensor, &it->normed.tensor, NULL) &&
              cli_sync(&st->place) &&
              st_crc(st, it->normed.tensor.data, (size_t)(row->T * row->D) * 2, &crc);
    if (ok) {
        st_check(st, row->name, "norm", crc, row->crc[0]);
    } else {
        st_broken(st, row->name, 1);
    }
    ctxkv_norms_destroy(plan);
}

bool st_weighted_norms(selftest *st, const io_csv *csv) {
    static const char *const integers[] = {"D", "T", "seed", NULL};
    static const char *const numbers[] = {"eps", NULL};
    for (size_t i = 0; i < csv->rows; ++i) {
        st_row row;
        weighted_case it;
        if (!st_read(csv, i, integers, numbers, &row)) return false;
        row.L = 1;
        if (!make_norms(st, &row, &it)) return false;
        check_norms(st, &row, &it);
        finish(st, csv->path, i + 1, csv->rows);
    }
    return true;
}

// ---- store -------------------------------------------------------------------------------------
// Seeds of a store's operands, which differ between the two tables.
typedef struct seeds {
    uint64_t positions, table, k_norm, slots;
} seeds;

static bool make_store(
    selftest *st, const st_row *row, weighted_case *it, int64_t slots, const seeds *seed) {
    uint16_t *cs = st_bf16(st, (size_t)(row->max_position * row->dim), seed->table, 1.0f);
    const int64_t gains[2] = {row->L, row->dim};
    if (!cs ||
        !st_input(st, &it->table, cs, CLI_BF16, 2, (int64_t[]){row->max_position, row->dim}) ||
        !st_gain(st, &it->k_norm, 'b', 2, gains, seed->k_norm, 0.0f) ||
        !st_positions(st, &it->positions, row->T, seed->positions, row->max_position) ||
        !st_slots(
            st, it->slots, it->lists, row->L, slots, seed->slots,
            row->num_blocks * row->block_size) ||
        !cli_caches_make(
            &it->caches, &st->place, row->L, row->num_blocks, row->H, row->block_size, row->dim,
            0x5A)) {
        return false;
    }
    ctxkv_store_desc_init(&it->store);
    it->store.num_layers = row->L;
    it->store.num_kv_heads = row->H;
    it->store.head_dim = row->dim;
    it->store.k_norm = CTXKV_K_NORM_RMS;
    it->store.k_eps = row->eps;
    it->store.k_norm_weight = &it->k_norm.tensor;
    it->store.rope = CTXKV_ROPE_NEOX;
    it->store.cos_sin = &it->table.tensor;
    return true;
}

static bool store_case(selftest *st, const st_row *row) {
    weighted_case it;
    cli_tensor k, v;
    uint64_t seed = (uint64_t)row->seed;
    int64_t width = 2 * row->H * row->dim;
    uint16_t *kv = st_bf16(st, (size_t)(row->T * row->L * width), seed, 4.0f);
    const seeds used = {seed + 1, seed + 2, seed + 3, seed};
    const int64_t shape[4] = {row->L, row->T, row->H, row->dim};
    const int64_t strides[4] = {width, row->L * width, row->dim, 1};
    if (!kv || !st_input(st, &k, kv, CLI_BF16, 3, (int64_t[]){row->T, row->L, width}) ||
        !make_store(st, row, &it, row->R, &used)) {
        return false;
    }
    const uint16_t *data = k.tensor.data;
    cli_tensor_set(&k, &st->place, data, CLI_BF16, 4, shape);
    cli_tensor_set(&v, &st->place, data + row->H * row->dim, CLI_BF16, 4, shape);
    memcpy(k.strides, strides, sizeof strides);
    memcpy(v.strides, strides, sizeof strides);
    ctxkv_store *plan = NULL;
    bool ok = !ctxkv_store_create(st->place.device, &it.store, &plan) &&
              !ctxkv_store_bind_caches(plan, it.caches.keys, it.caches.values, row->L) &&
              !ctxkv_store_run(
                  plan, &k.tensor, &v.tensor, &it.positions.tensor, it.lists, row->L, NULL) &&
              cli_sync(&st->place);
    if (ok) {
        st_caches(st, row->name, &it.caches, row->caches);
    } else {
        st_broken(st, row->name, (uint64_t)row->L);
    }
    ctxkv_store_destroy(plan);
    cli_caches_free(&it.caches);
    return true;
}

bool st_weighted_store(selftest *st, const io_csv *csv) {
    static const char *const integers[] = {
        "H", "head_dim", "L", "T", "R", "block_size", "num_blocks", "seed", "max_position", NULL};
    static const char *const numbers[] = {"eps", NULL};
    for (size_t i = 0; i < csv->rows; ++i) {
        st_row row;
        if (!st_read(csv, i, integers, numbers, &row)) return false;
        if (!store_case(st, &row)) return false;
        finish(st, csv->path, i + 1, csv->rows);
    }
    return true;
}

// ---- chain -------------------------------------------------------------------------------------
static bool make_chain(selftest *st, const st_row *row, weighted_case *it) {
    uint64_t seed = (uint64_t)row->seed;
    int64_t width = 2 * row->H * row->dim;
    const seeds used = {seed + 5, seed + 6, seed + 3, seed};
    uint16_t *w = st_bf16(st, (size_t)(row->L * width * row->D), seed + 4, 0x1p-5f);
    if (!w || !make_norms(st, row, it) ||
        !st_input(st, &it->weights, w, CLI_BF16, 3, (int64_t[]){row->L, width, row->D}) ||
        !st_output(st, &it->kv, CLI_BF16, 3, (int64_t[]){row->T, row->L, width}) ||
        !make_store(st, row, it, row->T, &used)) {
        return false;
    }
    // Stock's [T, L, 2, H, head_dim], seen as [L, T, ...].
    const int64_t strides[3] = {width, row->L * width, 1};
    const void *data = it->kv.tensor.data;
    cli_tensor_set(&it->kv, &st->place, data, CLI_BF16, 3, (int64_t[]){row->L, row->T, width});
    memcpy(it->kv.strides, strides, sizeof strides);
    ctxkv_projection_desc_init(&it->projection);
    it->projection.hidden_size = row->D;
    it->projection.num_layers = row->L;
    it->projection.num_kv_heads = row->H;
    it->projection.head_dim = row->dim;
    it->weight_list[0] = &it->weights.tensor;
    it->projection.weights = it->weight_list;
    it->projection.weight_count = 1;
    it->projection.max_rows = row->T;
    it->projection.mode = st->projection;
    return true;
}

static void check_projection(selftest *st, const st_row *row, weighted_case *it) {
    ctxkv_projection *plan = NULL;
    uint32_t crc;
    size_t bytes = (size_t)(row->L * row->T * 2 * row->H * row->dim) * 2;
    bool ok = !ctxkv_projection_create(st->place.device, &it->projection, &plan) &&
              !ctxkv_projection_run(plan, &it->normed.tensor, &it->kv.tensor, NULL) &&
              cli_sync(&st->place) && st_crc(st, it->kv.tensor.data, bytes, &crc);
    if (ok) {
        st_check(st, row->name, "projection", crc, row->crc[1]);
    } else {
        st_broken(st, row->name, 1);
    }
    ctxkv_projection_destroy(plan);
}

static void check_chain(selftest *st, const st_row *row, weighted_case *it) {
    ctxkv_chain_desc desc;
    ctxkv_chain *plan = NULL;
    ctxkv_chain_desc_init(&desc);
    desc.norms = &it->norms;
    desc.projection = &it->projection;
    desc.store = &it->store;
    desc.max_rows = row->T;
    bool ok =
        !ctxkv_chain_create(st->place.device, &desc, &plan) &&
        !ctxkv_chain_bind_caches(plan, it->caches.keys, it->caches.values, row->L) &&
        !ctxkv_chain_run(plan, &it->x.tensor, &it->positions.tensor, it->lists, row->L, NULL) &&
        cli_sync(&st->place);
    if (ok) {
        st_caches(st, row->name, &it->caches, row->caches);
    } else {
        st_broken(st, row->name, (uint64_t)row->L);
    }
    ctxkv_chain_destroy(plan);
}

bool st_weighted_chain(selftest *st, const io_csv *csv) {
    static const char *const integers[] = {
        "D", "H", "head_dim", "L", "T", "block_size", "num_blocks", "seed", "max_position", NULL};
    static const char *const numbers[] = {"eps", NULL};
    for (size_t i = 0; i < csv->rows; ++i) {
        st_row row;
        weighted_case it;
        if (!st_read(csv, i, integers, numbers, &row)) return false;
        if (!make_chain(st, &row, &it)) return false;
        check_norms(st, &row, &it);
        check_projection(st, &row, &it);
        check_chain(st, &row, &it);
        cli_caches_free(&it.caches);
        finish(st, csv->path, i + 1, csv->rows);
    }
    return true;
}
