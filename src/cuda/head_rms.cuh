// SPDX-License-Identifier: Apache-2.0
// K norm, RoPE and the insert of one head of SPEC 5's family (head_dim 64 or 128) held by a quad of
// lanes: lane t has the vectors t, t + 4, t + 8, .. of eight neighbouring columns, as
// quad_transpose leaves them. A vector is what a thread of vLLM's rms_norm reads, and NeoX's
// partners lie in one lane. All lanes of the warp take part in every call.
#ifndef CTXKV_CUDA_HEAD_RMS_CUH
#define CTXKV_CUDA_HEAD_RMS_CUH

#include "prim.cuh"

// fma in element order within a vector, then adjacent vectors as a tree.
template <int HD>
static __device__ __forceinline__ float rms_square_sum(const float (&x)[HD / 32][8]) {
    constexpr int VECS = HD / 32;
    float a[VECS];
#pragma unroll
    for (int i = 0; i < VECS; i++) {
        a[i] = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++) a[i] = fma_rn(x[i][e], x[i][e], a[i]);
        a[i] = add_rn(a[i], lane_xor(a[i], 1));
        a[i] = add_rn(a[i], lane_xor(a[i], 2));
    }
#pragma unroll
    for (int m = 1; m < VECS; m *= 2)
#pragma unroll
        for (int i = 0; i < VECS; i += 2 * m) a[i] = add_rn(a[i], a[i + m]);
    return a[0];
}

template <int HD>
static __device__ __forceinline__ void rms_norm_head(
    uint4 (&w)[HD / 32], const float *gain, float eps, int t) {
    float x[HD / 32][8];
#pragma unroll
    for (int i = 0; i < HD / 32; i++) bf16_unpack8(w[i], x[i]);
    const float r = rsqrt_any(add_rn(__fdiv_rn(rms_square_sum<HD>(x), (float)HD), eps));
#pragma unroll
    for (int i = 0; i < HD / 32; i++) {
        float g[8];
        load8_const(gain + (t + 4 * i) * 8, g);
#pragma unroll
        for (int e = 0; e < 8; e++) x[i][e] = mul_rn(mul_rn(x[i][e], r), g[e]);
        w[i] = bf16_pack8(x[i]);
    }
}

// The cosines of the lane's vectors of the lower half, then their sines.
template <int HD>
static __device__ __forceinline__ void rms_angles(uint4 (&cs)[HD / 32], const u16 *row, int t) {
    constexpr int PAIRS = HD / 64;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        cs[i] = __ldg((const uint4 *)(row + (t + 4 * i) * 8));
        cs[PAIRS + i] = __ldg((const uint4 *)(row + HD / 2 + (t + 4 * i) * 8));
    }
}

template <int HD>
static __device__ __forceinline__ void rms_rotate(uint4 (&w)[HD / 32], const uint4 (&cs)[HD / 32]) {
    constexpr int PAIRS = HD / 64;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        float x[8], y[8], c[8], s[8];
        bf16_unpack8(w[i], x), bf16_unpack8(w[PAIRS + i], y);
        bf16_unpack8(cs[i], c), bf16_unpack8(cs[PAIRS + i], s);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float a = fma_rn(x[e], c[e], -mul_rn(y[e], s[e]));
            y[e] = fma_rn(y[e], c[e], mul_rn(x[e], s[e]));
            x[e] = a;
        }
        w[i] = bf16_pack8(x), w[PAIRS + i] = bf16_pack8(y);
    }
}

template <int HD>
static __device__ __forceinline__ void rms_write(
    const uint4 (&w)[HD / 32], u16 *out, int t, bool store, bool vector) {
    if (!store) return;
#pragma unroll
    for (int i = 0; i < HD / 32; i++) {
        if (vector)
            store16(out + (t + 4 * i) * 8, w[i]);
        else
            store16_by2(out + (t + 4 * i) * 8, w[i]);
    }
}

#endif
