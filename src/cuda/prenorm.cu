// SPDX-License-Identifier: Apache-2.0
// The pre-kernel of prefill: hidden norm to BF16 and the row factor of the layer norms.
//
// y = (r * h) * g is what a layer norm without input scale makes of h, and r is the same for every
// layer, so h and r are all that the projection needs to build each layer's rows for itself.
// One CTA of 256 threads holds a row of 8192: thread t has columns 8t + 2048k + e. The sum order is
// SPEC 3.1's `pair`.
// archs: 90a
#include "prim.cuh"
#include "prefill_params.h"

#define COLUMNS 8192
#define THREADS 256

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

static __device__ __forceinline__ void load_gain8(
    float *g, const ctxkv_prenorm_params &p, int column) {
    if (p.gain_fp32) {
        const float *gain = (const float *)p.gain + column;
        const float4 a = __ldg((const float4 *)gain), b = __ldg((const float4 *)gain + 1);
        g[0] = a.x, g[1] = a.y, g[2] = a.z, g[3] = a.w;
        g[4] = b.x, g[5] = b.y, g[6] = b.z, g[7] = b.w;
    } else {
        bf16_unpack8(load16_const((const u16 *)p.gain + column), g);
    }
}

// v = x, or x * g where the gain multiplies the input.
static __device__ __forceinline__ void row_input(
    float *v, uint4 x, const ctxkv_prenorm_params &p, int column) {
    bf16_unpack8(x, v);
    if (!p.gain || !p.gain_input) return;
    float g[8];
    load_gain8(g, p, column);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = mul_rn(v[i], g[i]);
}

// The row stays packed, 64 bytes a thread: loads of some rows cover the reductions of others. Grid:
// one CTA per row.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    ctxkv_prenorm(const __grid_constant__ ctxkv_prenorm_params p) {
    __shared__ __align__(16) float sums[2][8];
    const int t = (int)threadIdx.x * 8;
    const u16 *x = (const u16 *)p.x + blockIdx.x * p.x_row + t;
    u16 *h = (u16 *)p.h + blockIdx.x * p.h_row + t;
    uint4 w[4];
    float share[4], v[8], g[8];
    launch_next();
    launch_wait();
#pragma unroll
    for (int k = 0; k < 4; k++) w[k] = load16_stream(x + 2048 * k);
#pragma unroll
    for (int k = 0; k < 4; k++) row_input(v, w[k], p, t + 2048 * k), share[k] = share8(v);
    const float inv = 1.0f / COLUMNS;
    const float r = rsqrt_ftz(fma_rn(row_sum(share, sums[0]), inv, p.hidden_eps));
    const bool gain = p.gain && !p.gain_input;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        row_input(v, w[k], p, t + 2048 * k);
        if (gain) load_gain8(g, p, t + 2048 * k);
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
    if (threadIdx.x == 0) p.row_scale[blockIdx.x] = rsqrt_ftz(fma_rn(s, inv, p.layer_eps));
}
