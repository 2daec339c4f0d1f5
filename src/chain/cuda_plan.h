// SPDX-License-Identifier: Apache-2.0
// What the CUDA plans share: small helpers, and the parts a chain takes from its three plans.
#ifndef CTXKV_CHAIN_CUDA_PLAN_H
#define CTXKV_CHAIN_CUDA_PLAN_H

#include "../cuda/params.h"
#include "../device/gpu.h"
#include "cuda_backend.h"

// CTXKV_CHAIN_WAYS names the ways that may be taken beside the three parts ("decode", "prefill", or
// "none"), for measuring and for finding a fault; unset, all. "prefill-always" takes
// that way also where another is faster. Read when a plan is made.
bool ctxkv__way_allowed(const char *name);

static inline bool ctxkv__aligned(const void *p, unsigned bytes) {
    return (uintptr_t)p % bytes == 0;
}
// Whether every eighth element of every head of the cache lies on a multiple of so many bytes.
static inline bool ctxkv__cache_wide(const struct ctxkv__cache *c, unsigned bytes) {
    return ctxkv__aligned(c->k, bytes) && ctxkv__aligned(c->v, bytes) && !(c->k_block_stride % 8) &&
           !(c->k_page_stride % 8) && !(c->k_head_stride % 8) && !(c->v_block_stride % 8) &&
           !(c->v_page_stride % 8) && !(c->v_head_stride % 8);
}
static inline bool ctxkv__block_wide(const struct ctxkv__weight_block *b) {
    return ctxkv__aligned(b->data, 16) && b->row_stride % 8 == 0;
}
// What the kernels' layers say of a cache, strides in elements: for their initialisers.
#define CTXKV__OF_CACHE(c)                                                                         \
    .k = (c)->k, .v = (c)->v, .slot_count = (c)->num_blocks * (c)->block_size,                     \
    .block_size = (c)->block_size, .k_block = (c)->k_block_stride, .k_page = (c)->k_page_stride,   \
    .k_head = (c)->k_head_stride, .v_block = (c)->v_block_stride, .v_page = (c)->v_page_stride,    \
    .v_head = (c)->v_head_stride
static inline int64_t ctxkv__ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Copies `count` weight rows of n values from the device and turns them into FP32 gains (host).
ctxkv_status ctxkv__cuda_gains(
    const struct ctxkv__cuda_device *gpu, const struct ctxkv__view *rows, int64_t count, int64_t n,
    float centre, float *gains);

// Norms written as "packed n" (params.h) for a kernel that begins early.
struct ctxkv__lines {
    int tile_rows;               // 0: row-major as the call says
    int64_t out_tile, out_layer; // 16-byte vectors
};
// Whether the norms can be written so: one launch does them.
bool ctxkv__cuda_norms_takes_lines(const struct ctxkv_norms *plan);

// Runs without entering the context: for a chain that has done so.
ctxkv_status ctxkv__cuda_norms_launch(
    const struct ctxkv_norms *plan, const struct ctxkv__norms_call *call,
    const struct ctxkv__lines *lines); // NULL: row-major
ctxkv_status ctxkv__cuda_projection_launch(
    struct ctxkv_projection *plan, const struct ctxkv__projection_call *call, void *workspace);
ctxkv_status ctxkv__cuda_store_launch(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call);

// What other kernels need to know of the norms. hidden16 is NULL where BF16 would lose bits.
struct ctxkv__norms_parts {
    const void *hidden32, *layer32, *hidden16, *layer16; // device memory
    bool hidden_input, layer_weight, scaled, packed;
    unsigned flags; // CTXKV_NORMS_*
};
struct ctxkv__norms_parts ctxkv__cuda_norms_parts(const struct ctxkv_norms *plan);
ctxkv_fault_record *ctxkv__cuda_store_faults_at(const struct ctxkv_store *plan);
const float *ctxkv__cuda_store_k_gain(const struct ctxkv_store *plan);
// Whether it needs the general kernels: then no other way of a chain stores for it.
bool ctxkv__cuda_store_is_general(const struct ctxkv_store *plan);

size_t ctxkv__cuda_norms_memory(const struct ctxkv_norms *plan);
size_t ctxkv__cuda_projection_memory(const struct ctxkv_projection *plan);
size_t ctxkv__cuda_store_memory(const struct ctxkv_store *plan);
// Whether runs go through cuBLAS (and want a workspace).
bool ctxkv__cuda_projection_uses_cublas(const struct ctxkv_projection *plan);
// How so many rows of a chain go, all layers reading one input or each its own.
enum ctxkv__projection_way {
    CTXKV__PROJECTION_MMA,
    CTXKV__PROJECTION_CUBLAS,
    CTXKV__PROJECTION_WINDOWS // several calls of cuBLAS that overlap or are small
};
enum ctxkv__projection_way ctxkv__cuda_projection_way(
    const struct ctxkv_projection *plan, int64_t rows, bool shared);

#endif
