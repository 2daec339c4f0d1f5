// SPDX-License-Identifier: Apache-2.0
// CRC-32, the generator, BF16 rounding and the division of heads, against values known by hand.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "crc32.h"
#include "ctxkv/ctxkv.h"
#include "draft.h"
#include "generator.h"

static void crc_of_known_texts(void **state) {
    (void)state;
    const char *text = "123456789";
    assert_int_equal(io_crc32(0, text, 9), 0xCBF43926u);
    assert_int_equal(io_crc32(0, text, 0), 0);
    for (size_t cut = 0; cut <= 9; ++cut) {
        uint32_t part = io_crc32(0, text, cut);
        assert_int_equal(io_crc32(part, text + cut, 9 - cut), 0xCBF43926u);
    }
    uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = (uint8_t)(i * 37 + 11);
    for (size_t from = 0; from < 16; ++from) {
        uint32_t slow = ~0u;
        for (size_t i = from; i < 64; ++i) {
            slow ^= bytes[i];
            for (int bit = 0; bit < 8; ++bit) slow = (slow >> 1) ^ (slow & 1 ? 0xEDB88320u : 0);
        }
        assert_int_equal(io_crc32(0, bytes + from, 64 - from), ~slow);
    }
}

// splitmix64 seeded with 0: its published first outputs.
static void mix_is_splitmix64(void **state) {
    (void)state;
    assert_true(io_mix(0, 0) == 0xE220A8397B1DCDAFu);
    assert_true(io_mix(0, 1) == 0x6E789E6AA1B965F4u);
    assert_true(io_mix(0, 2) == 0x06C45D188009454Fu);
}

static void values_are_in_range_and_exact(void **state) {
    (void)state;
    int small = 0;
    for (uint64_t i = 0; i < 10000; ++i) {
        uint64_t z = io_mix(5, i);
        double want = ((double)(z >> 40) / 8388608.0 - 1.0) / (double)(1 << (z & 7)) * 4.0;
        assert_true((double)io_value(5, i, 4.0f) == want);
        small += want < 0.01 && want > -0.01;
    }
    assert_true(small > 50 && small < 9000);
    assert_true(io_gain(5, 1, 0.0f) == 1.0f + io_value(5, 1, 0.5f));
    assert_true(io_gain(5, 1, 1.0f) == io_value(5, 1, 0.5f));
}

static void bf16_agrees_with_the_library(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 200000; ++i) {
        uint32_t bits = (uint32_t)io_mix(9, i);
        if (i % 3 == 0) bits = (bits & 0xFFFF0000u) | 0x8000u;
        if (i % 7 == 0) bits |= 0x7F800000u;
        float value;
        memcpy(&value, &bits, sizeof value);
        assert_int_equal(io_bf16(value), ctxkv_bf16(value));
    }
}

static void slots_are_distinct(void **state) {
    (void)state;
    int64_t slots[40];
    int seen[48] = {0};
    assert_true(io_fill_slots(slots, 40, 77, 48, 0));
    for (int i = 0; i < 40; ++i) {
        assert_in_range(slots[i], 0, 47);
        assert_int_equal(seen[slots[i]]++, 0);
        if (i) assert_true(io_mix(77, (uint64_t)slots[i - 1]) <= io_mix(77, (uint64_t)slots[i]));
    }
    assert_true(io_fill_slots(slots, 40, 77, 32, 1));
    for (int i = 0; i < 40; ++i) assert_true((slots[i] == -1) == (i % 5 == 0 || i >= 32));
}

static void heads_are_divided_as_in_vllm(void **state) {
    (void)state;
    io_error error;
    int64_t local, first;
    static const int64_t good[][5] = {// heads, ranks, rank, local, first
                                      {16, 1, 0, 16, 0}, {16, 4, 3, 4, 12}, {16, 16, 7, 1, 7},
                                      {2, 4, 1, 1, 0},   {2, 4, 2, 1, 1},   {8, 16, 15, 1, 7},
                                      {1, 8, 7, 1, 0}};
    for (size_t i = 0; i < sizeof good / sizeof *good; ++i) {
        const int64_t *c = good[i];
        assert_true(io_tensor_parallel(c[0], c[1], c[2], &local, &first, &error));
        assert_int_equal(local, c[3]);
        assert_int_equal(first, c[4]);
    }
    static const int64_t bad[][3] = {{3, 2, 0}, {8, 3, 0}, {2, 3, 0},
                                     {4, 2, 2}, {4, 0, 0}, {4, 2, -1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        assert_false(io_tensor_parallel(bad[i][0], bad[i][1], bad[i][2], &local, &first, &error));
    }
    io_tensor_parallel(8, 3, 0, &local, &first, &error);
    assert_non_null(strstr(error.text, "8"));
    assert_non_null(strstr(error.text, "3"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc_of_known_texts),
        cmocka_unit_test(mix_is_splitmix64),
        cmocka_unit_test(values_are_in_range_and_exact),
        cmocka_unit_test(bf16_agrees_with_the_library),
        cmocka_unit_test(slots_are_distinct),
        cmocka_unit_test(heads_are_divided_as_in_vllm)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
