// SPDX-License-Identifier: Apache-2.0
// How a projection of few rows is cut. The choices were measured on an H200: docs/op/projection.md.
#include "few_plan.h"

#include "few_params.h"
#include "ring_plan.h"

// FIRST_BYTES: weights asked for before x. TURNED_ROWS: T up to which the weights are the MMA's
// rows, whose time then depends on x's.
enum {
    SHARED_STATIC = 2048,
    LEAST_STAGES = 3,
    FIRST_BYTES = 96 * 1024,
    TURNED_ROWS = 8,
    EVEN_COLUMNS = 256
};

enum { MMA_ROWS = 64 };

bool ctxkv__few_takes(const struct ctxkv__few_shape *s) {
    return s->num_layers > 0 && s->num_layers <= 65535 && s->columns > 0 && s->columns % 2 == 0 &&
           s->columns <= 1 << 22 && s->hidden_size > 0 && s->hidden_size % 64 == 0 &&
           s->hidden_size <= 1 << 20 && s->shared_memory >= 64 * 1024;
}

// Weight rows a tile so that one wave of `blocks` blocks covers all layers. Few, large tiles: a
// block's time hardly depends on its rows up to 16, and blocks of the next launch find room.
static int wave_rows(const struct ctxkv__few_shape *s, int64_t blocks) {
    const int64_t columns = s->columns;
    int64_t tiles = blocks / s->num_layers;
    if (tiles < 2) tiles = 1;
    if (columns <= EVEN_COLUMNS) tiles = tiles < 2 ? 1 : tiles / 2 * 2; // 12 tiles, not 13
    return tile_rows(columns, tiles);
}

static struct ctxkv__few_packing pack(const struct ctxkv__few_shape *s, int rows) {
    struct ctxkv__few_packing p;
    p.tile_rows = rows;
    p.tiles = (int)((s->columns + rows - 1) / rows);
    p.layer_bytes = (size_t)p.tiles * (size_t)rows * (size_t)s->hidden_size * 2;
    return p;
}

// Above 32 rows two batch tiles share the tile's weights, where that does not make tiles too large.
static bool splits_batch(const struct ctxkv__few_shape *s) {
    return wave_rows(s, s->multiprocessors / 2) < 96;
}

int ctxkv__few_packings(
    const struct ctxkv__few_shape *s, struct ctxkv__few_packing packings[CTXKV__FEW_PACKINGS]) {
    packings[0] = pack(s, wave_rows(s, s->multiprocessors));
    if (!splits_batch(s)) return 1;
    packings[1] = pack(s, wave_rows(s, s->multiprocessors / 2));
    return packings[1].tile_rows == packings[0].tile_rows ? 1 : 2;
}

// A ring of stages of so many steps; false where too few fit.
static bool fit_ring(
    const struct ctxkv__few_shape *s, int steps, int least, struct ctxkv__few_cut *c) {
    const size_t weights = (size_t)steps * 32 * (size_t)c->packing.tile_rows;
    const size_t stage =
        (size_t)round_up((int64_t)steps * 32 * (c->packing.tile_rows + c->batch_rows), 1024);
    // An MMA reads 64 rows of x, up to 56 past the last line, past the stage's weights; or 64 of
    // weights.
    const size_t past_x = (MMA_ROWS - 8) * 128;
    const size_t pad = CTXKV_FEW_PAD + (!c->turned && weights < past_x ? past_x - weights : 0);
    const int all = (c->chunks + 2 * steps - 1) / (2 * steps), want = 8;
    int fit = (int)((s->shared_memory - SHARED_STATIC - pad) / stage);
    if (fit < all && fit < least) return false;
    c->steps = steps;
    c->stages = fit < want ? fit : want;
    if (c->stages > all) c->stages = all;
    const size_t first = FIRST_BYTES / weights;
    c->w_first = first < 1 ? 1 : first < (size_t)c->stages ? (int)first : c->stages;
    c->shared_bytes = (unsigned)(stage * (size_t)c->stages + pad);
    const int lines = steps / 4;
    if (lines % c->cluster_tiles) c->cluster_tiles = 1;
    c->box_lines = lines / c->cluster_tiles;
    return true;
}

// The longest stages of which the ring holds enough, or all of K.
static bool choose_kernel(const struct ctxkv__few_shape *s, struct ctxkv__few_cut *c) {
    if (c->turned) {
        c->columns = c->batch_rows;
        return fit_ring(s, 32, 5, c) || fit_ring(s, 16, LEAST_STAGES, c);
    }
    for (int k = 0; k < KERNELS; k++) {
        if (kernels[k].columns < c->packing.tile_rows) continue;
        c->columns = kernels[k].columns;
        const bool two = kernels[k].steps[1] > 0;
        if (fit_ring(s, kernels[k].steps[0], two ? 5 : LEAST_STAGES, c)) return true;
        return two && fit_ring(s, kernels[k].steps[1], LEAST_STAGES, c);
    }
    return false;
}

bool ctxkv__few_cut(const struct ctxkv__few_shape *s, int64_t rows, struct ctxkv__few_cut *c) {
    if (!ctxkv__few_takes(s) || rows < 1 || rows > CTXKV_FEW_MAX_ROWS) return false;
    const bool split = rows > 32 && splits_batch(s);
    *c = (struct ctxkv__few_cut){
        .packing = pack(s, wave_rows(s, s->multiprocessors / (split ? 2 : 1)))};
    c->batch_tiles = split ? 2 : 1;
    c->batch_rows = (int)round_up((rows + c->batch_tiles - 1) / c->batch_tiles, 8);
    c->batch_tiles = (int)((rows + c->batch_rows - 1) / c->batch_rows);
    // Tiles that fetch x together: worth the wait for each other where x is the larger operand.
    c->cluster_tiles = rows <= 16 || split         ? 1
                       : c->packing.tiles % 4 == 0 ? 4
                       : c->packing.tiles % 2 == 0 ? 2
                                                   : 1;
    c->cluster_batches = c->batch_tiles;
    c->chunks = (int)(s->hidden_size / 8);
    c->turned = rows <= TURNED_ROWS && c->packing.tile_rows <= MMA_ROWS;
    return choose_kernel(s, c);
}

bool ctxkv__few_one_wave(const struct ctxkv__few_shape *s) {
    struct ctxkv__few_cut c;
    for (int64_t rows = 1; rows <= CTXKV_FEW_MAX_ROWS; rows++)
        if (!ctxkv__few_cut(s, rows, &c) ||
            (int64_t)c.packing.tiles * c.batch_tiles * s->num_layers > s->multiprocessors)
            return false;
    return true;
}
