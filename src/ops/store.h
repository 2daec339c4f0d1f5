// SPDX-License-Identifier: Apache-2.0
// Contract of the store: K norm, RoPE, insert into each layer's paged cache (SPEC 3.4, 4.2, 5).
#ifndef CTXKV_OPS_STORE_H
#define CTXKV_OPS_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "numerics.h"

enum ctxkv__k_norm_kind { CTXKV__K_PLAIN, CTXKV__K_RMS, CTXKV__K_ABSENT };
enum ctxkv__rope_kind { CTXKV__ROPE_NONE, CTXKV__ROPE_GPTJ, CTXKV__ROPE_NEOX };
enum ctxkv__float_type { CTXKV__TABLE_BF16, CTXKV__TABLE_FP16, CTXKV__TABLE_FP32 };
enum ctxkv__cache_kind {
    CTXKV__CACHE_BF16,
    CTXKV__CACHE_FP16,
    CTXKV__CACHE_E4M3,
    CTXKV__CACHE_E5M2
};
enum ctxkv__fault { CTXKV__FAULT_NONE, CTXKV__FAULT_SLOT, CTXKV__FAULT_POSITION };

// One layer's cache: views [num_blocks, block_size, H, head_dim], strides in elements.
struct ctxkv__cache {
    void *k, *v;
    int64_t k_block_stride, k_page_stride, k_head_stride;
    int64_t v_block_stride, v_page_stride, v_head_stride;
    int64_t num_blocks, block_size;
};

// One layer's cos/sin table: [max_position, rotary_dim], cos, then sin.
struct ctxkv__table {
    const void *data;
    int64_t max_position, rotary_dim;
};

// One layer's FP8 scales, an FP32 value each; NULL: 1.
struct ctxkv__scales {
    const void *k, *v;
};

struct ctxkv__slots {
    const int64_t *slots; // NULL: nothing is stored in this layer
    int64_t rows;         // R <= T
};

struct ctxkv__store_args {
    int64_t num_layers, num_heads, head_dim;
    enum ctxkv__k_norm_kind k_norm;
    float k_eps;
    const float *k_gain;  // RMS: [L, head_dim]; NULL: weightless
    bool v_norm;          // weightless rms_norm of V
    float v_eps, v_scale; // v_scale 0: none
    bool v_from_k;        // V is made of raw K; v is not read
    enum ctxkv__rope_kind rope;
    enum ctxkv__float_type table_type;
    const struct ctxkv__table *tables; // L, with RoPE
    const int64_t *positions;
    const void *k, *v; // BF16; layer, row, head strides in elements
    int64_t k_layer_stride, k_row_stride, k_head_stride;
    int64_t v_layer_stride, v_row_stride, v_head_stride;
    enum ctxkv__cache_kind cache_kind;
    const struct ctxkv__scales *scales; // L
    const struct ctxkv__cache *caches;  // L
    const struct ctxkv__slots *slots;   // L
    bool stream; // a hint: much is stored, so it need not pass through the caches
};

// Value i of a cos/sin table.
static inline float ctxkv__cache_scale(const void *scale) {
    return scale ? ctxkv__load_float(scale, 0) : 1.0f;
}

float ctxkv__table_value(const void *table, enum ctxkv__float_type type, int64_t i);

// What a run skipped: the number of (layer, row) pairs and the smallest of them.
struct ctxkv__fault_record {
    uint64_t count;
    enum ctxkv__fault kind;
    int64_t layer, row, value, limit;
};

// Whether row t of layer l is stored; a fault is noted in the record (may be NULL).
enum ctxkv__row_fate { CTXKV__ROW_STORE, CTXKV__ROW_NEGATIVE, CTXKV__ROW_FAULT };
enum ctxkv__row_fate ctxkv__store_row_fate(
    const struct ctxkv__store_args *args, int64_t layer, int64_t row,
    struct ctxkv__fault_record *faults);
void ctxkv__fault_note(
    struct ctxkv__fault_record *faults, enum ctxkv__fault kind, int64_t layer, int64_t row,
    int64_t value, int64_t limit);
void ctxkv__fault_merge(struct ctxkv__fault_record *into, const struct ctxkv__fault_record *from);

// Rows [row_begin, row_end) of one layer; row_end <= the layer's R. No allocation, no globals.
typedef void ctxkv__store_fn(
    const struct ctxkv__store_args *args, int64_t layer, int64_t row_begin, int64_t row_end,
    struct ctxkv__fault_record *faults);

ctxkv__store_fn ctxkv__store_ref;

#define CTXKV__MAX_HEAD_DIM 512

#endif
