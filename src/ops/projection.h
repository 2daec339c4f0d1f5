// SPDX-License-Identifier: Apache-2.0
// Contract of the K/V projection: one chain of k16 tensor-core steps per output (SPEC 3.3).
#ifndef CTXKV_OPS_PROJECTION_H
#define CTXKV_OPS_PROJECTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// One contiguous run of a layer's output columns with its weight rows, BF16, any byte alignment.
struct ctxkv__weight_block {
    const void *data;
    int64_t row_stride; // elements
};

struct ctxkv__projection_args {
    int64_t hidden_size;   // K, a multiple of 16
    int64_t num_layers;    // L
    int64_t parts;         // 2: K and V; 1: K only
    int64_t block_columns; // H*head_dim
    // L*parts: block parts*l holds layer l's K rows, the next one its V rows.
    const struct ctxkv__weight_block *blocks;
    const float *bias;                    // [L, parts*block_columns] or NULL
    bool round_first;                     // the bias is added to the rounded accumulator
    int64_t rows;                         // T
    const void *x;                        // BF16, any byte alignment
    int64_t x_layer_stride, x_row_stride; // layer stride 0: one input for all layers
    void *kv;                             // BF16; column n of layer l, row t
    int64_t kv_layer_stride, kv_row_stride;
};

// Scratch of one worker, 64-byte aligned.
#define CTXKV__PROJECTION_SCRATCH ((size_t)512 * 1024)

// The work is cut in units of at most 32 columns of one block; unit u belongs to block
// u / units_per_block.
#define CTXKV__UNIT_COLUMNS 32
static inline int64_t ctxkv__projection_units_per_block(const struct ctxkv__projection_args *a) {
    return (a->block_columns + CTXKV__UNIT_COLUMNS - 1) / CTXKV__UNIT_COLUMNS;
}

static inline int64_t ctxkv__projection_units(const struct ctxkv__projection_args *a) {
    return a->parts * a->num_layers * ctxkv__projection_units_per_block(a);
}

// Units [begin, end), all rows. No allocation, no globals.
typedef void ctxkv__projection_fn(
    const struct ctxkv__projection_args *args, int64_t begin, int64_t end, void *scratch);

ctxkv__projection_fn ctxkv__projection_ref;

// The output of one row and column by the scalar truth, from k = first on (a multiple of 16).
float ctxkv__projection_chain(
    const void *x, const void *w, int64_t first, int64_t hidden_size, float acc);

#endif
