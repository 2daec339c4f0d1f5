// SPDX-License-Identifier: Apache-2.0
// B02: padding rows (negative slots, fewer slots than rows) never reach the cache.
#include "cases.h"

#define HEADS 2
#define ONE 0x3F80

static const uint16_t numbers[] = {0x3F80, 0x4000, 0x4040, 0x4080}; // 1, 2, 3, 4

// K all 1, V of row t all t + 1, as [1, rows, HEADS, 64].
static void rows_new(struct operand *k, struct operand *v, const struct place *place, int rows) {
    size_t row = HEADS * HEAD;
    uint16_t *values = malloc((size_t)rows * row * 2);
    fill_same(values, (size_t)rows * row, ONE);
    operand_new(k, place, BF16, 4, DIMS(1, rows, HEADS, HEAD), values);
    for (int t = 0; t < rows; t++) fill_same(values + (size_t)t * row, row, numbers[t]);
    operand_new(v, place, BF16, 4, DIMS(1, rows, HEADS, HEAD), values);
    free(values);
}

static void store_rows(
    const struct place *place, ctxkv_store *store, int rows, int slots, const int64_t *values) {
    struct operand k, v, s;
    rows_new(&k, &v, place, rows);
    const DLTensor *slot = operand_new(&s, place, I64, 1, DIMS(slots), values);
    assert_ok(ctxkv_store_run(store, &k.tensor.t, &v.tensor.t, 0, &slot, 1, 0));
    place_sync(place);
    operand_free(&k, place);
    operand_free(&v, place);
    operand_free(&s, place);
}

static void expect_row(struct caches *c, int64_t slot, uint16_t v) {
    for (int h = 0; h < HEADS; h++) caches_expect(c, 0, slot, h, ONE, v);
}

static void no_faults(ctxkv_store *store) {
    ctxkv_faults faults;
    assert_ok(ctxkv_store_faults(store, &faults));
    assert_int_equal(faults.count, 0);
}

void b02(void **state) {
    (void)state;
    struct place place = place_open(0);
    ctxkv_store *store = muse_store(&place, 1, HEADS, 0);
    struct caches c;
    caches_new(&c, &place, 1, 1, 16, HEADS);
    assert_ok(ctxkv_store_bind_caches(store, c.keys, c.values, 1));

    store_rows(&place, store, 3, 3, (const int64_t[]){3, -1, 7});
    expect_row(&c, 3, 0x3F80);
    expect_row(&c, 7, 0x4040);
    caches_check(&c, &place);
    no_faults(store);

    caches_poison(&c, &place);
    store_rows(&place, store, 3, 3, (const int64_t[]){3, -2, INT64_MIN});
    expect_row(&c, 3, 0x3F80);
    caches_check(&c, &place);
    no_faults(store);

    // Every negative number: all rows skipped.
    caches_poison(&c, &place);
    store_rows(&place, store, 4, 4, (const int64_t[]){-1, -16, -17, INT64_MIN + 1});
    caches_check(&c, &place);
    no_faults(store);

    // Two slots for four rows; the slots end where their memory ends.
    store_rows(&place, store, 4, 2, (const int64_t[]){5, 6});
    expect_row(&c, 5, 0x3F80);
    expect_row(&c, 6, 0x4000);
    caches_check(&c, &place);
    no_faults(store);

    ctxkv_store_destroy(store);
    caches_free(&c, &place);
    place_close(&place);
}
