// SPDX-License-Identifier: Apache-2.0
// Scalar truth of the store: K norm, RoPE, paged insert, and the rules of faulty rows.
#include "store.h"
#include "norms.h"
#include "numerics.h"

void ctxkv__fault_note(
    struct ctxkv__fault_record *faults, enum ctxkv__fault kind, int64_t layer, int64_t row,
    int64_t value, int64_t limit) {
    struct ctxkv__fault_record one = {1, kind, layer, row, value, limit};
    ctxkv__fault_merge(faults, &one);
}

void ctxkv__fault_merge(struct ctxkv__fault_record *into, const struct ctxkv__fault_record *from) {
    if (from->count == 0) return;
    uint64_t count = into->count + from->count;
    bool earlier =
        from->layer < into->layer || (from->layer == into->layer && from->row < into->row);
    if (into->count == 0 || earlier) *into = *from;
    into->count = count;
}

enum ctxkv__row_fate ctxkv__store_row_fate(
    const struct ctxkv__store_args *args, int64_t layer, int64_t row,
    struct ctxkv__fault_record *faults) {
    const struct ctxkv__cache *cache = &args->caches[layer];
    int64_t slot = args->slots[layer].slots[row];
    if (slot < 0) return CTXKV__ROW_NEGATIVE;
    if (slot / cache->block_size >= cache->num_blocks) {
        if (faults)
            ctxkv__fault_note(
                faults, CTXKV__FAULT_SLOT, layer, row, slot, cache->num_blocks * cache->block_size);
        return CTXKV__ROW_FAULT;
    }
    if (args->rope == CTXKV__ROPE_NONE) return CTXKV__ROW_STORE;
    int64_t position = args->positions[row];
    if (position >= 0 && position < args->max_position) return CTXKV__ROW_STORE;
    if (faults)
        ctxkv__fault_note(faults, CTXKV__FAULT_POSITION, layer, row, position, args->max_position);
    return CTXKV__ROW_FAULT;
}

static float plain_scale(const float *k, float eps) {
    float s[32];
    for (int i = 0; i < 32; i++) s[i] = k[i] * k[i] + k[i + 32] * k[i + 32];
    for (int half = 16; half >= 1; half /= 2)
        for (int i = 0; i < half; i++) s[i] = s[i] + s[i + half];
    return ctxkv__rsqrt(ctxkv__fma(s[0], 1.0f / 64, eps));
}

static void k_norm(const struct ctxkv__store_args *args, int64_t layer, float *k) {
    int64_t n = args->head_dim;
    if (args->k_norm == CTXKV__K_ABSENT) return;
    float scale = args->k_norm == CTXKV__K_PLAIN ? plain_scale(k, args->k_eps)
                                                 : ctxkv__rms_scale_ref(k, n, n / 8, args->k_eps);
    for (int64_t i = 0; i < n; i++) {
        float y = k[i] * scale;
        if (args->k_norm == CTXKV__K_RMS) y = y * args->k_gain[layer * n + i];
        k[i] = ctxkv__from_bf16(ctxkv__to_bf16(y));
    }
}

static void rotate(const struct ctxkv__store_args *args, int64_t position, float *k) {
    int64_t half = args->rotary_dim / 2;
    for (int64_t j = 0; j < half; j++) {
        float c = ctxkv__load_bf16(args->cos_sin, position * args->rotary_dim + j);
        float s = ctxkv__load_bf16(args->cos_sin, position * args->rotary_dim + half + j);
        bool gptj = args->rope == CTXKV__ROPE_GPTJ;
        float *first = gptj ? &k[2 * j] : &k[j], *second = gptj ? &k[2 * j + 1] : &k[j + half];
        float x = *first, y = *second;
        *first = ctxkv__fma(x, c, -(y * s));
        *second = ctxkv__fma(y, c, x * s);
    }
}

void ctxkv__store_ref(
    const struct ctxkv__store_args *args, int64_t layer, int64_t row_begin, int64_t row_end,
    struct ctxkv__fault_record *faults) {
    const struct ctxkv__cache *cache = &args->caches[layer];
    for (int64_t t = row_begin; t < row_end; t++) {
        if (ctxkv__store_row_fate(args, layer, t, faults) != CTXKV__ROW_STORE) continue;
        int64_t slot = args->slots[layer].slots[t];
        int64_t block = slot / cache->block_size, page = slot % cache->block_size;
        for (int64_t h = 0; h < args->num_heads; h++) {
            float key[CTXKV__MAX_HEAD_DIM];
            int64_t from_k =
                layer * args->k_layer_stride + t * args->k_row_stride + h * args->k_head_stride;
            int64_t from_v =
                layer * args->v_layer_stride + t * args->v_row_stride + h * args->v_head_stride;
            int64_t to_k = block * cache->k_block_stride + page * cache->k_page_stride +
                           h * cache->k_head_stride;
            int64_t to_v = block * cache->v_block_stride + page * cache->v_page_stride +
                           h * cache->v_head_stride;
            for (int64_t i = 0; i < args->head_dim; i++)
                key[i] = ctxkv__load_bf16(args->k, from_k + i);
            k_norm(args, layer, key);
            if (args->rope != CTXKV__ROPE_NONE) rotate(args, args->positions[t], key);
            for (int64_t i = 0; i < args->head_dim; i++) {
                ctxkv__store16(cache->k, to_k + i, ctxkv__to_bf16(key[i]));
                ctxkv__store16(cache->v, to_v + i, ctxkv__load16(args->v, from_v + i));
            }
        }
    }
}
