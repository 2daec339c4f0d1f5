// SPDX-License-Identifier: Apache-2.0
// What the prefill kernels are told: plain structs shared by the host and the kernels.
#ifndef CTXKV_CUDA_PREFILL_PARAMS_H
#define CTXKV_CUDA_PREFILL_PARAMS_H

#include "fault_record.h"
#include "tensor_map.h"

// Layers of one launch; a chain with more layers makes several launches, with first_layer set.
#define CTXKV_PREFILL_LAYERS 32

#define CTXKV_PREFILL_KV 1u  // write kv, not the caches
#define CTXKV_PREFILL_BY2 2u // a cache (or kv) is not 16-byte aligned in every row and head

// One layer's cache and slots. Strides are in elements.
typedef struct {
    void *k, *v;
    const long long *slots; // [rows]
    long long rows;         // 0: nothing is stored in this layer
    long long slot_count;   // num_blocks * block_size
    long long block_size;
    long long k_block, k_page, k_head, v_block, v_page, v_head;
} ctxkv_prefill_layer;

typedef struct {
    // BF16 [layers, T, D] of n, or [1, T, D] of h; box {64, tile rows / cluster columns, 1}.
    ctxkv_tensor_map a;
    // Device array of maps over w_rows rows each, in order all weight rows [L * columns, D];
    // box {64, min(64, tile columns / cluster rows)}. Both kinds swizzle 128 bytes.
    const ctxkv_tensor_map *w_maps;
    const float *row_scale; // [T]: r of the layer norms; not for ready input
    const float *gains;     // [L, D] as ctxkv_prefill_pack_gains leaves them; gained input only
    const long long *positions;
    const void *cos_sin; // BF16 [max_position, head_dim]; null: no RoPE
    const float *k_gain; // [L, head_dim]; kernels of the RMS K norm only
    ctxkv_fault_record *faults;
    void *kv;                   // BF16
    long long kv_layer, kv_row; // elements
    long long max_position;
    long long rows;   // T
    int first_layer;  // of layer[0]: added in maps, gains, kv and the fault record
    int heads;        // KV heads: a layer has 2 * heads * head_dim columns
    int k_blocks;     // D / 64, rounded up to a multiple of 4
    int w_rows;       // a multiple of 64
    int column_tiles; // layers of this launch * columns / tile columns
    int row_tiles;    // ceil(T / (tile rows * cluster rows))
    int group;        // cluster rows walked before the next column tile
    float k_eps;
    unsigned flags;
    int a_shared; // ready input: all layers read layer 0 of a
    ctxkv_prefill_layer layer[CTXKV_PREFILL_LAYERS];
} ctxkv_prefill_params;

// The pre-kernel: x [T, 8192] -> h (BF16) and r (float).
typedef struct {
    const void *x;
    void *h;
    float *row_scale;
    const void *gain;          // [8192]: the hidden norm's gains, BF16 or FP32; null: weightless
    long long x_row, h_row;    // elements, multiples of 8
    int gain_fp32, gain_input; // gain_input: the gain multiplies the input
    float hidden_eps, layer_eps;
} ctxkv_prenorm_params;

#endif
