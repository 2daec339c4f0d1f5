// SPDX-License-Identifier: Apache-2.0
// Hidden norm and layer norms of a row (SPEC 3.1) in one kernel, in either order of the sum.
//
//   v = input_scale ? x*g : x;  s = sum v^2;  r = rsqrt_ftz(s/D + eps);  y = r*v, then *g unless
//   input_scale;  BF16(y)
//
// 256 threads own a row: thread t holds columns 8t + 2048k + e, as the order of the sum asks.
// Without input scale (not SCALED) the layers share the second sum, for h is the same. Four shapes:
//   few   one block is one row of one layer, all gains in registers before x may be read
//   some  a block is a group of rows; the gains of its layers are on their way to shared memory
//         before x may be read; loops when there are more rows
//   many  one block is a row, gains through the first-level cache
//   any   plain and unlimited: unaligned x, absent norms, gains too large for shared memory
#include "params.h"
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

// The row's sum: lanes by butterfly, then its 8 warps. `row` names the block's row group, whose
// threads meet at a barrier of their own.
template <int ORDER>
static __device__ __forceinline__ float row_sum(
    const float *q, bool fuse, float *warp_sums, int row_group) {
    float s = thread_sum<ORDER>(q, fuse);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 7;
    s = add_rn(s, lane_xor(s, 16));
    s = add_rn(s, lane_xor(s, 8));
    s = add_rn(s, lane_xor(s, 4));
    s = add_rn(s, lane_xor(s, 2));
    s = add_rn(s, lane_xor(s, 1));
    if (lane == 0) warp_sums[warp] = s;
    barrier(row_group + 1, ROW_THREADS);
    s = warp_sums[lane & 7];
    s = add_rn(s, lane_xor(s, 4));
    s = add_rn(s, lane_xor(s, 2));
    return add_rn(s, lane_xor(s, 1));
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
// Eight gains from column `first`, and a thread's 32.
template <bool FP32>
static __device__ __forceinline__ void gains8(const void *g, i64 first, float *v) {
    if (FP32)
        load8_const((const float *)g + first, v);
    else
        bf16_unpack8(load16_const((const u16 *)g + first), v);
}
template <bool FP32>
static __device__ __forceinline__ void load_gains(const void *g, i64 first, float *v) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) gains8<FP32>(g, first + k * STEP, v + 8 * k);
}

// x -> h, rounded to BF16 and widened again.
template <int ORDER>
static __device__ __forceinline__ void hidden_norm(
    const ctxkv_norms_params &p, const float *g, float *h, float *warp_sums, int row_group) {
    const bool input = p.flags & CTXKV_NORMS_HIDDEN_INPUT;
    if (input) scale_by(g, h);
    const float s = row_sum<ORDER>(h, p.flags & CTXKV_NORMS_HIDDEN_FUSE, warp_sums, row_group);
    scale(root(s, p.hidden_eps), h);
    if (!input) scale_by(g, h);
    round_row(h);
}

struct place {
    char *base;
    i64 layer, chunk; // bytes
};
static __device__ __forceinline__ place place_of(const ctxkv_norms_params &p, i64 row, int t) {
    place o;
    i64 vector = row * p.out_row + t * p.out_column, chunk = p.out_column * (STEP / 8);
    if (p.tile_rows) {
        const u32 tile = (u32)row / (u32)p.tile_rows, r = (u32)row - tile * p.tile_rows;
        vector = tile * p.out_tile + ((t / 8) * p.tile_rows + r) * 8 + ((t ^ r) & 7);
        chunk = STEP / 8 * p.tile_rows;
    }
    o.base = (char *)p.out + vector * 16;
    o.layer = p.out_layer * 16;
    o.chunk = chunk * 16;
    return o;
}
// Words that the next kernel expects to be zero; call after the launch wait.
static __device__ __forceinline__ void clear_words(const ctxkv_norms_params &p) {
    if (blockIdx.x | blockIdx.y) return;
    for (int i = threadIdx.x; i < p.zero_count; i += blockDim.x) p.zero[i] = 0;
}
static __device__ __forceinline__ void write_row(const place &o, int layer, const float *v) {
    char *dst = o.base + layer * o.layer;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) store16(dst + k * o.chunk, bf16_pack8(v + 8 * k));
}

template <int ORDER, bool SCALED, bool FP32>
static __device__ __forceinline__ void norms_few(const ctxkv_norms_params &p) {
    __shared__ float warp_sums[2][8];
    const int first = threadIdx.x * 8, layer = blockIdx.y;
    if (p.flags & CTXKV_NORMS_NEXT_EARLY) launch_next();
    uint4 x[CHUNKS];
    float h[VALUES], g[VALUES], layer_g[VALUES];
    load_gains<FP32>(p.hidden_gain, first, g);
    load_gains<FP32>(p.layer_gain, layer * D + first, layer_g);
    const place o = place_of(p, blockIdx.x, threadIdx.x);
    launch_wait();
    load_row((const u16 *)p.x + blockIdx.x * p.x_row + first, x);
    clear_words(p);
    widen(x, h);
    hidden_norm<ORDER>(p, g, h, warp_sums[0], 0);
    if (SCALED) scale_by(layer_g, h);
    const float s = row_sum<ORDER>(h, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums[1], 0);
    // Not earlier as a rule: the next kernel's blocks would take issue slots that this one needs.
    launch_next();
    scale(root(s, p.layer_eps), h);
    if (!SCALED) scale_by(layer_g, h);
    write_row(o, layer, h);
}

// Eight gains from shared memory.
template <bool FP32>
static __device__ __forceinline__ void shared_gains(const void *gains, int column, float *g) {
    if (FP32) {
        const float4 *s = (const float4 *)((const float *)gains + column);
        const float4 a = s[0], b = s[1];
        g[0] = a.x, g[1] = a.y, g[2] = a.z, g[3] = a.w;
        g[4] = b.x, g[5] = b.y, g[6] = b.z, g[7] = b.w;
    } else {
        bf16_unpack8(*(const uint4 *)((const u16 *)gains + column), g);
    }
}

// One layer from h (SCALED) or from r*h, its gains in shared memory.
template <int ORDER, bool SCALED, bool FP32>
static __device__ __forceinline__ void write_layer(
    const ctxkv_norms_params &p, const float *h, const void *gains, const place &o, int layer,
    float *warp_sums, int row_group) {
    const int column = (threadIdx.x & (ROW_THREADS - 1)) * 8;
    char *dst = o.base + layer * o.layer;
    float v[SCALED ? VALUES : 8], r = 1.0f;
    if (SCALED) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) shared_gains<FP32>(gains, column + k * STEP, v + 8 * k);
        scale_by(h, v);
        r = root(
            row_sum<ORDER>(v, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums, row_group), p.layer_eps);
        scale(r, v);
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        if (!SCALED) {
            shared_gains<FP32>(gains, column + k * STEP, v);
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = mul_rn(h[8 * k + e], v[e]);
        }
        store16(dst + k * o.chunk, bf16_pack8(v + (SCALED ? 8 * k : 0)));
    }
}

template <int ORDER, bool SCALED, bool FP32>
static __device__ __forceinline__ void norms_some(const ctxkv_norms_params &p) {
    extern __shared__ uint4 gains[];
    __shared__ float warp_sums[4][4][8];
    const int t = threadIdx.x & (ROW_THREADS - 1), group = threadIdx.x / ROW_THREADS;
    const int groups = blockDim.x / ROW_THREADS, first = t * 8;
    const int layer = blockIdx.y * p.layers_per_block;
    const int end = min(layer + p.layers_per_block, p.layers);
    const int layer_vectors = D * (FP32 ? 4 : 2) / 16;
    if (p.flags & CTXKV_NORMS_NEXT_EARLY) launch_next();
    {
        const uint4 *src = (const uint4 *)p.layer_gain + (i64)layer * layer_vectors;
        for (int i = threadIdx.x; i < (end - layer) * layer_vectors; i += blockDim.x)
            copy16_async(gains + i, src + i);
    }
    float g[VALUES];
    load_gains<FP32>(p.hidden_gain, first, g);
    launch_wait();
    i64 row = (i64)blockIdx.x * groups + group;
    const i64 stride = (i64)gridDim.x * groups;
    const u16 *x = (const u16 *)p.x + first;
    uint4 next[CHUNKS];
    if (row < p.rows) load_row(x + row * p.x_row, next);
    clear_words(p);
    copy_wait();
    __syncthreads();
    for (int turn = 0; row < p.rows; row += stride, turn ^= 1) {
        float h[VALUES];
        widen(next, h);
        if (row + stride < p.rows) load_row(x + (row + stride) * p.x_row, next);
        hidden_norm<ORDER>(p, g, h, warp_sums[group][turn], group);
        if (!SCALED) {
            const float s = row_sum<ORDER>(
                h, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums[group][2 + turn], group);
            scale(root(s, p.layer_eps), h);
        }
        const place o = place_of(p, row, t);
        // Buffers in turn: a warp can be one barrier ahead of another of its row, never two.
        for (int l = layer; l < end; l++)
            write_layer<ORDER, SCALED, FP32>(
                p, h, gains + (l - layer) * layer_vectors, o, l,
                warp_sums[group][2 + ((l - layer) & 1)], group);
        if (SCALED) barrier(group + 1, ROW_THREADS);
    }
    launch_next();
}

// v[i] *= g[i], chunk by chunk: few gains in registers at a time.
template <bool FP32>
static __device__ __forceinline__ void scale_row(const void *gains, i64 first, float *v) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        float g[8];
        gains8<FP32>(gains, first + k * STEP, g);
#pragma unroll
        for (int e = 0; e < 8; e++) v[8 * k + e] = mul_rn(v[8 * k + e], g[e]);
    }
}

template <int ORDER, bool SCALED, bool FP32>
static __device__ __forceinline__ void norms_many(const ctxkv_norms_params &p) {
    __shared__ float warp_sums[4][8];
    const int first = threadIdx.x * 8;
    const bool input = p.flags & CTXKV_NORMS_HIDDEN_INPUT;
    launch_next();
    launch_wait();
    uint4 x[CHUNKS];
    float h[VALUES];
    load_row((const u16 *)p.x + (i64)blockIdx.x * p.x_row + first, x);
    widen(x, h);
    if (input) scale_row<FP32>(p.hidden_gain, first, h);
    float s = row_sum<ORDER>(h, p.flags & CTXKV_NORMS_HIDDEN_FUSE, warp_sums[0], 0);
    scale(root(s, p.hidden_eps), h);
    if (!input) scale_row<FP32>(p.hidden_gain, first, h);
    round_row(h);
    const place o = place_of(p, blockIdx.x, threadIdx.x);
    if (!SCALED) {
        s = row_sum<ORDER>(h, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums[1], 0);
        scale(root(s, p.layer_eps), h);
    }
    for (int l = 0; l < p.layers; l++) {
        const i64 column = (i64)l * D + first;
        char *dst = o.base + l * o.layer;
        if (SCALED) {
            float v[VALUES];
#pragma unroll
            for (int i = 0; i < VALUES; i++) v[i] = h[i];
            scale_row<FP32>(p.layer_gain, column, v);
            s = row_sum<ORDER>(v, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums[2 + (l & 1)], 0);
            scale(root(s, p.layer_eps), v);
            write_row(o, l, v);
        } else {
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) {
                float v[8];
                gains8<FP32>(p.layer_gain, column + k * STEP, v);
#pragma unroll
                for (int e = 0; e < 8; e++) v[e] = mul_rn(h[8 * k + e], v[e]);
                store16(dst + k * o.chunk, bf16_pack8(v));
            }
        }
    }
}

template <int ORDER, bool SCALED>
static __device__ __forceinline__ void norms_any(const ctxkv_norms_params &p) {
    __shared__ float warp_sums[4][8];
    const int first = threadIdx.x * 8;
    launch_next();
    launch_wait();
    clear_words(p);
    int turn = 0;
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
        const u16 *x = (const u16 *)p.x + row * p.x_row + first;
        float h[VALUES], g[VALUES];
#pragma unroll 1
        for (int k = 0; k < CHUNKS; k++) {
            const uint4 w = p.flags & CTXKV_NORMS_X_BY2 ? load16_by2(x + k * STEP)
                                                        : load16_stream(x + k * STEP);
            // The row is kept in registers, so the chunk is chosen by comparison, not by index.
#pragma unroll
            for (int j = 0; j < CHUNKS; j++)
                if (j == k) bf16_unpack8(w, h + 8 * j);
        }
        const place o = place_of(p, row, threadIdx.x);
        if (!(p.flags & CTXKV_NORMS_NO_HIDDEN)) {
            load_gains<true>(p.hidden_gain, first, g);
            hidden_norm<ORDER>(p, g, h, warp_sums[turn], 0);
        }
        if (p.flags & CTXKV_NORMS_NO_LAYER) {
            write_row(o, 0, h);
            continue;
        }
        float r = 0.0f;
        if (!SCALED)
            r = root(
                row_sum<ORDER>(h, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums[2 + turn], 0),
                p.layer_eps);
#pragma unroll 1
        for (int l = 0; l < p.layers; l++) {
            load_gains<true>(p.layer_gain, (i64)l * D + first, g);
            if (SCALED) {
                scale_by(h, g);
                r = root(
                    row_sum<ORDER>(g, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums[2 + (l & 1)], 0),
                    p.layer_eps);
                scale(r, g);
            } else {
#pragma unroll
                for (int i = 0; i < VALUES; i++) g[i] = mul_rn(mul_rn(r, h[i]), g[i]);
            }
            write_row(o, l, g);
        }
        if (SCALED) __syncthreads();
    }
}

#define NORMS_GAINS(name, order, scaled, bits)                                                     \
    extern "C" __global__ void __launch_bounds__(256, bits == 16 ? 3 : 2)                          \
        ctxkv_norms_few##bits##_##name(const __grid_constant__ ctxkv_norms_params p) {             \
        norms_few<order, scaled, bits == 32>(p);                                                   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(512, 1)                                           \
        ctxkv_norms_some##bits##_##name(const __grid_constant__ ctxkv_norms_params p) {            \
        norms_some<order, scaled, bits == 32>(p);                                                  \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 3)                                           \
        ctxkv_norms_many##bits##_##name(const __grid_constant__ ctxkv_norms_params p) {            \
        norms_many<order, scaled, bits == 32>(p);                                                  \
    }
#define NORMS(name, order, scaled)                                                                 \
    NORMS_GAINS(name, order, scaled, 16)                                                           \
    NORMS_GAINS(name, order, scaled, 32)                                                           \
    extern "C" __global__ void __launch_bounds__(256, 2)                                           \
        ctxkv_norms_any_##name(const __grid_constant__ ctxkv_norms_params p) {                     \
        norms_any<order, scaled>(p);                                                               \
    }
NORMS(pair, PAIR, false)
NORMS(pair_scaled, PAIR, true)
NORMS(packed, PACKED, false)
NORMS(packed_scaled, PACKED, true)
