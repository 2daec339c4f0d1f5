// SPDX-License-Identifier: Apache-2.0
// What the decode kernels (T <= 64) are told: plain structs shared by the host and the kernels.
#ifndef CTXKV_CUDA_DECODE_PARAMS_H
#define CTXKV_CUDA_DECODE_PARAMS_H

#include "fault_record.h"

// Layers of one launch; a chain with more layers makes several launches, with first_layer set and
// x, w and kv moved on.
#define CTXKV_DECODE_LAYERS 16

#define CTXKV_DECODE_THREADS 256
#define CTXKV_DECODE_MAX_ROWS 64 // T
#define CTXKV_DECODE_MAX_STAGES 32
#define CTXKV_DECODE_SHARED_PAD 1024 // what an MMA may read past the last stage

// The kernels: columns of an MMA, steps of a stage.
// clang-format off
#define CTXKV_DECODE_SHAPES(X)                                                                     \
    X(8, 32) X(8, 16) X(16, 32) X(16, 16) X(24, 32) X(24, 16) X(32, 32) X(32, 16)                  \
    X(48, 16) X(64, 16) X(64, 8) X(96, 8) X(128, 8)
// clang-format on

// decode_fused.cu, the whole chain in one kernel. A layer is two clusters of 8 tiles. The kernels:
// rows of x, whether every CTA norms all of them (two at most), steps of a stage of weights.
#define CTXKV_DECODE_FUSED_CLUSTER 8
#define CTXKV_DECODE_FUSED_COLUMNS 256 // of a cluster at most
#define CTXKV_DECODE_FUSED_THREADS 704
#define CTXKV_DECODE_FUSED_X_BYTES (128 * 1024) // of shared memory
#define CTXKV_DECODE_FUSED_MMA 2048 // bytes from the first that an MMA reads of weights, 64 rows
#define CTXKV_DECODE_FUSED_SHAPES(X) X(8, 1, 32) X(8, 0, 32) X(8, 1, 16)

#define CTXKV_DECODE_ROPE_NONE 0u
#define CTXKV_DECODE_ROPE_GPTJ 1u
#define CTXKV_DECODE_ROPE_NEOX 2u
#define CTXKV_DECODE_NORM_PLAIN 0u // SPEC 3.4, head_dim 64
#define CTXKV_DECODE_NORM_RMS 1u   // SPEC 5, with a weight row per layer
#define CTXKV_DECODE_NORM_ABSENT 2u

#define CTXKV_DECODE_TABLE_BY2 1u // the cos/sin table is not 16-byte aligned
#define CTXKV_DECODE_CACHE_BY2 2u // a cache is not 16-byte aligned in every row and head

// One layer's cache and slots. Strides are in elements.
typedef struct {
    void *k, *v;
    const long long *slots; // [rows]
    const float *k_weight;  // NORM_RMS: [head_dim]
    long long rows;         // 0: nothing is stored in this layer
    long long slot_count;   // num_blocks * block_size
    long long block_size;
    long long k_block, k_page, k_head, v_block, v_page, v_head;
} ctxkv_decode_layer;

// Packed n: a line holds 64 columns of a row, and its eight 16-byte vectors change places by the
// row: vector (row r of the batch tile, chunk c of 8 columns) is at (c/8*batch_rows + r)*8 + (c%8 ^
// r%8). batch_rows is a multiple of 8; rows past T may hold anything.
// The columns of a layer's tiles: the first k_tiles begin with k_columns columns of K, a head's
// next to each other (head_dim/k_columns tiles a head), and go on with columns of V; the rest are
// V's. A cluster is cluster_tiles weight tiles by cluster_batches batch tiles of one layer, and
// holds whole heads.
typedef struct {
    const void *x; // packed n: BF16 [layer][batch tile][D/64][batch_rows][64], swizzled
    const void *w; // packed weights: BF16 [layer][tile][chunks][tile_rows][8]
    void *room;    // decode_fused.cu: for packed n
    const long long *positions;
    const void *cos_sin; // BF16 [max_position, head_dim]
    ctxkv_fault_record *faults;
    long long max_position; // -1: no table
    long long x_layer;      // 16-byte vectors; 0: one x for all layers
    int rows;               // T
    int columns;            // of a layer: 2*heads*head_dim, K then V
    int heads, head_dim;
    int chunks; // D/8, D rounded up to a multiple of 64: the operands are zero there
    int tile_rows, tiles, batch_rows, batch_tiles;
    int k_tiles, k_columns; // multiples of head_dim/k_columns and of 8
    int cluster_tiles, cluster_batches;
    int shares_x;    // the tiles of a cluster fetch x together
    int k_room;      // where in dynamic shared memory the outputs of K are put together
    int stages;      // slots of the ring in shared memory, >= 3 unless all of K fits
    int w_first;     // stages of weights asked for before x, <= stages
    int first_layer; // of layer[0], for the fault record
    unsigned norm, rope, flags;
    float eps;
    // decode_fused.cu alone: x is row-major there.
    const void *hidden_gain, *layer_gain; // BF16 [D], [L, D]
    long long x_row;                      // elements
    float hidden_eps, layer_eps;
    unsigned norm_flags; // CTXKV_NORMS_HIDDEN_INPUT
    unsigned pad;
    ctxkv_decode_layer layer[CTXKV_DECODE_LAYERS];
} ctxkv_decode_params;

// Weights of one layer into [tile][chunks][tile_rows][8]; what is past the last row or column is
// zero. half: rows of k, and of v.
typedef struct {
    const void *k, *v;
    void *out;
    long long k_row, v_row; // elements
    int half, tile_rows, tiles, k_tiles, k_columns;
    int chunks, data_chunks; // with the zero columns, and without: D/8
    unsigned by2;            // k or v is not 16-byte aligned in every row
} ctxkv_decode_pack_params;

#endif
