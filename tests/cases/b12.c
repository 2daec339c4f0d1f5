// SPDX-License-Identifier: Apache-2.0
// B12: stacked per-layer weights: each layer uses its own row, and layer 8 its own cache and slot.
#include "cases.h"

#define LAYERS 9
#define COLUMNS (2 * HEAD)

static const uint16_t powers[LAYERS] = {0x3F80, 0x4000, 0x4080, 0x4100, 0x4180,
                                        0x4200, 0x4280, 0x4300, 0x4380};

static ctxkv_norms_desc norms_desc(const DLTensor *const *weights, int64_t count) {
    ctxkv_norms_desc d;
    ctxkv_norms_desc_init(&d);
    d.num_layers = LAYERS;
    d.hidden.eps = d.layer.eps = 1e-6f;
    d.layer_weights = weights;
    d.layer_weight_count = count;
    return d;
}

static void norms_only(
    const struct place *place, const DLTensor *const *weights, int64_t count, const DLTensor *x) {
    ctxkv_norms_desc d = norms_desc(weights, count);
    ctxkv_norms *norms;
    assert_ok(ctxkv_norms_create(place->device, &d, &norms));
    struct buffer out = buffer_new(place, LAYERS * HIDDEN * 2);
    uint16_t *image = poison_image(out.bytes);
    for (int l = 0; l < LAYERS; l++) fill_same(image + l * HIDDEN, HIDDEN, powers[l]);
    struct tensor t;
    assert_ok(ctxkv_norms_run(
        norms, x, tensor_on(&t, place, out.data, BF16, 3, DIMS(LAYERS, 1, HIDDEN), 0), 0));
    assert_true(buffer_is(place, &out, image));
    ctxkv_norms_destroy(norms);
    buffer_free(place, &out);
    free(image);
}

static void chain(const struct place *place, const DLTensor *weights, const DLTensor *x) {
    size_t count = (size_t)LAYERS * COLUMNS * HIDDEN;
    uint16_t *w = malloc(count * 2);
    fill_same(w, count, 0x3900); // 2^-13
    struct operand matrix, slots[LAYERS];
    const DLTensor *stacked =
        operand_new(&matrix, place, BF16, 3, DIMS(LAYERS, COLUMNS, HIDDEN), w);
    struct chain_descs d;
    chain_descs_init(&d, HIDDEN, LAYERS, 1, 1);
    d.norms = norms_desc(&weights, 1);
    d.projection.weights = &stacked;
    d.projection.weight_count = 1;
    d.store.k_eps = 1e-6f;
    ctxkv_chain *chain;
    assert_ok(ctxkv_chain_create(place->device, &d.chain, &chain));
    struct caches c;
    caches_new(&c, place, LAYERS, 2, 16, 1);
    const DLTensor *slot[LAYERS];
    for (int64_t l = 0; l < LAYERS; l++) {
        slot[l] = operand_new(&slots[l], place, I64, 1, DIMS(1), (const int64_t[]){3 * l + 2});
        caches_expect(&c, l, 3 * l + 2, 0, 0x3F80, powers[l]);
    }
    assert_ok(ctxkv_chain_bind_caches(chain, c.keys, c.values, LAYERS));
    assert_ok(ctxkv_chain_run(chain, x, 0, slot, LAYERS, 0));
    caches_check(&c, place);
    ctxkv_chain_destroy(chain);
    caches_free(&c, place);
    for (int l = 0; l < LAYERS; l++) operand_free(&slots[l], place);
    operand_free(&matrix, place);
    free(w);
}

void b12(void **state) {
    (void)state;
    struct place place = place_open(0);
    uint16_t *values = malloc(LAYERS * HIDDEN * 2), ones[HIDDEN];
    for (int l = 0; l < LAYERS; l++) fill_same(values + l * HIDDEN, HIDDEN, powers[l]);
    fill_same(ones, HIDDEN, 0x3F80);
    struct operand x, stacked, fewer, single[LAYERS];
    operand_new(&x, &place, BF16, 2, DIMS(1, HIDDEN), ones);
    const DLTensor *w = operand_new(&stacked, &place, BF16, 2, DIMS(LAYERS, HIDDEN), values),
                   *each[LAYERS];
    for (int l = 0; l < LAYERS; l++)
        each[l] = operand_new(&single[l], &place, BF16, 1, DIMS(HIDDEN), values + l * HIDDEN);
    norms_only(&place, &w, 1, &x.tensor.t);
    norms_only(&place, each, LAYERS, &x.tensor.t);
    chain(&place, w, &x.tensor.t);

    // (b) one row too few: both shapes in the message; a list too short: both counts.
    const DLTensor *bad = operand_new(&fewer, &place, BF16, 2, DIMS(LAYERS - 1, HIDDEN), values);
    ctxkv_norms *norms = 0;
    ctxkv_norms_desc d = norms_desc(&bad, 1);
    assert_refused(
        ctxkv_norms_create(place.device, &d, &norms), CTXKV_INVALID_ARGUMENT,
        "layer_weights has shape [8, 8192] (2 dimensions), must be [9, 8192]");
    assert_null(norms);
    d = norms_desc(each, LAYERS - 1);
    assert_refused(
        ctxkv_norms_create(place.device, &d, &norms), CTXKV_INVALID_ARGUMENT,
        "layer_weight_count is 8, must be 0, 1 or num_layers (9)");
    free(values);
    operand_free(&x, &place);
    operand_free(&stacked, &place);
    operand_free(&fewer, &place);
    for (int l = 0; l < LAYERS; l++) operand_free(&single[l], &place);
    place_close(&place);
}
