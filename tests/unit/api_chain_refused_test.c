// SPDX-License-Identifier: Apache-2.0
// ctxkv_chain: every refusal, and that nothing is written then.
#include "chain_scene.h"

static const ctxkv_status bad = CTXKV_INVALID_ARGUMENT;

static bool untouched(const struct scene *s) {
    for (int i = 0; i < L * STORAGE; i++)
        if (s->storage[i] != 0x5A5A) return false;
    return true;
}

static void refused_parts(void **state) {
    (void)state;
    struct scene s;
    scene_new(&s, 1, MOST);
    ctxkv_chain *chain;
#define REFUSE(change, status, text)                                                               \
    do {                                                                                           \
        struct scene good = s;                                                                     \
        change;                                                                                    \
        chain = (ctxkv_chain *)&chain;                                                             \
        assert_refused(ctxkv_chain_create(s.place.device, &s.d.chain, &chain), status, text);      \
        assert_null(chain);                                                                        \
        s = good;                                                                                  \
    } while (0)
    REFUSE(s.d.chain.size = 1, bad, "desc->size is 1, must be at least");
    REFUSE(s.d.chain.norms = 0, bad, "desc->norms is NULL");
    REFUSE(s.d.chain.projection = 0, bad, "desc->projection is NULL");
    REFUSE(s.d.chain.store = 0, bad, "desc->store is NULL");
    REFUSE(s.d.chain.max_rows = 0, bad, "max_rows is 0, must be in 1..");
    REFUSE(s.d.chain.max_rows = INT64_MAX, bad, "max_rows is 9223372036854775807, must be in 1..");
    REFUSE(s.d.chain.max_rows = INT64_MAX / 4096, bad, "max_rows is 2251799813685247, too large");
    REFUSE(s.d.norms.hidden_size = 68, bad, "hidden_size is 68, must be a multiple of 8");
    REFUSE(s.d.projection.head_dim = 63, bad, "head_dim is 63");
    REFUSE(s.d.store.rotary_dim = 3, bad, "rotary_dim is 3");
    REFUSE(
        (s.d.norms.num_layers = 2, s.layer.shape[0] = 2), bad,
        "projection.num_layers is 3, must equal norms.num_layers (2)");
    REFUSE(
        (s.d.store.num_layers = 2, s.k_gain.shape[0] = 2), bad,
        "store.num_layers is 2, must equal norms.num_layers (3)");
    REFUSE(
        s.d.store.num_kv_heads = 1, bad,
        "store.num_kv_heads is 1, must equal projection.num_kv_heads (2)");
    REFUSE(
        (s.d.store.head_dim = 128, s.d.store.rotary_dim = 64, s.k_gain.shape[1] = 128,
         s.k_gain.shape[0] = L),
        bad, "store.head_dim is 128, must equal projection.head_dim (64)");
    assert_refused(ctxkv_chain_create(0, &s.d.chain, &chain), bad, "device is NULL");
    assert_refused(ctxkv_chain_create(s.place.device, 0, &chain), bad, "desc is NULL");
    assert_refused(ctxkv_chain_create(s.place.device, &s.d.chain, 0), bad, "chain is NULL");
    scene_free(&s);
}

static void refused_runs(void **state) {
    (void)state;
    struct scene s;
    scene_new(&s, 1, 8);
    ctxkv_chain *chain;
    assert_ok(ctxkv_chain_create(s.place.device, &s.d.chain, &chain));
    assert_refused(run(&s, chain, 0, 4), CTXKV_NOT_BOUND, "ctxkv_chain_bind_caches first");
    assert_ok(ctxkv_chain_bind_caches(chain, s.key_list, s.value_list, L));
    assert_refused(run(&s, chain, 0, 9), bad, "rows is 9, must be in 0..8");
    operands(&s, 0, 4);
#define RUN(x, p, slots, count) ctxkv_chain_run(chain, x, p, slots, count, 0)
    assert_refused(RUN(0, &s.positions.t, s.slot_list, L), bad, "x is NULL");
    assert_refused(RUN(&s.x.t, 0, s.slot_list, L), bad, "positions is NULL");
    assert_refused(RUN(&s.x.t, &s.positions.t, 0, L), bad, "slots is NULL");
    assert_refused(RUN(&s.x.t, &s.positions.t, s.slot_list, 2), bad, "slot_count is 2, must be 1");
    s.x.shape[1] = D - 1;
    assert_refused(RUN(&s.x.t, &s.positions.t, s.slot_list, L), bad, "x has shape [4, 63]");
    s.x.shape[1] = D;
    s.slots[2].shape[0] = 5;
    assert_refused(RUN(&s.x.t, &s.positions.t, s.slot_list, L), bad, "slots[2] has 5 rows");
    assert_refused(ctxkv_chain_faults(chain, 0), bad, "faults is NULL");
    assert_refused(
        ctxkv_chain_bind_caches(chain, s.key_list, s.value_list, 1), bad, "count is 1, must be");
    assert_true(untouched(&s));
    assert_ok(run(&s, chain, 0, 4));
    assert_false(untouched(&s));
    ctxkv_chain_destroy(chain);
    scene_free(&s);
}

static void refused_raw_calls(void **state) {
    (void)state;
    struct scene s;
    scene_new(&s, 1, 8);
    ctxkv_chain *chain = chain_new(&s);
    int64_t lengths[L] = {4, 4, 4};
    const int64_t *slots[L] = {slot_values[0], slot_values[1], slot_values[2]};
    ctxkv_chain_call good, c;
    ctxkv_chain_call_init(&good);
    assert_int_equal(good.size, sizeof good);
    good.x = x_values;
    good.x_row_stride = D;
    good.rows = 4;
    good.positions = position_values;
    good.slots = slots;
    good.slot_rows = lengths;
    good.slot_count = L;
#define CALL_REFUSED(change, text)                                                                 \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        assert_refused(ctxkv_chain_run_call(chain, &c), bad, text);                                \
        assert_true(untouched(&s));                                                                \
    } while (0)
    CALL_REFUSED(c.size = 4, "call->size is 4, must be at least");
    CALL_REFUSED(c.x = 0, "x is NULL");
    CALL_REFUSED(c.rows = -1, "rows is -1, must be in 0..8");
    CALL_REFUSED(c.rows = 9, "rows is 9, must be in 0..8");
    CALL_REFUSED(c.positions = 0, "positions is NULL");
    CALL_REFUSED(
        c.positions = (const int64_t *)(const void *)((const char *)position_values + 4),
        "positions lies at address");
    CALL_REFUSED(c.slots = 0, "slots is NULL");
    CALL_REFUSED(c.slot_rows = 0, "slot_rows is NULL");
    CALL_REFUSED(c.slot_count = 0, "slot_count is 0, must be 1 or the number of layers (3)");
    CALL_REFUSED(c.slot_count = -7, "slot_count is -7, must be 1");
    CALL_REFUSED(
        c.workspace = (char *)s.storage + 8 - (uintptr_t)s.storage % 8,
        "workspace lies at address");
    CALL_REFUSED(c.rows = 3, "slots[0] has 4 rows, must have 0..3 (T)");
    lengths[1] = -1;
    CALL_REFUSED(c = good, "slots[1] has -1 rows, must have 0..4 (T)");
    lengths[1] = 4;
    assert_refused(ctxkv_chain_run_call(chain, 0), bad, "call is NULL");
    c = good;
    c.rows = 0;
    c.x = 0;
    memset(lengths, 0, sizeof lengths);
    assert_ok(ctxkv_chain_run_call(chain, &c));
    assert_true(untouched(&s));
    assert_true(ctxkv_chain_workspace_size(chain) >= 8 * (L * D + L * C) * 2);
    assert_true(ctxkv_chain_memory(chain) >= ctxkv_chain_workspace_size(chain));
    ctxkv_chain_destroy(chain);
    scene_free(&s);
}

int main(void) {
    fill_inputs();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_parts),
        cmocka_unit_test(refused_runs),
        cmocka_unit_test(refused_raw_calls),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
