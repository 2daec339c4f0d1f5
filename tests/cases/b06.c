// SPDX-License-Identifier: Apache-2.0
// B06: a position past the cos/sin table is never read, and the row is skipped or refused.
#include "cases.h"

#define ROWS 2048
#define MINUS_ONE 0xBF80

struct scene {
    struct place place;
    struct caches c;
    struct operand k, v, positions, slots;
};

static void scene_new(struct scene *s) {
    uint16_t ones[2 * HEAD], numbered[2 * HEAD];
    fill_same(ones, 2 * HEAD, 0x3F80);
    fill_same(numbered, HEAD, 0x3F80);
    fill_same(numbered + HEAD, HEAD, 0x4000);
    caches_new(&s->c, &s->place, 1, 1, 16, 1);
    operand_new(&s->k, &s->place, BF16, 4, DIMS(1, 2, 1, HEAD), ones);
    operand_new(&s->v, &s->place, BF16, 4, DIMS(1, 2, 1, HEAD), numbered);
    operand_new(&s->positions, &s->place, I64, 1, DIMS(2), (const int64_t[]){2047, 2048});
    operand_new(&s->slots, &s->place, I64, 1, DIMS(2), (const int64_t[]){0, 1});
}

static void scene_free(struct scene *s) {
    operand_free(&s->k, &s->place);
    operand_free(&s->v, &s->place);
    operand_free(&s->positions, &s->place);
    operand_free(&s->slots, &s->place);
    caches_free(&s->c, &s->place);
}

static ctxkv_status run(struct scene *s, ctxkv_store *store) {
    const DLTensor *slots = &s->slots.tensor.t;
    return ctxkv_store_run(
        store, &s->k.tensor.t, &s->v.tensor.t, &s->positions.tensor.t, &slots, 1, 0);
}

// Row 2047 turns by a quarter: (1, 1) becomes (-1, 1).
static void expect_first(struct caches *c) {
    caches_expect(c, 0, 0, 0, 0x3F80, 0x3F80);
    for (int j = 0; j < HEAD; j += 2) c->image[0][j] = MINUS_ONE;
}

static void unchecked(struct scene *s, const DLTensor *table) {
    ctxkv_store *store = muse_store(&s->place, 1, 1, table);
    assert_ok(ctxkv_store_bind_caches(store, s->c.keys, s->c.values, 1));
    caches_poison(&s->c, &s->place);
    assert_ok(run(s, store));
    expect_first(&s->c);
    caches_check(&s->c, &s->place);
    ctxkv_faults f;
    assert_ok(ctxkv_store_faults(store, &f));
    assert_int_equal(f.count, 1);
    assert_int_equal(f.kind, CTXKV_FAULT_POSITION);
    assert_int_equal(f.layer, 0);
    assert_int_equal(f.row, 1);
    assert_int_equal(f.value, 2048);
    assert_int_equal(f.limit, 2048);
    ctxkv_store_destroy(store);
}

static void checked(struct scene *s, const DLTensor *table) {
    ctxkv_store_desc desc;
    ctxkv_store_desc_init(&desc);
    desc.num_layers = desc.num_kv_heads = 1;
    desc.k_eps = 1e-6f;
    desc.rope = CTXKV_ROPE_GPTJ;
    desc.cos_sin = table;
    desc.checked = 1;
    ctxkv_store *store;
    if (place_is_cuda(&s->place)) { // it would have to wait for the device
        assert_refused(
            ctxkv_store_create(s->place.device, &desc, &store), CTXKV_UNSUPPORTED, "checked is 1");
        return;
    }
    assert_ok(ctxkv_store_create(s->place.device, &desc, &store));
    assert_ok(ctxkv_store_bind_caches(store, s->c.keys, s->c.values, 1));
    caches_poison(&s->c, &s->place);
    assert_refused(
        run(s, store), CTXKV_INVALID_ARGUMENT,
        "positions of row 1 (layer 0) is 2048, must be in 0..2047");
    caches_check(&s->c, &s->place);
    buffer_put(&s->place, &s->positions.buffer, 8, (const int64_t[]){2047}, 8);
    assert_ok(run(s, store)); // the next valid call works
    caches_expect(&s->c, 0, 1, 0, 0x3F80, 0x4000);
    for (int j = 0; j < HEAD; j += 2) s->c.image[0][2 * HEAD + j] = MINUS_ONE;
    expect_first(&s->c);
    caches_check(&s->c, &s->place);
    ctxkv_store_destroy(store);
    buffer_put(&s->place, &s->positions.buffer, 8, (const int64_t[]){2048}, 8);
}

void b06(void **state) {
    (void)state;
    struct scene s = {.place = place_open(0)};
    scene_new(&s);
    uint16_t *rows = malloc((size_t)(ROWS + 64) * HEAD * 2);
    fill_same(rows, (size_t)(ROWS + 64) * HEAD, 0x7FC0);
    for (int p = 0; p < ROWS; p++) { // no turn, but for the last row
        fill_same(rows + p * HEAD, HEAD / 2, p == ROWS - 1 ? 0 : 0x3F80);
        fill_same(rows + p * HEAD + HEAD / 2, HEAD / 2, p == ROWS - 1 ? 0x3F80 : 0);
    }
    struct operand cut, end;
    operand_new(&cut, &s.place, BF16, 2, DIMS(ROWS + 64, HEAD), rows); // NaN rows follow
    cut.tensor.shape[0] = ROWS;
    operand_new(&end, &s.place, BF16, 2, DIMS(ROWS, HEAD), rows); // nothing follows
    unchecked(&s, &cut.tensor.t);
    unchecked(&s, &end.tensor.t);
    checked(&s, &end.tensor.t);
    free(rows);
    operand_free(&cut, &s.place);
    operand_free(&end, &s.place);
    scene_free(&s);
    place_close(&s.place);
}
