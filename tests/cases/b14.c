// SPDX-License-Identifier: Apache-2.0
// B14: a row's bits do not change with the number of rows, its place, or the layers beside it.
#include "cases.h"

#define ROWS 4096
#define LAYERS 2
#define HEADS 16

static const int64_t counts[] = {1, 255, 256, 257, ROWS};

static ctxkv_norms *plan_new(
    const struct place *place, int64_t layers, const DLTensor *weight, bool rms) {
    ctxkv_norms_desc d;
    ctxkv_norms_desc_init(&d);
    d.num_layers = layers;
    d.hidden.eps = d.layer.eps = 1e-6f;
    d.layer_weights = &weight;
    d.layer_weight_count = 1;
    d.hidden.kind = d.layer.kind = rms ? CTXKV_NORM_RMS : CTXKV_NORM_ROW;
    d.numerics = rms ? CTXKV_NUMERICS_INVARIANT : CTXKV_NUMERICS_STOCK;
    ctxkv_norms *norms;
    assert_ok(ctxkv_norms_create(place->device, &d, &norms));
    return norms;
}

// out [layers, rows, HIDDEN] of rows rows of x from row first on.
static void run(
    const struct place *place, ctxkv_norms *norms, const struct buffer *x, int64_t first,
    int64_t rows, int64_t layers, const struct buffer *out) {
    struct tensor from, to;
    assert_ok(ctxkv_norms_run(
        norms,
        tensor_on(&from, place, x->data + first * HIDDEN * 2, BF16, 2, DIMS(rows, HIDDEN), 0),
        tensor_on(&to, place, out->data, BF16, 3, DIMS(layers, rows, HIDDEN), 0), 0));
}

static void same_layer(
    const struct place *place, const uint16_t *want, const struct buffer *out, int64_t layer,
    int64_t rows) {
    size_t bytes = (size_t)rows * HIDDEN * 2;
    void *got = malloc(bytes);
    buffer_get(place, out, (size_t)layer * bytes, got, bytes);
    assert_memory_equal(got, want, bytes);
    free(got);
}

static void norms(const struct place *place, const uint16_t *values, bool rms) {
    size_t bytes = (size_t)ROWS * HIDDEN * 2;
    uint16_t *weights = malloc(LAYERS * HIDDEN * 2), *all = malloc(LAYERS * bytes);
    fill_bf16(weights, LAYERS * HIDDEN, 15, 0.5f);
    struct operand w, one;
    struct buffer x = buffer_tail(place, bytes), out = buffer_tail(place, LAYERS * bytes);
    buffer_put(place, &x, 0, values, bytes);
    operand_new(&w, place, BF16, 2, DIMS(LAYERS, HIDDEN), weights);
    ctxkv_norms *plan = plan_new(place, LAYERS, &w.tensor.t, rms);
    run(place, plan, &x, 0, ROWS, LAYERS, &out);
    buffer_get(place, &out, 0, all, LAYERS * bytes);
    for (size_t i = 0; i < 4; i++) {
        for (int again = 0; again < 2; again++) run(place, plan, &x, 0, counts[i], LAYERS, &out);
        for (int64_t l = 0; l < LAYERS; l++)
            same_layer(place, all + l * ROWS * HIDDEN, &out, l, counts[i]);
    }
    // Row 0 in the last place of 257 rows.
    buffer_put(place, &x, (size_t)256 * HIDDEN * 2, values, HIDDEN * 2);
    run(place, plan, &x, 0, 257, LAYERS, &out);
    for (int64_t l = 0; l < LAYERS; l++) {
        struct buffer last = {.data = out.data + (l * 257 + 256) * HIDDEN * 2};
        same_layer(place, all + l * ROWS * HIDDEN, &last, 0, 1);
    }
    // Layer 1 in a plan of its own.
    ctxkv_norms_destroy(plan);
    operand_new(&one, place, BF16, 2, DIMS(1, HIDDEN), weights + HIDDEN);
    plan = plan_new(place, 1, &one.tensor.t, rms);
    run(place, plan, &x, 0, 255, 1, &out);
    same_layer(place, all + ROWS * HIDDEN, &out, 0, 255);
    ctxkv_norms_destroy(plan);
    buffer_free(place, &x);
    buffer_free(place, &out);
    operand_free(&w, place);
    operand_free(&one, place);
    free(weights);
    free(all);
}

static void store(const struct place *place, const uint16_t *values) {
    struct operand kv, slots;
    struct caches c;
    int64_t *slot = malloc(ROWS * sizeof *slot);
    for (int64_t t = 0; t < ROWS; t++) slot[t] = (t * 1031) % ROWS;
    operand_new(&kv, place, BF16, 4, DIMS(ROWS, 2, HEADS, HEAD), values);
    operand_new(&slots, place, I64, 1, DIMS(ROWS), slot);
    caches_new(&c, place, 1, ROWS / 16, 16, HEADS);
    ctxkv_store *plan = muse_store(place, 1, HEADS, 0);
    assert_ok(ctxkv_store_bind_caches(plan, c.keys, c.values, 1));
    size_t bytes = c.storage[0].bytes, row = 2 * HEAD * 2;
    char *whole = malloc(bytes), *part = poison_image(bytes);
    for (int i = 4; i >= 0; i--) {
        int64_t rows = counts[i], stride = 2 * HEADS * HEAD;
        struct tensor k, v, s;
        const DLTensor *some = tensor_on(&s, place, slots.buffer.data, I64, 1, DIMS(rows), 0);
        const int64_t shape[] = {1, rows, HEADS, HEAD}, strides[] = {stride, stride, HEAD, 1};
        buffer_put(place, &c.storage[0], 0, c.image[0], bytes);
        assert_ok(ctxkv_store_run(
            plan, tensor_on(&k, place, kv.buffer.data, BF16, 4, shape, strides),
            tensor_on(&v, place, kv.buffer.data + HEADS * HEAD * 2, BF16, 4, shape, strides), 0,
            &some, 1, 0));
        if (rows == ROWS) {
            buffer_get(place, &c.storage[0], 0, whole, bytes);
            continue;
        }
        memset(part, POISON, bytes);
        for (int64_t t = 0; t < rows; t++)
            for (int h = 0; h < HEADS; h++) {
                size_t at = (size_t)((slot[t] / 16 * HEADS + h) * 16 + slot[t] % 16) * row;
                memcpy(part + at, whole + at, row);
            }
        assert_true(buffer_is(place, &c.storage[0], part));
    }
    free(whole);
    free(part);
    free(slot);
    ctxkv_store_destroy(plan);
    caches_free(&c, place);
    operand_free(&kv, place);
    operand_free(&slots, place);
}

void b14(void **state) {
    (void)state;
    struct place place = place_open(0);
    uint16_t *values = malloc((size_t)ROWS * HIDDEN * 2);
    fill_bf16(values, (size_t)ROWS * HIDDEN, 14, 2.0f);
    norms(&place, values, false);
    norms(&place, values, true);
    store(&place, values);
    free(values);
    place_close(&place);
}
