// SPDX-License-Identifier: Apache-2.0
// What this GPU can do at most: reading, copying, BF16 products. Only ctxkv bench runs them.
#include "params.h"
#include "prim.cuh"
#include "wgmma.cuh"

#define FLOOR_UNROLL 8

template <bool write> static __device__ __forceinline__ void move(const ctxkv_floor_params &p) {
    const uint4 *from = (const uint4 *)p.from;
    uint4 *to = (uint4 *)p.to;
    i64 step = (i64)gridDim.x * CTXKV_FLOOR_THREADS;
    uint4 all = make_uint4(0, 0, 0, 0);
    for (i64 i = (i64)blockIdx.x * CTXKV_FLOOR_THREADS + threadIdx.x; i < p.vectors;
         i += step * FLOOR_UNROLL) {
        uint4 v[FLOOR_UNROLL];
#pragma unroll
        for (int k = 0; k < FLOOR_UNROLL; k++)
            if (i + k * step < p.vectors) v[k] = __ldcs(from + i + k * step);
#pragma unroll
        for (int k = 0; k < FLOOR_UNROLL; k++) {
            if (i + k * step >= p.vectors) continue;
            if (write)
                __stcs(to + i + k * step, v[k]);
            else
                all.x ^= v[k].x, all.y ^= v[k].y, all.z ^= v[k].z, all.w ^= v[k].w;
        }
    }
    // Keeps the loads alive: no memory of bench holds such vectors.
    if (!write && (all.x & all.y & all.z & all.w) == 0xffffffffu) *to = all;
}

extern "C" __global__ void __launch_bounds__(CTXKV_FLOOR_THREADS)
    ctxkv_floor_read(const __grid_constant__ ctxkv_floor_params p) {
    move<false>(p);
}

extern "C" __global__ void __launch_bounds__(CTXKV_FLOOR_THREADS)
    ctxkv_floor_copy(const __grid_constant__ ctxkv_floor_params p) {
    move<true>(p);
}

// Pairs of BF16 values of magnitude 2^-7 to 1 and any sign: zeros would save power, and so time.
static __device__ __forceinline__ u32 noise(u32 index) {
    u32 z = index * 0x9E3779B9u;
    z = (z ^ z >> 16) * 0x85EBCA6Bu;
    z ^= z >> 13;
    return (z & 0x83FF83FFu) | 0x3C003C00u;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static __device__ __forceinline__ float products(int steps) {
    __shared__ __align__(1024) u32 tiles[(64 + 64 + 256) * 32]; // A of each warpgroup, then B
    for (u32 i = threadIdx.x; i < sizeof tiles / 4; i += CTXKV_FLOOR_THREADS) tiles[i] = noise(i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u32 base = (u32)__cvta_generic_to_shared(tiles);
    u32 a = wgmma_tile(base + threadIdx.x / 128 * 8192), b = wgmma_tile(base + 16384);
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    for (int s = 0; s < steps; s += 4) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma<256>::memory(d, a + 2 * k, b + 2 * k);
        wgmma_commit();
        wgmma_wait<0>();
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 128; i++) sum += d[i];
    return sum;
}
#else
static __device__ __forceinline__ float products(int steps) {
    u32 a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = noise(threadIdx.x * 8 + i);
    for (int i = 0; i < 2; i++) b[i] = noise(threadIdx.x * 8 + 4 + i);
    float d[16][4] = {};
    // Eight warps' m16n8k16: 32 of each make the step's multiply-adds.
    for (int s = 0; s < 2 * steps; s++)
#pragma unroll
        for (int i = 0; i < 16; i++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    return sum;
}
#endif

extern "C" __global__ void __launch_bounds__(CTXKV_FLOOR_THREADS)
    ctxkv_floor_products(const __grid_constant__ ctxkv_floor_params p) {
    float sum = products(p.steps);
    if (__float_as_uint(sum) == 0x7f123456u) *(float *)p.to = sum;
}
