// SPDX-License-Identifier: Apache-2.0
// What the general store's kernels are told: any table, any cache type, V made or scaled. Shared by
// C and CUDA code, passed by value.
#ifndef CTXKV_CUDA_STORE_GENERAL_H
#define CTXKV_CUDA_STORE_GENERAL_H

#include "fault_record.h"

#define CTXKV_GENERAL_TABLE_BF16 0u
#define CTXKV_GENERAL_TABLE_FP16 1u
#define CTXKV_GENERAL_TABLE_FP32 2u

#define CTXKV_GENERAL_CACHE_BF16 0u
#define CTXKV_GENERAL_CACHE_FP16 1u
#define CTXKV_GENERAL_CACHE_E4M3 2u
#define CTXKV_GENERAL_CACHE_E5M2 3u

#define CTXKV_GENERAL_SRC_BY2 1u  // k and v are not 16-byte aligned in every row
#define CTXKV_GENERAL_V_NORM 2u   // V is normed, without a weight
#define CTXKV_GENERAL_V_SCALE 4u  // then multiplied by v_scale
#define CTXKV_GENERAL_V_FROM_K 8u // V is made of the raw K; v_src is not read

#define CTXKV_GENERAL_TABLE_WIDE 1u // 16 divides rotary_dim, the table lies on 16 bytes
#define CTXKV_GENERAL_CACHE_WIDE 2u // eight elements of the cache lie on a multiple of their size

// One layer. Strides are in elements.
typedef struct {
    const void *k_src, *v_src;      // BF16 [T, H, head_dim]
    void *k, *v;                    // the cache views
    const long long *slots;         // [rows]
    const float *k_weight;          // RMS K norm: [head_dim]
    const void *table;              // [max_position, rotary_dim]
    const float *k_scale, *v_scale; // FP8: what K and V are divided by; null: 1
    long long max_position;
    long long rows;       // 0: nothing is stored in this layer
    long long slot_count; // num_blocks * block_size
    long long block_size;
    long long k_block, k_page, k_head, v_block, v_page, v_head;
    int rotary_dim;
    unsigned flags; // CTXKV_GENERAL_TABLE_WIDE, CTXKV_GENERAL_CACHE_WIDE
} ctxkv_general_layer;

#define CTXKV_GENERAL_LAYERS 176

typedef struct {
    long long k_row, k_head, v_row, v_head; // strides of k_src and v_src
    const long long *positions;
    ctxkv_fault_record *faults;
    int first_layer; // of layer[0], for the fault record
    int heads;
    unsigned norm, rope; // CTXKV_STORE_NORM_*, CTXKV_STORE_ROPE_*
    unsigned table_type, cache_type, flags;
    float k_eps, v_eps, v_scale;
    ctxkv_general_layer layer[CTXKV_GENERAL_LAYERS];
} ctxkv_store_general;

#endif
