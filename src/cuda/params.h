// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of the norms and the store: shared by C and CUDA code, passed by value.
#ifndef CTXKV_CUDA_PARAMS_H
#define CTXKV_CUDA_PARAMS_H

#include "fault_record.h"

// ---- norms ----
// A plan turns each weight row into gains, g = float(w) + centre (1 when absent), exact in FP32;
// where all of them are BF16 values (in both norms), the kernels named 16 read them as such.
#define CTXKV_NORMS_HIDDEN_INPUT 1u // the hidden norm's gain multiplies the input
#define CTXKV_NORMS_HIDDEN_FUSE 2u  // packed order: the first combination is an fma
#define CTXKV_NORMS_LAYER_FUSE 4u
#define CTXKV_NORMS_X_BY2 8u       // x is not 16-byte aligned in every row (only in `any`)
#define CTXKV_NORMS_NO_HIDDEN 16u  // the hidden norm is absent: h = x (only in `any`)
#define CTXKV_NORMS_NO_LAYER 32u   // the layer norm is absent: out = h (only in `any`)
#define CTXKV_NORMS_NEXT_EARLY 64u // the next kernel has much to do before its launch wait

// Output vector (16 bytes) of columns 8c..8c+7 of row t of layer l lies at index
// l*out_layer + t*out_row + c*out_column: row-major and "packed n" differ in these alone.
typedef struct {
    const void *x;
    void *out;
    const void *hidden_gain; // [D]: FP32, or BF16 for the kernels named 16
    const void *layer_gain;  // [L, D], likewise
    long long x_row;         // elements
    long long rows;
    long long out_layer, out_row, out_column;
    int layers;
    int layers_per_block;
    float hidden_eps, layer_eps;
    unsigned flags;
    // 0, or the rows of an output tile of "packed n": row t is row r = t % tile_rows of tile
    // t / tile_rows, tiles begin out_tile vectors apart, and a tile's vector of columns 8c..8c+7
    // lies at (c/8*tile_rows + r)*8 + (c%8 ^ r%8). out_row and out_column mean nothing then.
    int tile_rows;
    long long out_tile;
} ctxkv_norms_params;

#define CTXKV_RMS_COPY 128u // no norm: out = x

// vLLM's rms_norm: y = (x * r) * w. `threads` of the block take part in the sum's order.
typedef struct {
    const void *x;
    void *out;
    const float *gain; // [D]: the weight, exact in FP32
    long long x_row;
    long long rows;
    long long out_row, out_column; // 16-byte vectors
    int vectors;                   // D / 8
    int threads;
    float eps;
    unsigned flags; // CTXKV_NORMS_X_BY2, CTXKV_RMS_COPY
    int tile_rows;  // these as above
    long long out_tile;
} ctxkv_rms_params;

// ---- projection ----
#define CTXKV_PROJECTION_BY2 1u         // an operand is not 16-byte aligned in every row
#define CTXKV_PROJECTION_KV_BY2 2u      // kv is not 4-byte aligned in every row
#define CTXKV_PROJECTION_ROUND_FIRST 4u // the bias is added to the rounded output

typedef struct {
    const void *data; // BF16 [block_columns, K]
    long long row;    // stride, elements
} ctxkv_projection_block;

typedef struct {
    const void *x;                              // BF16
    void *kv;                                   // BF16
    long long x_layer, x_row, kv_layer, kv_row; // elements
    const ctxkv_projection_block *blocks;       // device memory, `parts` per layer
    const float *bias;                          // [L, parts * block_columns], or null
    long long rows;
    int k, block_columns;
    unsigned flags;
    int parts; // 2: K and V; 1: K alone
} ctxkv_projection_params;

// ---- store ----
#define CTXKV_STORE_ROPE_NONE 0u
#define CTXKV_STORE_ROPE_GPTJ 1u
#define CTXKV_STORE_ROPE_NEOX 2u
#define CTXKV_STORE_NORM_PLAIN 0u
#define CTXKV_STORE_NORM_RMS 1u
#define CTXKV_STORE_NORM_ABSENT 2u

#define CTXKV_STORE_TABLE_BY2 1u // the cos/sin table is not 16-byte aligned
#define CTXKV_STORE_SRC_BY2 2u   // nor are all rows of k and v
#define CTXKV_STORE_PAST 4u      // so much is stored that it need not stay in the cache

// One layer, any operands. Strides are in elements.
typedef struct {
    const void *k_src, *v_src; // BF16 [T, H, head_dim]
    void *k, *v;               // the cache views
    const long long *slots;    // [rows]
    const float *k_weight;     // RMS K norm: [head_dim]
    long long rows;            // 0: nothing is stored in this layer
    long long slot_count;      // num_blocks * block_size
    long long block_size;
    long long k_block, k_page, k_head, v_block, v_page, v_head;
    unsigned by2; // the cache is not 16-byte aligned in every row
    unsigned pad;
} ctxkv_store_layer;

// One layer for the kernels that know more: everything 16-byte aligned, rows * heads and slot_count
// below 2^32, strides in units of 16 bytes and below 2^32.
typedef struct {
    const void *k_src, *v_src;
    void *k, *v;
    const long long *slots;
    const float *k_weight;
    long long slot_count;
    unsigned rows;
    unsigned block_size;
    int block_shift; // log2(block_size), or -1
    unsigned k_block, k_page, k_head, v_block, v_page, v_head;
    unsigned pad;
} ctxkv_store_fast_layer;

typedef struct {
    long long k_row, k_head, v_row, v_head; // strides of k_src and v_src, in the layers' unit
    const long long *positions;
    const void *cos_sin;
    long long max_position; // -1: no table
    ctxkv_fault_record *faults;
    int first_layer; // of layer[0], for the fault record
    int heads;
    unsigned rope, norm, flags;
    float eps;
} ctxkv_store_common;

#define CTXKV_STORE_FEW 16
#define CTXKV_STORE_MANY 224

typedef struct {
    ctxkv_store_common c;
    ctxkv_store_fast_layer layer[CTXKV_STORE_FEW];
} ctxkv_store_fast;

typedef struct {
    ctxkv_store_common c;
    ctxkv_store_layer layer[CTXKV_STORE_MANY];
} ctxkv_store_any;

// ---- floors, measured by ctxkv bench ----
#define CTXKV_FLOOR_THREADS 256
// Multiply-adds of a block in one step of the products: two warpgroups' m64n256k16.
#define CTXKV_FLOOR_MACS (2 * 64 * 256 * 16)

typedef struct {
    const void *from;
    void *to;          // read: 16 bytes, hardly ever written
    long long vectors; // of 16 bytes
    int steps;         // products
} ctxkv_floor_params;

#endif
