// SPDX-License-Identifier: Apache-2.0
// K norm, RoPE and the insert of one head of 64 held by a quad of lanes as tensor-core
// accumulators.
//
// Lane t of the quad holds columns 8j + 2t and 8j + 2t + 1 of the head for j = 0..7, as eight words
// of two BF16: the layout of mma and wgmma accumulators, once rounded. All lanes of the warp take
// part in every call; eight quads work on eight rows.
#ifndef CTXKV_CUDA_HEAD_STORE_CUH
#define CTXKV_CUDA_HEAD_STORE_CUH

#include "prim.cuh"

// SPEC 3.4's sum: columns i and i + 32, then halves of 16, 8, 4, 2, 1. The first three folds are
// within a lane, the next two between lanes.
static __device__ __forceinline__ float head_square_sum(const u32 (&w)[8]) {
    float a[8], b[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float x = bf16_low(w[j]), y = bf16_high(w[j]);
        a[j] = mul_rn(x, x), b[j] = mul_rn(y, y);
    }
#pragma unroll
    for (int n = 4; n > 0; n /= 2)
#pragma unroll
        for (int j = 0; j < n; j++) a[j] = add_rn(a[j], a[j + n]), b[j] = add_rn(b[j], b[j + n]);
    float s = a[0], u = b[0];
    s = add_rn(s, lane_xor(s, 2)), u = add_rn(u, lane_xor(u, 2));
    s = add_rn(s, lane_xor(s, 1)), u = add_rn(u, lane_xor(u, 1));
    return add_rn(s, u);
}

static __device__ __forceinline__ void head_norm(u32 (&w)[8], float eps) {
    const float r = rsqrt_any(fma_rn(head_square_sum(w), 1.0f / 64, eps));
#pragma unroll
    for (int j = 0; j < 8; j++)
        w[j] = bf16_pack(mul_rn(bf16_low(w[j]), r), mul_rn(bf16_high(w[j]), r));
}

// The cosines and sines of a position for this lane's pairs 4j + t: low half cos, high half sin.
static __device__ __forceinline__ void head_angles(u32 (&cs)[8], const u16 *row, int t) {
#pragma unroll
    for (int j = 0; j < 8; j++)
        cs[j] = (u32)__ldg(row + 4 * j + t) | (u32)__ldg(row + 32 + 4 * j + t) << 16;
}

static __device__ __forceinline__ void head_rotate(u32 (&w)[8], const u32 (&cs)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float x = bf16_low(w[j]), y = bf16_high(w[j]);
        const float c = bf16_low(cs[j]), s = bf16_high(cs[j]);
        w[j] = bf16_pack(fma_rn(x, c, -mul_rn(y, s)), fma_rn(y, c, mul_rn(x, s)));
    }
}

// 4x4 transposition among the lanes of a quad: lane t ends with word t of lanes 0..3.
static __device__ __forceinline__ uint4 quad_transpose(u32 a, u32 b, u32 c, u32 d, int t) {
    const bool odd = t & 1, upper = t & 2;
    const u32 x = lane_xor(odd ? a : b, 1), y = lane_xor(odd ? c : d, 1);
    if (odd)
        a = x, c = y;
    else
        b = x, d = y;
    const u32 z = lane_xor(upper ? a : c, 2), v = lane_xor(upper ? b : d, 2);
    if (upper)
        a = z, b = v;
    else
        c = z, d = v;
    return make_uint4(a, b, c, d);
}

// Writes the head at `out` where `store` holds; `vector`: addresses are multiples of 16 bytes.
static __device__ __forceinline__ void head_write(
    const u32 (&w)[8], u16 *out, int t, bool store, bool vector) {
    const uint4 low = quad_transpose(w[0], w[1], w[2], w[3], t);
    const uint4 high = quad_transpose(w[4], w[5], w[6], w[7], t);
    if (!store) return;
    if (vector) {
        store16(out + 8 * t, low);
        store16(out + 32 + 8 * t, high);
    } else {
        store16_by2(out + 8 * t, low);
        store16_by2(out + 32 + 8 * t, high);
    }
}

#endif
