// SPDX-License-Identifier: Apache-2.0
// The arithmetic of a row of the norms (SPEC 3.1), shared by the kernels that have one.
//
// 256 threads own a row: thread t holds columns 8t + 2048k + e, as the order of the sum asks.
#ifndef CTXKV_CUDA_NORM_ROW_CUH
#define CTXKV_CUDA_NORM_ROW_CUH

#include "prim.cuh"

#define D 8192
#define ROW_THREADS 256
#define CHUNKS 4
#define STEP 2048 // columns between a thread's chunks
#define VALUES 32

enum { PAIR = 0, PACKED = 1 };

// The thread's 32 squares by the order's tree.
template <int ORDER> static __device__ __forceinline__ float thread_sum(const float *q, bool fuse) {
    float p[16];
    if (ORDER == PAIR) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            p[i] = fma_rn(q[2 * i], q[2 * i], mul_rn(q[2 * i + 1], q[2 * i + 1]));
#pragma unroll
        for (int j = 1; j < 16; j *= 2)
#pragma unroll
            for (int i = 0; i < 16; i += 2 * j) p[i] = add_rn(p[i], p[i + j]);
        return p[0];
    } else {
        // Vectors of two: p[2i] and p[2i + 1] are the two halves of combination i.
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float a = q[4 * i + half], b = q[4 * i + 2 + half], bb = mul_rn(b, b);
                p[2 * i + half] = fuse ? fma_rn(a, a, bb) : add_rn(mul_rn(a, a), bb);
            }
#pragma unroll
        for (int j = 2; j < 16; j *= 2)
#pragma unroll
            for (int i = 0; i < 16; i += 2 * j) {
                p[i] = add_rn(p[i], p[i + j]);
                p[i + 1] = add_rn(p[i + 1], p[i + j + 1]);
            }
        return add_rn(p[0], p[1]);
    }
}

// The row's sum: lanes by butterfly, then its 8 warps, with a barrier between the two halves. Warps
// may be counted from any multiple of 4: warps i and i + 4 are added first.
template <int ORDER>
static __device__ __forceinline__ void warp_sum(const float *q, bool fuse, float *warp_sums) {
    float s = thread_sum<ORDER>(q, fuse);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 7;
    s = add_rn(s, lane_xor(s, 16));
    s = add_rn(s, lane_xor(s, 8));
    s = add_rn(s, lane_xor(s, 4));
    s = add_rn(s, lane_xor(s, 2));
    s = add_rn(s, lane_xor(s, 1));
    if (lane == 0) warp_sums[warp] = s;
}
static __device__ __forceinline__ float all_sum(const float *warp_sums) {
    float s = warp_sums[threadIdx.x & 7];
    s = add_rn(s, lane_xor(s, 4));
    s = add_rn(s, lane_xor(s, 2));
    return add_rn(s, lane_xor(s, 1));
}
// `row_group` names the block's row group, whose threads meet at a barrier of their own.
template <int ORDER>
static __device__ __forceinline__ float row_sum(
    const float *q, bool fuse, float *warp_sums, int row_group) {
    warp_sum<ORDER>(q, fuse, warp_sums);
    barrier(row_group + 1, ROW_THREADS);
    return all_sum(warp_sums);
}

static __device__ __forceinline__ float root(float sum, float eps) {
    return rsqrt_ftz(fma_rn(sum, 1.0f / D, eps));
}

static __device__ __forceinline__ void scale(float r, float *v) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) v[i] = mul_rn(r, v[i]);
}
static __device__ __forceinline__ void scale_by(const float *g, float *v) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) v[i] = mul_rn(v[i], g[i]);
}
static __device__ __forceinline__ void widen(const uint4 *w, float *v) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) bf16_unpack8(w[k], v + 8 * k);
}
static __device__ __forceinline__ void round_row(float *v) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) bf16_unpack8(bf16_pack8(v + 8 * k), v + 8 * k);
}
static __device__ __forceinline__ void load_row(const u16 *x, uint4 *w) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) w[k] = load16_stream(x + k * STEP);
}

#endif
