// SPDX-License-Identifier: Apache-2.0
// How a projection of few rows (T <= 64) is cut: pure arithmetic on shapes, no driver.
#ifndef CTXKV_CUDA_FEW_PLAN_H
#define CTXKV_CUDA_FEW_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What a plan is made for.
struct ctxkv__few_shape {
    int64_t hidden_size, num_layers;
    int64_t columns;      // of a layer
    int multiprocessors;  // of the device
    size_t shared_memory; // a block may have, dynamic and static together
};

// The weights are packed once, for all T; two packings where small and large T want other tiles.
struct ctxkv__few_packing {
    int tile_rows, tiles; // of a layer
    size_t layer_bytes;   // packed weights of one layer
};

// One launch.
struct ctxkv__few_cut {
    struct ctxkv__few_packing packing;
    int batch_rows, batch_tiles;
    int cluster_tiles, cluster_batches;
    int chunks;            // D/8
    bool turned;           // the weights are the MMA's 64 rows
    int columns, steps;    // of the kernel: ctxkv_few_{n or t}{columns}_s{steps}
    int box_lines;         // of x, 64 columns each, that a CTA of the cluster fetches at once
    int stages, w_first;   // of the ring
    unsigned shared_bytes; // dynamic
};

enum { CTXKV__FEW_PACKINGS = 2 };

// Whether the kernels take the shape at all.
bool ctxkv__few_takes(const struct ctxkv__few_shape *shape);

// The packings of a shape, 1 or 2 of them; a launch for T rows uses ctxkv__few_cut's.
int ctxkv__few_packings(
    const struct ctxkv__few_shape *shape, struct ctxkv__few_packing packings[CTXKV__FEW_PACKINGS]);

// The cut for 1 <= rows <= 64; false where the kernels do not take the shape.
bool ctxkv__few_cut(const struct ctxkv__few_shape *shape, int64_t rows, struct ctxkv__few_cut *cut);

// Whether every launch is one wave of blocks: a second wave, of few blocks, takes as long as the
// first, and only one was timed beside cuBLAS.
bool ctxkv__few_one_wave(const struct ctxkv__few_shape *shape);

#endif
