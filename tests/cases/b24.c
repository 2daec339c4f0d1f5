// SPDX-License-Identifier: Apache-2.0
// B24: more ranks than KV heads: local head counts, one head a rank, shards as strided views.
#include "cases.h"

// Rank r of `ranks` over `heads` heads holds max(1, heads/ranks) heads from this one on.
static int64_t local_heads(int64_t heads, int64_t ranks) {
    return heads / ranks > 1 ? heads / ranks : 1;
}
static int64_t first_head(int64_t heads, int64_t ranks, int64_t rank) {
    return heads >= ranks ? rank * (heads / ranks) : rank / (ranks / heads);
}

// W: K rows of all heads, then V rows; row of head h all (h + 1) * 2^-13 in V, 2^-13 in K.
static void full_weights(struct operand *w, const struct place *place, int64_t heads) {
    size_t rows = (size_t)(2 * heads * HEAD);
    uint16_t *values = malloc(rows * HIDDEN * 2);
    for (size_t r = 0; r < rows; r++) {
        int64_t head = (int64_t)r / HEAD;
        float number = head < heads ? 1.0f : (float)(head - heads + 1);
        fill_same(values + r * HIDDEN, HIDDEN, bf16_of(number / 8192.0f));
    }
    operand_new(w, place, BF16, 2, DIMS((int64_t)rows, HIDDEN), values);
    free(values);
}

static void rank(
    const struct place *place, const struct operand *w, const DLTensor *x, int64_t heads,
    int64_t ranks, int64_t rank) {
    int64_t local = local_heads(heads, ranks), first = first_head(heads, ranks, rank);
    struct tensor halves[2];
    const DLTensor *weights[2];
    for (int part = 0; part < 2; part++)
        weights[part] = tensor_on(
            &halves[part], place, w->buffer.data + (part * heads + first) * HEAD * HIDDEN * 2, BF16,
            2, DIMS(local * HEAD, HIDDEN), 0);
    struct chain_descs d;
    chain_descs_init(&d, HIDDEN, 1, local, 1);
    d.norms.hidden.eps = d.norms.layer.eps = d.store.k_eps = 1e-6f;
    d.projection.weights = weights;
    d.projection.weight_count = 2;
    ctxkv_chain *chain;
    assert_ok(ctxkv_chain_create(place->device, &d.chain, &chain));
    struct caches c;
    caches_new(&c, place, 1, 2, 16, local);
    for (int64_t h = 0; h < local; h++)
        caches_expect(&c, 0, 17, h, 0x3F80, bf16_of((float)(first + h + 1)));
    struct operand slots;
    const DLTensor *slot = operand_new(&slots, place, I64, 1, DIMS(1), DIMS(17));
    assert_ok(ctxkv_chain_bind_caches(chain, c.keys, c.values, 1));
    assert_ok(ctxkv_chain_run(chain, x, 0, &slot, 1, 0));
    caches_check(&c, place);
    ctxkv_chain_destroy(chain);
    caches_free(&c, place);
    operand_free(&slots, place);
}

static void ranks(const struct place *place, const DLTensor *x, int64_t heads, int64_t count) {
    struct operand w;
    full_weights(&w, place, heads);
    for (int64_t r = 0; r < count; r++) rank(place, &w, x, heads, count, r);
    operand_free(&w, place);
}

void b24(void **state) {
    (void)state;
    struct place place = place_open(0);
    uint16_t ones[HIDDEN];
    fill_same(ones, HIDDEN, 0x3F80);
    struct operand x;
    operand_new(&x, &place, BF16, 2, DIMS(1, HIDDEN), ones);
    assert_int_equal(first_head(2, 4, 1), 0);
    assert_int_equal(first_head(2, 4, 2), 1);
    assert_int_equal(first_head(8, 16, 7), 3);
    ranks(&place, &x.tensor.t, 2, 4);
    ranks(&place, &x.tensor.t, 8, 16);
    ranks(&place, &x.tensor.t, 4, 2);

    // Half a head or none is refused with the number.
    ctxkv_projection_desc p;
    ctxkv_projection_desc_init(&p);
    p.num_layers = 1;
    ctxkv_projection *projection = 0;
    assert_refused(
        ctxkv_projection_create(place.device, &p, &projection), CTXKV_INVALID_ARGUMENT,
        "num_kv_heads is 0, must be in 1..");
    p.num_kv_heads = 1;
    p.head_dim = HEAD / 2;
    assert_refused(
        ctxkv_projection_create(place.device, &p, &projection), CTXKV_INVALID_ARGUMENT,
        "head_dim is 32, must be 64, 128, 256 or 512");
    operand_free(&x, &place);
    place_close(&place);
}
