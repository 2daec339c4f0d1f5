// SPDX-License-Identifier: Apache-2.0
// How a decode launch (T <= 64) is cut: pure arithmetic on shapes, no driver.
#ifndef CTXKV_CUDA_DECODE_PLAN_H
#define CTXKV_CUDA_DECODE_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What a plan is made for.
struct ctxkv__decode_shape {
    int64_t hidden_size;  // D, a multiple of 16
    int64_t num_layers;   // L
    int64_t num_heads;    // of K, per layer
    int64_t head_dim;     // 64, 128, 256 or 512
    int multiprocessors;  // of the device
    size_t shared_memory; // a block may have, dynamic and static together
};

// The weights are packed once, for all T; more than once where small and large T want other tiles.
struct ctxkv__decode_packing {
    int tile_rows, tiles;   // of a layer
    int k_tiles, k_columns; // the tiles with columns of K, and how many each has
    size_t layer_bytes;     // packed weights of one layer
};

static inline bool ctxkv__decode_same_packing(
    const struct ctxkv__decode_packing *a, const struct ctxkv__decode_packing *b) {
    return a->tile_rows == b->tile_rows && a->tiles == b->tiles && a->k_columns == b->k_columns;
}

// One launch.
struct ctxkv__decode_cut {
    struct ctxkv__decode_packing packing;
    int batch_rows, batch_tiles;
    int cluster_tiles, cluster_batches;
    int chunks;            // D/8, D rounded up to a multiple of 64
    int columns, steps;    // of the kernel: ctxkv_decode_n{columns}_s{steps}
    int stages, w_first;   // of the ring
    bool shares_x;         // the tiles of a cluster fetch x together
    int k_room;            // offset in dynamic shared memory
    unsigned shared_bytes; // dynamic
    // decode_fused.cu: batch_rows are the kernel's, columns mean nothing. local: every CTA norms
    // all rows; else the CTAs of a cluster share the work.
    bool fused, local;
};

// Whether the kernels take the shape at all.
bool ctxkv__decode_takes(const struct ctxkv__decode_shape *shape);

// The packings of a shape, 1 to 3 of them; a launch for T rows uses ctxkv__decode_cut's.
enum { CTXKV__DECODE_PACKINGS = 3 };
int ctxkv__decode_packings(
    const struct ctxkv__decode_shape *shape,
    struct ctxkv__decode_packing packings[CTXKV__DECODE_PACKINGS]);

// The cut for 1 <= rows <= 64; false where the kernels do not take the shape.
bool ctxkv__decode_cut(
    const struct ctxkv__decode_shape *shape, int64_t rows, struct ctxkv__decode_cut *cut);

// One kernel for the whole chain, with norms of the kind that it knows: the packing that it wants,
// and the cut; false where there is none or the norms and decode kernels are faster.
bool ctxkv__decode_fused_packing(
    const struct ctxkv__decode_shape *shape, struct ctxkv__decode_packing *packing);
bool ctxkv__decode_fused_cut(
    const struct ctxkv__decode_shape *shape, int64_t rows, struct ctxkv__decode_cut *cut);

// Bytes of packed n for any rows up to max_rows and for x_layers layers (1 where all share one x);
// it starts zeroed when D is no multiple of 64, since the columns past D must stay zero.
size_t ctxkv__decode_x_bytes(
    const struct ctxkv__decode_shape *shape, int64_t max_rows, int64_t x_layers);

// Bytes of the plan's room for packed n in one kernel; 0 where there is none.
size_t ctxkv__decode_room_bytes(const struct ctxkv__decode_shape *shape, int64_t max_rows);

#endif
