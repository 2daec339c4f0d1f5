// SPDX-License-Identifier: Apache-2.0
// The tensor-core chain of one prefill tile, with A as it lies or made in registers.
#ifndef CTXKV_CUDA_PREFILL_CHAIN_CUH
#define CTXKV_CUDA_PREFILL_CHAIN_CUH

#include "prefill_ring.cuh"
#include "wgmma.cuh"

// What one k16 step of A is made of, for a warp's 16 rows: the fragment of h and the lane's gains.
struct prefill_step {
    u32 h[4];
    float4 g;
};

// The copy engine has swizzled the block: 16-byte piece c of row r lies at piece c ^ (r & 7).
template <class S>
static __device__ __forceinline__ void prefill_load_step(
    prefill_step &s, u32 stage, const u32 (&lane_at)[4], int j) {
    load_matrix4(s.h, stage + lane_at[j]);
    if constexpr (S::INPUT == INPUT_GAINED)
        s.g = load_smem16(stage + S::G_AT + (threadIdx.x & 3) * 16 + 64 * j);
}

// Words 0, 1: rows g, g + 8 of columns 2t, 2t + 1; words 2, 3: of columns 2t + 8, 2t + 9.
template <class S>
static __device__ __forceinline__ void prefill_make_step(
    u32 (&a)[4], const prefill_step &s, float r0, float r1) {
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
static __device__ __forceinline__ void prefill_chain_ready(
    float (&acc)[S::N / 2], prefill_part<S> &part, int k_blocks, u32 warp_row, int rank) {
    const u32 rows = (warp_row & ~63u) * 128;
    u32 last = 0;
    for (int k = 0; k < k_blocks; k += S::PART) {
        const u32 at = part.at(), parity = part.parity;
        const u32 w = wgmma_tile(at + S::W_AT), a = wgmma_tile(at + rows);
        part = part.next();
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
    }
    wgmma_wait<0>();
    prefill_release<S>(last, rank);
}

// The chain of one tile with A made in registers. A warp that issues a tensor-core step is held
// until the step before it has begun, so the work of making A is spread between the steps: behind
// step j, step j + 2 is made of what was loaded behind step j - 1. Past the last block this makes,
// of whatever the ring holds, steps that are never used.
template <class S>
static __device__ __forceinline__ void prefill_chain_made(
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
    // With one stage a part, its descriptor is made a block ahead; else that costs more than it
    // saves.
    const bool AHEAD = S::PART == 1;
    u32 w = wgmma_tile(part.at() + S::W_AT);
    for (int k = 0; k < k_blocks; k += S::PART) {
        const prefill_part<S> after = part.next();
        const u32 at = part.at(), then = after.at();
        const u32 w_then = AHEAD ? wgmma_tile(then + S::W_AT) : 0;
        if (!AHEAD) w = wgmma_tile(at + S::W_AT);
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
                prefill_load_step<S>(step[(j + 1) & 1], j == 0 ? now : ahead, lane_at, (j + 3) & 3);
                wgmma_wait<2>();
                if (j == 1 && s > 0) prefill_release<S>(now - S::STRIDE, rank);
                if (j == 1 && s == 0 && k > 0) prefill_release<S>(last, rank);
                prefill_make_step<S>(a[(j + 2) & 3], step[j & 1], r0, r1);
            }
        }
        last = at + (S::PART - 1) * S::STRIDE;
        part = after;
        if (AHEAD) w = w_then;
    }
    wgmma_wait<0>();
    prefill_release<S>(last, rank);
}

#endif
