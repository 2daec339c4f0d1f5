// SPDX-License-Identifier: Apache-2.0
// A projection alone of few rows (T <= 64), from row-major x to kv.
// archs: 90a
//
//   kv[t][n] = BF16(chain over k16 steps of mma16(x[t], w[n], acc)), acc = +0    (SPEC 3.3)
//
// A CTA has tile_rows weight rows and batch_rows rows of x, and walks all of K through the ring of
// decode_ring.cuh. Weights were packed when the plan was made and come by bulk copies, the first
// before the launch wait; x comes by tensor copies, a stage at once, which leave it in the MMA's
// swizzle. docs/op/projection.md: what was measured.
#include "decode_ring.cuh"
#include "few_params.h"

struct ring_barriers {
    u64 full[CTXKV_FEW_MAX_STAGES], empty[CTXKV_FEW_MAX_STAGES];
};

// Where this CTA stands: grid {tiles, batch tiles, layers}, clusters {cluster_tiles,
// cluster_batches, 1}.
struct where {
    int layer, tile, first_row;
    int in_tiles, in_batches; // place in the cluster
};
static __device__ __forceinline__ where find(const ctxkv_few_params &p) {
    where o;
    o.tile = blockIdx.x, o.layer = blockIdx.z, o.first_row = blockIdx.y * p.batch_rows;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(o.in_tiles));
    asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(o.in_batches));
    return o;
}

template <int STEPS>
static __device__ __forceinline__ ring
ring_of(const ctxkv_few_params &p, const char *stages, const ring_barriers &bars) {
    ring g;
    g.base = smem_address(stages), g.full = smem_address(bars.full);
    g.empty = smem_address(bars.empty), g.depth = p.stages, g.chunks = STEPS * 2;
    // x first: its lines want the alignment of the stage.
    g.x_bytes = g.chunks * p.batch_rows * 16;
    g.bytes = (g.x_bytes + g.chunks * p.tile_rows * 16 + 1023) & ~1023;
    return g;
}

static __device__ __forceinline__ feed
weights_of(const ctxkv_few_params &p, const where &o, const ring &g) {
    const i64 tile = (i64)o.layer * p.tiles + o.tile;
    u32 column = 0;
    for (int i = 0; i < p.cluster_batches; i++) column |= 1u << (i * p.cluster_tiles + o.in_tiles);
    return {
        (const char *)p.w + tile * p.chunks * p.tile_rows * 16,
        g.x_bytes,
        p.tile_rows * 16,
        o.in_batches,
        p.cluster_batches,
        column};
}

// The box of layer `layer`, line `line` and on, row `row` and on; what is past the tensor is zero.
static __device__ __forceinline__ void copy_box(
    u32 dst, const ctxkv_tensor_map &map, int row, int line, int layer, u32 bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(dst),
                 "l"(&map), "r"(0), "r"(row), "r"(line), "r"(layer), "r"(bar)
                 : "memory");
}
static __device__ __forceinline__ void copy_box_to(
    u32 dst, const ctxkv_tensor_map &map, int row, int line, int layer, u32 bar, u32 mask) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(dst),
                 "l"(&map), "r"(0), "r"(row), "r"(line), "r"(layer), "r"(bar), "h"((u16)mask)
                 : "memory");
}

// The copier of x. The zeros of lines past the last count, too.
static __device__ __forceinline__ void copy_rows(
    const ctxkv_few_params &p, const where &o, const ring &g) {
    const int ct = p.cluster_tiles, lines = g.chunks / 8, layer = p.x_shared ? 0 : o.layer;
    const u32 mask = ((1u << ct) - 1) << (o.in_batches * ct);
    int slot = 0, line = o.in_tiles * p.box_lines;
    const u32 base = g.base + line * p.batch_rows * 128;
    u32 parity = 1, dst = base;
    for (int stage = 0; stage * lines * 8 < p.chunks; stage++) {
        if (slot == g.depth) slot = 0, parity ^= 1, dst = base;
        if (stage >= g.depth) bar_wait(g.empty + slot * 8, parity);
        const u32 bar = g.full + slot * 8;
        bar_expect(bar, g.x_bytes);
        if (ct == 1)
            copy_box(dst, p.x, o.first_row, line, layer, bar);
        else
            copy_box_to(dst, p.x, o.first_row, line, layer, bar, mask);
        slot++, dst += g.bytes, line += lines;
    }
}

// A stage is full when both operands have come, and empty when the warps of all CTAs that this one
// feeds are done with it.
static __device__ __forceinline__ void start(
    const ctxkv_few_params &p, const ring &g, const feed &weights) {
    const int told = p.cluster_tiles + p.cluster_batches - 1;
    if (threadIdx.x == 128) {
        for (int i = 0; i < g.depth; i++) bar_init(g.full + i * 8, 2);
        bar_init_done();
        ring_fill_early(g, weights, p.chunks, p.w_first);
    } else if (threadIdx.x == 160) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x) : "memory");
        for (int i = 0; i < g.depth; i++) bar_init(g.empty + i * 8, 4 * told);
        bar_init_done();
    }
    __syncwarp();
    if (told > 1)
        cluster_sync();
    else
        __syncthreads();
}

template <int N, bool TURNED>
static __device__ __forceinline__ void store_tile(
    const ctxkv_few_params &p, const where &o, const u32 (&out)[N / 4]) {
    const int lane = threadIdx.x & 31, major = threadIdx.x / 32 * 16 + lane / 4;
    const int rows = min(p.batch_rows, p.rows - o.first_row);
    const int columns = min(p.tile_rows, p.columns - o.tile * p.tile_rows);
    u16 *kv = (u16 *)p.kv + o.layer * p.kv_layer + o.first_row * p.kv_row + o.tile * p.tile_rows;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        const int m = major + j % 2 * 8, n = j / 2 * 8 + (lane & 3) * 2;
        if (TURNED) { // m: column, n: two rows
            if (m >= columns) continue;
            if (n < rows) kv[n * p.kv_row + m] = (u16)out[j];
            if (n + 1 < rows) kv[(n + 1) * p.kv_row + m] = (u16)(out[j] >> 16);
        } else if (m < rows && n < columns) {
            store_pair(kv + m * p.kv_row + n, out[j], p.kv_by2);
        }
    }
}

template <int N, int STEPS, bool TURNED>
static __device__ __forceinline__ void project(const ctxkv_few_params &p) {
    extern __shared__ __align__(1024) char stages[];
    __shared__ ring_barriers bars;
    launch_next();
    const where o = find(p);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const ring g = ring_of<STEPS>(p, stages, bars);
    const feed weights = weights_of(p, o, g);
    start(p, g, weights);
    if (warp < 4) {
        // Whom this CTA's slots are filled by: the row and the column of the cluster it is in.
        const int ct = p.cluster_tiles, cb = p.cluster_batches;
        const bool tells = lane < ct + cb - 1;
        const int other = lane - ct + (lane - ct >= o.in_batches);
        const int rank = lane < ct ? o.in_batches * ct + lane : other * ct + o.in_tiles;
        const u32 target = bar_in(g.empty, tells ? rank : 0);
        u32 out[N / 4];
        launch_wait();
        multiply<N, STEPS, TURNED>(g, p.chunks / 2, p.tile_rows, p.batch_rows, target, tells, out);
        store_tile<N, TURNED>(p, o, out);
    } else if (lane == 0) {
        // Copies are served in order: x must not stand behind all the weights that there is room
        // for, so that only the first are asked for before the wait.
        if (warp == 4)
            ring_fill(
                g, weights, p.chunks, weights.shares > 1 ? 0 : min(EARLY, p.w_first), p.w_first);
        launch_wait();
        if (warp == 4)
            ring_fill(g, weights, p.chunks, p.w_first, 1 << 30);
        else
            copy_rows(p, o, g);
    }
}

#define FEW(n, steps)                                                                              \
    extern "C" __global__ void __launch_bounds__(CTXKV_FEW_THREADS)                                \
        ctxkv_few_n##n##_s##steps(const __grid_constant__ ctxkv_few_params p) {                    \
        project<n, steps, false>(p);                                                               \
    }
CTXKV_FEW_SHAPES(FEW)
#undef FEW
#define FEW(n, steps)                                                                              \
    extern "C" __global__ void __launch_bounds__(CTXKV_FEW_THREADS)                                \
        ctxkv_few_t##n##_s##steps(const __grid_constant__ ctxkv_few_params p) {                    \
        project<n, steps, true>(p);                                                                \
    }
CTXKV_FEW_TURNED_SHAPES(FEW)
#undef FEW

// grid {ceil(chunks/256), tile_rows, tiles}: neighbours read neighbouring vectors of a row.
extern "C" __global__ void __launch_bounds__(256)
    ctxkv_few_pack(const __grid_constant__ ctxkv_few_pack_params p) {
    const int chunk = blockIdx.x * 256 + threadIdx.x;
    if (chunk >= p.chunks) return;
    const int in_tile = blockIdx.y, tile = blockIdx.z, row = tile * p.tile_rows + in_tile;
    uint4 w = make_uint4(0, 0, 0, 0);
    if (row < p.rows) {
        const u16 *src = row < p.half ? (const u16 *)p.k + row * p.k_row
                                      : (const u16 *)p.v + (row - p.half) * p.v_row;
        src += chunk * 8;
        w = p.by2 ? load16_by2(src) : load16(src);
    }
    store16((uint4 *)p.out + ((i64)tile * p.chunks + chunk) * p.tile_rows + in_tile, w);
}
