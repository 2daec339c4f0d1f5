// SPDX-License-Identifier: Apache-2.0
// Which prefill kernel runs a shape: measured times of one tile, times the waves of tiles.
#include "prefill_plan.h"

#define WARPGROUP 128
#define COPIERS 96
#define SMS 132 // of an H200

// The sizes below restate prefill_tile.cuh's prefill_shape.
#define STAGE(groups, n) ((64 * (groups) + (n)) * 128 + 1024)
#define MOVES(groups, n) (((groups) == 2 && (n) == 256) || (groups) == 3)
#define SHAPE(id, groups, n, rows, cols, stages)                                                   \
    {#id,                                                                                          \
     64 * (groups),                                                                                \
     n,                                                                                            \
     rows,                                                                                         \
     WARPGROUP * (groups) + (MOVES(groups, n) ? WARPGROUP : COPIERS),                              \
     1024 + (stages)*STAGE(groups, n),                                                             \
     (n) / (rows) < 64 ? (n) / (rows) : 64,                                                        \
     64 * (groups) / (cols)},
static const ctxkv_prefill_shape shapes[] = {
#include "prefill_shapes.inc"
};
#undef SHAPE
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

// Microseconds on an H200 at 8192 columns, [made in registers, ready]: of the first wave of tiles,
// of every further one (all multiprocessors busy, lower clock), and of a launch beside its waves.
// docs/op/prefill.md has the measurements.
static const struct {
    double first[2], more[2], fixed;
} times[SHAPES] = {
    {{26, 20}, {30, 24}, 5.5}, // 64x64c2
    {{32, 30}, {48, 40}, 6},   // 64x128c2
    {{48, 50}, {66, 58}, 7},   // 64x256c2
    {{56, 44}, {66, 60}, 7.5}, // 128x128c2
    {{80, 72}, {88, 80}, 9},   // 192x128c2
    {{90, 80}, {97, 97}, 9},   // 128x256c2
};

int ctxkv__prefill_shape_count(void) {
    return SHAPES;
}
const ctxkv_prefill_shape *ctxkv__prefill_shape_at(int index) {
    return &shapes[index];
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static int tile_counts(
    const ctxkv_prefill_shape *shape, int64_t rows, int64_t layers, int64_t heads,
    ctxkv_prefill_choice *c) {
    if (heads * 128 % shape->tile_columns) return 0;
    const int64_t columns = layers * (heads * 128 / shape->tile_columns);
    const int64_t row_tiles = ceil_div(rows, (int64_t)shape->tile_rows * shape->cluster_rows);
    if (columns > INT32_MAX || row_tiles > INT32_MAX / 2 / columns / shape->cluster_rows) return 0;
    // Row coordinates of the copies are ints, too.
    if (row_tiles * shape->cluster_rows > INT32_MAX / shape->tile_rows) return 0;
    c->column_tiles = (int)columns;
    c->row_tiles = (int)row_tiles;
    return 1;
}

int ctxkv__prefill_choose(
    int64_t rows, int64_t columns, int64_t layers, int64_t heads, int sms,
    ctxkv_prefill_input input, ctxkv_prefill_choice *choice) {
    if (columns < 1 || columns > 1 << 24 || rows < 1 || rows > INT32_MAX || layers < 1 ||
        layers > 1 << 20)
        return 0;
    if (heads < 1 || heads > 1 << 20) return 0;
    const int head = ctxkv__prefill_head_dim(input);
    const int ready = input != CTXKV_PREFILL_SCALED && input != CTXKV_PREFILL_GAINED;
    const double part = 64.0 * ctxkv__prefill_k_blocks(columns) / 8192;
    int found = 0;
    for (int i = 0; i < SHAPES; i++) {
        ctxkv_prefill_choice c = {.shape = i};
        if (sms < shapes[i].cluster_rows || shapes[i].tile_columns < head ||
            !tile_counts(&shapes[i], rows, layers, heads * (head / 64), &c))
            continue;
        const int64_t clusters = (int64_t)c.column_tiles * c.row_tiles;
        const int64_t room = sms / shapes[i].cluster_rows;
        const int64_t waves = ceil_div(clusters, room);
        c.us = times[i].fixed +
               part * (times[i].first[ready] + (double)(waves - 1) * times[i].more[ready]);
        if (found && c.us >= choice->us) continue;
        c.grid = (unsigned)((clusters < room ? clusters : room) * shapes[i].cluster_rows);
        c.group = c.column_tiles <= 10 ? 2 : 8;
        *choice = c;
        found = 1;
    }
    return found;
}

int ctxkv__prefill_head_dim(ctxkv_prefill_input input) {
    return input == CTXKV_PREFILL_RMS128 ? 128 : 64;
}

static double larger(double a, double b) {
    return a > b ? a : b;
}

// Beside cuBLAS and the store, by all N columns (docs/op/prefill.md): what the store takes is
// saved, what the last wave of tiles leaves idle is lost.
static int family_pays(int64_t rows, int64_t n, const ctxkv_prefill_choice *choice) {
    const ctxkv_prefill_shape *shape = &shapes[choice->shape];
    if (n < 5120) return rows >= 16384;
    const double tile = (double)shape->tile_rows * shape->tile_columns;
    const int64_t tiles = (int64_t)choice->row_tiles * choice->column_tiles * shape->cluster_rows;
    const double done = (double)rows * (double)n,
                 room = (double)(ceil_div(tiles, SMS) * SMS) * tile;
    return rows >= 2048 && done >= 15.0 / 16 * room;
}

int ctxkv__prefill_pays(
    int64_t rows, int64_t columns, int64_t layers, int64_t heads, ctxkv_prefill_input input,
    ctxkv_prefill_other other) {
    ctxkv_prefill_choice choice = {0};
    if (!ctxkv__prefill_choose(rows, columns, layers, heads, SMS, input, &choice)) return 0;
    if (other != CTXKV_PREFILL_OR_CUBLAS) return 1;
    if (input >= CTXKV_PREFILL_RMS64)
        return family_pays(rows, 2 * layers * heads * ctxkv__prefill_head_dim(input), &choice);
    if (heads > 8) return 0; // level with cuBLAS at best
    // Fits to measured times of the pre-kernel and of the three steps it replaces, in microseconds.
    const double t = (double)rows, l = (double)layers, h = (double)heads;
    const double flops = 2 * t * l * 128 * h * 8192, rate = heads == 1 ? 530e6 : 745e6;
    const double prenorm = larger(4.5, 1.8 + 0.0085 * t);
    const double norms = larger(5, 3 + 0.0042 * t * (1 + l));
    const double gemm = larger(16, 5 + flops / rate);
    const double store = 2 + t * (0.0022 + 0.0005 * h) * l / 5;
    return 1.02 * (prenorm + choice.us) < norms + gemm + store;
}

int ctxkv__prefill_k_blocks(int64_t columns) {
    return (int)(ceil_div(columns, 256) * 4);
}

void ctxkv__prefill_pack_gains(float *out, const float *gains, int64_t columns) {
    for (int64_t i = 0; i < columns; i += 16)
        for (int t = 0; t < 4; t++) {
            out[i + 4 * t + 0] = gains[i + 2 * t];
            out[i + 4 * t + 1] = gains[i + 2 * t + 1];
            out[i + 4 * t + 2] = gains[i + 2 * t + 8];
            out[i + 4 * t + 3] = gains[i + 2 * t + 9];
        }
}
