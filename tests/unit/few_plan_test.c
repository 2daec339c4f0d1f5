// SPDX-License-Identifier: Apache-2.0
// The plan of a projection of few rows: tiles cover every row and column, rings fit, boxes are ones
// that a tensor map can have, packings are those the cuts use.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cuda/few_params.h"
#include "cuda/few_plan.h"

enum { H200_BLOCKS = 132, H200_SHARED = 232448, STATIC_SHARED = 1024, RESERVED = 1024 };

static struct ctxkv__few_shape shape_of(int64_t hidden, int64_t layers, int64_t columns) {
    return (struct ctxkv__few_shape){hidden, layers, columns, H200_BLOCKS, H200_SHARED};
}

static bool has_kernel(const struct ctxkv__few_cut *c) {
#define IS(n, s) || (c->columns == n && c->steps == s)
    return c->turned ? false CTXKV_FEW_TURNED_SHAPES(IS) : false CTXKV_FEW_SHAPES(IS);
#undef IS
}

static void check_ring(const struct ctxkv__few_cut *c) {
    assert_true(has_kernel(c));
    const int all = (c->chunks + 2 * c->steps - 1) / (2 * c->steps);
    // The multipliers tell of a slot two stages late.
    assert_true(c->stages >= 3 || c->stages == all);
    assert_true(c->stages <= all && c->stages <= CTXKV_FEW_MAX_STAGES);
    assert_in_range(c->w_first, 1, c->stages);
    const int64_t weights = (int64_t)c->steps * 32 * c->packing.tile_rows;
    const int64_t x = (int64_t)c->steps * 32 * c->batch_rows;
    const int64_t stage = (x + weights + 1023) / 1024 * 1024;
    assert_true(c->shared_bytes <= H200_SHARED - STATIC_SHARED - RESERVED);
    // What the last MMA reads: 64 rows of one operand, `columns` of the other; of weights, a whole
    // 2048 bytes from the first, as compute-sanitizer counts them.
    const int64_t last = (c->stages - 1) * stage;
    const int64_t last_w = last + x + (int64_t)(c->steps - 1) * 32 * c->packing.tile_rows;
    const int64_t last_x = last + (int64_t)(c->steps / 4 - 1) * 128 * c->batch_rows;
    const int w_rows = c->turned ? 64 : c->columns, x_rows = c->turned ? c->columns : 64;
    const int64_t w_end = last_w + (int64_t)c->packing.tile_rows * 16 + w_rows * 16;
    assert_true(w_end <= c->shared_bytes && last_w + 2048 <= c->shared_bytes);
    assert_true(last_x + (int64_t)x_rows * 128 <= c->shared_bytes);
    assert_true(c->columns >= (c->turned ? c->batch_rows : c->packing.tile_rows));
    assert_true(!c->turned || (c->packing.tile_rows <= 64 && c->columns == c->batch_rows));
}

static void check_cut(const struct ctxkv__few_shape *s, int64_t rows) {
    struct ctxkv__few_cut c;
    struct ctxkv__few_packing p[CTXKV__FEW_PACKINGS];
    memset(&c, 0xff, sizeof c);
    assert_true(ctxkv__few_cut(s, rows, &c));
    const int count = ctxkv__few_packings(s, p);
    assert_in_range(count, 1, CTXKV__FEW_PACKINGS);
    int found = 0;
    for (int i = 0; i < count; i++) found += !memcmp(&c.packing, &p[i], sizeof *p);
    assert_int_equal(found, 1);
    assert_true((int64_t)c.packing.tiles * c.packing.tile_rows >= s->columns);
    assert_true((int64_t)(c.packing.tiles - 1) * c.packing.tile_rows < s->columns);
    assert_int_equal(c.packing.tile_rows % 2, 0);
    assert_int_equal(
        c.packing.layer_bytes,
        (size_t)c.packing.tiles * (size_t)c.packing.tile_rows * (size_t)s->hidden_size * 2);
    assert_int_equal(c.batch_rows % 8, 0);
    assert_in_range(c.batch_rows, 8, CTXKV_FEW_MAX_ROWS);
    assert_true((int64_t)c.batch_tiles * c.batch_rows >= rows);
    assert_true((int64_t)(c.batch_tiles - 1) * c.batch_rows < rows);
    assert_int_equal(c.packing.tiles % c.cluster_tiles, 0);
    assert_int_equal(c.batch_tiles % c.cluster_batches, 0);
    assert_true(c.cluster_tiles * c.cluster_batches <= 8);
    assert_int_equal(c.chunks * 8, s->hidden_size);
    // The boxes of a cluster are a stage's lines.
    assert_int_equal(c.box_lines * c.cluster_tiles, c.steps / 4);
    check_ring(&c);
}

static void cuts(void **state) {
    (void)state;
    const int64_t hidden[] = {64, 128, 896, 1088, 2560, 4096, 8192, 16384};
    const int64_t layers[] = {1, 2, 5, 16, 40, 1000};
    const int64_t columns[] = {64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 5120, 40960};
    for (size_t d = 0; d < sizeof hidden / sizeof *hidden; d++)
        for (size_t l = 0; l < sizeof layers / sizeof *layers; l++)
            for (size_t n = 0; n < sizeof columns / sizeof *columns; n++)
                for (int64_t rows = 1; rows <= 64; rows++) {
                    const struct ctxkv__few_shape s = shape_of(hidden[d], layers[l], columns[n]);
                    check_cut(&s, rows);
                }
}

static void refusals(void **state) {
    (void)state;
    struct ctxkv__few_cut c;
    const struct ctxkv__few_shape good = shape_of(8192, 5, 256);
    struct ctxkv__few_shape s = good;
    assert_true(ctxkv__few_takes(&good));
    assert_false(ctxkv__few_cut(&good, 0, &c));
    assert_false(ctxkv__few_cut(&good, 65, &c));
    s.hidden_size = 8192 + 16; // a line would end in the next row
    assert_false(ctxkv__few_takes(&s) || ctxkv__few_cut(&s, 1, &c));
    s = good, s.shared_memory = 48 * 1024;
    assert_false(ctxkv__few_takes(&s) || ctxkv__few_cut(&s, 1, &c));
    s = good, s.num_layers = 65536; // a grid's z
    assert_false(ctxkv__few_takes(&s) || ctxkv__few_cut(&s, 1, &c));
}

// The shapes that were timed, and larger ones.
static void waves(void **state) {
    (void)state;
    static const struct {
        int64_t hidden, layers, columns;
        bool one;
    } cases[] = {{8192, 5, 128, true},  {8192, 5, 256, true},   {8192, 5, 512, true},
                 {8192, 5, 1024, true}, {8192, 5, 2048, true},  {4096, 5, 2048, true},
                 {4096, 5, 256, true},  {2560, 5, 2048, true},  {2048, 8, 1024, true},
                 {5120, 5, 2048, true}, {4096, 5, 4096, false}, {4096, 40, 2048, false},
                 {8192, 8, 2048, true}, {8192, 9, 2048, false}, {4096, 133, 128, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct ctxkv__few_shape s =
            shape_of(cases[i].hidden, cases[i].layers, cases[i].columns);
        assert_int_equal(ctxkv__few_one_wave(&s), cases[i].one);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts),
        cmocka_unit_test(refusals),
        cmocka_unit_test(waves),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
