// SPDX-License-Identifier: Apache-2.0
// How a decode launch is cut. The choices were measured on an H200: see docs/op/decode.md.
#include "decode_plan.h"

#include "decode_params.h"
#include "ring_plan.h"

// FIRST_BYTES: weights asked for before x, enough to come while the norms run.
// CLUSTER: CTAs of a cluster at most.
enum {
    SHARED_STATIC = 4096,
    WAVE_STAGES = 3,
    FIRST_BYTES = 96 * 1024,
    CLUSTER = 8,
    FEW_ROWS = 16,
    SPLIT_ROWS = 48,
};
// FUSED_FIRST: stages asked for before x; more of them would be in x's way. FUSED_ROWS: where one
// kernel was faster; with more than two heads, FUSED_LOCAL.
enum {
    FUSED_TILES = 2 * CTXKV_DECODE_FUSED_CLUSTER,
    FUSED_HIDDEN = 8192,
    FUSED_HEADS = 4,
    FUSED_SHARED = 227 * 1024,
    FUSED_FIRST = 2,
    FUSED_LOCAL = 2,
    FUSED_ROWS = 8,
};

static int64_t columns_of(const struct ctxkv__decode_shape *s) {
    return 2 * s->num_heads * s->head_dim;
}
static int chunks_of(const struct ctxkv__decode_shape *s) {
    return (int)(round_up(s->hidden_size, 64) / 8);
}

bool ctxkv__decode_takes(const struct ctxkv__decode_shape *s) {
    const bool head =
        s->head_dim == 64 || s->head_dim == 128 || s->head_dim == 256 || s->head_dim == 512;
    return head && s->num_layers > 0 && s->num_heads > 0 && s->hidden_size > 0 &&
           s->hidden_size % 16 == 0 && s->hidden_size <= 1 << 20 &&
           s->num_heads <= (1 << 24) / s->head_dim;
}

// Tiles of `rows` columns; a head of K lies in `spread` of them.
static struct ctxkv__decode_packing pack(
    const struct ctxkv__decode_shape *s, int64_t rows, int64_t spread) {
    const int64_t k_tiles = s->num_heads * spread, k_columns = s->head_dim / spread;
    const int64_t left = columns_of(s) - k_tiles * rows;
    const int64_t tiles = k_tiles + (left > 0 ? (left + rows - 1) / rows : 0);
    struct ctxkv__decode_packing p = {
        .tile_rows = (int)rows,
        .tiles = (int)round_up(tiles, spread), // whole clusters
        .k_tiles = (int)k_tiles,
        .k_columns = (int)k_columns,
    };
    p.layer_bytes = (size_t)p.tiles * (size_t)rows * (size_t)chunks_of(s) * 16;
    return p;
}

// Tiles so that one wave of `blocks` blocks covers all layers, a head of K in at most `most` of
// them. Few, large tiles: a block's time hardly depends on its rows up to 16, and blocks of the
// next launch find room.
static struct ctxkv__decode_packing pack_wave(
    const struct ctxkv__decode_shape *s, int64_t blocks, int64_t most) {
    const int64_t layers =
        s->num_layers < CTXKV_DECODE_LAYERS ? s->num_layers : CTXKV_DECODE_LAYERS;
    int64_t tiles = blocks / layers, spread = 1;
    tiles = tiles < 2 ? 1 : tiles / 2 * 2; // 12 tiles were better than 13
    int64_t rows = tile_rows(columns_of(s), tiles);
    while (spread < most && s->head_dim / spread > rows) spread *= 2;
    if (tiles > spread) rows = tile_rows(columns_of(s), tiles / spread * spread);
    const int64_t least = round_up(s->head_dim / spread, 8);
    return pack(s, rows < least ? least : rows, spread);
}

// Above 32 rows two batch tiles share the tile's weights, where that does not make tiles too large.
static struct ctxkv__decode_packing pack_half(const struct ctxkv__decode_shape *s) {
    return pack_wave(s, s->multiprocessors / 2, CLUSTER / 2);
}
static bool splits_batch(const struct ctxkv__decode_shape *s) {
    const int rows = pack_half(s).tile_rows;
    return rows <= 32 || (rows > 64 && rows < 96);
}
// Up to 16 rows, 16 tiles of 32 columns were faster than 24 of 22: an MMA of 32 takes hardly longer
// than one of 24, and more multiprocessors are free for the next launch.
static struct ctxkv__decode_packing pack_few(const struct ctxkv__decode_shape *s) {
    const struct ctxkv__decode_packing p = pack_wave(s, s->multiprocessors, CLUSTER);
    return p.tile_rows > 16 && p.tile_rows < 32 && s->head_dim == 64 ? pack(s, 32, 2) : p;
}

// One kernel for the whole chain: 16 tiles of 16 or 32 rows at most, all in one wave.
static bool fuses(const struct ctxkv__decode_shape *s) {
    return s->hidden_size == FUSED_HIDDEN && s->head_dim == 64 && s->num_heads <= FUSED_HEADS &&
           s->num_layers <= CTXKV_DECODE_LAYERS &&
           FUSED_TILES * s->num_layers <= s->multiprocessors && s->shared_memory >= FUSED_SHARED;
}

bool ctxkv__decode_fused_packing(
    const struct ctxkv__decode_shape *s, struct ctxkv__decode_packing *packing) {
    if (!fuses(s)) return false;
    const int rows = (int)(columns_of(s) / FUSED_TILES);
    *packing = (struct ctxkv__decode_packing){
        .tile_rows = rows,
        .tiles = FUSED_TILES,
        .k_tiles = FUSED_TILES / 2,
        .k_columns = rows,
        .layer_bytes = (size_t)columns_of(s) * (size_t)s->hidden_size * 2,
    };
    return true;
}

int ctxkv__decode_packings(
    const struct ctxkv__decode_shape *s,
    struct ctxkv__decode_packing packings[CTXKV__DECODE_PACKINGS]) {
    int count = 0;
    packings[count++] = pack_wave(s, s->multiprocessors, CLUSTER);
    const struct ctxkv__decode_packing few = pack_few(s), half = pack_half(s);
    if (!ctxkv__decode_same_packing(&packings[0], &few)) packings[count++] = few;
    if (splits_batch(s) && !ctxkv__decode_same_packing(&packings[0], &half))
        packings[count++] = half;
    return count;
}

bool ctxkv__decode_fused_cut(
    const struct ctxkv__decode_shape *s, int64_t rows, struct ctxkv__decode_cut *c) {
    if (!fuses(s) || rows < 1 || rows > (s->num_heads > 2 ? FUSED_LOCAL : FUSED_ROWS)) return false;
    struct ctxkv__decode_packing packing;
    if (!ctxkv__decode_fused_packing(s, &packing)) return false;
    const int tile = packing.tile_rows;
    *c = (struct ctxkv__decode_cut){
        .packing = packing,
        .batch_rows = 8,
        .batch_tiles = 1,
        .cluster_tiles = CTXKV_DECODE_FUSED_CLUSTER,
        .cluster_batches = 1,
        .chunks = chunks_of(s),
        .steps = tile <= 16 ? 32 : 16,
        .fused = true,
        .local = rows <= FUSED_LOCAL,
    };
    const size_t stage = (size_t)c->steps * 32 * (size_t)tile;
    const size_t fit =
        (FUSED_SHARED - SHARED_STATIC - CTXKV_DECODE_FUSED_MMA - CTXKV_DECODE_FUSED_X_BYTES) /
        stage;
    c->stages = fit < CTXKV_DECODE_MAX_STAGES ? (int)fit : CTXKV_DECODE_MAX_STAGES;
    c->w_first = FUSED_FIRST;
    c->shared_bytes =
        (unsigned)(CTXKV_DECODE_FUSED_X_BYTES + stage * (size_t)c->stages + CTXKV_DECODE_FUSED_MMA);
    return true;
}

// The longest stages of which the ring holds three, or all of K.
static bool fit_ring(const struct ctxkv__decode_shape *s, struct ctxkv__decode_cut *c) {
    const size_t most = s->shared_memory - SHARED_STATIC;
    for (int k = 0; k < KERNELS; k++) {
        if (kernels[k].columns < c->packing.tile_rows) continue;
        for (int i = 0; i < 2 && kernels[k].steps[i]; i++) {
            const int steps = kernels[k].steps[i];
            const size_t stage = (size_t)round_up(
                (int64_t)steps * 32 * (c->packing.tile_rows + c->batch_rows), 1024);
            const int all = (c->chunks + 2 * steps - 1) / (2 * steps);
            // An MMA reads 64 rows of x: up to 56 past the last line, past the stage's weights.
            const size_t weights = (size_t)steps * 32 * (size_t)c->packing.tile_rows;
            const size_t pad = CTXKV_DECODE_SHARED_PAD + (weights < 7168 ? 7168 - weights : 0);
            // A head in one tile is put together where the ring was.
            const bool alone = c->packing.k_columns == s->head_dim;
            const size_t room =
                alone ? 0 : (size_t)c->batch_rows * (size_t)c->packing.k_columns * 2;
            const int fit = (int)((most - pad - room) / stage);
            const int want = 8;
            if (fit < all && fit < (i == 0 && kernels[k].steps[1] ? 5 : WAVE_STAGES)) continue;
            c->columns = kernels[k].columns;
            c->steps = steps;
            c->stages = fit < want ? fit : want;
            if (c->stages > all) c->stages = all;
            const size_t first = FIRST_BYTES / weights;
            c->w_first = first < 1 ? 1 : first < (size_t)c->stages ? (int)first : c->stages;
            const size_t used = stage * (size_t)c->stages + pad;
            c->k_room = alone ? 0 : (int)used;
            c->shared_bytes = (unsigned)(used + room);
            return true;
        }
        if (k + 1 == KERNELS) break;
    }
    return false;
}

bool ctxkv__decode_cut(
    const struct ctxkv__decode_shape *s, int64_t rows, struct ctxkv__decode_cut *c) {
    if (!ctxkv__decode_takes(s) || rows < 1 || rows > CTXKV_DECODE_MAX_ROWS) return false;
    if (s->shared_memory < 64 * 1024) return false;
    const bool split = rows > SPLIT_ROWS && splits_batch(s);
    *c = (struct ctxkv__decode_cut){
        .packing = split              ? pack_half(s)
                   : rows <= FEW_ROWS ? pack_few(s)
                                      : pack_wave(s, s->multiprocessors, CLUSTER)};
    c->batch_tiles = split ? 2 : 1;
    c->batch_rows = (int)round_up((rows + c->batch_tiles - 1) / c->batch_tiles, 8);
    c->batch_tiles = (int)((rows + c->batch_rows - 1) / c->batch_rows);
    c->cluster_tiles = (int)s->head_dim / c->packing.k_columns;
    c->cluster_batches = c->batch_tiles;
    c->shares_x = c->cluster_tiles > 1 && rows > 32;
    c->chunks = chunks_of(s);
    return fit_ring(s, c);
}

size_t ctxkv__decode_x_bytes(
    const struct ctxkv__decode_shape *s, int64_t max_rows, int64_t x_layers) {
    // Two batch tiles of rounded-up rows hold at most 16 rows more than one of them.
    const int64_t rows =
        round_up(max_rows < CTXKV_DECODE_MAX_ROWS ? max_rows : CTXKV_DECODE_MAX_ROWS, 16);
    return (size_t)x_layers * (size_t)rows * (size_t)chunks_of(s) * 16;
}

size_t ctxkv__decode_room_bytes(const struct ctxkv__decode_shape *s, int64_t max_rows) {
    const int64_t rows = max_rows < CTXKV_DECODE_MAX_ROWS ? max_rows : CTXKV_DECODE_MAX_ROWS;
    size_t bytes = 0; // packed n of each cluster, with the rows of the kernel
    struct ctxkv__decode_cut c;
    for (int64_t r = 1; r <= rows; r++)
        if (ctxkv__decode_fused_cut(s, r, &c))
            bytes = (size_t)s->num_layers * 2 * (size_t)c.batch_rows * (size_t)s->hidden_size * 2;
    return bytes;
}
