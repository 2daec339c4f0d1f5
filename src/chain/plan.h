// SPDX-License-Identifier: Apache-2.0
// The plans behind the public handles: what was asked for, checked, and what a run needs.
#ifndef CTXKV_CHAIN_PLAN_H
#define CTXKV_CHAIN_PLAN_H

#include "../api/lock.h"
#include "../api/tensor.h"
#include "device.h"

struct ctxkv_norms {
    ctxkv_device *device;
    ctxkv_norms_desc desc;             // its tensors are not kept
    struct ctxkv__view hidden_weight;  // valid during create only; data NULL: weightless
    struct ctxkv__view *layer_weights; // L views [D], valid during create only; NULL: weightless
    int64_t out_layers;                // L, or 1 when the layer norm is absent
    struct ctxkv__norms_args args;     // CPU: all but the operands of a run
    float *gains;                      // CPU
    void *gpu;
};

struct ctxkv_projection {
    ctxkv_device *device;
    ctxkv_projection_desc desc;
    struct ctxkv__weight_block *blocks; // L*parts, on either device
    struct ctxkv__view bias_view;       // valid during create only
    struct ctxkv__projection_args args;
    float *bias;   // CPU
    bool in_chain; // which has ways of its own for few rows
    void *gpu;
};

struct ctxkv_store {
    ctxkv_device *device;
    ctxkv_store_desc desc;
    struct ctxkv__table *tables;  // L; data NULL without RoPE
    struct ctxkv__scales *scales; // L
    struct ctxkv__view k_weight;  // valid during create only
    struct ctxkv__cache *caches;  // L
    bool bound;
    struct ctxkv__store_args args;
    float *k_gain; // CPU
    struct ctxkv__lock lock;
    struct ctxkv__fault_record faults;         // CPU
    struct ctxkv__fault_record *worker_faults; // CPU: one per worker, used under run_lock
    struct ctxkv__lock run_lock;
    void *gpu;
};

struct ctxkv_chain {
    ctxkv_device *device;
    struct ctxkv_norms *norms;
    struct ctxkv_projection *projection;
    struct ctxkv_store *store;
    int64_t max_rows, chunk_rows;
    size_t workspace_size;
    void *workspace; // CPU: the plan's own
    struct ctxkv__lock lock;
    void *gpu;
};

// The operands of one run, checked. Rows T of x; slots as given (host array of length L).
struct ctxkv__norms_call {
    const void *x;
    int64_t x_row_stride, rows;
    void *out;
    int64_t out_layer_stride, out_row_stride;
    void *stream;
};

struct ctxkv__projection_call {
    const void *x;
    int64_t x_layer_stride, x_row_stride, rows;
    void *kv;
    int64_t kv_layer_stride, kv_row_stride;
    void *stream;
};

struct ctxkv__store_call {
    const void *k, *v;
    int64_t k_layer_stride, k_row_stride, k_head_stride;
    int64_t v_layer_stride, v_row_stride, v_head_stride;
    int64_t rows;
    const int64_t *positions;
    const struct ctxkv__slots *slots; // L
    void *stream;
};

struct ctxkv__chain_call {
    const void *x;
    int64_t x_row_stride, rows;
    const int64_t *positions;
    const struct ctxkv__slots *slots; // L
    void *workspace;                  // NULL: the plan's own
    void *stream;
};

// CPU runs.
void ctxkv__cpu_norms(const struct ctxkv_norms *plan, const struct ctxkv__norms_call *call);
void ctxkv__cpu_projection(
    const struct ctxkv_projection *plan, const struct ctxkv__projection_call *call);
ctxkv_status ctxkv__cpu_store(struct ctxkv_store *plan, const struct ctxkv__store_call *call);
ctxkv_status ctxkv__cpu_chain(struct ctxkv_chain *plan, const struct ctxkv__chain_call *call);
// Sizes of a CPU chain: rows per chunk and bytes of workspace.
void ctxkv__cpu_chain_plan(struct ctxkv_chain *plan);

// The order of sums of a norm over this many rows in one call: T for the hidden norm, L*T for the
// layers' norms.
enum ctxkv__sum_order ctxkv__norm_order(
    const ctxkv_norm *norm, ctxkv_numerics numerics, bool packed_device, int64_t rows);

#endif
