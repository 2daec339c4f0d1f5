// SPDX-License-Identifier: Apache-2.0
// vLLM's rms_norm over a row of any width (SPEC 5), the hidden norm of the Qwen3 family.
//
// p.threads of the block take part: thread t adds the squares of the 8-wide vectors t, t+B, t+2B
// ... by fma in element order; lanes are added as a tree of neighbours, warps in order. A lane or a
// warp that is not there counts as +0, which changes no sum of squares. y = (x*r)*w, rounded once.
#include "params.h"
#include "prim.cuh"

#define KEEP 4 // vectors a thread keeps in registers; more are read again

static __device__ __forceinline__ float squares8(uint4 w, float a) {
    float v[8];
    bf16_unpack8(w, v);
#pragma unroll
    for (int e = 0; e < 8; e++) a = fma_rn(v[e], v[e], a);
    return a;
}

static __device__ __forceinline__ uint4 load_x(const ctxkv_rms_params &p, const u16 *x, int v) {
    return p.flags & CTXKV_NORMS_X_BY2 ? load16_by2(x + v * 8) : load16_stream(x + v * 8);
}

static __device__ __forceinline__ char *place(const ctxkv_rms_params &p, i64 row, int v) {
    i64 vector = row * p.out_row + v * p.out_column;
    if (p.tile_rows) {
        const u32 tile = (u32)row / (u32)p.tile_rows, r = (u32)row - tile * p.tile_rows;
        vector = tile * p.out_tile + ((i64)(v / 8) * p.tile_rows + r) * 8 + ((v ^ r) & 7);
    }
    return (char *)p.out + vector * 16;
}

static __device__ __forceinline__ void write8(
    const ctxkv_rms_params &p, i64 row, int v, uint4 w, float r) {
    float y[8];
    bf16_unpack8(w, y);
    const float4 a = __ldg((const float4 *)p.gain + 2 * v);
    const float4 b = __ldg((const float4 *)p.gain + 2 * v + 1);
    const float g[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 8; e++) y[e] = mul_rn(mul_rn(y[e], r), g[e]);
    store16(place(p, row, v), bf16_pack8(y));
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    ctxkv_norms_rms(const __grid_constant__ ctxkv_rms_params p) {
    __shared__ float warp_sums[32];
    const int t = threadIdx.x, warps = (p.threads + 31) / 32;
    const i64 row = blockIdx.x;
    const u16 *x = (const u16 *)p.x + row * p.x_row;
    const bool takes_part = t < p.threads;
    uint4 kept[KEEP];
    float a = 0.0f;
    launch_next();
    launch_wait();
    if (p.flags & CTXKV_RMS_COPY) {
        for (int v = t; v < p.vectors; v += blockDim.x) store16(place(p, row, v), load_x(p, x, v));
        return;
    }
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
        const int v = t + i * p.threads;
        if (takes_part && v < p.vectors) kept[i] = load_x(p, x, v);
    }
#pragma unroll
    for (int i = 0; i < KEEP; i++)
        if (takes_part && t + i * p.threads < p.vectors) a = squares8(kept[i], a);
    if (takes_part)
        for (int v = t + KEEP * p.threads; v < p.vectors; v += p.threads)
            a = squares8(load_x(p, x, v), a);
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) a = add_rn(a, lane_xor(a, m));
    if ((t & 31) == 0) warp_sums[t >> 5] = a;
    __syncthreads();
    float s = warp_sums[0];
    for (int w = 1; w < warps; w++) s = add_rn(s, warp_sums[w]);
    const float r = rsqrt_any(add_rn(__fdiv_rn(s, (float)(p.vectors * 8)), p.eps));
    if (!takes_part) return;
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
        const int v = t + i * p.threads;
        if (v < p.vectors) write8(p, row, v, kept[i], r);
    }
    for (int v = t + KEEP * p.threads; v < p.vectors; v += p.threads)
        write8(p, row, v, load_x(p, x, v), r);
}
