// SPDX-License-Identifier: Apache-2.0
// The prefill plan: tiles cover every row and column, grids fit, gains are a permutation.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "cuda/prefill_plan.h"

static void check_choice(int64_t rows, int64_t layers, int64_t heads, ctxkv_prefill_input input) {
    ctxkv_prefill_choice c;
    memset(&c, 0xff, sizeof c);
    assert_true(ctxkv__prefill_choose(rows, 8192, layers, heads, 132, input, &c));
    assert_in_range(c.shape, 0, ctxkv__prefill_shape_count() - 1);
    const ctxkv_prefill_shape *s = ctxkv__prefill_shape_at(c.shape);
    const int64_t head_dim = ctxkv__prefill_head_dim(input), columns = 2 * heads * head_dim;
    assert_int_equal(columns % s->tile_columns, 0);
    assert_int_equal(s->tile_columns % head_dim, 0);
    assert_int_equal((int64_t)c.column_tiles * s->tile_columns, layers * columns);
    const int64_t cluster = (int64_t)s->tile_rows * s->cluster_rows;
    assert_true(c.row_tiles * cluster >= rows && (c.row_tiles - 1) * cluster < rows);
    assert_true(c.grid > 0 && c.grid <= 132 && c.grid % (unsigned)s->cluster_rows == 0);
    assert_true((int64_t)c.grid <= (int64_t)c.column_tiles * c.row_tiles * s->cluster_rows);
    assert_true(c.group > 0 && c.us > 0);
}

static void choices(void **state) {
    (void)state;
    const int64_t rows[] = {1, 65, 128, 257, 1000, 4096, 16384, 65537, 1 << 20};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int64_t heads = 1; heads <= 16; heads++)
            for (int64_t layers = 1; layers <= 32; layers += 31)
                for (int input = 0; input <= CTXKV_PREFILL_RMS128; input++)
                    check_choice(rows[i], layers, heads, (ctxkv_prefill_input)input);
}

static void refusals(void **state) {
    (void)state;
    ctxkv_prefill_choice c;
    assert_false(ctxkv__prefill_choose(0, 8192, 5, 2, 132, CTXKV_PREFILL_READY, &c));
    assert_false(ctxkv__prefill_choose(-1, 8192, 5, 2, 132, CTXKV_PREFILL_READY, &c));
    assert_false(ctxkv__prefill_choose(64, 0, 5, 2, 132, CTXKV_PREFILL_READY, &c));
    assert_false(ctxkv__prefill_choose(64, 8192, 0, 2, 132, CTXKV_PREFILL_READY, &c));
    assert_false(ctxkv__prefill_choose(64, 8192, 5, 0, 132, CTXKV_PREFILL_READY, &c));
    assert_false(ctxkv__prefill_choose(64, 8192, 5, 2, 1, CTXKV_PREFILL_READY, &c));
    assert_false(ctxkv__prefill_choose(INT64_MAX, 8192, 5, 2, 132, CTXKV_PREFILL_READY, &c));
    assert_false(ctxkv__prefill_choose(1ll << 32, 8192, 32, 64, 132, CTXKV_PREFILL_READY, &c));
}

static void shapes(void **state) {
    (void)state;
    for (int i = 0; i < ctxkv__prefill_shape_count(); i++) {
        const ctxkv_prefill_shape *s = ctxkv__prefill_shape_at(i);
        assert_true(s->threads <= 1024 && s->threads % 32 == 0);
        assert_true(s->shared <= 232448 - 1024);
        assert_int_equal(s->tile_columns / s->cluster_rows % s->weight_box, 0);
        assert_true(s->weight_box <= 64 && s->row_box <= 256);
    }
}

static void pays(void **state) {
    (void)state;
    const ctxkv_prefill_input muse = CTXKV_PREFILL_GAINED, qwen = CTXKV_PREFILL_RMS128;
    const ctxkv_prefill_other exact = CTXKV_PREFILL_OR_EXACT, cublas = CTXKV_PREFILL_OR_CUBLAS,
                              windows = CTXKV_PREFILL_OR_WINDOWS;
    static const struct {
        int64_t rows, columns, layers, heads;
        ctxkv_prefill_input input;
        ctxkv_prefill_other other;
        int pays;
    } cases[] = {
        {16384, 8192, 5, 2, muse, cublas, 1}, {4096, 8192, 5, 4, muse, cublas, 1},
        {65, 8192, 5, 2, muse, cublas, 0},    {1024, 8192, 5, 16, muse, cublas, 0},
        {0, 8192, 5, 2, muse, cublas, 0},     {65, 8192, 5, 2, muse, exact, 1},
        {1, 8192, 1, 16, muse, exact, 1},     {1024, 4096, 5, 8, qwen, cublas, 0},
        {2047, 4096, 5, 8, qwen, cublas, 0},  {2048, 4096, 5, 8, qwen, cublas, 1},
        {2304, 4096, 5, 8, qwen, cublas, 0},  {3072, 2560, 5, 8, qwen, cublas, 0},
        {4096, 2560, 5, 8, qwen, cublas, 1},  {5000, 4096, 5, 8, qwen, cublas, 0},
        {16384, 2560, 5, 8, qwen, cublas, 1}, {2048, 4096, 5, 4, qwen, cublas, 0},
        {4096, 4096, 5, 4, qwen, cublas, 1},  {4096, 4096, 5, 1, qwen, cublas, 0},
        {8192, 4096, 5, 1, qwen, cublas, 0},  {16384, 4096, 5, 1, qwen, cublas, 1},
        {65, 4096, 5, 1, qwen, windows, 1},   {3000, 4096, 5, 1, qwen, windows, 1},
        {1, 1024, 3, 2, qwen, exact, 1},      {INT64_MAX, 4096, 5, 8, qwen, exact, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(
            ctxkv__prefill_pays(
                cases[i].rows, cases[i].columns, cases[i].layers, cases[i].heads, cases[i].input,
                cases[i].other),
            cases[i].pays);
}

static void gains(void **state) {
    (void)state;
    float in[48], out[48];
    for (int i = 0; i < 48; i++) in[i] = (float)i;
    ctxkv__prefill_pack_gains(out, in, 48);
    for (int b = 0; b < 48; b += 16)
        for (int lane = 0; lane < 4; lane++) {
            const float *o = out + b + 4 * lane;
            assert_true(o[0] == b + 2 * lane && o[1] == b + 2 * lane + 1);
            assert_true(o[2] == b + 2 * lane + 8 && o[3] == b + 2 * lane + 9);
        }
    assert_int_equal(ctxkv__prefill_k_blocks(8192), 128);
    assert_int_equal(ctxkv__prefill_k_blocks(896), 16);
    assert_int_equal(ctxkv__prefill_k_blocks(16), 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(choices), cmocka_unit_test(refusals), cmocka_unit_test(shapes),
        cmocka_unit_test(pays),    cmocka_unit_test(gains),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
