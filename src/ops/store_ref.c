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
    int64_t limit = args->tables[layer].max_position;
    if (position >= 0 && position < limit) return CTXKV__ROW_STORE;
    if (faults) ctxkv__fault_note(faults, CTXKV__FAULT_POSITION, layer, row, position, limit);
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
        if (args->k_norm == CTXKV__K_RMS && args->k_gain) y = y * args->k_gain[layer * n + i];
        k[i] = ctxkv__round_bf16(y);
    }
}

float ctxkv__table_value(const void *table, enum ctxkv__float_type type, int64_t i) {
    if (type == CTXKV__TABLE_FP32) return ctxkv__load_float(table, i);
    uint16_t h = ctxkv__load16(table, i);
    return type == CTXKV__TABLE_FP16 ? ctxkv__from_fp16(h) : ctxkv__from_bf16(h);
}

static void rotate(
    const struct ctxkv__store_args *args, int64_t layer, int64_t position, float *k) {
    const struct ctxkv__table *table = &args->tables[layer];
    int64_t half = table->rotary_dim / 2, row = position * table->rotary_dim;
    for (int64_t j = 0; j < half; j++) {
        float c = ctxkv__table_value(table->data, args->table_type, row + j);
        float s = ctxkv__table_value(table->data, args->table_type, row + half + j);
        bool gptj = args->rope == CTXKV__ROPE_GPTJ;
        float *first = gptj ? &k[2 * j] : &k[j], *second = gptj ? &k[2 * j + 1] : &k[j + half];
        float x = *first, y = *second;
        *first = ctxkv__fma(x, c, -(y * s));
        *second = ctxkv__fma(y, c, x * s);
    }
}

static void v_norm(const struct ctxkv__store_args *args, float *v) {
    int64_t n = args->head_dim;
    float scale = ctxkv__rms_scale_ref(v, n, n / 8, args->v_eps);
    for (int64_t i = 0; i < n; i++) v[i] = ctxkv__round_bf16(v[i] * scale);
}

// bits: the BF16 value as it is stored. to: element i of a cache of this kind.
static void put(enum ctxkv__cache_kind kind, void *to, int64_t i, uint16_t bits, float scale) {
    float x = ctxkv__from_bf16(bits);
    switch (kind) {
    case CTXKV__CACHE_BF16:
        ctxkv__store16(to, i, bits);
        return;
    case CTXKV__CACHE_FP16:
        ctxkv__store16(to, i, ctxkv__to_fp16(x));
        return;
    case CTXKV__CACHE_E4M3:
        ((uint8_t *)to)[i] = ctxkv__to_e4m3(x / scale);
        return;
    case CTXKV__CACHE_E5M2:
        ((uint8_t *)to)[i] = ctxkv__to_e5m2(x / scale);
    }
}

static void store_key(
    const struct ctxkv__store_args *args, int64_t layer, int64_t row, int64_t from, int64_t to) {
    float key[CTXKV__MAX_HEAD_DIM];
    float scale = ctxkv__cache_scale(args->scales[layer].k);
    for (int64_t i = 0; i < args->head_dim; i++) key[i] = ctxkv__load_bf16(args->k, from + i);
    k_norm(args, layer, key);
    if (args->rope != CTXKV__ROPE_NONE) rotate(args, layer, args->positions[row], key);
    for (int64_t i = 0; i < args->head_dim; i++)
        put(args->cache_kind, args->caches[layer].k, to + i, ctxkv__to_bf16(key[i]), scale);
}

static void store_value(
    const struct ctxkv__store_args *args, int64_t layer, const void *source, int64_t from,
    int64_t to) {
    float value[CTXKV__MAX_HEAD_DIM] = {0};
    float scale = ctxkv__cache_scale(args->scales[layer].v);
    for (int64_t i = 0; i < args->head_dim; i++) value[i] = ctxkv__load_bf16(source, from + i);
    if (args->v_norm) v_norm(args, value);
    for (int64_t i = 0; i < args->head_dim; i++) {
        // As it came, a NaN's payload too, unless something is computed.
        uint16_t bits = ctxkv__load16(source, from + i);
        if (args->v_norm) bits = ctxkv__to_bf16(value[i]);
        if (args->v_scale != 0) bits = ctxkv__to_bf16(value[i] * args->v_scale);
        put(args->cache_kind, args->caches[layer].v, to + i, bits, scale);
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
            int64_t from_k =
                layer * args->k_layer_stride + t * args->k_row_stride + h * args->k_head_stride;
            int64_t from_v =
                layer * args->v_layer_stride + t * args->v_row_stride + h * args->v_head_stride;
            int64_t to_k = block * cache->k_block_stride + page * cache->k_page_stride +
                           h * cache->k_head_stride;
            int64_t to_v = block * cache->v_block_stride + page * cache->v_page_stride +
                           h * cache->v_head_stride;
            store_key(args, layer, t, from_k, to_k);
            if (args->v_from_k)
                store_value(args, layer, args->k, from_k, to_v);
            else
                store_value(args, layer, args->v, from_v, to_v);
        }
    }
}
