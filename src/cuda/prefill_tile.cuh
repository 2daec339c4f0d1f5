// SPDX-License-Identifier: Apache-2.0
// The prefill kernel for one tile shape: pipeline, producer warp, tensor-core chain, epilogue.
//
// A CTA computes tiles of 64*GROUPS rows x N columns of kv. One warp copies 64-column blocks of h and
// W into a ring of stages; each of GROUPS warpgroups owns 64 rows, turns its rows of h into rows of
// the layer's norm in registers, y = bf16((r*h)*g), and feeds them to wgmma as the A operand. Every
// output is one chain of k16 steps in rising K (SPEC 3.3): nothing is split, so a row's bits do not
// depend on T or on the tile shape. CTAs of a cluster of ROWS x COLS tiles share what they read: a
// block of W goes to the ROWS tiles of a column, a block of h to the COLS tiles of a row.
#ifndef CTXKV_CUDA_PREFILL_TILE_CUH
#define CTXKV_CUDA_PREFILL_TILE_CUH

#include "faults.cuh"
#include "head_store.cuh"
#include "hopper.cuh"
#include "prefill_params.h"
#include "wgmma.cuh"

// What A is: rows of n as they lie, or made of h with the row's factor, or with the gain as well.
enum prefill_input { INPUT_READY, INPUT_SCALED, INPUT_GAINED };

template <int GROUPS_, int N_, int ROWS_, int COLS_, int STAGES_, prefill_input INPUT_>
struct prefill_shape {
    static const int GROUPS = GROUPS_, N = N_, ROWS = ROWS_, COLS = COLS_, STAGES = STAGES_;
    static const prefill_input INPUT = INPUT_;
    // Three warps copy. Where the consumers need more registers than an even share they are a whole
    // warpgroup that gives its own away.
    static const bool MOVE_REGISTERS = (GROUPS == 2 && N == 256) || GROUPS == 3;
    static const int KEEP = GROUPS == 3 ? 56 : 40, TAKE = GROUPS == 3 ? 152 : 232;
    static const int M = 64 * GROUPS, CTAS = ROWS * COLS;
    static const int THREADS = 128 * GROUPS + (MOVE_REGISTERS ? 128 : 96);
    // A stage: the block of rows, the block of weights, gains and the two barriers.
    static const int W_AT = M * 128, G_AT = W_AT + N * 128, FULL_AT = G_AT + 256;
    static const int EMPTY_AT = FULL_AT + 8, STRIDE = G_AT + 1024;
    static const int BYTES = G_AT + (INPUT == INPUT_GAINED ? 256 : 0);
    // Consumers unroll over a part of the ring, so that addresses within it are constants.
    static const int PART = STAGES % 4 == 0 ? 4 : STAGES % 2 == 0 ? 2 : 1, PARTS = STAGES / PART;
    static const int SMEM = 1024 + STAGES * STRIDE;
    // Every warp that reads a stage tells every CTA whose copies land in it.
    static const int RELEASES = 4 * GROUPS * (ROWS + COLS - 1);
    static_assert(STAGES % PART == 0 && SMEM <= 232448, "the ring of a prefill tile shape");
};

// A place in the ring of stages that the copiers walk.
template <class S> struct prefill_ring {
    u32 base, at, parity;
    int stage;
    __device__ __forceinline__ explicit prefill_ring(u32 smem)
        : base((smem + 1023u) & ~1023u), at(base), parity(0), stage(0) {}
    __device__ __forceinline__ u32 full() const { return at + S::FULL_AT; }
    __device__ __forceinline__ u32 empty() const { return at + S::EMPTY_AT; }
    __device__ __forceinline__ void next() {
        at += S::STRIDE;
        if (++stage == S::STAGES) stage = 0, at = base, parity ^= 1u;
    }
};

// The part of the ring that the consumers are in, and the one after it.
template <class S> struct prefill_part {
    u32 base, parity;
    int index;
    __device__ __forceinline__ explicit prefill_part(u32 smem)
        : base((smem + 1023u) & ~1023u), parity(0), index(0) {}
    __device__ __forceinline__ u32 at() const { return base + index * (S::PART * S::STRIDE); }
    __device__ __forceinline__ prefill_part next() const {
        prefill_part n = *this;
        if (++n.index == S::PARTS) n.index = 0, n.parity ^= 1u;
        return n;
    }
};

// Where a tile lies. Tiles are walked in groups of `group` cluster rows, rows first, so that the
// CTAs at work together share both operands in the second-level cache.
struct prefill_place {
    int row_tile, column_tile; // of the whole cluster
};
template <class S>
static __device__ __forceinline__ prefill_place
prefill_locate(const ctxkv_prefill_params &p, int tile) {
    const int columns = (p.column_tiles + S::COLS - 1) / S::COLS;
    const int band = tile / (p.group * columns), in = tile % (p.group * columns);
    const int first = band * p.group, height = min(p.row_tiles - first, p.group);
    prefill_place place = {first + in % height, in / height};
    return place;
}

// The tiles of a cluster, one after the other.
#define PREFILL_TILES(S, p, tile)                                                                  \
    for (int tile = (int)blockIdx.x / S::CTAS, tile##_count = prefill_tile_count<S>(p),            \
             tile##_step = (int)gridDim.x / S::CTAS;                                               \
         tile < tile##_count; tile += tile##_step)

template <class S>
static __device__ __forceinline__ int prefill_tile_count(const ctxkv_prefill_params &p) {
    return (p.column_tiles + S::COLS - 1) / S::COLS * p.row_tiles;
}

// The column tile of this CTA; past the last one it repeats that and stores nothing.
template <class S>
static __device__ __forceinline__ int
prefill_column(const ctxkv_prefill_params &p, const prefill_place &place, int rank) {
    return place.column_tile * S::COLS + rank / S::ROWS;
}

// First copier: this CTA's share of the tile's N weight rows, to all tiles of its column. Weights
// never change, so it does not wait for the kernels before this one.
template <class S>
static __device__ __forceinline__ void
prefill_copy_weights(const ctxkv_prefill_params &p, prefill_ring<S> ring, int rank) {
    const int PART = S::N / S::ROWS, BOX = PART < 64 ? PART : 64, BOXES = PART / BOX;
    const int r = rank % S::ROWS;
    const u16 mask = (u16)(((1u << S::ROWS) - 1u) << (rank - r));
    PREFILL_TILES(S, p, tile) {
        const prefill_place place = prefill_locate<S>(p, tile);
        const int column = min(prefill_column<S>(p, place, rank), p.column_tiles - 1);
        const void *map[BOXES];
        int row[BOXES];
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            const int at = p.first_layer * 128 * p.heads + column * S::N + r * PART + i * BOX;
            map[i] = p.w_maps + at / p.w_rows;
            row[i] = at % p.w_rows;
        }
        for (int k = 0; k < p.k_blocks; k++, ring.next()) {
            barrier_wait(ring.empty(), ring.parity ^ 1u);
            barrier_expect(ring.full(), S::BYTES);
#pragma unroll
            for (int i = 0; i < BOXES; i++)
                copy_box2<(S::ROWS > 1)>(
                    ring.at + S::W_AT + (r * PART + i * BOX) * 128, map[i], k * 64, row[i], ring.full(),
                    mask);
        }
    }
}

// Second copier: this CTA's share of the tile's rows, to all tiles of its row.
template <class S>
static __device__ __forceinline__ void
prefill_copy_rows(const ctxkv_prefill_params &p, prefill_ring<S> ring, int rank) {
    const int PART = S::M / S::COLS, r = rank % S::ROWS, c = rank / S::ROWS;
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < S::COLS; i++) mask |= 1u << (r + i * S::ROWS);
    const int per_layer = 128 * p.heads / S::N;
    launch_wait();
    PREFILL_TILES(S, p, tile) {
        const prefill_place place = prefill_locate<S>(p, tile);
        const int row = (place.row_tile * S::ROWS + r) * S::M + c * PART;
        const int column = min(prefill_column<S>(p, place, rank), p.column_tiles - 1);
        const int layer = S::INPUT == INPUT_READY ? p.first_layer + column / per_layer : 0;
        for (int k = 0; k < p.k_blocks; k++, ring.next()) {
            barrier_wait(ring.empty(), ring.parity ^ 1u);
            copy_box3<(S::COLS > 1)>(
                ring.at + c * PART * 128, &p.a, k * 64, row, layer, ring.full(), (u16)mask);
        }
    }
}

// Third copier: the layer's gains.
template <class S>
static __device__ __forceinline__ void
prefill_copy_gains(const ctxkv_prefill_params &p, prefill_ring<S> ring, int rank) {
    if (S::INPUT != INPUT_GAINED) return;
    const int per_layer = 128 * p.heads / S::N;
    launch_wait();
    PREFILL_TILES(S, p, tile) {
        const prefill_place place = prefill_locate<S>(p, tile);
        const int column = min(prefill_column<S>(p, place, rank), p.column_tiles - 1);
        const float *gains = p.gains + (i64)(p.first_layer + column / per_layer) * p.k_blocks * 64;
        for (int k = 0; k < p.k_blocks; k++, ring.next(), gains += 64) {
            barrier_wait(ring.empty(), ring.parity ^ 1u);
            copy_bytes(ring.at + S::G_AT, gains, 256, ring.full());
        }
    }
}

// What one k16 step of A is made of, for a warp's 16 rows: the fragment of h and the lane's gains.
struct prefill_step {
    u32 h[4];
    float4 g;
};

// The copy engine has swizzled the block: 16-byte piece c of row r lies at piece c ^ (r & 7).
template <class S>
static __device__ __forceinline__ void
prefill_load_step(prefill_step &s, u32 stage, const u32 (&lane_at)[4], int j) {
    load_matrix4(s.h, stage + lane_at[j]);
    if constexpr (S::INPUT == INPUT_GAINED)
        s.g = load_smem16(stage + S::G_AT + (threadIdx.x & 3) * 16 + 64 * j);
}

// Words 0, 1: rows g, g + 8 of columns 2t, 2t + 1; words 2, 3: of columns 2t + 8, 2t + 9.
template <class S>
static __device__ __forceinline__ void
prefill_make_step(u32 (&a)[4], const prefill_step &s, float r0, float r1) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float r = i & 1 ? r1 : r0;
        float x = mul_rn(r, bf16_low(s.h[i])), y = mul_rn(r, bf16_high(s.h[i]));
        if constexpr (S::INPUT == INPUT_GAINED) {
            x = mul_rn(x, i < 2 ? s.g.x : s.g.z);
            y = mul_rn(y, i < 2 ? s.g.y : s.g.w);
        }
        a[i] = bf16_pack(x, y);
    }
}

template <class S> static __device__ __forceinline__ void prefill_release(u32 stage, int rank) {
    const int lane = (int)threadIdx.x & 31, r = rank % S::ROWS;
    const u32 empty = stage + S::EMPTY_AT;
    __syncwarp();
    if (S::CTAS == 1) {
        if (lane == 0) barrier_arrive(empty);
    } else if (lane < S::ROWS) { // the CTAs of this column, this one among them
        barrier_arrive_at(empty, (u32)(rank - r + lane));
    } else if (lane < S::ROWS + S::COLS - 1) { // the others of this row
        const int c = lane - S::ROWS, own = rank / S::ROWS;
        barrier_arrive_at(empty, (u32)(r + (c < own ? c : c + 1) * S::ROWS));
    }
}

// The chain of one tile with A as it lies. The wait leaves the newest block in flight and frees the
// stage of the one before.
template <class S>
static __device__ __forceinline__ void
prefill_chain_ready(
    float (&acc)[S::N / 2], prefill_part<S> &part, int k_blocks, u32 warp_row, int rank) {
    const u32 rows = (warp_row & ~63u) * 128;
    u32 last = 0, w = wgmma_tile(part.at() + S::W_AT), a = wgmma_tile(part.at() + rows);
    for (int k = 0; k < k_blocks; k += S::PART) {
        const u32 at = part.at(), parity = part.parity;
        part = part.next();
        const u32 w_then = wgmma_tile(part.at() + S::W_AT), a_then = wgmma_tile(part.at() + rows);
#pragma unroll
        for (int s = 0; s < S::PART; s++) {
            barrier_wait(at + s * S::STRIDE + S::FULL_AT, parity);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++)
                wgmma<S::N>::memory(
                    acc, a + (s * S::STRIDE / 16 + 2 * j), w + (s * S::STRIDE / 16 + 2 * j));
            wgmma_commit();
            wgmma_wait<1>();
            if (s > 0)
                prefill_release<S>(at + (s - 1) * S::STRIDE, rank);
            else if (k > 0)
                prefill_release<S>(last, rank);
        }
        last = at + (S::PART - 1) * S::STRIDE;
        w = w_then, a = a_then;
    }
    wgmma_wait<0>();
    prefill_release<S>(last, rank);
}

// The chain of one tile with A made in registers. A warp that issues a tensor-core step is held until
// the step before it has begun, so the work of making A is spread between the steps: behind step j,
// step j + 2 is made of what was loaded behind step j - 1. Past the last block this makes, of
// whatever the ring holds, steps that are never used.
template <class S>
static __device__ __forceinline__ void
prefill_chain_made(
    float (&acc)[S::N / 2], prefill_part<S> &part, int k_blocks, u32 warp_row, float r0, float r1,
    int rank) {
    u32 a[4][4], lane_at[4], last = 0;
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 4; j++)
        lane_at[j] = (warp_row + (lane & 15)) * 128 + ((((lane >> 4) + 2 * j) ^ (lane & 7)) << 4);
    prefill_step step[2];
    barrier_wait(part.at() + S::FULL_AT, part.parity);
    prefill_load_step<S>(step[0], part.at(), lane_at, 0);
    prefill_load_step<S>(step[1], part.at(), lane_at, 1);
    prefill_make_step<S>(a[0], step[0], r0, r1);
    prefill_load_step<S>(step[0], part.at(), lane_at, 2);
    prefill_make_step<S>(a[1], step[1], r0, r1);
    u32 w = wgmma_tile(part.at() + S::W_AT);
    for (int k = 0; k < k_blocks; k += S::PART) {
        const prefill_part<S> after = part.next();
        const u32 at = part.at(), then = after.at(), w_then = wgmma_tile(then + S::W_AT);
#pragma unroll
        for (int s = 0; s < S::PART; s++) {
            const bool inside = s + 1 < S::PART;
            const u32 now = at + s * S::STRIDE, ahead = inside ? now + S::STRIDE : then;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                wgmma_fence();
                wgmma<S::N>::registers(acc, a[j], w + (s * S::STRIDE / 16 + 2 * j));
                wgmma_commit();
                if (j == 1 && (inside || k + S::PART < k_blocks))
                    barrier_wait(ahead + S::FULL_AT, inside ? part.parity : after.parity);
                prefill_load_step<S>(
                    step[(j + 1) & 1], j == 0 ? now : ahead, lane_at, (j + 3) & 3);
                wgmma_wait<2>();
                if (j == 1 && s > 0) prefill_release<S>(now - S::STRIDE, rank);
                if (j == 1 && s == 0 && k > 0) prefill_release<S>(last, rank);
                prefill_make_step<S>(a[(j + 2) & 3], step[j & 1], r0, r1);
            }
        }
        last = at + (S::PART - 1) * S::STRIDE;
        part = after, w = w_then;
    }
    wgmma_wait<0>();
    prefill_release<S>(last, rank);
}

// A lane's row in one layer. The slot is asked for before the chain and first looked at behind it.
static __device__ __forceinline__ i64
prefill_slot(const ctxkv_prefill_params &p, int layer, i64 row) {
    if (p.flags & CTXKV_PREFILL_KV) return row < p.rows ? 0 : -1;
    const ctxkv_prefill_layer &to = p.layer[layer];
    return row < to.rows && row < p.rows ? to.slots[row] : -1;
}

struct prefill_goal {
    i64 slot;
    u32 position; // below 2^32 because the table fits in memory
    bool store;
};
static __device__ __forceinline__ prefill_goal
prefill_look(const ctxkv_prefill_params &p, int layer, i64 row, i64 slot, bool report) {
    prefill_goal out = {slot, 0, slot >= 0};
    if (!out.store || p.flags & CTXKV_PREFILL_KV) return out;
    i64 value = slot;
    const i64 slot_count = p.layer[layer].slot_count;
    unsigned kind = fault_kind(slot, slot_count, 0, -1);
    if (kind == CTXKV_FAULT_KIND_NONE && p.cos_sin) {
        value = p.positions[row];
        kind = fault_kind(slot, slot_count, value, p.max_position);
        out.position = (u32)value;
    }
    out.store = kind == CTXKV_FAULT_KIND_NONE;
    if (!out.store && report) fault_report(p.faults, p.first_layer + layer, row, kind, value);
    return out;
}

static __device__ __forceinline__ void
prefill_angles(
    u32 (&cs)[2][8], const ctxkv_prefill_params &p, const prefill_goal (&goal)[2], int t) {
    if (!p.cos_sin || p.flags & CTXKV_PREFILL_KV) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (goal[i].store)
            head_angles(cs[i], (const u16 *)p.cos_sin + goal[i].position * 64ull, t);
}

static __device__ __forceinline__ void
prefill_target(u16 *&k, u16 *&v, const ctxkv_prefill_params &p, int layer, i64 row, i64 slot) {
    if (p.flags & CTXKV_PREFILL_KV) {
        k = (u16 *)p.kv + (p.first_layer + layer) * p.kv_layer + row * p.kv_row;
        v = k + 64 * p.heads;
        return;
    }
    const ctxkv_prefill_layer &to = p.layer[layer];
    i64 block, at;
    if (((u64)slot | (u64)to.block_size) >> 32 == 0) {
        block = (u32)slot / (u32)to.block_size;
        at = (u32)slot % (u32)to.block_size;
    } else {
        block = slot / to.block_size;
        at = slot % to.block_size;
    }
    k = (u16 *)to.k + block * to.k_block + at * to.k_page;
    v = (u16 *)to.v + block * to.v_block + at * to.v_page;
}

// The lane's rows g and g + 8 of the warp's 16, one after the other, head by head.
template <class S>
static __device__ __forceinline__ void
prefill_finish(const float (&acc)[S::N / 2], const ctxkv_prefill_params &p, i64 row, int layer,
               int first_head, const prefill_goal (&goal)[2], const u32 (&cs)[2][8]) {
    const int t = (int)threadIdx.x & 3;
    const bool plain = p.flags & CTXKV_PREFILL_KV, vector = !(p.flags & CTXKV_PREFILL_BY2);
    const i64 k_head = plain ? 64 : p.layer[layer].k_head;
    const i64 v_head = plain ? 64 : p.layer[layer].v_head;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u16 *k, *v;
        prefill_target(k, v, p, layer, row + 8 * half, goal[half].slot);
#pragma unroll
        for (int h = 0; h < S::N / 64; h++) {
            u32 w[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                w[j] = bf16_pack(
                    acc[32 * h + 4 * j + 2 * half], acc[32 * h + 4 * j + 2 * half + 1]);
            const int head = first_head + h;
            u16 *out = v + (head - p.heads) * v_head;
            if (head < p.heads) {
                out = k + head * k_head;
                if (!plain) {
                    head_norm(w, p.k_eps);
                    if (p.cos_sin) head_rotate(w, cs[half]);
                }
            }
            head_write(w, out, t, goal[half].store, vector);
        }
    }
}

template <class S>
static __device__ __forceinline__ void
prefill_consume(const ctxkv_prefill_params &p, prefill_part<S> part, int rank) {
    const u32 warp_row = threadIdx.x / 32 * 16;
    const int t = (int)threadIdx.x & 3;
    launch_wait();
    PREFILL_TILES(S, p, tile) {
        const prefill_place place = prefill_locate<S>(p, tile);
        const i64 row = (i64)(place.row_tile * S::ROWS + rank % S::ROWS) * S::M + warp_row +
                        (threadIdx.x & 31) / 4;
        const int column = prefill_column<S>(p, place, rank);
        const int heads = min(column, p.column_tiles - 1) * (S::N / 64);
        const int layer = heads / (2 * p.heads), first_head = heads - layer * 2 * p.heads;
        float r0 = 0.0f, r1 = 0.0f;
        if constexpr (S::INPUT != INPUT_READY) {
            if (row < p.rows) r0 = p.row_scale[row];
            if (row + 8 < p.rows) r1 = p.row_scale[row + 8];
        }
        const i64 slot[2] = {prefill_slot(p, layer, row), prefill_slot(p, layer, row + 8)};
        float acc[S::N / 2];
#pragma unroll
        for (int i = 0; i < S::N / 2; i++) acc[i] = 0.0f;
        if constexpr (S::INPUT == INPUT_READY)
            prefill_chain_ready<S>(acc, part, p.k_blocks, warp_row, rank);
        else
            prefill_chain_made<S>(acc, part, p.k_blocks, warp_row, r0, r1, rank);
        if (column >= p.column_tiles) continue;
        const bool report = first_head == 0 && t == 0;
        const prefill_goal goal[2] = {
            prefill_look(p, layer, row, slot[0], report),
            prefill_look(p, layer, row + 8, slot[1], report)};
        u32 cs[2][8];
        prefill_angles(cs, p, goal, t);
        prefill_finish<S>(acc, p, row, layer, first_head, goal, cs);
    }
}

template <class S> static __device__ __forceinline__ void prefill(const ctxkv_prefill_params &p) {
    extern __shared__ unsigned char smem[];
    const prefill_ring<S> ring(smem_addr(smem));
    const int rank = S::CTAS > 1 ? (int)cluster_rank() : 0;
    if (threadIdx.x == 0) {
        prefill_ring<S> each = ring;
        for (int i = 0; i < S::STAGES; i++, each.next()) {
            barrier_init(each.full(), 1);
            barrier_init(each.empty(), S::RELEASES);
        }
        barrier_init_visible();
    }
    if (S::CTAS > 1)
        cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x >= 128 * S::GROUPS) {
        if (S::MOVE_REGISTERS) registers_give<S::KEEP>();
        const int warp = (int)threadIdx.x / 32 - 4 * S::GROUPS;
        if ((threadIdx.x & 31) == 0) {
            prefetch_map(warp == 0 ? p.w_maps : &p.a);
            if (warp == 0) prefill_copy_weights<S>(p, ring, rank);
            if (warp == 1) prefill_copy_rows<S>(p, ring, rank);
            if (warp == 2) prefill_copy_gains<S>(p, ring, rank);
        }
        __syncwarp();
        launch_next();
    } else {
        if (S::MOVE_REGISTERS) registers_take<S::TAKE>();
        prefill_consume<S>(p, prefill_part<S>(smem_addr(smem)), rank);
    }
    // No CTA may leave while another can still write to its memory or count on its barriers.
    if (S::CTAS > 1) cluster_sync();
}

#endif
