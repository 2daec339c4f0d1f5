// SPDX-License-Identifier: Apache-2.0
// A prefill tile shape, its ring of stages in shared memory, and the walk over the tiles.
#ifndef CTXKV_CUDA_PREFILL_RING_CUH
#define CTXKV_CUDA_PREFILL_RING_CUH

#include "hopper.cuh"
#include "prefill_params.h"

// How a K head is finished: SPEC 3.4 (heads of 64, GPT-J), or SPEC 5 with a gain row a layer and
// NeoX.
enum prefill_family { FAMILY_PLAIN, FAMILY_RMS_64, FAMILY_RMS_128 };

// What A is: rows of n as they lie, or made of h with the row's factor, or with the gain as well.
enum prefill_input { INPUT_READY, INPUT_SCALED, INPUT_GAINED };

template <
    int GROUPS_, int N_, int ROWS_, int COLS_, int STAGES_, prefill_input INPUT_,
    prefill_family FAMILY_ = FAMILY_PLAIN>
struct prefill_shape {
    static const int GROUPS = GROUPS_, N = N_, ROWS = ROWS_, COLS = COLS_, STAGES = STAGES_;
    static const prefill_input INPUT = INPUT_;
    static const prefill_family FAMILY = FAMILY_;
    static const int HEAD = FAMILY == FAMILY_RMS_128 ? 128 : 64;
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
static __device__ __forceinline__ int prefill_column(
    const ctxkv_prefill_params &p, const prefill_place &place, int rank) {
    return place.column_tile * S::COLS + rank / S::ROWS;
}

#endif
