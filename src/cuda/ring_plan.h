// SPDX-License-Identifier: Apache-2.0
// What the cuts of decode.cu and few.cu share: the MMAs that there are, and tiles that suit them.
#ifndef CTXKV_CUDA_RING_PLAN_H
#define CTXKV_CUDA_RING_PLAN_H

#include <stdint.h>

// Columns of the MMAs, and the longest stages there are kernels for.
static const struct {
    int columns, steps[2];
} kernels[] = {
    {8, {32, 16}}, {16, {32, 16}}, {24, {32, 16}}, {32, {32, 16}},
    {48, {16, 0}}, {64, {16, 8}},  {96, {8, 0}},   {128, {8, 0}},
};
enum { KERNELS = sizeof(kernels) / sizeof(kernels[0]), MOST_COLUMNS = 128 };

static inline int64_t round_up(int64_t a, int64_t b) {
    return (a + b - 1) / b * b;
}

// Weight rows a tile where `tiles` tiles are to cover `columns`.
static inline int tile_rows(int64_t columns, int64_t tiles) {
    int64_t rows = round_up((columns + tiles - 1) / tiles, 2);
    rows = rows <= 8 ? 8 : rows < 16 ? 16 : rows;
    if (rows > MOST_COLUMNS) rows = MOST_COLUMNS;
    // Rows that fill the MMA when that costs no tile.
    for (int i = 0; i < KERNELS; i++)
        if (kernels[i].columns >= rows) {
            const int64_t full = kernels[i].columns;
            if ((columns + full - 1) / full == (columns + rows - 1) / rows) rows = full;
            break;
        }
    return (int)rows;
}

#endif
