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

void bench_set_heads(bench_shape *it, bench *all, int64_t heads) {
    it->all = all;
    it->heads = heads;
    it->parts = all->family == IO_FAMILY_GEMMA4 ? 1 : 2;
    it->width = it->parts * heads * all->head_dim;
}

bool bench_layer_norms(const bench *all) {
    return all->family == IO_FAMILY_MUSE || all->family == IO_FAMILY_LAGUNA;
}

static void describe_norms(bench_shape *it) {
    const bench *all = it->all;
    bool muse = all->family == IO_FAMILY_MUSE, affine = all->draft.affine;
    float centre = all->draft.zero_centered ? 1.0f : 0.0f;
    ctxkv_norms_desc *desc = &it->norms_desc;
    ctxkv_norms_desc_init(desc);
    desc->hidden_size = all->hidden_size;
    desc->num_layers = all->layers;
    desc->hidden = (ctxkv_norm){muse ? CTXKV_NORM_ROW : CTXKV_NORM_RMS, 1e-5f, centre, 0};
    desc->layer = desc->hidden;
    it->layer_gains[0] = &it->layer_gain.tensor;
    if (all->family == IO_FAMILY_LAGUNA)
        desc->hidden.kind = CTXKV_NORM_ABSENT;
    else if (affine)
        desc->hidden_weight = &it->hidden_gain.tensor;
    if (!bench_layer_norms(all)) {
        desc->layer.kind = CTXKV_NORM_ABSENT;
    } else if (affine) {
        desc->layer_weights = it->layer_gains;
        desc->layer_weight_count = 1;
    }
    desc->numerics = (ctxkv_numerics)all->options.numerics;
}

static void describe_store(bench_shape *it) {
    const bench *all = it->all;
    const io_config *draft = &all->draft;
    bool muse = all->family == IO_FAMILY_MUSE;
    ctxkv_store_desc *desc = &it->store_desc;
    ctxkv_store_desc_init(desc);
    desc->num_layers = all->layers;
    desc->num_kv_heads = it->heads;
    desc->head_dim = all->head_dim;
    desc->k_norm = muse ? CTXKV_K_NORM_PLAIN : CTXKV_K_NORM_RMS;
    desc->k_eps = desc->v_eps = 1e-5f;
    if (!muse && draft->affine) desc->k_norm_weight = &it->k_gain.tensor;
    desc->k_gain_centre = draft->zero_centered ? 1.0f : 0.0f;
    if (draft->rope) desc->rope = draft->neox ? CTXKV_ROPE_NEOX : CTXKV_ROPE_GPTJ;
    if (draft->rope) desc->rotary_dim = draft->rotary_dim;
    if (draft->rope && all->layer_tables) {
        desc->layer_cos_sin = it->table_list;
        desc->layer_cos_sin_count = all->layers;
    } else if (draft->rope) {
        desc->cos_sin = it->table_list[0];
    }
    desc->v_scale = draft->v_scale;
    desc->v_from_k = it->parts == 1;
    if (desc->v_from_k) desc->v_norm = CTXKV_V_NORM_RMS;
    desc->cache_type = (ctxkv_cache_type)all->cache_type;
    if (all->cache_type < CTXKV_CACHE_FP8_E4M3) return;
    desc->k_scales = it->scale_list;
    desc->v_scales = it->scale_list + all->layers;
    desc->scale_count = all->layers;
}

static void describe(bench_shape *it) {
    const bench *all = it->all;
    describe_norms(it);
    describe_store(it);
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        ctxkv_projection_desc *desc = &it->projection_desc[i];
        ctxkv_projection_desc_init(desc);
        desc->hidden_size = all->hidden_size;
        desc->num_layers = all->layers;
        desc->num_kv_heads = it->heads;
        desc->head_dim = all->head_dim;
        desc->k_only = it->parts == 1;
        if (all->draft.bias) desc->bias = &it->bias.tensor;
        if (all->family == IO_FAMILY_LAGUNA) desc->bias_add = CTXKV_BIAS_AFTER;
        it->weight_list[i][0] = &it->weights[i].tensor;
        desc->weights = it->weight_list[i];
        desc->weight_count = 1;
        desc->mode = (ctxkv_projection_mode)all->options.projection;
    }
}

// Tables, one or one for each layer, and the scales of FP8 caches.
static bool make_tables(bench_shape *it) {
    static const DLDataType types[] = {{kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {kDLFloat, 32, 1}};
    static const int64_t one = 1;
    bench *all = it->all;
    DLDataType type = types[all->table_type];
    const int64_t shape[2] = {BENCH_POSITIONS, all->draft.rotary_dim};
    cli_tensor made;
    float *scales = cli_alloc(&all->host, (size_t)(2 * all->layers) * sizeof *scales);
    void *rows = cli_alloc(&all->host, (size_t)(shape[0] * shape[1]) * type.bits / 8);
    if (!scales || !rows) return false;
    cli_tensor_set(&made, &all->host, rows, type, 2, shape);
    if (ctxkv_rope_table(1e6f, shape[1], shape[0], &made.tensor)) {
        cli_fail_status("bench");
        return false;
    }
    for (int64_t i = 0; i < (all->layer_tables ? all->layers : 1); ++i) {
        if (!put(all, &it->tables[i], rows, type, 2, shape)) return false;
        it->table_list[i] = &it->tables[i].tensor;
    }
    io_fill_gain_f32(scales, (size_t)(2 * all->layers), 6, 0);
    for (int64_t i = 0; i < 2 * all->layers; ++i) {
        if (!put(all, &it->scales[i], scales + i, CLI_F32, 1, &one)) return false;
        it->scale_list[i] = &it->scales[i].tensor;
    }
    return true;
}

// What does not depend on the rows: weights, gains, tables, caches.
bool bench_make_fixed(bench_shape *it) {
    bench *all = it->all;
    size_t count = (size_t)(all->layers * it->width * all->hidden_size);
    const int64_t size[3] = {all->layers, it->width, all->hidden_size};
    const int64_t gains[2] = {all->layers, all->hidden_size};
    const int64_t k_gains[2] = {all->layers, all->head_dim};
    const int64_t biases[2] = {all->layers, it->width};
    it->weight_sets = sets_for(all, (double)count * 2, BENCH_WEIGHT_SETS);
    it->host_weights = values(all, count, 3, 0x1p-5f);
    int64_t widest = all->hidden_size > all->head_dim ? all->hidden_size : all->head_dim;
    uint16_t *ones = values(all, (size_t)(all->layers * widest), 1, 0.5f);
    uint16_t *bias = values(all, (size_t)(all->layers * it->width), 2, 0.5f);
    if (!it->host_weights || !ones || !bias) return false;
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        if (!put(all, &it->weights[i], it->host_weights, CLI_BF16, 3, size)) return false;
    }
    int64_t least = (int64_t)((double)all->beyond_cache / (double)(all->layers * it->width * 2));
    int64_t most = 0;
    for (int i = 0; i < all->row_count; ++i) most = all->rows[i] > most ? all->rows[i] : most;
    it->places = (least > 2 * most ? least : 2 * most) / BENCH_BLOCK * BENCH_BLOCK + BENCH_BLOCK;
    it->caches = (cli_caches){
        .layers = all->layers,
        .blocks = it->places / BENCH_BLOCK,
        .heads = it->heads,
        .block_size = BENCH_BLOCK,
        .dim = all->head_dim,
        .type = (ctxkv_cache_type)all->cache_type};
    if (!put(all, &it->hidden_gain, ones, CLI_BF16, 1, &all->hidden_size) ||
        !put(all, &it->layer_gain, ones, CLI_BF16, 2, gains) ||
        !put(all, &it->k_gain, ones, CLI_BF16, 2, k_gains) ||
        !put(all, &it->bias, bias, CLI_BF16, 2, biases) || !make_tables(it) ||
        !cli_caches_make_as(&it->caches, &all->place, 0)) {
        return false;
    }
    describe(it);
    return true;
}

static bool make_row_set(bench_shape *it, int64_t set, int64_t *slots) {
    bench *all = it->all;
    int64_t rows = it->rows, width = it->width, half = width / 2;
    const int64_t kv[3] = {all->layers, rows, width};
    const int64_t heads[4] = {all->layers, rows, it->heads, all->head_dim};
    const int64_t strides[4] = {rows * width, width, all->head_dim, 1};
    for (int64_t t = 0; t < rows; ++t) slots[t] = (set * rows + t) % it->places;
    if (!put(all, &it->x[set], it->host_x, CLI_BF16, 2, (int64_t[]){rows, all->hidden_size}) ||
        !put(
            all, &it->normed[set], NULL, CLI_BF16, 3,
            (int64_t[]){bench_layer_norms(all) ? all->layers : 1, rows, all->hidden_size}) ||
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
    size_t width = (size_t)all->hidden_size, most = (size_t)total;
    if (all->family == IO_FAMILY_MUSE) most = (size_t)count;
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
