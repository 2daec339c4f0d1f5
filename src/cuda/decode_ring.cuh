// SPDX-License-Identifier: Apache-2.0
// A ring of stages of weights and x in shared memory: how it is filled, and the MMAs that walk all
// of K through it.
#ifndef CTXKV_CUDA_DECODE_RING_CUH
#define CTXKV_CUDA_DECODE_RING_CUH

#include "decode_async.cuh"
#include "decode_wgmma.cuh"
#include "prim.cuh"

// The ring of stages, each STEPS steps of both operands.
struct ring {
    u32 base, full, empty; // shared addresses
    int depth, chunks;     // chunks of a stage
    int x_bytes, bytes;    // of a stage: x, then weights
};

// One operand's way into the ring, in shares by the CTAs of the cluster that want it.
struct feed {
    const char *src;
    int offset, vector; // in a stage; bytes of a chunk
    int share, shares;
    u32 mask; // the CTAs that want it
};

// Stages [first, last) of those that K has, first <= depth. Short, for a stage may last less than
// 200 ns: what does not change from one to the next is worked out before.
static __device__ __forceinline__ void ring_fill(
    const ring &g, const feed &f, int chunks, int first, int last) {
    int n = g.chunks, slot = first;
    // Lines are shared out in eights; stages are multiples of them.
    int part = f.shares == 1 ? n : (n / f.shares + 7) & ~7;
    int a = min(f.share * part, n), bytes = (min(a + part, n) - a) * f.vector;
    u32 parity = 1, dst = g.base + f.offset + first * g.bytes;
    const char *src = f.src + (i64)first * n * f.vector;
    last = min(last, (chunks + n - 1) / n);
    for (int stage = first; stage < last; stage++) {
        if (slot == g.depth) slot = 0, parity ^= 1, dst = g.base + f.offset;
        if (chunks - stage * g.chunks < n) {
            n = chunks - stage * g.chunks;
            part = ((n + f.shares - 1) / f.shares + 7) & ~7;
            a = min(f.share * part, n), bytes = (min(a + part, n) - a) * f.vector;
        }
        if (stage >= g.depth) bar_wait(g.empty + slot * 8, parity);
        const u32 bar = g.full + slot * 8;
        bar_expect(bar, n * f.vector);
        if (f.shares == 1)
            copy_bulk(dst, src, bytes, bar);
        else if (bytes > 0)
            copy_bulk_to(dst + a * f.vector, src + a * f.vector, bytes, bar, f.mask);
        slot++, dst += g.bytes, src += g.chunks * f.vector;
    }
}

#define EARLY 4 // stages of weights asked for before anything else

// By a CTA that needs nobody's help with its weights.
static __device__ __forceinline__ void ring_fill_early(
    const ring &g, const feed &weights, int chunks, int w_first) {
    // Not a loop: with one, the compiler would keep the ring in registers of each lane, and the
    // MMAs of the consumers would have to wait for their descriptors.
    if (weights.shares == 1) {
#pragma unroll
        for (int i = 0; i < EARLY; i++)
            if (i < w_first) ring_fill(g, weights, chunks, i, i + 1);
    }
}

// The consumers. An MMA is issued when the one before is nearly done, so that every instruction
// between two stages is time lost; what has to be done sits between the MMAs of a stage instead:
// telling the producers that the stage before last is free, and looking whether the next is full.
// TURNED: the weights are the MMA's 64 rows and x its N, so that `out` are pairs of rows of a
// column, not of columns of a row.
template <int N, int STEPS, bool TURNED = false>
static __device__ __forceinline__ void multiply(
    const ring &g, int steps, u32 w_pitch, u32 x_pitch, u32 target, bool tells, u32 (&out)[N / 4]) {
    const u32 x_turn = x_pitch * 8 - 6; // from the last step of a line to the next line
    const int stages = steps / STEPS, all_stages = (steps + STEPS - 1) / STEPS;
    int slot = 0, free_slot = 0;
    u32 parity = 0, ready = 0;
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
    wgmma_fix<N>(acc);
    const auto step = [](float(&acc)[N / 2], u32 x, u32 w) {
        const u64 xs = lines_operand(x), ws = chunks_operand(w);
        wgmma<N>(acc, TURNED ? ws : xs, TURNED ? xs : ws);
    };
    for (int s = 0; s < stages; s++) {
        if (!ready) bar_wait(g.full + slot * 8, parity);
        u32 w = chunks_start(g.base + slot * g.bytes + g.x_bytes, w_pitch);
        u32 x = lines_start(g.base + slot * g.bytes);
        if (++slot == g.depth) slot = 0, parity ^= 1;
        const bool release = tells && s >= 2 && s - 2 + g.depth < all_stages;
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            step(acc, x, w);
            w += w_pitch * 2, x += i % 4 == 3 ? x_turn : 2;
            if (i == 1) bar_arrive_if(target + free_slot * 8, release);
            if (i == STEPS - 3) ready = bar_test(g.full + slot * 8, parity);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (s >= 2 && ++free_slot == g.depth) free_slot = 0;
    }
    if (stages < all_stages) {
        bar_wait(g.full + slot * 8, parity);
        u32 w = chunks_start(g.base + slot * g.bytes + g.x_bytes, w_pitch);
        u32 x = lines_start(g.base + slot * g.bytes);
        for (int i = stages * STEPS; i < steps; i++) {
            wgmma_begin();
            step(acc, x, w);
            w += w_pitch * 2, x += i % 4 == 3 ? x_turn : 2;
            wgmma_commit();
            wgmma_wait<0>();
        }
    }
    wgmma_wait<0>();
    wgmma_fix<N>(acc);
#pragma unroll
    for (int i = 0; i < N / 4; i++) out[i] = bf16_pack(acc[2 * i], acc[2 * i + 1]);
}

// Two columns' outputs.
static __device__ __forceinline__ void store_pair(u16 *out, u32 word, bool by2) {
    if (by2)
        out[0] = (u16)word, out[1] = (u16)(word >> 16);
    else
        *(u32 *)out = word;
}

#endif
