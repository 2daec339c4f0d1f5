// SPDX-License-Identifier: Apache-2.0
// Weights, rows and caches of the measurements, in as many copies as rotation needs.
#include <stdlib.h>
#include <string.h>

#include "bench_shape.h"
#include "generator.h"

typedef struct fill {
    uint16_t *to;
    size_t count;
    uint64_t seed;
    float scale;
} fill;

static void fill_slice(void *user, int64_t index) {
    const fill *job = user;
    size_t first = (size_t)index << 18, left = job->count - first;
    io_fill_bf16(job->to + first, left < 1u << 18 ? left : 1u << 18, job->seed, first, job->scale);
}

static uint16_t *values(bench *all, size_t count, uint64_t seed, float scale) {
    fill job = {cli_alloc(&all->host, count * 2), count, seed, scale};
    int64_t slices = (int64_t)((count + (1u << 18) - 1) >> 18);
    if (job.to) cli_parallel(cli_cpus(), slices, fill_slice, &job);
    return job.to;
}

static bool put(
    bench *all, cli_tensor *tensor, const void *host, DLDataType dtype, int rank,
    const int64_t *size) {
    size_t bytes = dtype.bits / 8u;
    for (int i = 0; i < rank; ++i) bytes *= (size_t)size[i];
    void *data = cli_alloc(&all->place, bytes);
    cli_tensor_set(tensor, &all->place, data, dtype, rank, size);
    return data && (!host || cli_to_device(&all->place, data, host, bytes));
}

static int64_t sets_for(const bench *all, double bytes, int64_t most) {
    int64_t sets = (int64_t)((double)all->beyond_cache / bytes) + 1;
    return sets > most ? most : sets;
}

static void describe(bench_shape *it) {
    const bench *all = it->all;
    bool muse = !all->family;
    ctxkv_norms_desc_init(&it->norms_desc);
    it->norms_desc.hidden_size = all->hidden_size;
    it->norms_desc.num_layers = all->layers;
    it->norms_desc.hidden = (ctxkv_norm){muse ? CTXKV_NORM_ROW : CTXKV_NORM_RMS, 1e-5f, 0, 0};
    it->norms_desc.layer = it->norms_desc.hidden;
    it->norms_desc.hidden_weight = &it->hidden_gain.tensor;
    it->layer_gains[0] = &it->layer_gain.tensor;
    if (muse) {
        it->norms_desc.layer_weights = it->layer_gains;
        it->norms_desc.layer_weight_count = 1;
    } else {
        it->norms_desc.layer.kind = CTXKV_NORM_ABSENT;
    }
    it->norms_desc.numerics = (ctxkv_numerics)all->options.numerics;
    ctxkv_store_desc_init(&it->store_desc);
    it->store_desc.num_layers = all->layers;
    it->store_desc.num_kv_heads = it->heads;
    it->store_desc.head_dim = all->head_dim;
    it->store_desc.k_norm = muse ? CTXKV_K_NORM_PLAIN : CTXKV_K_NORM_RMS;
    it->store_desc.k_eps = 1e-5f;
    if (!muse) it->store_desc.k_norm_weight = &it->k_gain.tensor;
    it->store_desc.rope = muse ? CTXKV_ROPE_GPTJ : CTXKV_ROPE_NEOX;
    it->store_desc.cos_sin = &it->table.tensor;
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        ctxkv_projection_desc *desc = &it->projection_desc[i];
        ctxkv_projection_desc_init(desc);
        desc->hidden_size = all->hidden_size;
        desc->num_layers = all->layers;
        desc->num_kv_heads = it->heads;
        desc->head_dim = all->head_dim;
        it->weight_list[i][0] = &it->weights[i].tensor;
        desc->weights = it->weight_list[i];
        desc->weight_count = 1;
        desc->mode = (ctxkv_projection_mode)all->options.projection;
    }
}

// What does not depend on the rows: weights, gains, table, caches.
bool bench_make_fixed(bench_shape *it) {
    bench *all = it->all;
    size_t count = (size_t)(all->layers * it->width * all->hidden_size);
    const int64_t size[3] = {all->layers, it->width, all->hidden_size};
    const int64_t gains[2] = {all->layers, all->hidden_size};
    const int64_t k_gains[2] = {all->layers, all->head_dim};
    const int64_t table[2] = {BENCH_POSITIONS, all->head_dim};
    it->weight_sets = sets_for(all, (double)count * 2, BENCH_WEIGHT_SETS);
    it->host_weights = values(all, count, 3, 0x1p-5f);
    uint16_t *ones = values(all, (size_t)(all->layers * all->hidden_size), 1, 0.5f);
    uint16_t *rows = values(all, (size_t)(BENCH_POSITIONS * all->head_dim), 5, 1.0f);
    if (!it->host_weights || !ones || !rows) return false;
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        if (!put(all, &it->weights[i], it->host_weights, CLI_BF16, 3, size)) return false;
    }
    int64_t least = (int64_t)((double)all->beyond_cache / (double)(all->layers * it->width * 2));
    int64_t most = 0;
    for (int i = 0; i < all->row_count; ++i) most = all->rows[i] > most ? all->rows[i] : most;
    it->places = (least > 2 * most ? least : 2 * most) / BENCH_BLOCK * BENCH_BLOCK + BENCH_BLOCK;
    if (!put(all, &it->hidden_gain, ones, CLI_BF16, 1, &all->hidden_size) ||
        !put(all, &it->layer_gain, ones, CLI_BF16, 2, gains) ||
        !put(all, &it->k_gain, ones, CLI_BF16, 2, k_gains) ||
        !put(all, &it->table, rows, CLI_BF16, 2, table) ||
        !cli_caches_make(
            &it->caches, &all->place, all->layers, it->places / BENCH_BLOCK, it->heads, BENCH_BLOCK,
            all->head_dim, 0)) {
        return false;
    }
    describe(it);
    return true;
}

static bool make_row_set(bench_shape *it, int64_t set, int64_t *slots) {
    bench *all = it->all;
    int64_t rows = it->rows, width = it->width, half = width / 2;
    bool muse = !all->family;
    const int64_t kv[3] = {all->layers, rows, width};
    const int64_t heads[4] = {all->layers, rows, it->heads, all->head_dim};
    const int64_t strides[4] = {rows * width, width, all->head_dim, 1};
    for (int64_t t = 0; t < rows; ++t) slots[t] = (set * rows + t) % it->places;
    if (!put(all, &it->x[set], it->host_x, CLI_BF16, 2, (int64_t[]){rows, all->hidden_size}) ||
        !put(
            all, &it->normed[set], NULL, CLI_BF16, 3,
            (int64_t[]){muse ? all->layers : 1, rows, all->hidden_size}) ||
        !put(all, &it->kv[set], NULL, CLI_BF16, 3, kv) ||
        !put(all, &it->slots[set], slots, CLI_I64, 1, &rows)) {
        return false;
    }
    const uint16_t *data = it->kv[set].tensor.data;
    cli_tensor_set(&it->k[set], &all->place, data, CLI_BF16, 4, heads);
    cli_tensor_set(&it->v[set], &all->place, data + half, CLI_BF16, 4, heads);
    memcpy(it->k[set].strides, strides, sizeof strides);
    memcpy(it->v[set].strides, strides, sizeof strides);
    return true;
}

bool bench_make_rows(bench_shape *it) {
    bench *all = it->all;
    int64_t rows = it->rows;
    double bytes =
        (double)rows * 2 * (double)((all->layers + 1) * all->hidden_size + all->layers * it->width);
    // A CPU's rows rotate no further than its peers' do (bench/cpu_torch.py).
    it->row_sets = sets_for(all, bytes, all->replay ? BENCH_ROW_SETS : 64);
    it->host_x = values(all, (size_t)(rows * all->hidden_size), 0, 1.0f);
    int64_t *slots = cli_alloc(&all->host, (size_t)rows * sizeof *slots);
    it->host_positions = cli_alloc(&all->host, (size_t)rows * sizeof *slots);
    if (!it->host_x || !slots || !it->host_positions) return false;
    io_fill_positions(it->host_positions, (size_t)rows, 4, BENCH_POSITIONS);
    if (!put(all, &it->positions, it->host_positions, CLI_I64, 1, &rows)) return false;
    for (int64_t i = 0; i < it->row_sets; ++i) {
        if (!make_row_set(it, i, slots)) return false;
    }
    return true;
}

bool bench_make_picked(bench_shape *it, const int64_t *picked, int64_t count, int64_t total) {
    bench *all = it->all;
    size_t width = (size_t)all->hidden_size, most = (size_t)(all->family ? total : count);
    int64_t *slots = cli_alloc(&all->host, most * sizeof *slots);
    int64_t *positions = cli_alloc(&all->host, (size_t)total * sizeof *positions);
    it->host_x = cli_alloc(&all->host, most * width * sizeof *it->host_x);
    if (!it->host_x || !slots || !positions) return false;
    memset(it->host_x, 0, most * width * sizeof *it->host_x);
    io_fill_positions(positions, (size_t)total, 4, BENCH_POSITIONS);
    for (int64_t i = 0; i < count; ++i) {
        size_t first = (size_t)picked[i] * width;
        io_fill_bf16(it->host_x + (size_t)i * width, width, 0, first, 1.0f);
        positions[i] = positions[picked[i]]; // picked grows, so this one is still whole
    }
    it->rows = (int64_t)most;
    it->row_sets = 1;
    return put(all, &it->positions, positions, CLI_I64, 1, &count) && make_row_set(it, 0, slots);
}
