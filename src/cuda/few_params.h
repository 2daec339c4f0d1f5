// SPDX-License-Identifier: Apache-2.0
// What the kernels of a projection of few rows (T <= 64) are told: plain structs shared by the host
// and the kernels.
#ifndef CTXKV_CUDA_FEW_PARAMS_H
#define CTXKV_CUDA_FEW_PARAMS_H

#include "tensor_map.h"

#define CTXKV_FEW_THREADS 192
#define CTXKV_FEW_MAX_ROWS 64 // T
#define CTXKV_FEW_MAX_STAGES 16
#define CTXKV_FEW_PAD 2048 // of shared memory behind the ring: what an MMA may read past its rows

// The kernels with x as the MMA's 64 rows: columns of weights, steps of a stage.
// clang-format off
#define CTXKV_FEW_SHAPES(X)                                                                        \
    X(8, 32) X(8, 16) X(16, 32) X(16, 16) X(24, 32) X(24, 16) X(32, 32) X(32, 16)                  \
    X(48, 16) X(64, 16) X(64, 8) X(96, 8) X(128, 8)
// clang-format on
// Those with the weights as its 64 rows: rows of x, steps of a stage.
#define CTXKV_FEW_TURNED_SHAPES(X) X(8, 32) X(8, 16) X(16, 32) X(16, 16)

typedef struct {
    // BF16 {64 columns, T rows, D/64 lines, layers (one where all share x)}; box {64, batch_rows,
    // box_lines, 1}; swizzles 128 bytes.
    ctxkv_tensor_map x;
    const void *w;              // packed weights: BF16 [layer][tile][D/8][tile_rows][8]
    void *kv;                   // BF16
    long long kv_layer, kv_row; // elements
    int rows;                   // T
    int columns;                // of a layer
    int chunks;                 // D/8, a multiple of 8
    int tile_rows, tiles, batch_rows;
    int cluster_tiles, cluster_batches; // weight tiles by batch tiles of one layer
    int box_lines;                      // a stage's lines / cluster_tiles
    int stages;                         // slots of the ring in shared memory
    int w_first;                        // stages of weights asked for before x, <= stages
    int x_shared;                       // one x for all layers
    unsigned kv_by2;                    // kv is not 4-byte aligned in every row
} ctxkv_few_params;

// Weights of one layer into [tile][D/8][tile_rows][8]; what is past the last row is zero. Row r
// of `rows` comes from k where r < half, else from v.
typedef struct {
    const void *k, *v;
    void *out;
    long long k_row, v_row; // elements
    int half, rows, tile_rows, chunks;
    unsigned by2; // k or v is not 16-byte aligned in every row
} ctxkv_few_pack_params;

#endif
