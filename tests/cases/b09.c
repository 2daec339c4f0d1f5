// SPDX-License-Identifier: Apache-2.0
// B09: operands that break silent assumptions: odd addresses, strides, transposes, int32.
#include "cases.h"

#include <stdio.h>

#define ROWS 4

static uint16_t *noise; // [2*ROWS, HIDDEN]

// Norms of x with that hidden weight (or none) into a fresh [1, ROWS, HIDDEN]; NULL: refused.
static ctxkv_status norms(
    const struct place *place, const DLTensor *x, const DLTensor *weight, uint16_t *result) {
    ctxkv_norms_desc d;
    ctxkv_norms_desc_init(&d);
    d.num_layers = 1;
    d.hidden.eps = d.layer.eps = 1e-6f;
    d.hidden_weight = weight;
    ctxkv_norms *plan;
    ctxkv_status status = ctxkv_norms_create(place->device, &d, &plan);
    if (status) return status;
    struct buffer out = buffer_new(place, ROWS * HIDDEN * 2);
    void *image = poison_image(out.bytes);
    struct tensor t;
    status = ctxkv_norms_run(
        plan, x, tensor_on(&t, place, out.data, BF16, 3, DIMS(1, ROWS, HIDDEN), 0), 0);
    if (status)
        assert_true(buffer_is(place, &out, image));
    else
        buffer_get(place, &out, 0, result, out.bytes);
    ctxkv_norms_destroy(plan);
    buffer_free(place, &out);
    free(image);
    return status;
}

// The same bits as want, or refused with a message holding text.
static void same_or_named(
    const struct place *place, const DLTensor *x, const DLTensor *weight, const uint16_t *want,
    const char *text) {
    uint16_t *got = malloc(ROWS * HIDDEN * 2);
    ctxkv_status status = norms(place, x, weight, got);
    if (status)
        assert_refused(status, CTXKV_INVALID_ARGUMENT, text);
    else
        assert_memory_equal(got, want, ROWS * HIDDEN * 2);
    free(got);
}

static void addresses_and_strides(const struct place *place) {
    uint16_t *want = malloc(ROWS * HIDDEN * 2);
    struct buffer big = buffer_new(place, (size_t)2 * ROWS * HIDDEN * 2 + 2);
    struct tensor t;
    buffer_put(place, &big, 0, noise, ROWS * HIDDEN * 2);
    const DLTensor *x = tensor_on(&t, place, big.data, BF16, 2, DIMS(ROWS, HIDDEN), 0);
    assert_ok(norms(place, x, 0, want));

    // (a) x = buf[1:], by address and by byte_offset.
    buffer_put(place, &big, 2, noise, ROWS * HIDDEN * 2);
    x = tensor_on(&t, place, big.data + 2, BF16, 2, DIMS(ROWS, HIDDEN), 0);
    same_or_named(place, x, 0, want, "x lies at address");
    tensor_on(&t, place, big.data, BF16, 2, DIMS(ROWS, HIDDEN), 0);
    t.t.byte_offset = 2;
    same_or_named(place, &t.t, 0, want, "x lies at address");

    // (b) x = big[:, :8192].
    for (int r = 0; r < ROWS; r++)
        buffer_put(place, &big, (size_t)r * 4 * HIDDEN, noise + r * HIDDEN, HIDDEN * 2);
    x = tensor_on(&t, place, big.data, BF16, 2, DIMS(ROWS, HIDDEN), DIMS(2 * HIDDEN, 1));
    same_or_named(place, x, 0, want, "x has strides [16384, 1]");

    // (c) x transposed.
    x = tensor_on(&t, place, big.data, BF16, 2, DIMS(ROWS, HIDDEN), DIMS(1, ROWS));
    assert_refused(
        norms(place, x, 0, want), CTXKV_INVALID_ARGUMENT,
        "x has strides [1, 4], must have stride 1 in the last dimension");
    buffer_free(place, &big);
    free(want);
}

static void weight_at_four_bytes(const struct place *place) {
    uint16_t *want = malloc(ROWS * HIDDEN * 2);
    float *gains = malloc(HIDDEN * sizeof *gains);
    for (int i = 0; i < HIDDEN; i++) gains[i] = 1.0f + (float)(i % 97) / 128.0f;
    struct operand x;
    operand_new(&x, place, BF16, 2, DIMS(ROWS, HIDDEN), noise);
    struct buffer room = buffer_new(place, (HIDDEN + 1) * sizeof(float));
    struct tensor t;
    for (int shift = 0; shift < 2; shift++) {
        buffer_put(place, &room, (size_t)shift * 4, gains, HIDDEN * sizeof *gains);
        const DLTensor *weight =
            tensor_on(&t, place, room.data + 4 * shift, FP32, 1, DIMS(HIDDEN), 0);
        if (shift == 0)
            assert_ok(norms(place, &x.tensor.t, weight, want));
        else
            same_or_named(place, &x.tensor.t, weight, want, "hidden_weight lies at address");
    }
    operand_free(&x, place);
    buffer_free(place, &room);
    free(gains);
    free(want);
}

static void narrow_integers(const struct place *place) {
    uint16_t ones[ROWS * HEAD], turn[9 * HEAD];
    fill_same(ones, ROWS * HEAD, 0x3F80);
    fill_same(turn, 9 * HEAD, 0x3F80);
    struct operand k, v, table, wide, narrow, slots;
    struct caches c;
    operand_new(&k, place, BF16, 4, DIMS(1, ROWS, 1, HEAD), ones);
    operand_new(&v, place, BF16, 4, DIMS(1, ROWS, 1, HEAD), ones);
    operand_new(&table, place, BF16, 2, DIMS(9, HEAD), turn);
    operand_new(&narrow, place, I32, 1, DIMS(ROWS), (const int32_t[]){5, 6, 7, 8});
    operand_new(&wide, place, I64, 1, DIMS(ROWS), (const int64_t[]){5, 6, 7, 8});
    operand_new(&slots, place, I64, 1, DIMS(ROWS), (const int64_t[]){0, 1, 2, 3});
    caches_new(&c, place, 1, 1, 16, 1);
    ctxkv_store *store = muse_store(place, 1, 1, &table.tensor.t);
    assert_ok(ctxkv_store_bind_caches(store, c.keys, c.values, 1));
    const DLTensor *good = &slots.tensor.t, *bad = &narrow.tensor.t;
    assert_refused(
        ctxkv_store_run(store, &k.tensor.t, &v.tensor.t, &narrow.tensor.t, &good, 1, 0),
        CTXKV_INVALID_ARGUMENT, "positions has dtype int32 (lanes 1), must be int64");
    assert_refused(
        ctxkv_store_run(store, &k.tensor.t, &v.tensor.t, &wide.tensor.t, &bad, 1, 0),
        CTXKV_INVALID_ARGUMENT, "slots[0] has dtype int32 (lanes 1), must be int64");
    caches_check(&c, place);
    ctxkv_faults f;
    assert_ok(ctxkv_store_faults(store, &f));
    assert_int_equal(f.count, 0);
    assert_ok(ctxkv_store_run(store, &k.tensor.t, &v.tensor.t, &wide.tensor.t, &good, 1, 0));
    ctxkv_store_destroy(store);
    caches_free(&c, place);
    struct operand *all[] = {&k, &v, &table, &wide, &narrow, &slots};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) operand_free(all[i], place);
}

// (e) K with an odd row stride: the bits of a contiguous copy, or a refusal naming k.
static void odd_row_stride(const struct place *place) {
    enum { HEADS = 2, ROW = HEADS * HEAD, ODD = 2 * ROW + 1 };
    struct buffer room = buffer_new(place, ROWS * ODD * 2);
    struct operand k, v, slots;
    operand_new(&k, place, BF16, 4, DIMS(1, ROWS, HEADS, HEAD), noise);
    operand_new(&v, place, BF16, 4, DIMS(1, ROWS, HEADS, HEAD), noise + ROWS * ROW);
    const DLTensor *slot = operand_new(&slots, place, I64, 1, DIMS(ROWS), DIMS(3, 1, 0, 2));
    for (int r = 0; r < ROWS; r++)
        buffer_put(place, &room, (size_t)r * ODD * 2, noise + r * ROW, ROW * 2);
    struct caches c;
    caches_new(&c, place, 1, 1, 16, HEADS);
    ctxkv_store *store = muse_store(place, 1, HEADS, 0);
    assert_ok(ctxkv_store_bind_caches(store, c.keys, c.values, 1));
    assert_ok(ctxkv_store_run(store, &k.tensor.t, &v.tensor.t, 0, &slot, 1, 0));
    buffer_get(place, &c.storage[0], 0, c.image[0], c.storage[0].bytes);
    void *poison = poison_image(c.storage[0].bytes);
    buffer_put(place, &c.storage[0], 0, poison, c.storage[0].bytes);
    struct tensor t;
    const DLTensor *odd = tensor_on(
        &t, place, room.data, BF16, 4, DIMS(1, ROWS, HEADS, HEAD),
        DIMS((int64_t)ROWS * ODD, ODD, HEAD, 1));
    ctxkv_status status = ctxkv_store_run(store, odd, &v.tensor.t, 0, &slot, 1, 0);
    if (status) {
        assert_refused(status, CTXKV_INVALID_ARGUMENT, "k has strides");
        assert_true(buffer_is(place, &c.storage[0], poison));
    } else {
        caches_check(&c, place);
    }
    free(poison);
    ctxkv_store_destroy(store);
    caches_free(&c, place);
    operand_free(&k, place);
    operand_free(&v, place);
    operand_free(&slots, place);
    buffer_free(place, &room);
}

void b09(void **state) {
    (void)state;
    struct place place = place_open(0);
    noise = malloc((size_t)2 * ROWS * HIDDEN * 2);
    fill_bf16(noise, (size_t)2 * ROWS * HIDDEN, 9, 1.0f);
    addresses_and_strides(&place);
    weight_at_four_bytes(&place);
    narrow_integers(&place);
    odd_row_stride(&place);
    free(noise);
    place_close(&place);
}
