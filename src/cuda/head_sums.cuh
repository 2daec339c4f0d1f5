// SPDX-License-Identifier: Apache-2.0
// Sums of squares over a head, in the orders of SPEC 3.4 and 5. A head belongs to LANES =
// min(head_dim/8, 32) neighbouring lanes, each with 8 neighbouring elements (head_dim 512: with
// vectors lane and lane + 32). Every lane of the warp takes part.
#ifndef CTXKV_CUDA_HEAD_SUMS_CUH
#define CTXKV_CUDA_HEAD_SUMS_CUH

#include "prim.cuh"

// Torch's order over 64 elements: squares of i and i + 32 are added, then halves are folded. A lane
// gives its partner what the partner keeps, over 32, 16 and 8 elements; the last three folds have
// one element a lane left.
static __device__ __forceinline__ float head_sum_folded64(const float *k, int lane) {
    float q[8];
#pragma unroll
    for (int e = 0; e < 8; e++) q[e] = mul_rn(k[e], k[e]);
#pragma unroll
    for (int n = 4; n > 0; n /= 2) {
        const bool upper = lane & n;
#pragma unroll
        for (int e = 0; e < n; e++) {
            const float keep = upper ? q[e + n] : q[e], give = upper ? q[e] : q[e + n];
            q[e] = add_rn(keep, lane_xor(give, n));
        }
    }
    float s = q[0];
    s = add_rn(s, lane_xor(s, 4));
    s = add_rn(s, lane_xor(s, 2));
    return add_rn(s, lane_xor(s, 1));
}

// vLLM's rms_norm: fma in element order, then adjacent lanes as a tree, warps in order.
template <int HD> static __device__ __forceinline__ float head_sum_rms(const float (*k)[8]) {
    constexpr int LANES = HD / 8 < 32 ? HD / 8 : 32;
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < HD / 8 / LANES; v++) {
        float a = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++) a = fma_rn(k[v][e], k[v][e], a);
#pragma unroll
        for (int m = 1; m < LANES; m *= 2) a = add_rn(a, lane_xor(a, m));
        total = v ? add_rn(total, a) : a;
    }
    return total;
}

#endif
