// SPDX-License-Identifier: Apache-2.0
// The copiers of the prefill kernels: weights, rows and gains into the ring.
#ifndef CTXKV_CUDA_PREFILL_COPY_CUH
#define CTXKV_CUDA_PREFILL_COPY_CUH

#include "prefill_ring.cuh"

// First copier: this CTA's share of the tile's N weight rows, to all tiles of its column. Weights
// never change, so it does not wait for the kernels before this one.
template <class S>
static __device__ __forceinline__ void prefill_copy_weights(
    const ctxkv_prefill_params &p, prefill_ring<S> ring, int rank) {
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
            const int at =
                p.first_layer * 2 * S::HEAD * p.heads + column * S::N + r * PART + i * BOX;
            map[i] = p.w_maps + at / p.w_rows;
            row[i] = at % p.w_rows;
        }
        for (int k = 0; k < p.k_blocks; k++, ring.next()) {
            barrier_wait(ring.empty(), ring.parity ^ 1u);
            barrier_expect(ring.full(), S::BYTES);
#pragma unroll
            for (int i = 0; i < BOXES; i++)
                copy_box2<(S::ROWS > 1)>(
                    ring.at + S::W_AT + (r * PART + i * BOX) * 128, map[i], k * 64, row[i],
                    ring.full(), mask);
        }
    }
}

// Second copier: this CTA's share of the tile's rows, to all tiles of its row.
template <class S>
static __device__ __forceinline__ void prefill_copy_rows(
    const ctxkv_prefill_params &p, prefill_ring<S> ring, int rank) {
    const int PART = S::M / S::COLS, r = rank % S::ROWS, c = rank / S::ROWS;
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < S::COLS; i++) mask |= 1u << (r + i * S::ROWS);
    const int per_layer = 2 * S::HEAD * p.heads / S::N;
    launch_wait();
    PREFILL_TILES(S, p, tile) {
        const prefill_place place = prefill_locate<S>(p, tile);
        const int row = (place.row_tile * S::ROWS + r) * S::M + c * PART;
        const int column = min(prefill_column<S>(p, place, rank), p.column_tiles - 1);
        const bool own = S::INPUT == INPUT_READY && !p.a_shared;
        const int layer = own ? p.first_layer + column / per_layer : 0;
        for (int k = 0; k < p.k_blocks; k++, ring.next()) {
            barrier_wait(ring.empty(), ring.parity ^ 1u);
            copy_box3<(S::COLS > 1)>(
                ring.at + c * PART * 128, &p.a, k * 64, row, layer, ring.full(), (u16)mask);
        }
    }
}

// Third copier: the layer's gains.
template <class S>
static __device__ __forceinline__ void prefill_copy_gains(
    const ctxkv_prefill_params &p, prefill_ring<S> ring, int rank) {
    if (S::INPUT != INPUT_GAINED) return;
    const int per_layer = 2 * S::HEAD * p.heads / S::N;
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

#endif
