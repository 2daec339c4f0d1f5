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
// wait. The columns of a head of K lie in tiles of one cluster: its outputs are put together in the
// shared memory of the CTA that the row falls to, V's go straight to the cache. docs/op/decode.md:
// the layouts, why this shape, what was measured.
#include "decode_head.cuh"
#include "decode_params.h"
#include "decode_ring.cuh"
#include "prim.cuh"

struct shared_state {
    u64 full[CTXKV_DECODE_MAX_STAGES], empty[CTXKV_DECODE_MAX_STAGES], k_full;
    row_place places[CTXKV_DECODE_MAX_ROWS];
};

// Where this CTA stands: grid {tiles, batch tiles, layers}, clusters {cluster_tiles,
// cluster_batches, 1}.
struct where {
    int layer, tile, batch;   // batch: batch tile
    int in_tiles, in_batches; // place in the cluster
    int first_row, rows;      // of T
    // The tile's columns: k_columns of K, then V's from v_first.
    int k_columns, v_first;
    // A head's tiles, 2^spread of them, share out the rows; this is number `part`.
    int spread, part;
};
static __device__ __forceinline__ where find(const ctxkv_decode_params &p) {
    where o;
    o.tile = blockIdx.x, o.batch = blockIdx.y, o.layer = blockIdx.z;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(o.in_tiles));
    asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(o.in_batches));
    o.first_row = o.batch * p.batch_rows;
    o.rows = min(p.batch_rows, p.rows - o.first_row);
    const bool has_k = o.tile < p.k_tiles;
    o.k_columns = has_k ? p.k_columns : 0;
    o.v_first = o.tile * p.tile_rows - min(o.tile, p.k_tiles) * p.k_columns;
    o.spread = 31 - __clz(p.head_dim / p.k_columns);
    o.part = o.tile & (1 << o.spread) - 1;
    return o;
}

// The row of the batch tile whose outputs this thread hands on.
static __device__ __forceinline__ int output_row() {
    const int lane = threadIdx.x & 31;
    return threadIdx.x / 32 * 16 + lane / 4 + (lane & 1) * 8;
}
// Calls f(first column in the tile, outputs) for each four neighbouring columns of that row. A
// thread's accumulators are pairs of two rows: it exchanges with the lane of the next pair.
template <int N, class F>
static __device__ __forceinline__ void each_output(
    const ctxkv_decode_params &p, bool row_counts, const u32 (&out)[N / 4], F f) {
    const int lane = threadIdx.x & 31;
    const bool odd = lane & 1;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const u32 got = lane_xor(odd ? out[2 * j] : out[2 * j + 1], 1);
        const int column = 8 * j + (lane & 2) * 2;
        if (row_counts && column < p.tile_rows)
            f(column, odd ? make_uint2(got, out[2 * j + 1]) : make_uint2(out[2 * j], got));
    }
}

// Columns v..v+3 of V to the cache, or the first two of them.
static __device__ __forceinline__ void put_v(
    const ctxkv_decode_params &p, const ctxkv_decode_layer &l, i64 place, int v, bool four,
    uint2 w) {
    const int half = p.columns / 2, shift = 31 - __clz(p.head_dim);
    const bool by2 = p.flags & CTXKV_DECODE_CACHE_BY2;
    u16 *to = (u16 *)l.v + place + (v >> shift) * l.v_head + (v & p.head_dim - 1);
    if (v % 4 == 0 && four && v < half && !by2) {
        *(uint2 *)to = w;
        return;
    }
    if (v < half) store_pair(to, w.x, by2);
    v += 2;
    to = (u16 *)l.v + place + (v >> shift) * l.v_head + (v & p.head_dim - 1);
    if (four && v < half) store_pair(to, w.y, by2);
}

#define PLACES_BARRIER 1 // of the multipliers and the two warps that look up places
#define FINISH_BARRIER 2 // of the other warps

// K's outputs to the CTA of the row, by asynchronous stores unless it is this one alone: then the
// room is where the ring was, whose last MMA is over for all. V's to the cache.
template <int N>
static __device__ __forceinline__ void put_outputs(
    const ctxkv_decode_params &p, const where &o, const u32 (&out)[N / 4], const shared_state &sm,
    char *room) {
    const ctxkv_decode_layer &l = p.layer[o.layer];
    const int row = output_row(), r = row >> o.spread, in_head = o.part * p.k_columns;
    const bool alone = o.spread == 0;
    const int owner = (row & (1 << o.spread) - 1) - o.part + o.in_tiles;
    const u32 cta = o.in_batches * p.cluster_tiles + owner;
    const u32 full = smem_address(&sm.k_full), bar = bar_in(full, cta);
    const u32 to = bar_in(smem_address(room), cta);
    barrier(PLACES_BARRIER, 192);
    const row_place place = row < o.rows ? sm.places[row] : row_place{0, 0, -1};
    each_output<N>(p, row < o.rows, out, [&](int i, uint2 w) {
        if (i < o.k_columns) {
            const int at = head_vector(r, (in_head + i) / 8, p.head_dim) * 16 + (i & 4) * 2;
            if (alone)
                *(uint2 *)(room + at) = w;
            else
                store8_to(to + at, w, bar);
            return;
        }
        if (place.position >= 0)
            put_v(p, l, place.v, o.v_first + i - o.k_columns, i + 2 < p.tile_rows, w);
    });
    __syncwarp();
    if (alone) bar_arrive_here_if(full, (threadIdx.x & 31) == 0);
}

// The other warps, once they have no more to fetch or to look up.
static __device__ __forceinline__ void finish(
    const ctxkv_decode_params &p, const where &o, const shared_state &sm, char *memory) {
    const ctxkv_decode_layer &l = p.layer[o.layer];
    const int head = o.tile >> o.spread, step = 1 << o.spread;
    const head_room room = {
        (uint4 *)memory, smem_address(&sm.k_full), o.part, step,
        o.rows - o.part + step - 1 >> o.spread};
    barrier(FINISH_BARRIER, CTXKV_DECODE_THREADS - HEAD_THREADS);
    if (p.head_dim == 64) finish_head<64>(p, l, room, head, sm.places);
    if (p.head_dim == 128) finish_head<128>(p, l, room, head, sm.places);
    if (p.head_dim == 256) finish_head<256>(p, l, room, head, sm.places);
    if (p.head_dim == 512) finish_head<512>(p, l, room, head, sm.places);
}

// A stage is full when both operands have come, and empty when the warps of all CTAs that this one
// feeds are done with it. A CTA that needs nobody's help with its weights asks for the first at
// once.
static __device__ __forceinline__ void start(
    const ctxkv_decode_params &p, const where &o, const ring &g, const feed &weights, int told,
    u32 k_full) {
    if (threadIdx.x == 128) {
        for (int i = 0; i < g.depth; i++) bar_init(g.full + i * 8, 2);
        bar_init_done();
        ring_fill_early(g, weights, p.chunks, p.w_first);
    } else if (threadIdx.x == 160) {
        for (int i = 0; i < g.depth; i++) bar_init(g.empty + i * 8, 4 * told);
        // The outputs of this CTA's rows: told of by its own four warps, or counted in bytes.
        bar_init(k_full, o.spread == 0 ? 4 : 1);
        bar_init_done();
        const int rows = o.rows - o.part + (1 << o.spread) - 1 >> o.spread;
        if (o.spread > 0 && o.k_columns) bar_expect(k_full, rows * p.head_dim * 2);
    }
    __syncwarp();
    if (p.cluster_tiles * p.cluster_batches > 1)
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
    const int ct = p.cluster_tiles, cb = p.cluster_batches, x_tiles = p.shares_x ? ct : 1;
    const int told = x_tiles + cb - 1;      // whose slots this CTA fills, and who fills its own
    if (p.layer[o.layer].rows == 0) return; // so does the whole cluster
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
    start(p, o, g, weights, told, smem_address(&sm.k_full));
    if (warp < 4) {
        // Whom this CTA's slots are filled by: its row of the cluster, or itself, and its column.
        const bool tells = lane < told;
        const int other = lane - x_tiles + (lane - x_tiles >= o.in_batches);
        const int rank = lane < x_tiles ? o.in_batches * ct + (p.shares_x ? lane : o.in_tiles)
                                        : other * ct + o.in_tiles;
        const u32 target = bar_in(g.empty, tells ? rank : 0);
        u32 out[N / 4];
        launch_wait();
        multiply<N, STEPS>(g, p.chunks / 2, p.tile_rows, p.batch_rows, target, tells, out);
        put_outputs<N>(p, o, out, sm, stages + p.k_room);
        return;
    }
    if (warp == 4) {
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
                (const char *)p.x + batch * 16, 0,       p.batch_rows * 16,
                p.shares_x ? o.in_tiles : 0,    x_tiles, ((1u << ct) - 1) << (o.in_batches * ct)};
            ring_fill(g, x, p.chunks, 0, 1 << 30);
        }
        if (warp >= 6) {
            const int row = threadIdx.x - 192;
            sm.places[row] =
                row < o.rows
                    ? place_row(p, p.layer[o.layer], o.layer, o.first_row + row, o.tile == 0)
                    : row_place{0, 0, -1};
            barrier_arrive(PLACES_BARRIER, 192);
        }
        __syncwarp();
    }
    if (o.k_columns) finish(p, o, sm, stages + p.k_room);
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
    const int in_tile = blockIdx.y, tile = blockIdx.z;
    const bool is_k = tile < p.k_tiles && in_tile < p.k_columns;
    const int row = is_k ? tile * p.k_columns + in_tile
                         : tile * p.tile_rows + in_tile - min(tile + 1, p.k_tiles) * p.k_columns;
    uint4 w = make_uint4(0, 0, 0, 0);
    if (row < p.half && chunk < p.data_chunks) {
        const u16 *src = is_k ? (const u16 *)p.k + row * p.k_row : (const u16 *)p.v + row * p.v_row;
        src += chunk * 8;
        w = p.by2 ? load16_by2(src) : load16(src);
    }
    store16((uint4 *)p.out + ((i64)tile * p.chunks + chunk) * p.tile_rows + in_tile, w);
}
