// SPDX-License-Identifier: Apache-2.0
// The pre-kernel of prefill: hidden norm to BF16, the layer norms' row factor, the packed gains.
//
// y = (r * h) * g is what a layer norm without input scale makes of h, and r is the same for every
// layer, so h and r are all that the projection needs to build each layer's rows for itself.
// One CTA of 256 threads holds a row of 8192 in registers: thread t has columns 8t + 2048k + e.
// The sum order is SPEC 3.1's `pair`.
#include "prim.cuh"
#include "prefill_params.h"

#define COLUMNS 8192
#define THREADS 256
#ifndef PER_SM
#define PER_SM 4
#endif

// Eight columns' share of the sum: adjacent pairs, then a tree; and the tree over a thread's four
// shares, a warp's lanes and the eight warps.
static __device__ __forceinline__ float share8(const float *v) {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        p[i] = fma_rn(v[2 * i], v[2 * i], mul_rn(v[2 * i + 1], v[2 * i + 1]));
    return add_rn(add_rn(p[0], p[1]), add_rn(p[2], p[3]));
}
static __device__ __forceinline__ float row_sum(const float (&share)[4], float *warp_sums) {
    float s = add_rn(add_rn(share[0], share[1]), add_rn(share[2], share[3]));
#pragma unroll
    for (int m = 16; m > 0; m /= 2) s = add_rn(s, lane_xor(s, m));
    if ((threadIdx.x & 31) == 0) warp_sums[threadIdx.x / 32] = s;
    __syncthreads();
    const float4 a = *(const float4 *)warp_sums, b = *(const float4 *)(warp_sums + 4);
    const float x = add_rn(a.x, b.x), y = add_rn(a.y, b.y);
    const float z = add_rn(a.z, b.z), w = add_rn(a.w, b.w);
    return add_rn(add_rn(x, z), add_rn(y, w));
}

static __device__ __forceinline__ void
load_gain8(float *g, unsigned long long weight, int column, int fp32, float centre) {
    if (fp32) {
        const uint4 a = load16_const((const float *)weight + column);
        const uint4 b = load16_const((const float *)weight + column + 4);
        const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = __uint_as_float(w[i]);
    } else {
        bf16_unpack8(load16_const((const u16 *)weight + column), g);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = add_rn(g[i], centre);
}

// Each k16 block of gains in the order its readers want: lane t of a quad takes columns 2t, 2t + 1,
// 2t + 8, 2t + 9 with one load.
static __device__ __forceinline__ void pack_gains(const ctxkv_prenorm_params &p, int block) {
    const int base = block * (THREADS * 8) + (int)threadIdx.x * 8;
    const int layer = base / COLUMNS, column = base % COLUMNS;
    const unsigned long long weight =
        p.layer_weight + (unsigned long long)(layer * p.layer_stride) * (p.layer_fp32 ? 4 : 2);
    float g[8];
    load_gain8(g, weight, column, p.layer_fp32, p.layer_centre);
    float *out = (float *)p.gains + (base & ~15) + ((base & 8) ? 2 : 0);
    launch_wait();
#pragma unroll
    for (int t = 0; t < 4; t++) *(float2 *)(out + 4 * t) = make_float2(g[2 * t], g[2 * t + 1]);
}

// v = x, or x * g where the weight scales the input.
static __device__ __forceinline__ void
row_input(float *v, uint4 x, const ctxkv_prenorm_params &p, int column) {
    bf16_unpack8(x, v);
    if (!p.hidden_weight || !p.hidden_input) return;
    float g[8];
    load_gain8(g, p.hidden_weight, column, p.hidden_fp32, p.hidden_centre);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = mul_rn(v[i], g[i]);
}

// The row stays packed, 64 bytes a thread, so that six CTAs fit an SM and loads of some rows cover
// the reductions of others.
static __device__ __forceinline__ void norm_row(const ctxkv_prenorm_params &p, long long row) {
    __shared__ __align__(16) float sums[2][8];
    const int t = (int)threadIdx.x * 8;
    const u16 *x = (const u16 *)p.x + row * p.x_stride + t;
    u16 *h = (u16 *)p.h + row * p.h_stride + t;
    uint4 w[4];
    float share[4], v[8], g[8];
    launch_wait();
#pragma unroll
    for (int k = 0; k < 4; k++) w[k] = load16_stream(x + 2048 * k);
#pragma unroll
    for (int k = 0; k < 4; k++) row_input(v, w[k], p, t + 2048 * k), share[k] = share8(v);
    const float inv = 1.0f / COLUMNS;
    const float r = rsqrt_ftz(fma_rn(row_sum(share, sums[0]), inv, p.hidden_eps));
    const bool gain = p.hidden_weight && !p.hidden_input;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        row_input(v, w[k], p, t + 2048 * k);
        if (gain) load_gain8(g, p.hidden_weight, t + 2048 * k, p.hidden_fp32, p.hidden_centre);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = mul_rn(r, v[i]);
            if (gain) v[i] = mul_rn(v[i], g[i]);
        }
        w[k] = bf16_pack8(v);
        store16(h + 2048 * k, w[k]);
        bf16_unpack8(w[k], v);
        share[k] = share8(v);
    }
    const float s = row_sum(share, sums[1]);
    if (threadIdx.x == 0) ((float *)p.row_scale)[row] = rsqrt_ftz(fma_rn(s, inv, p.layer_eps));
}

// Grid: the CTAs that pack gains (4 per layer with weights), then one CTA per row.
extern "C" __global__ void __launch_bounds__(THREADS, PER_SM)
ctxkv_prenorm(const __grid_constant__ ctxkv_prenorm_params p) {
    launch_next();
    const int packers = p.layer_weight ? p.layers * (COLUMNS / (THREADS * 8)) : 0;
    if ((int)blockIdx.x < packers)
        pack_gains(p, (int)blockIdx.x);
    else
        norm_row(p, (long long)blockIdx.x - packers);
}
