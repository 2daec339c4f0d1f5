// SPDX-License-Identifier: Apache-2.0
// The whole chain for T <= 8 in one launch: norms, projection, K norm, RoPE and cache insert.
// archs: 90a
//
// A layer has 16 tiles of weight rows, in two clusters of 8 CTAs: the columns of K and those of V.
// CTA i of a cluster norms row i of x and hands it to all eight; then every CTA
// multiplies all rows by its tile as decode.cu does, but with the weights as the M operand, for an
// MMA's time depends on N alone and there are fewer rows than weights; then the rows' outputs go
// back to the CTA of the row, which stores them. Everything between the CTAs is asynchronous
// stores into their shared memory. docs/op/decode.md: why, and what was measured.
#include "decode_async.cuh"
#include "decode_head.cuh"
#include "decode_params.h"
#include "decode_wgmma.cuh"
#include "norm_row.cuh"
#include "params.h"

#define CLUSTER CTXKV_DECODE_FUSED_CLUSTER
#define MULTIPLIERS 128
#define GROUPS 2                // of 256 threads, each at a row
#define COPIER (4 + 8 * GROUPS) // the first warp behind them
#define LINE 128
#define COLUMNS CTXKV_DECODE_FUSED_COLUMNS

// ROWS of x (8, or 16, slower than two launches): stages of 32 steps, `slots` of them in shared
// memory at once. With LOCAL, every CTA norms all rows, one or two.
template <int ROWS> struct room {
    static constexpr int steps = 32;
    static constexpr int stages = D / 16 / steps;
    static constexpr int x_bytes = ROWS * steps * 32;
    static constexpr int slots = CTXKV_DECODE_FUSED_X_BYTES / x_bytes;
};

template <int ROWS> struct shared_state {
    u64 full[CTXKV_DECODE_MAX_STAGES], empty[CTXKV_DECODE_MAX_STAGES]; // of the weights' ring
    u64 x_full[room<ROWS>::stages], x_empty[room<ROWS>::stages];
    u64 rows_ready, out_full;
    float warp_sums[GROUPS][2][8];
    row_place places[ROWS / CLUSTER];
    uint4 out[ROWS / CLUSTER * COLUMNS / 8]; // of this CTA's rows
};

// Stores into the shared memory of a CTA of the cluster, counted by a barrier there.
static __device__ __forceinline__ void store4_to(u32 address, u32 w, u32 bar) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
        "r"(w), "r"(bar)
        : "memory");
}
// Between accesses by threads and by bulk copies or MMAs.
static __device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

static __device__ __forceinline__ void load_packed(const u16 *from, uint4 (&w)[CHUNKS]) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) w[k] = load16_const(from + k * STEP);
}
static __device__ __forceinline__ void scale_packed(const uint4 (&gains)[CHUNKS], float *v) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        float g[8];
        bf16_unpack8(gains[k], g);
#pragma unroll
        for (int e = 0; e < 8; e++) v[8 * k + e] = mul_rn(v[8 * k + e], g[e]);
    }
}

// One row to normed BF16; `gains` hold the hidden norm's at first.
static __device__ __forceinline__ void norm_row(
    const ctxkv_decode_params &p, const u16 *layer_gain, int first, uint4 (&gains)[CHUNKS],
    uint4 (&w)[CHUNKS], float (&sums)[2][8], int group) {
    float v[VALUES];
    const bool input = p.norm_flags & CTXKV_NORMS_HIDDEN_INPUT;
    widen(w, v);
    if (input) scale_packed(gains, v);
    scale(root(row_sum<PAIR>(v, false, sums[0], group), p.hidden_eps), v);
    if (!input) scale_packed(gains, v);
    load_packed(layer_gain + first, gains);
    round_row(v);
    scale(root(row_sum<PAIR>(v, false, sums[1], group), p.layer_eps), v);
    scale_packed(gains, v);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) w[k] = bf16_pack8(v + 8 * k);
}

// Row `r` as packed n: into this CTA's stages of x, or into the plan's room, from where every CTA
// of the cluster copies it. (Stores into the other CTAs' shared memory took 2.5 us and more.)
template <int ROWS, bool LOCAL>
static __device__ __forceinline__ void put_row(
    char *room_of_cluster, char *x, u32 x_full, int t, int r, const uint4 (&w)[CHUNKS]) {
    using R = room<ROWS>;
    const int at = (t / 8 * ROWS + r) * LINE + (t % 8 ^ r % 8) * 16;
    char *to = (LOCAL ? x : room_of_cluster) + at;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) *(uint4 *)(to + k * (STEP / 64 * ROWS * LINE)) = w[k];
    proxy_fence();
    if (!LOCAL) return;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        bar_arrive_here_if(
            x_full + (k * STEP + 8 * t) / (16 * R::steps) * 8, (threadIdx.x & 31) == 0);
}

// Norms this CTA's rows, one for each group of threads: rank and rank + 8 or, with LOCAL, all.
template <int ROWS, bool LOCAL>
static __device__ __forceinline__ void norm_and_put(
    const ctxkv_decode_params &p, char *room_of_cluster, char *x, shared_state<ROWS> &sm, int layer,
    int rank) {
    const int t = threadIdx.x - MULTIPLIERS & ROW_THREADS - 1, first = 8 * t;
    const int group = (threadIdx.x - MULTIPLIERS) / ROW_THREADS;
    const u16 *layer_gain = (const u16 *)p.layer_gain + (i64)layer * D;
    const int r = LOCAL ? group : rank + group * CLUSTER;
    uint4 gains[CHUNKS], w[CHUNKS];
    load_packed((const u16 *)p.hidden_gain + first, gains);
    if (t < D * 2 / 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(layer_gain + t * 64));
    launch_wait();
    if (r < p.rows) load_row((const u16 *)p.x + r * p.x_row + first, w);
    cluster_wait();
    if (r >= p.rows) return;
    norm_row(p, layer_gain, first, gains, w, sm.warp_sums[group], group);
    put_row<ROWS, LOCAL>(room_of_cluster, x, smem_address(sm.x_full), t, r, w);
    if (LOCAL) return;
    barrier(group + 1, ROW_THREADS);
    if (t < CLUSTER) bar_arrive_cluster(bar_in(smem_address(&sm.rows_ready), t));
}

// All rows from the plan's room, once every CTA of the cluster has put its own there.
template <int ROWS>
static __device__ __forceinline__ void copy_rows(
    const char *room_of_cluster, u32 x, shared_state<ROWS> &sm) {
    using R = room<ROWS>;
    bar_wait_cluster(smem_address(&sm.rows_ready), 0);
    proxy_fence();
    for (int i = 0; i < R::stages; i++) {
        if (i >= R::slots) bar_wait(smem_address(&sm.x_empty[i - R::slots]), 0);
        const u32 bar = smem_address(&sm.x_full[i]);
        bar_expect(bar, R::x_bytes);
        copy_bulk(x + i % R::slots * R::x_bytes, room_of_cluster + i * R::x_bytes, R::x_bytes, bar);
    }
}

// K norm, RoPE and insert, or V's insert, of this CTA's rows: eight lanes a head.
template <int ROWS>
static __device__ __forceinline__ void store_rows(
    const ctxkv_decode_params &p, shared_state<ROWS> &sm, int t, int layer, int rank, bool is_k) {
    const ctxkv_decode_layer &l = p.layer[layer];
    if (rank >= p.rows) return;
    if (t < ROWS / CLUSTER) sm.places[t] = place_row(p, l, layer, t * CLUSTER + rank, is_k);
    barrier(1, ROW_THREADS);
    const int lane = t % 8, group = t / 8, n = group / p.heads, head = group - n * p.heads;
    if (t / 32 * 4 >= ROWS / CLUSTER * p.heads) return; // the whole warp
    const bool mine = n < ROWS / CLUSTER && sm.places[n].position >= 0;
    uint4 angles[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (mine && is_k && p.rope != CTXKV_DECODE_ROPE_NONE)
        load_angles<64>(p, sm.places[n].position, lane, angles);
    bar_wait_cluster(smem_address(&sm.out_full), 0);
    uint4 word = make_uint4(0, 0, 0, 0);
    if (mine) word = sm.out[(n * COLUMNS + head * 64) / 8 + lane];
    if (is_k) {
        float k[1][8];
        bf16_unpack8(word, k[0]);
        norm_head<64>(p, l.k_weight, lane, k);
        rotate_head<64>(p, angles, lane, k);
        word = bf16_pack8(k[0]);
    }
    if (!mine) return;
    const i64 place = is_k ? sm.places[n].k + head * l.k_head : sm.places[n].v + head * l.v_head;
    u16 *out = (u16 *)(is_k ? l.k : l.v) + place + lane * 8;
    if (p.flags & CTXKV_DECODE_CACHE_BY2)
        store16_by2(out, word);
    else
        store16(out, word);
}

// The weights' ring: stages of STEPS steps.
struct weights_ring {
    const char *src;
    u32 base, full, empty;
    int depth, bytes;
};

// The multipliers. The weights are M and x is N, for an MMA's time depends on N alone and there are
// fewer rows of x. As in decode.cu, what has to be done between stages sits between the MMAs of
// one.
template <int ROWS, int STEPS>
static __device__ __forceinline__ void multiply(
    const weights_ring &g, u32 pitch, u32 x_base, const shared_state<ROWS> &sm,
    float (&acc)[ROWS / 2]) {
    using R = room<ROWS>;
    constexpr int STAGES = D / 16 / STEPS, PER_X = R::steps / STEPS;
    const bool tells = (threadIdx.x & 31) == 0;
    const u32 x_full = smem_address(sm.x_full), x_empty = smem_address(sm.x_empty);
    int slot = 0, free_slot = 0;
    u32 parity = 0, ready = 0;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.0f;
    wgmma_fix<ROWS>(acc);
    for (int s = 0; s < STAGES; s++) {
        const int x_stage = s / PER_X, x_done = (s - 2) / PER_X;
        if (!ready) {
            bar_wait(x_full + x_stage * 8, 0);
            bar_wait(g.full + slot * 8, parity);
        }
        u32 w = chunks_start(g.base + slot * g.bytes, pitch);
        u32 x = lines_start(
            x_base + x_stage % R::slots * R::x_bytes + s % PER_X * (STEPS / 4 * ROWS * LINE));
        if (++slot == g.depth) slot = 0, parity ^= 1;
        const bool release = tells && s >= 2;
        const bool x_release = release && (s - 1) % PER_X == 0 && x_done < R::stages - R::slots;
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            wgmma<ROWS>(acc, chunks_operand(w), lines_operand(x));
            w += pitch * 2, x += i % 4 == 3 ? ROWS * 8 - 6 : 2;
            if (i == 1) {
                bar_arrive_here_if(g.empty + free_slot * 8, release);
                if (R::stages > R::slots) bar_arrive_here_if(x_empty + x_done * 8, x_release);
            }
            if (i == STEPS - 3)
                ready = bar_test(g.full + slot * 8, parity) &
                        bar_test(x_full + ((s + 1) / PER_X & (R::stages - 1)) * 8, 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (s >= 2 && ++free_slot == g.depth) free_slot = 0;
    }
    wgmma_wait<0>();
    wgmma_fix<ROWS>(acc);
}

// Hands the tile's outputs to the CTAs of their rows, in pairs of neighbouring columns. A thread's
// neighbours are of two rows of x: it exchanges with the lane of the neighbouring column.
template <int ROWS>
static __device__ __forceinline__ void send_outputs(
    const ctxkv_decode_params &p, const shared_state<ROWS> &sm, int rank,
    const float (&acc)[ROWS / 2]) {
    const int lane = threadIdx.x & 31, m = threadIdx.x / 32 * 16 + lane / 4, odd = lane / 4 & 1;
    const u32 bar = smem_address(&sm.out_full), out = smem_address(sm.out);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 2) {
        const float give = odd ? acc[i] : acc[i + 1], got = lane_xor(give, 4);
        const u32 word = odd ? bf16_pack(got, acc[i + 1]) : bf16_pack(acc[i], got);
        const int t = i / 4 * 8 + (lane & 3) * 2 + odd, column = m + (i & 2 ? 8 : 0) & ~1;
        if (column >= p.tile_rows || t >= p.rows) continue;
        const int at = t / CLUSTER * COLUMNS + rank * p.tile_rows + column;
        store4_to(bar_in(out + at * 2, t % CLUSTER), word, bar_in(bar, t % CLUSTER));
    }
}

// The barriers, and the first weights. All threads arrive at the cluster's barrier; who needs the
// others' barriers, or these, waits for it.
template <int ROWS, bool LOCAL>
static __device__ __forceinline__ void start(
    const ctxkv_decode_params &p, const weights_ring &g, shared_state<ROWS> &sm, int warp,
    int rank) {
    using R = room<ROWS>;
    if (warp == COPIER && (threadIdx.x & 31) == 0) {
        for (int i = 0; i < g.depth; i++) bar_init(g.full + i * 8, 1), bar_init(g.empty + i * 8, 4);
        bar_init_done();
        for (int i = 0; i < p.w_first; i++) {
            bar_expect(g.full + i * 8, g.bytes);
            copy_bulk(g.base + i * g.bytes, g.src + (i64)i * g.bytes, g.bytes, g.full + i * 8);
        }
    } else if (warp == COPIER + 1 && (threadIdx.x & 31) == 0) {
        for (int i = 0; i < R::stages; i++) {
            bar_init(smem_address(&sm.x_full[i]), LOCAL ? 2 * p.rows : 1);
            bar_init(smem_address(&sm.x_empty[i]), 4);
        }
        // Each group that has a row says so.
        bar_init(smem_address(&sm.rows_ready), min(p.rows, GROUPS * CLUSTER));
        bar_init(smem_address(&sm.out_full), 1);
        bar_init_done();
        const int rows = (p.rows + CLUSTER - 1 - rank) / CLUSTER; // of this CTA
        bar_expect(smem_address(&sm.out_full), rows * CLUSTER * p.tile_rows * 2);
    }
    __syncwarp();
    cluster_arrive();
}

template <int ROWS, bool LOCAL, int STEPS>
static __device__ __forceinline__ void fused(const ctxkv_decode_params &p) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ shared_state<ROWS> sm;
    launch_next();
    const int layer = blockIdx.z, rank = blockIdx.x % CLUSTER;
    const bool is_k = blockIdx.x < CLUSTER;
    if (p.layer[layer].rows == 0) return; // so does the whole cluster
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 x = smem_address(memory);
    weights_ring g;
    g.depth = p.stages, g.bytes = STEPS * 32 * p.tile_rows;
    g.base = x + CTXKV_DECODE_FUSED_X_BYTES;
    g.full = smem_address(sm.full), g.empty = smem_address(sm.empty);
    g.src = (const char *)p.w + ((i64)layer * p.tiles + blockIdx.x) * g.bytes * (D / 16 / STEPS);
    char *room_of_cluster = (char *)p.room + (layer * 2 + !is_k) * (ROWS * D * 2);
    start<ROWS, LOCAL>(p, g, sm, warp, rank);
    if (warp < 4) {
        float acc[ROWS / 2];
        cluster_wait();
        multiply<ROWS, STEPS>(g, p.tile_rows, x, sm, acc);
        send_outputs<ROWS>(p, sm, rank, acc);
    } else if (warp < COPIER) {
        norm_and_put<ROWS, LOCAL>(p, room_of_cluster, memory, sm, layer, rank);
        if (warp < 12) store_rows<ROWS>(p, sm, threadIdx.x - MULTIPLIERS, layer, rank, is_k);
    } else {
        cluster_wait();
        if (warp == COPIER && lane == 0) {
            int slot = p.w_first % g.depth, turn = p.w_first / g.depth;
            for (int s = p.w_first; s < D / 16 / STEPS; s++) {
                if (turn > 0) bar_wait(g.empty + slot * 8, turn - 1 & 1);
                bar_expect(g.full + slot * 8, g.bytes);
                copy_bulk(
                    g.base + slot * g.bytes, g.src + (i64)s * g.bytes, g.bytes, g.full + slot * 8);
                if (++slot == g.depth) slot = 0, turn++;
            }
        } else if (warp == COPIER + 1 && lane == 0 && !LOCAL) {
            copy_rows<ROWS>(room_of_cluster, x, sm);
        }
    }
}

#define FUSED(rows, local, steps)                                                                  \
    extern "C" __global__ void __launch_bounds__(CTXKV_DECODE_FUSED_THREADS, 1)                    \
        __cluster_dims__(CLUSTER, 1, 1) ctxkv_decode_fused_r##rows##_l##local##_s##steps(          \
            const __grid_constant__ ctxkv_decode_params p) {                                       \
        fused<rows, local, steps>(p);                                                              \
    }
CTXKV_DECODE_FUSED_SHAPES(FUSED)
#undef FUSED
