// SPDX-License-Identifier: Apache-2.0
// Which prefill kernel runs a shape, with what grid: pure C, no driver calls.
#ifndef CTXKV_CUDA_PREFILL_PLAN_H
#define CTXKV_CUDA_PREFILL_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "prefill_params.h"

// What the A operand is. The names of the kernels are ctxkv_prefill_<shape>_<input>.
typedef enum {
    CTXKV_PREFILL_READY,  // n as it lies: the exact projection alone
    CTXKV_PREFILL_SCALED, // n = bf16(r*h): weightless layer norms
    CTXKV_PREFILL_GAINED, // n = bf16((r*h)*g)
    CTXKV_PREFILL_RMS64,  // n as it lies, heads of 64 or of 128 finished as SPEC 5 has it
    CTXKV_PREFILL_RMS128
} ctxkv_prefill_input;

// Columns of a head.
int ctxkv__prefill_head_dim(ctxkv_prefill_input input);

typedef struct {
    const char *name; // "128x256c2"
    int tile_rows, tile_columns;
    int cluster_rows;
    int threads, shared; // per CTA; dynamic shared memory in bytes
    int weight_box;      // rows of a box of the weight maps
    int row_box;         // rows of a box of the map of h or n
} ctxkv_prefill_shape;

// All shapes, in the order of prefill_shapes.inc.
int ctxkv__prefill_shape_count(void);
const ctxkv_prefill_shape *ctxkv__prefill_shape_at(int index);

typedef struct {
    int shape;                          // index
    unsigned grid;                      // CTAs, a multiple of cluster_rows
    int column_tiles, row_tiles, group; // for ctxkv_prefill_params
    double us; // what it should take on an H200, the pre-kernel not counted
} ctxkv_prefill_choice;

// Chooses the shape for `rows` rows of `columns` columns, `layers` layers of this launch and
// `heads` KV heads on a device of `sms` multiprocessors. Returns 0 where no shape can run it
// (rows < 1, or more tiles than an int counts). The choice never changes a bit of the result.
int ctxkv__prefill_choose(
    int64_t rows, int64_t columns, int64_t layers, int64_t heads, int sms,
    ctxkv_prefill_input input, ctxkv_prefill_choice *choice);

// How norms, projection and store would project instead.
typedef enum {
    CTXKV_PREFILL_OR_EXACT,  // the mma kernel
    CTXKV_PREFILL_OR_CUBLAS, // each row once
    CTXKV_PREFILL_OR_WINDOWS // cuBLAS, overlapping or small windows of rows
} ctxkv_prefill_other;

// 1 where this way was measured faster on an H200 than the three steps.
int ctxkv__prefill_pays(
    int64_t rows, int64_t columns, int64_t layers, int64_t heads, ctxkv_prefill_input input,
    ctxkv_prefill_other other);

// K blocks of a row of `columns` columns, as the kernels want them.
int ctxkv__prefill_k_blocks(int64_t columns);

// A layer's gains in the order the kernels read; `columns` is a multiple of 16, out has as many,
// and layers follow one another at 64 * ctxkv__prefill_k_blocks(columns) floats.
void ctxkv__prefill_pack_gains(float *out, const float *gains, int64_t columns);

#endif
