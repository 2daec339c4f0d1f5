// SPDX-License-Identifier: Apache-2.0
// The projection for T <= 64 with K norm, RoPE and cache insert behind it, in one kernel.
// archs: 90a
//
//   kv[t][n] = BF16(chain over k16 steps of mma16(x[t], w[n], acc)), acc = +0    (SPEC 3.3)
//
// A CTA has tile_rows weight rows and batch_rows rows of x, and walks all of K: x is the M operand
// (64 rows, those past batch_rows are noise), the weights are N. A ring of stages in shared memory
// is filled by bulk copies, one contiguous piece per operand and stage; CTAs of a cluster that want
// the same bytes fetch a share each and hand it to all. Weights are on their way before the launch
// wait. docs/op/decode.md: the layouts, why this shape, what was measured.
#include "decode_head.cuh"
#include "decode_params.h"
#include "decode_ring.cuh"
#include "prim.cuh"

struct shared_state {
    u64 full[CTXKV_DECODE_MAX_STAGES], empty[CTXKV_DECODE_MAX_STAGES];
    row_place places[CTXKV_DECODE_MAX_ROWS];
    int last[CTXKV_DECODE_THREADS / 32];
};

// Where this CTA stands: grid {tiles, batch tiles, layers}, clusters {cluster_tiles,
// cluster_batches, 1}.
struct where {
    int layer, tile, batch;   // batch: batch tile
    int in_tiles, in_batches; // place in the cluster
    int first_row, rows;      // of T
    int first_column;         // of the layer
};
static __device__ __forceinline__ where find(const ctxkv_decode_params &p) {
    where o;
    o.tile = blockIdx.x, o.batch = blockIdx.y, o.layer = blockIdx.z;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(o.in_tiles));
    asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(o.in_batches));
    o.first_row = o.batch * p.batch_rows;
    o.rows = min(p.batch_rows, p.rows - o.first_row);
    o.first_column = o.tile * p.tile_rows;
    return o;
}

static __device__ __forceinline__ void store_pair(u16 *out, u32 word, bool by2) {
    if (by2)
        out[0] = (u16)word, out[1] = (u16)(word >> 16);
    else
        *(u32 *)out = word;
}

// Calls f(row of the batch tile, column of the layer, two outputs) for this thread's outputs.
template <int N, class F>
static __device__ __forceinline__ void each_output(
    const ctxkv_decode_params &p, const where &o, const u32 (&out)[N / 4], F f) {
    const int row = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4, pair = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int in_tile = 8 * j + pair, column = o.first_column + in_tile;
        if (in_tile >= p.tile_rows || column >= p.columns) continue;
        if (row < o.rows) f(row, column, out[2 * j]);
        if (row + 8 < o.rows) f(row + 8, column, out[2 * j + 1]);
    }
}

// Counts this CTA in for a head that it has columns of; says whether it is the last.
static __device__ __forceinline__ bool arrive_at_head(
    const ctxkv_decode_params &p, const where &o, int head) {
    const int first = head * p.head_dim / p.tile_rows;
    const int last = (head * p.head_dim + p.head_dim - 1) / p.tile_rows;
    unsigned *c = p.counters + ((i64)o.layer * p.batch_tiles + o.batch) * p.heads + head;
    __threadfence();
    const bool all = atomicAdd(c, 1u) == (unsigned)(last - first);
    if (all) *c = 0;
    __threadfence();
    return all;
}

// K goes to the plan's room, V straight to the cache; the CTA that completes a head finishes it.
template <int N>
static __device__ __forceinline__ void store_tile(
    const ctxkv_decode_params &p, const where &o, const u32 (&out)[N / 4], shared_state &sm) {
    const ctxkv_decode_layer &l = p.layer[o.layer];
    const int half = p.columns / 2;
    u16 *kv = (u16 *)p.kv + o.layer * p.kv_layer + o.first_row * p.kv_row;
    const bool owner = threadIdx.x < 128;
    if (owner)
        each_output<N>(p, o, out, [&](int row, int column, u32 word) {
            if (column < half) *(u32 *)(kv + row * p.kv_row + column) = word;
        });
    __syncthreads();
    const int first_head = o.first_column / p.head_dim;
    const int end = min(o.first_column + p.tile_rows, half);
    const int heads = end > o.first_column ? (end - 1) / p.head_dim - first_head + 1 : 0;
    if (threadIdx.x >= 128 && (int)threadIdx.x < 128 + heads)
        sm.last[threadIdx.x - 128] = arrive_at_head(p, o, first_head + threadIdx.x - 128);
    if (owner)
        each_output<N>(p, o, out, [&](int row, int column, u32 word) {
            if (column < half || sm.places[row].position < 0) return;
            const int head = (column - half) / p.head_dim, i = (column - half) % p.head_dim;
            store_pair(
                (u16 *)l.v + sm.places[row].v + head * l.v_head + i, word,
                p.flags & CTXKV_DECODE_CACHE_BY2);
        });
    if (heads == 0) return;
    __syncthreads();
    for (int h = 0; h < heads; h++) {
        if (!sm.last[h]) continue;
        const int head = first_head + h;
        if (p.head_dim == 64) finish_head<64>(p, l, kv, head, sm.places, o.rows);
        if (p.head_dim == 128) finish_head<128>(p, l, kv, head, sm.places, o.rows);
        if (p.head_dim == 256) finish_head<256>(p, l, kv, head, sm.places, o.rows);
        if (p.head_dim == 512) finish_head<512>(p, l, kv, head, sm.places, o.rows);
    }
}

#define EARLY 4 // stages of weights asked for before anything else

// A stage is full when both operands have come, and empty when the warps of all CTAs that this one
// feeds are done with it. A CTA that needs nobody's help with its weights asks for the first at
// once.
static __device__ __forceinline__ void start(
    const ctxkv_decode_params &p, const ring &g, const feed &weights) {
    const int told = p.cluster_tiles + p.cluster_batches - 1;
    if (threadIdx.x == 128) {
        for (int i = 0; i < g.depth; i++) bar_init(g.full + i * 8, 2);
        bar_init_done();
        // Not a loop: with one, the compiler would keep the ring in registers of each lane, and the
        // MMAs of the consumers would have to wait for their descriptors.
        if (weights.shares == 1) {
#pragma unroll
            for (int i = 0; i < EARLY; i++)
                if (i < p.w_first) ring_fill(g, weights, p.chunks, i, i + 1);
        }
    } else if (threadIdx.x == 160) {
        for (int i = 0; i < g.depth; i++) bar_init(g.empty + i * 8, 4 * told);
        bar_init_done();
    }
    __syncwarp();
    if (told > 1)
        cluster_sync();
    else
        __syncthreads();
}

template <int N, int STEPS>
static __device__ __forceinline__ void decode(const ctxkv_decode_params &p) {
    extern __shared__ __align__(1024) char stages[];
    __shared__ shared_state sm;
    launch_next();
    const where o = find(p);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const int ct = p.cluster_tiles, cb = p.cluster_batches;
    const bool to_kv = p.flags & CTXKV_DECODE_KV;
    if (!to_kv && p.layer[o.layer].rows == 0) return; // so does the whole cluster
    ring g;
    g.base = smem_address(stages), g.full = smem_address(sm.full);
    g.empty = smem_address(sm.empty), g.depth = p.stages, g.chunks = STEPS * 2;
    // x first: its lines want the alignment of the stage.
    g.x_bytes = g.chunks * p.batch_rows * 16;
    g.bytes = (g.x_bytes + g.chunks * p.tile_rows * 16 + 1023) & ~1023;
    const i64 tile = (i64)o.layer * p.tiles + o.tile;
    u32 column = 0;
    for (int i = 0; i < cb; i++) column |= 1u << (i * ct + o.in_tiles);
    const feed weights = {
        (const char *)p.w + tile * p.chunks * p.tile_rows * 16,
        g.x_bytes,
        p.tile_rows * 16,
        o.in_batches,
        cb,
        column};
    start(p, g, weights);
    u32 out[N / 4];
    if (warp < 4) {
        // Whom this CTA's slots are filled by: the row and the column of the cluster it is in.
        const bool tells = lane < ct + cb - 1;
        const int other = lane - ct + (lane - ct >= o.in_batches);
        const int rank = lane < ct ? o.in_batches * ct + lane : other * ct + o.in_tiles;
        const u32 target = bar_in(g.empty, tells ? rank : 0);
        launch_wait();
        multiply<N, STEPS>(g, p.chunks / 2, p.tile_rows, p.batch_rows, target, tells, out);
    } else if (warp == 4) {
        // Copies are served in order: x must not stand behind all the weights that there is room
        // for, so that only the first are asked for before the wait.
        if (lane == 0) {
            ring_fill(g, weights, p.chunks, cb > 1 ? 0 : min(EARLY, p.w_first), p.w_first);
            launch_wait();
            ring_fill(g, weights, p.chunks, p.w_first, 1 << 30);
        }
        __syncwarp();
        launch_wait();
    } else {
        launch_wait();
        if (warp == 5 && lane == 0) {
            const i64 batch = o.layer * p.x_layer + (i64)o.batch * p.chunks * p.batch_rows;
            const feed x = {
                (const char *)p.x + batch * 16,         0, p.batch_rows * 16, o.in_tiles, ct,
                ((1u << ct) - 1) << (o.in_batches * ct)};
            ring_fill(g, x, p.chunks, 0, 1 << 30);
        }
        if (warp >= 6 && !to_kv) {
            const int row = threadIdx.x - 192;
            sm.places[row] =
                row < o.rows
                    ? place_row(p, p.layer[o.layer], o.layer, o.first_row + row, o.tile == 0)
                    : row_place{0, 0, -1};
        }
        __syncwarp();
    }
    if (to_kv) {
        u16 *kv = (u16 *)p.kv + o.layer * p.kv_layer + o.first_row * p.kv_row;
        if (warp < 4)
            each_output<N>(p, o, out, [&](int row, int column, u32 word) {
                store_pair(kv + row * p.kv_row + column, word, p.flags & CTXKV_DECODE_KV_BY2);
            });
    } else {
        store_tile<N>(p, o, out, sm);
    }
}

#define DECODE(n, steps)                                                                           \
    extern "C" __global__ void __launch_bounds__(CTXKV_DECODE_THREADS, 2)                          \
        ctxkv_decode_n##n##_s##steps(const __grid_constant__ ctxkv_decode_params p) {              \
        decode<n, steps>(p);                                                                       \
    }
CTXKV_DECODE_SHAPES(DECODE)
#undef DECODE

// grid {ceil(chunks/256), tile_rows, tiles}: neighbours read neighbouring vectors of a row.
extern "C" __global__ void __launch_bounds__(256)
    ctxkv_decode_pack(const __grid_constant__ ctxkv_decode_pack_params p) {
    const int chunk = blockIdx.x * 256 + threadIdx.x;
    if (chunk >= p.chunks) return;
    const int in_tile = blockIdx.y, tile = blockIdx.z, row = tile * p.tile_rows + in_tile;
    uint4 w = make_uint4(0, 0, 0, 0);
    if (row < 2 * p.half && chunk < p.data_chunks) {
        const u16 *src = row < p.half ? (const u16 *)p.k + row * p.k_row
                                      : (const u16 *)p.v + (row - p.half) * p.v_row;
        src += chunk * 8;
        w = p.by2 ? load16_by2(src) : load16(src);
    }
    store16((uint4 *)p.out + ((i64)tile * p.chunks + chunk) * p.tile_rows + in_tile, w);
}

// grid {ceil(data_chunks/256), T, layers}
extern "C" __global__ void __launch_bounds__(256)
    ctxkv_decode_pack_rows(const __grid_constant__ ctxkv_decode_rows_params p) {
    const int chunk = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    const int batch = row / p.batch_rows, r = row % p.batch_rows;
    launch_next();
    launch_wait();
    if (chunk >= p.data_chunks) return;
    const u16 *src = (const u16 *)p.x + blockIdx.z * p.x_layer + row * p.x_row + chunk * 8;
    const uint4 w = p.by2 ? load16_by2(src) : load16(src);
    uint4 *out = (uint4 *)p.out + blockIdx.z * p.out_layer + (i64)batch * p.chunks * p.batch_rows;
    store16(out + (chunk / 8 * p.batch_rows + r) * 8 + (chunk % 8 ^ r % 8), w);
}
