// SPDX-License-Identifier: Apache-2.0
// What the prefill kernels are told: plain structs shared by the host and the kernels.
#ifndef CTXKV_CUDA_PREFILL_PARAMS_H
#define CTXKV_CUDA_PREFILL_PARAMS_H

// Layers of one launch; a chain with more layers makes several launches. Kernel arguments hold the
// table, so this is bounded by their size.
#define CTXKV_PREFILL_MAX_LAYERS 32

// Columns of K per pipeline stage and rows of one box of a weight map are fixed by the kernels.
#define CTXKV_PREFILL_BLOCK_K 64

// A tensor map as the driver encodes it.
typedef struct {
#ifdef __CUDACC__
    __align__(64)
#else
    _Alignas(64)
#endif
        unsigned long long opaque[16];
} ctxkv_tensor_map;

// Addresses are device addresses; strides are in elements (BF16).
typedef struct {
    unsigned long long slots; // int64 [rows]
    long long rows;           // 0: the layer stores nothing
    long long slot_count;     // num_blocks * block_size
    long long block_size;
    unsigned long long k, v;
    long long k_block, k_slot, k_head;
    long long v_block, v_slot, v_head;
} ctxkv_prefill_layer;

typedef struct {
    ctxkv_tensor_map a; // BF16 [A layers, rows, D]: box {64, tile rows / cluster columns, 1}, swizzle 128
    unsigned long long w_maps;    // device array of tensor maps over the weights, box {64, box rows}
    unsigned long long row_scale; // float [T]: r of the layer norm; fused modes
    unsigned long long gains;     // float [L, D] as the pre-kernel packs them; gain mode
    unsigned long long positions; // int64 [T], read for rows that are stored
    unsigned long long cos_sin;   // BF16 [max_position, 64]; 0: no RoPE
    unsigned long long kv;        // 0: store to the caches; else BF16 kv here, with these strides:
    unsigned long long faults;    // ctxkv_fault_record
    long long kv_layer, kv_row;
    long long max_position;
    long long rows;         // T
    int layers;             // of this launch
    int first_layer;        // added to the layer in maps, gains, kv and faults
    int heads;              // H
    int k_blocks;           // D / 64, rounded up
    int w_rows;             // weight rows per tensor map
    int column_tiles;       // layers * 128 * H / tile columns
    int row_tiles;          // cluster rows: ceil(T / (tile rows * cluster rows))
    int group;              // cluster rows walked before the next column tile
    float k_eps;
    int vector_store;       // every cache (or kv) address is a multiple of 16 bytes
    ctxkv_prefill_layer layer[CTXKV_PREFILL_MAX_LAYERS];
} ctxkv_prefill_params;

// The pre-kernel: x -> h (BF16), r (float) and the packed layer gains.
typedef struct {
    unsigned long long x, h, row_scale, gains;
    unsigned long long hidden_weight; // [D] BF16 or FP32, 0: weightless
    unsigned long long layer_weight;  // [layers, D] BF16 or FP32, 0: weightless (gains unused)
    long long rows, x_stride, h_stride, layer_stride; // elements
    int layers;
    int hidden_fp32, hidden_input, layer_fp32;
    float hidden_eps, layer_eps, hidden_centre, layer_centre;
} ctxkv_prenorm_params;

#endif
