// SPDX-License-Identifier: Apache-2.0
// The prefill kernel for one tile shape: copiers, tensor-core chain, K norm, RoPE and insert.
//
// A CTA computes tiles of 64*GROUPS rows x N columns of kv. Three warps copy 64-column blocks of h,
// W and gains into a ring of stages; each of GROUPS warpgroups owns 64 rows, turns its rows of h
// into rows of the layer's norm in registers, y = bf16((r*h)*g), and feeds them to wgmma as the A
// operand. Every output is one chain of k16 steps in rising K (SPEC 3.3): nothing is split, so a
// row's bits do not depend on T or on the tile shape. CTAs of a cluster of ROWS x COLS tiles share
// what they read: a block of W goes to the ROWS tiles of a column, a block of h to the COLS tiles
// of a row.
#ifndef CTXKV_CUDA_PREFILL_TILE_CUH
#define CTXKV_CUDA_PREFILL_TILE_CUH

#include "faults.cuh"
#include "head_rms.cuh"
#include "head_store.cuh"
#include "prefill_chain.cuh"
#include "prefill_copy.cuh"

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
    if (slot < 0) return {0, 0, false};
    prefill_goal out = {slot, 0, true};
    if (p.flags & CTXKV_PREFILL_KV) return out;
    i64 value = slot;
    const i64 slot_count = p.layer[layer].slot_count;
    unsigned kind = fault_kind(slot, slot_count, 0, -1);
    if (kind == CTXKV_FAULT_KIND_NONE && p.cos_sin) {
        value = p.positions[row];
        kind = fault_kind(slot, slot_count, value, p.max_position);
        out.position = (u32)value;
    }
    if (kind == CTXKV_FAULT_KIND_NONE) return out;
    if (report) fault_report(p.faults, p.first_layer + layer, row, kind, value);
    return {0, 0, false};
}

static __device__ __forceinline__ void prefill_angles(
    u32 (&cs)[2][8], const ctxkv_prefill_params &p, const prefill_goal (&goal)[2], int t) {
    if (!p.cos_sin || p.flags & CTXKV_PREFILL_KV) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (goal[i].store) head_angles(cs[i], (const u16 *)p.cos_sin + goal[i].position * 64ull, t);
}

template <class S>
static __device__ __forceinline__ void prefill_target(
    u16 *&k, u16 *&v, const ctxkv_prefill_params &p, int layer, i64 row, i64 slot) {
    if (p.flags & CTXKV_PREFILL_KV) {
        k = (u16 *)p.kv + (p.first_layer + layer) * p.kv_layer + row * p.kv_row;
        v = k + S::HEAD * p.heads;
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
static __device__ __forceinline__ void prefill_finish(
    const float (&acc)[S::N / 2], const ctxkv_prefill_params &p, i64 row, int layer, int first_head,
    const prefill_goal (&goal)[2], const u32 (&cs)[2][8]) {
    const int t = (int)threadIdx.x & 3;
    const bool plain = p.flags & CTXKV_PREFILL_KV, vector = !(p.flags & CTXKV_PREFILL_BY2);
    const i64 k_head = plain ? 64 : p.layer[layer].k_head;
    const i64 v_head = plain ? 64 : p.layer[layer].v_head;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u16 *k, *v;
        prefill_target<S>(k, v, p, layer, row + 8 * half, goal[half].slot);
#pragma unroll
        for (int h = 0; h < S::N / 64; h++) {
            u32 w[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                w[j] =
                    bf16_pack(acc[32 * h + 4 * j + 2 * half], acc[32 * h + 4 * j + 2 * half + 1]);
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

// The same for the family of SPEC 5, once the quad has exchanged words for vectors of eight
// columns.
template <class S>
static __device__ __forceinline__ void prefill_finish_rms(
    const float (&acc)[S::N / 2], const ctxkv_prefill_params &p, i64 row, int layer, int first_head,
    const prefill_goal (&goal)[2]) {
    constexpr int HD = S::HEAD, VECS = HD / 32;
    const int t = (int)threadIdx.x & 3;
    const bool plain = p.flags & CTXKV_PREFILL_KV, vector = !(p.flags & CTXKV_PREFILL_BY2);
    const i64 k_head = plain ? HD : p.layer[layer].k_head;
    const i64 v_head = plain ? HD : p.layer[layer].v_head;
    const float *gain = p.k_gain + (i64)(p.first_layer + layer) * HD;
    const bool rotate = p.cos_sin && !plain && first_head < p.heads;
    uint4 cs[2][VECS];
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (rotate && goal[half].store)
            rms_angles<HD>(cs[half], (const u16 *)p.cos_sin + goal[half].position * (u64)HD, t);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u16 *k, *v;
        prefill_target<S>(k, v, p, layer, row + 8 * half, goal[half].slot);
#pragma unroll
        for (int h = 0; h < S::N / HD; h++) {
            uint4 w[VECS];
#pragma unroll
            for (int i = 0; i < VECS; i++) {
                const float *c = acc + HD / 2 * h + 16 * i + 2 * half;
                w[i] = quad_transpose(
                    bf16_pack(c[0], c[1]), bf16_pack(c[4], c[5]), bf16_pack(c[8], c[9]),
                    bf16_pack(c[12], c[13]), t);
            }
            const int head = first_head + h;
            u16 *out = v + (head - p.heads) * v_head;
            if (head < p.heads) {
                out = k + head * k_head;
                if (!plain) {
                    rms_norm_head<HD>(w, gain, p.k_eps, t);
                    if (p.cos_sin) rms_rotate<HD>(w, cs[half]);
                }
            }
            rms_write<HD>(w, out, t, goal[half].store, vector);
        }
    }
}

template <class S>
static __device__ __forceinline__ void prefill_consume(
    const ctxkv_prefill_params &p, prefill_part<S> part, int rank) {
    const u32 warp_row = threadIdx.x / 32 * 16;
    const int t = (int)threadIdx.x & 3;
    launch_wait();
    PREFILL_TILES(S, p, tile) {
        const prefill_place place = prefill_locate<S>(p, tile);
        const i64 row = (i64)(place.row_tile * S::ROWS + rank % S::ROWS) * S::M + warp_row +
                        (threadIdx.x & 31) / 4;
        const int column = prefill_column<S>(p, place, rank);
        const int heads = min(column, p.column_tiles - 1) * (S::N / S::HEAD);
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
        if constexpr (S::FAMILY == FAMILY_PLAIN) {
            u32 cs[2][8];
            prefill_angles(cs, p, goal, t);
            prefill_finish<S>(acc, p, row, layer, first_head, goal, cs);
        } else {
            prefill_finish_rms<S>(acc, p, row, layer, first_head, goal);
        }
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
