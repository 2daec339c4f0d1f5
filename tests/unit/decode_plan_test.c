// SPDX-License-Identifier: Apache-2.0
// The decode plan: tiles cover every row and column, rings fit, packings are those the cuts use.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "cuda/decode_params.h"
#include "cuda/decode_plan.h"

enum { H200_BLOCKS = 132, H200_SHARED = 232448, STATIC_SHARED = 4096 };

static struct ctxkv__decode_shape shape_of(
    int64_t hidden, int64_t layers, int64_t heads, int64_t head_dim) {
    return (struct ctxkv__decode_shape){hidden, layers, heads, head_dim, H200_BLOCKS, H200_SHARED};
}

static bool has_kernel(int columns, int steps) {
#define IS(n, s) || (columns == n && steps == s)
    return false CTXKV_DECODE_SHAPES(IS);
#undef IS
}

static void check_ring(const struct ctxkv__decode_cut *c, int64_t head_dim) {
    assert_true(has_kernel(c->columns, c->steps));
    const int all = (c->chunks + 2 * c->steps - 1) / (2 * c->steps);
    assert_true(c->stages >= 3 || c->stages == all);
    assert_true(c->stages <= all && c->stages <= CTXKV_DECODE_MAX_STAGES);
    assert_in_range(c->w_first, 1, c->stages);
    const int64_t weights = (int64_t)c->steps * 32 * c->packing.tile_rows;
    const int64_t used = weights + (int64_t)c->steps * 32 * c->batch_rows;
    const int64_t stage = (used + 1023) / 1024 * 1024;
    assert_true(c->shared_bytes <= H200_SHARED - STATIC_SHARED);
    // The MMA of the last line reads 64 rows, that of the last chunk `columns`.
    const int64_t past_x = (64 - c->batch_rows) * 128 - weights;
    const int64_t past_w = (c->columns - c->packing.tile_rows) * 16;
    const bool alone = c->packing.k_columns == head_dim;
    const int64_t end = alone ? (int64_t)c->shared_bytes : c->k_room;
    const int64_t room = end - (c->stages - 1) * stage - used;
    assert_true(room >= past_x && room >= past_w);
    // The outputs of K of a CTA's rows: behind all that, or where the ring was.
    const int64_t k = (int64_t)c->batch_rows * c->packing.k_columns * 2;
    assert_true(c->k_room % 16 == 0 && c->k_room + k <= c->shared_bytes);
    if (alone) assert_true(c->k_room == 0 && k <= c->stages * stage);
}

// The columns that the tiles hold: each of K and V once, in whole heads of K for a cluster.
static void check_columns(
    const struct ctxkv__decode_shape *s, const struct ctxkv__decode_packing *p) {
    static unsigned char seen[2][1 << 15];
    const int64_t half = s->num_heads * s->head_dim;
    assert_true(half <= 1 << 15);
    memset(seen, 0, sizeof seen);
    const int spread = (int)(s->head_dim / p->k_columns);
    assert_int_equal(spread * p->k_columns, s->head_dim);
    assert_int_equal(p->k_columns % 8, 0);
    assert_int_equal(p->k_tiles, s->num_heads * spread);
    assert_true(p->k_columns <= p->tile_rows && p->tile_rows <= 128);
    assert_int_equal(p->tiles % spread, 0);
    int64_t left = 2 * half;
    for (int tile = 0; tile < p->tiles; tile++)
        for (int i = 0; i < p->tile_rows; i++) {
            const bool is_k = tile < p->k_tiles && i < p->k_columns;
            const int k_before = (tile < p->k_tiles ? tile + 1 : p->k_tiles) * p->k_columns;
            const int64_t column =
                is_k ? tile * p->k_columns + i : tile * p->tile_rows + i - k_before;
            assert_true(column >= 0);
            if (column >= half) {
                assert_false(is_k);
                continue;
            }
            assert_int_equal(seen[!is_k][column]++, 0);
            if (is_k) assert_int_equal(tile / spread, column / s->head_dim);
            left--;
        }
    assert_int_equal(left, 0);
}

static bool is_packed(
    const struct ctxkv__decode_shape *s, const struct ctxkv__decode_packing *packing) {
    struct ctxkv__decode_packing p[CTXKV__DECODE_PACKINGS];
    const int count = ctxkv__decode_packings(s, p);
    assert_in_range(count, 1, CTXKV__DECODE_PACKINGS);
    for (int i = 0; i < count; i++)
        if (!memcmp(packing, &p[i], sizeof *p)) return true;
    return false;
}

static void check_cut(const struct ctxkv__decode_shape *s, int64_t rows) {
    struct ctxkv__decode_cut c;
    memset(&c, 0xff, sizeof c);
    assert_true(ctxkv__decode_cut(s, rows, &c));
    assert_true(is_packed(s, &c.packing));
    assert_false(c.fused);
    const int64_t columns = 2 * s->num_heads * s->head_dim;
    assert_true((int64_t)c.packing.tiles * c.packing.tile_rows >= columns);
    assert_int_equal(c.packing.tile_rows % 2, 0);
    assert_int_equal(c.cluster_tiles % (s->head_dim / c.packing.k_columns), 0);
    assert_true(c.columns >= c.packing.tile_rows);
    assert_int_equal(c.batch_rows % 8, 0);
    assert_true(c.batch_rows <= CTXKV_DECODE_MAX_ROWS);
    assert_true((int64_t)c.batch_tiles * c.batch_rows >= rows);
    assert_true((int64_t)(c.batch_tiles - 1) * c.batch_rows < rows);
    assert_int_equal(c.packing.tiles % c.cluster_tiles, 0);
    assert_int_equal(c.batch_tiles % c.cluster_batches, 0);
    assert_true(c.cluster_tiles * c.cluster_batches <= 8);
    assert_true(c.chunks % 8 == 0 && c.chunks * 8 >= s->hidden_size);
    assert_true(c.chunks * 8 < s->hidden_size + 64);
    const size_t x = (size_t)c.batch_tiles * (size_t)c.batch_rows * (size_t)c.chunks * 16;
    assert_true(ctxkv__decode_x_bytes(s, rows, 3) >= 3 * x);
    check_ring(&c, s->head_dim);
}

static void cuts(void **state) {
    (void)state;
    const int64_t hidden[] = {16, 64, 896, 912, 2560, 4096, 8192, 16384};
    const int64_t layers[] = {1, 5, 16, 40}, heads[] = {1, 2, 3, 4, 8, 16, 40};
    for (size_t d = 0; d < sizeof hidden / sizeof *hidden; d++)
        for (size_t l = 0; l < sizeof layers / sizeof *layers; l++)
            for (size_t h = 0; h < sizeof heads / sizeof *heads; h++)
                for (int64_t head_dim = 64; head_dim <= 512; head_dim *= 2)
                    for (int64_t rows = 1; rows <= 64; rows++) {
                        const struct ctxkv__decode_shape s =
                            shape_of(hidden[d], layers[l], heads[h], head_dim);
                        check_cut(&s, rows);
                        if (rows > 1) continue;
                        struct ctxkv__decode_packing p[CTXKV__DECODE_PACKINGS];
                        for (int i = ctxkv__decode_packings(&s, p); i--;) check_columns(&s, &p[i]);
                    }
}

static void one_wave(void **state) {
    (void)state;
    for (int64_t heads = 1; heads <= 16; heads *= 2)
        for (int64_t rows = 1; rows <= 64; rows++) {
            const struct ctxkv__decode_shape s = shape_of(8192, 5, heads, 64);
            struct ctxkv__decode_cut c;
            assert_true(ctxkv__decode_cut(&s, rows, &c));
            assert_true(5 * c.packing.tiles * c.batch_tiles <= H200_BLOCKS);
        }
}

static bool has_fused_kernel(const struct ctxkv__decode_cut *c) {
#define IS(r, l, s) || (c->batch_rows == r && c->local == l && c->steps == s)
    return false CTXKV_DECODE_FUSED_SHAPES(IS);
#undef IS
}

static void one_kernel(void **state) {
    (void)state;
    int found = 0;
    for (int64_t heads = 1; heads <= 8; heads++)
        for (int64_t layers = 1; layers <= 10; layers++)
            for (int64_t rows = 1; rows <= 64; rows++) {
                const struct ctxkv__decode_shape s = shape_of(8192, layers, heads, 64);
                struct ctxkv__decode_cut c;
                memset(&c, 0xff, sizeof c);
                if (!ctxkv__decode_fused_cut(&s, rows, &c)) continue;
                found++;
                struct ctxkv__decode_packing p;
                assert_true(c.fused && has_fused_kernel(&c));
                assert_true(ctxkv__decode_fused_packing(&s, &p));
                assert_memory_equal(&p, &c.packing, sizeof p);
                assert_int_equal(c.packing.tiles, 2 * CTXKV_DECODE_FUSED_CLUSTER);
                assert_int_equal(c.packing.tiles * c.packing.tile_rows, 2 * heads * 64);
                assert_true(c.packing.tiles * layers <= H200_BLOCKS);
                assert_true(heads * 64 <= CTXKV_DECODE_FUSED_COLUMNS);
                assert_true(rows <= c.batch_rows && rows <= (c.local ? 2 : 16));
                assert_true(c.packing.tile_rows <= 64);
                // Eight lanes for a head of a row, 256 threads.
                assert_true(c.batch_rows / CTXKV_DECODE_FUSED_CLUSTER * heads <= 32);
                const int64_t stage = (int64_t)c.steps * 32 * c.packing.tile_rows;
                assert_in_range(c.stages, 3, CTXKV_DECODE_MAX_STAGES);
                assert_in_range(c.w_first, 1, c.stages);
                // The MMA of the last step in the ring has all that it may read: 64 rows from its
                // first, of which tile_rows are its own.
                const int64_t ring = CTXKV_DECODE_FUSED_X_BYTES + stage * c.stages;
                assert_true(ring - 32 * c.packing.tile_rows + 2048 <= c.shared_bytes);
                assert_true(c.shared_bytes <= H200_SHARED - STATIC_SHARED);
                const size_t n = (size_t)layers * 2 * (size_t)c.batch_rows * 8192 * 2;
                assert_true(ctxkv__decode_room_bytes(&s, rows) >= n);
                assert_true(ctxkv__decode_room_bytes(&s, 64) >= n);
            }
    assert_true(found > 0);
    struct ctxkv__decode_cut c;
    struct ctxkv__decode_shape s = shape_of(8192, 9, 2, 64); // two waves
    assert_false(ctxkv__decode_fused_cut(&s, 1, &c));
    s = shape_of(4096, 5, 2, 64);
    assert_false(ctxkv__decode_fused_cut(&s, 1, &c));
    s = shape_of(8192, 5, 2, 64);
    assert_false(ctxkv__decode_fused_cut(&s, 0, &c));
    s.shared_memory = 160 * 1024;
    assert_false(ctxkv__decode_fused_cut(&s, 1, &c));
}

static void refusals(void **state) {
    (void)state;
    struct ctxkv__decode_cut c;
    struct ctxkv__decode_shape s = shape_of(8192, 5, 2, 64);
    assert_false(ctxkv__decode_cut(&s, 0, &c));
    assert_false(ctxkv__decode_cut(&s, 65, &c));
    s = shape_of(8192, 5, 2, 96);
    assert_false(ctxkv__decode_cut(&s, 8, &c));
    s = shape_of(8200, 5, 2, 64);
    assert_false(ctxkv__decode_cut(&s, 8, &c));
    s = shape_of(8192, 0, 2, 64);
    assert_false(ctxkv__decode_takes(&s));
    s = shape_of(8192, 5, INT64_MAX / 64, 64);
    assert_false(ctxkv__decode_takes(&s));
    s = shape_of(8192, 5, 2, 64);
    s.shared_memory = 49152;
    assert_false(ctxkv__decode_cut(&s, 8, &c));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts), cmocka_unit_test(one_wave), cmocka_unit_test(one_kernel),
        cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
