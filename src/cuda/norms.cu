// SPDX-License-Identifier: Apache-2.0
// Hidden norm and layer norms of a row (SPEC 3.1) in one kernel, in either order of the sum.
//
//   v = input_scale ? x*g : x;  s = sum v^2;  r = rsqrt_ftz(s/D + eps);  y = r*v, then *g unless
//   input_scale;  BF16(y)
//
// 256 threads own a row: thread t holds columns 8t + 2048k + e, as the order of the sum asks.
// Without input scale (not SCALED) the layers share the second sum, for h is the same. The shapes:
//   row   one block is a row, for some of its layers; gains in registers and shared memory before x
//         may be read (not SCALED)
//   half  the same for half the columns: both halves make the sums
//   few   one block is one row of one layer, all gains in registers before x may be read (SCALED)
//   some  a block is a group of rows; the gains of its layers are on their way to shared memory
//         before x may be read; loops when there are more rows
//   many  one block is a row, gains through the first-level cache
//   any   plain and unlimited: unaligned x, absent norms, gains too large for shared memory
#include "norm_row.cuh"
#include "params.h"

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
static __device__ __forceinline__ void write_row(const place &o, int layer, const float *v) {
    char *dst = o.base + layer * o.layer;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) store16(dst + k * o.chunk, bf16_pack8(v + 8 * k));
}

// As row_sum, the end by two wide reads in place of three exchanges.
template <int ORDER>
static __device__ __forceinline__ float row_sum16(const float *q, bool fuse, float4 *warp_sums) {
    warp_sum<ORDER>(q, fuse, (float *)warp_sums);
    barrier(1, ROW_THREADS);
    const float4 a = warp_sums[0], b = warp_sums[1];
    const float even = add_rn(add_rn(a.x, b.x), add_rn(a.z, b.z));
    return add_rn(even, add_rn(add_rn(a.y, b.y), add_rn(a.w, b.w)));
}

// Eight columns of a layer from r*h and gains.
static __device__ __forceinline__ void write8(char *dst, const float *v, const float *g) {
    float y[8];
#pragma unroll
    for (int e = 0; e < 8; e++) y[e] = mul_rn(v[e], g[e]);
    store16(dst, bf16_pack8(y));
}

// The gains of a thread's chunks of the layers after the block's first, in its own part of shared
// memory: no barrier is needed.
template <int K, bool FP32>
static __device__ __forceinline__ void fetch_gains(
    uint4 *gains, const void *layer_gain, i64 column, int layers) {
    constexpr int UNITS = FP32 ? 2 : 1, SIZE = FP32 ? 4 : 2;
    for (int l = 0; l < layers; l++)
#pragma unroll
        for (int i = 0; i < K * UNITS; i++)
            copy16_async(
                gains + (l * K * UNITS + i) * ROW_THREADS + threadIdx.x,
                (const char *)layer_gain + (column + (i64)l * D + i / UNITS * STEP) * SIZE +
                    i % UNITS * 16);
}
template <bool FP32>
static __device__ __forceinline__ void fetched_gains(const uint4 *gains, float *g) {
    if (FP32) {
        const uint4 a = gains[0], b = gains[ROW_THREADS];
        g[0] = __uint_as_float(a.x), g[1] = __uint_as_float(a.y), g[2] = __uint_as_float(a.z);
        g[3] = __uint_as_float(a.w), g[4] = __uint_as_float(b.x), g[5] = __uint_as_float(b.y);
        g[6] = __uint_as_float(b.z), g[7] = __uint_as_float(b.w);
    } else {
        bf16_unpack8(gains[0], g);
    }
}

// PARTS blocks a row and layers_per_block layers a block: grid {rows, layer groups, PARTS}.
template <int ORDER, int PARTS, bool FP32>
static __device__ __forceinline__ void norms_row(const ctxkv_norms_params &p) {
    constexpr int K = CHUNKS / PARTS;
    extern __shared__ uint4 gains[];
    __shared__ float4 warp_sums[2][2];
    const bool early = p.flags & CTXKV_NORMS_NEXT_EARLY;
    const int first = threadIdx.x * 8, part = blockIdx.z;
    const int layer = blockIdx.y * p.layers_per_block;
    const int more = min(p.layers_per_block, p.layers - layer) - 1; // layers after the first
    if (early) launch_next();
    const u16 *src = (const u16 *)p.x + (i64)blockIdx.x * p.x_row + first;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) prefetch(src + k * STEP);
    const i64 column = (i64)layer * D + part * K * STEP + first;
    float g[VALUES], layer_g[8 * K], h[VALUES];
    load_gains<FP32>(p.hidden_gain, first, g);
#pragma unroll
    for (int k = 0; k < K; k++) gains8<FP32>(p.layer_gain, column + k * STEP, layer_g + 8 * k);
    fetch_gains<K, FP32>(gains, p.layer_gain, column + D, more);
    const place o = place_of(p, blockIdx.x, threadIdx.x);
    uint4 x[CHUNKS];
    launch_wait();
    // Not before: blocks of launches to come would crowd those that run on a few multiprocessors.
    if (!early) launch_next();
    load_row(src, x);
    widen(x, h);
    const bool input = p.flags & CTXKV_NORMS_HIDDEN_INPUT;
    if (input) scale_by(g, h);
    float s = row_sum16<ORDER>(h, p.flags & CTXKV_NORMS_HIDDEN_FUSE, warp_sums[0]);
    scale(root(s, p.hidden_eps), h);
    if (!input) scale_by(g, h);
    round_row(h);
    s = row_sum16<ORDER>(h, p.flags & CTXKV_NORMS_LAYER_FUSE, warp_sums[1]);
    const float r = root(s, p.layer_eps);
    copy_wait();
#pragma unroll
    for (int c = 0; c < PARTS; c++) {
        if (c != part) continue;
        float *v = h + c * 8 * K;
        char *dst = o.base + layer * o.layer + c * K * o.chunk;
#pragma unroll
        for (int i = 0; i < 8 * K; i++) v[i] = mul_rn(r, v[i]);
#pragma unroll
        for (int k = 0; k < K; k++) write8(dst + k * o.chunk, v + 8 * k, layer_g + 8 * k);
        const uint4 *fetched = gains + threadIdx.x;
        for (int l = 0; l < more; l++) {
            dst += o.layer;
#pragma unroll
            for (int k = 0; k < K; k++, fetched += (FP32 ? 2 : 1) * ROW_THREADS) {
                float y[8];
                fetched_gains<FP32>(fetched, y);
                write8(dst + k * o.chunk, v + 8 * k, y);
            }
        }
    }
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

#define KERNEL(name, threads, blocks, body)                                                        \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                  \
        ctxkv_norms_##name(const __grid_constant__ ctxkv_norms_params p) {                         \
        body(p);                                                                                   \
    }
#define NORMS_GAINS(name, order, scaled, bits)                                                     \
    KERNEL(some##bits##_##name, 512, 1, (norms_some<order, scaled, bits == 32>))                   \
    KERNEL(many##bits##_##name, 256, 3, (norms_many<order, scaled, bits == 32>))
#define NORMS_ROW(name, order, bits)                                                               \
    KERNEL(row##bits##_##name, 256, 2, (norms_row<order, 1, bits == 32>))                          \
    KERNEL(half##bits##_##name, 256, 2, (norms_row<order, 2, bits == 32>))
#define NORMS_FEW(name, order, bits)                                                               \
    KERNEL(few##bits##_##name, 256, bits == 16 ? 3 : 2, (norms_few<order, true, bits == 32>))
#define NORMS(name, order, scaled)                                                                 \
    NORMS_GAINS(name, order, scaled, 16)                                                           \
    NORMS_GAINS(name, order, scaled, 32)                                                           \
    KERNEL(any_##name, 256, 2, (norms_any<order, scaled>))
NORMS(pair, PAIR, false)
NORMS_ROW(pair, PAIR, 16)
NORMS_ROW(pair, PAIR, 32)
NORMS(pair_scaled, PAIR, true)
NORMS_FEW(pair_scaled, PAIR, 16)
NORMS_FEW(pair_scaled, PAIR, 32)
NORMS(packed, PACKED, false)
NORMS_ROW(packed, PACKED, 16)
NORMS_ROW(packed, PACKED, 32)
NORMS(packed_scaled, PACKED, true)
NORMS_FEW(packed_scaled, PACKED, 16)
NORMS_FEW(packed_scaled, PACKED, 32)
