// SPDX-License-Identifier: Apache-2.0
// B18, the part that needs no capture: runs allocate nothing that stays, and a plan lives on after
// the caller has freed what create copied.
#include "cases.h"

#include <malloc.h>

#define ROWS 50
#define SMALL 64
#define COLUMNS (2 * HEAD)

static ctxkv_chain *chain_new(
    const struct place *place, const DLTensor *w, const DLTensor *hidden, const DLTensor *bias,
    const DLTensor *k_weight) {
    struct chain_descs d;
    chain_descs_init(&d, SMALL, 1, 1, ROWS);
    d.norms.hidden.kind = CTXKV_NORM_RMS;
    d.norms.hidden_weight = hidden;
    d.norms.layer.kind = CTXKV_NORM_ABSENT;
    d.projection.weights = &w;
    d.projection.weight_count = 1;
    d.projection.bias = bias;
    d.projection.max_rows = ROWS;
    d.store.k_norm = CTXKV_K_NORM_RMS;
    d.store.k_norm_weight = k_weight;
    ctxkv_chain *chain;
    assert_ok(ctxkv_chain_create(place->device, &d.chain, &chain));
    return chain;
}

static size_t heap_in_use(void) {
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

void b18(void **state) {
    (void)state;
    struct place place = place_open(0);
    uint16_t noise[ROWS * SMALL];
    int64_t slot[ROWS];
    struct operand x, w, hidden, bias, k_weight, slots;
    for (int t = 0; t < ROWS; t++) slot[t] = t;
    uint16_t *weights = malloc(COLUMNS * SMALL * 2);
    fill_bf16(noise, ROWS * SMALL, 18, 1.0f);
    fill_bf16(weights, COLUMNS * SMALL, 19, 1.0f);
    operand_new(&x, &place, BF16, 2, DIMS(ROWS, SMALL), noise);
    operand_new(&w, &place, BF16, 2, DIMS(COLUMNS, SMALL), weights);
    operand_new(&hidden, &place, BF16, 1, DIMS(SMALL), weights);
    operand_new(&bias, &place, BF16, 2, DIMS(1, COLUMNS), weights + SMALL);
    operand_new(&k_weight, &place, BF16, 2, DIMS(1, HEAD), weights + 2 * SMALL);
    operand_new(&slots, &place, I64, 1, DIMS(ROWS), slot);
    struct caches c;
    caches_new(&c, &place, 1, 4, 16, 1);
    ctxkv_chain *chain =
        chain_new(&place, &w.tensor.t, &hidden.tensor.t, &bias.tensor.t, &k_weight.tensor.t);
    assert_ok(ctxkv_chain_bind_caches(chain, c.keys, c.values, 1));
    memset(c.k, 0xFF, sizeof c.k); // the views are copied
    memset(c.v, 0xFF, sizeof c.v);
    // The first run of this process has 17 rows; its bits are what all later ones give.
    struct tensor xt, st;
    const DLTensor *some = tensor_on(&st, &place, slots.buffer.data, I64, 1, DIMS(17), 0);
    assert_ok(ctxkv_chain_run(
        chain, tensor_on(&xt, &place, x.buffer.data, BF16, 2, DIMS(17, SMALL), 0), 0, &some, 1, 0));
    buffer_get(&place, &c.storage[0], 0, c.image[0], c.storage[0].bytes);
    operand_free(&hidden, &place); // unmapped: a late read would be fatal
    operand_free(&bias, &place);
    operand_free(&k_weight, &place);
    size_t before = heap_in_use(), plan = ctxkv_chain_memory(chain);
    for (int again = 0; again < 100; again++)
        assert_ok(ctxkv_chain_run(chain, &xt.t, 0, &some, 1, 0));
    caches_check(&c, &place);
    for (int64_t rows = 1; rows <= ROWS; rows++) {
        some = tensor_on(&st, &place, slots.buffer.data, I64, 1, DIMS(rows), 0);
        tensor_on(&xt, &place, x.buffer.data, BF16, 2, DIMS(rows, SMALL), 0);
        assert_ok(ctxkv_chain_run(chain, &xt.t, 0, &some, 1, 0));
    }
    place_sync(&place);
    if (!place_is_cuda(&place)) assert_int_equal(heap_in_use(), before);
    assert_int_equal(ctxkv_chain_memory(chain), plan);
    uint16_t *after = malloc(c.storage[0].bytes);
    buffer_get(&place, &c.storage[0], 0, after, c.storage[0].bytes);
    assert_memory_equal(after, c.image[0], 16 * 2 * HEAD * 2); // rows 0..15 as in the first run
    free(after);
    free(weights);
    ctxkv_chain_destroy(chain);
    caches_free(&c, &place);
    operand_free(&x, &place);
    operand_free(&w, &place);
    operand_free(&slots, &place);
    place_close(&place);
}
