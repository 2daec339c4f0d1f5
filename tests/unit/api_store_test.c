// SPDX-License-Identifier: Apache-2.0
// ctxkv_store: every refusal, and what is told about skipped rows.
#include <math.h>

#include "plan_checks.h"

#define L 3
#define H 2
#define N 64
#define T 4
#define BLOCKS 2
#define PAGE 4
#define STORAGE (BLOCKS * H * PAGE * 2 * N)

static uint16_t kv[2 * L * T * H * N], table[16 * N], k_weights[L * N], storage[L][STORAGE];
static int64_t positions[T] = {0, 1, 2, 3}, slots[L][T];
static struct tensor k, v, p, s[L], cos_sin, k_weight, keys[L], values[L];
static const DLTensor *slot_list[L], *key_list[L], *value_list[L];

static void reset(void) {
    tensor_on(&k, &place, kv, BF16, 4, DIMS(L, T, H, N), 0);
    tensor_on(&v, &place, kv + L * T * H * N, BF16, 4, DIMS(L, T, H, N), 0);
    tensor_on(&p, &place, positions, I64, 1, DIMS(T), 0);
    tensor_on(&cos_sin, &place, table, BF16, 2, DIMS(16, N), 0);
    tensor_on(&k_weight, &place, k_weights, BF16, 2, DIMS(L, N), 0);
    memset(storage, POISON, sizeof storage);
    for (int l = 0; l < L; l++) {
        for (int t = 0; t < T; t++) positions[t] = t, slots[l][t] = 2 * t;
        slot_list[l] = tensor_on(&s[l], &place, slots[l], I64, 1, DIMS(T), 0);
        key_list[l] =
            cache_half(&keys[l], &place, storage[l], 0, BLOCKS, PAGE, H, N, H * PAGE * 2 * N);
        value_list[l] =
            cache_half(&values[l], &place, storage[l], 1, BLOCKS, PAGE, H, N, H * PAGE * 2 * N);
    }
}

static int set_up(void **state) {
    (void)state;
    place = place_open(3);
    fill_bf16(kv, 2 * L * T * H * N, 8, 1.0f);
    fill_bf16(table, 16 * N, 9, 1.0f);
    fill_bf16(k_weights, L * N, 10, 1.0f);
    reset();
    return 0;
}

static ctxkv_store_desc good(void) {
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = L;
    d.num_kv_heads = H;
    d.rope = CTXKV_ROPE_GPTJ;
    d.cos_sin = &cos_sin.t;
    return d;
}

CREATE_OF(store)
#define REFUSE(assignment, status, text) REFUSE_OF(store, assignment, status, text)

static void descriptor(void **state) {
    (void)state;
    REFUSE(d.size = 8, bad, "desc->size is 8, must be at least");
    REFUSE(d.num_layers = 0, bad, "num_layers is 0, must be in 1..65535");
    REFUSE(d.num_kv_heads = -3, bad, "num_kv_heads is -3, must be in 1..65535");
    REFUSE(d.head_dim = 65, bad, "head_dim is 65, must be 64, 128, 256 or 512");
    REFUSE(d.head_dim = 128, CTXKV_UNSUPPORTED, "head_dim is 128, must be 64 for k_norm PLAIN");
    REFUSE(d.k_norm = (ctxkv_k_norm)3, bad, "k_norm is 3, must be in 0..2");
    REFUSE(d.k_norm_weight = &k_weight.t, bad, "k_norm_weight is given, must be NULL unless");
    REFUSE(d.k_eps = -1.0f, bad, "k_eps is -1, must be finite and >= 0");
    REFUSE(d.k_eps = NAN, bad, "k_eps is ");
    REFUSE(d.rope = (ctxkv_rope)3, bad, "rope is 3, must be in 0..2");
    REFUSE(d.rope = CTXKV_ROPE_NONE, bad, "cos_sin is given, must be NULL when rope is NONE");
    REFUSE(d.cos_sin = 0, bad, "cos_sin is NULL, must be a tensor");
    REFUSE(d.rotary_dim = 66, bad, "rotary_dim is 66, must be even and in 2..head_dim (64)");
    REFUSE(d.rotary_dim = 31, bad, "rotary_dim is 31, must be even");
    REFUSE(d.rotary_dim = -2, bad, "rotary_dim is -2, must be even");
    REFUSE(d.rotary_dim = 32, bad, "cos_sin has shape [16, 64] (2 dimensions), must be [*, 32]");
    struct tensor t;
    tensor_on(&t, &place, table, BF16, 2, DIMS(8, N), DIMS(2 * N, 1));
    REFUSE(d.cos_sin = &t.t, bad, "cos_sin has row stride 128, must be contiguous (64)");
    tensor_on(&t, &place, table, I32, 2, DIMS(8, N), 0);
    REFUSE(
        d.cos_sin = &t.t, bad, "cos_sin has dtype int32 (lanes 1), must be BF16 or FP16 or FP32");
    tensor_on(&t, &place, k_weights, BF16, 2, DIMS(L - 1, N), 0);
    REFUSE(
        (d.k_norm = CTXKV_K_NORM_RMS, d.k_norm_weight = &t.t), bad,
        "k_norm_weight has shape [2, 64] (2 dimensions), must be [3, 64]");
    ctxkv_store_desc d = good();
    ctxkv_store *store;
    assert_refused(ctxkv_store_create(0, &d, &store), bad, "device is NULL");
    assert_refused(ctxkv_store_create(place.device, 0, &store), bad, "desc is NULL");
    assert_refused(ctxkv_store_create(place.device, &d, 0), bad, "store is NULL");
}

static ctxkv_store *plan_new(int checked) {
    ctxkv_store_desc d = good();
    ctxkv_store *store;
    d.checked = checked;
    assert_ok(ctxkv_store_create(place.device, &d, &store));
    return store;
}

static bool untouched(void) {
    for (int l = 0; l < L; l++)
        for (int i = 0; i < STORAGE; i++)
            if (storage[l][i] != 0x5A5A) return false;
    return true;
}

static void caches(void **state) {
    (void)state;
    ctxkv_store *store = plan_new(0);
    reset();
#define BIND_REFUSED(text)                                                                         \
    assert_refused(ctxkv_store_bind_caches(store, key_list, value_list, L), bad, text)
    assert_refused(
        ctxkv_store_run(store, &k.t, &v.t, &p.t, slot_list, L, 0), CTXKV_NOT_BOUND, "no caches");
    assert_refused(ctxkv_store_bind_caches(store, 0, value_list, L), bad, "keys is NULL");
    assert_refused(ctxkv_store_bind_caches(store, key_list, 0, L), bad, "values is NULL");
    assert_refused(
        ctxkv_store_bind_caches(store, key_list, value_list, L - 1), bad,
        "count is 2, must be num_layers (3)");
    key_list[1] = 0;
    BIND_REFUSED("keys[1] is NULL, must be a tensor");
    reset();
    values[2].shape[0] = BLOCKS + 1;
    BIND_REFUSED("values[2] has shape [3, 4, 2, 64] (4 dimensions), must be [2, 4, 2, 64]");
    reset();
    keys[0].shape[2] = H + 1;
    BIND_REFUSED("keys[0] has shape [2, 4, 3, 64]");
    reset();
    keys[0].shape[1] = values[0].shape[1] = 0;
    BIND_REFUSED("keys[0] has block_size 0, must be at least 1");
    reset();
    keys[1].strides[3] = 2;
    BIND_REFUSED("must have stride 1 in the last dimension");
    reset();
    keys[1].strides[0] = 0;
    BIND_REFUSED("must give each element an address of its own");
    reset();
    values[1].strides[1] = N / 2;
    BIND_REFUSED("values[1] has strides [1024, 32, 512, 1], must give each element an address");
    reset();
    keys[2].strides[0] = INT64_MAX / 8;
    BIND_REFUSED("keys[2] has strides [1152921504606846975, ");
    reset();
    keys[2].t.data = 0;
    BIND_REFUSED("keys[2] has a NULL data address");
    reset();
    keys[0].shape[0] = values[0].shape[0] = INT64_MAX;
    keys[0].shape[1] = values[0].shape[1] = 2;
    keys[0].shape[0] = values[0].shape[0] = 0; // a cache without blocks: every slot is a fault
    keys[0].t.data = values[0].t.data = 0;
    assert_ok(ctxkv_store_bind_caches(store, key_list, value_list, L));
    assert_ok(ctxkv_store_run(store, &k.t, &v.t, &p.t, slot_list, L, 0));
    ctxkv_faults f;
    assert_ok(ctxkv_store_faults(store, &f));
    assert_int_equal(f.count, T);
    assert_int_equal(f.limit, 0);
    // A refused bind leaves the earlier one in force.
    reset();
    assert_ok(ctxkv_store_bind_caches(store, key_list, value_list, L));
    key_list[0] = 0;
    BIND_REFUSED("keys[0] is NULL");
    assert_ok(ctxkv_store_run(store, &k.t, &v.t, &p.t, slot_list, L, 0));
    assert_false(untouched());
    ctxkv_store_destroy(store);
}

static void operands(void **state) {
    (void)state;
    ctxkv_store *store = plan_new(0);
    reset();
    assert_ok(ctxkv_store_bind_caches(store, key_list, value_list, L));
#define RUN(count) ctxkv_store_run(store, &k.t, &v.t, &p.t, slot_list, count, 0)
#define RUN_REFUSED(change, text)                                                                  \
    do {                                                                                           \
        reset();                                                                                   \
        change;                                                                                    \
        assert_refused(RUN(L), bad, text);                                                         \
        assert_true(untouched());                                                                  \
        reset();                                                                                   \
        assert_ok(RUN(L));                                                                         \
        assert_false(untouched());                                                                 \
    } while (0)
    RUN_REFUSED(
        k.shape[0] = L - 1, "k has shape [2, 4, 2, 64] (4 dimensions), must be [3, *, 2, 64]");
    RUN_REFUSED(
        v.shape[1] = T - 1, "v has shape [3, 3, 2, 64] (4 dimensions), must be [3, 4, 2, 64]");
    RUN_REFUSED(p.shape[0] = T - 1, "positions has shape [3] (1 dimensions), must be [4]");
    RUN_REFUSED(p.t.data = (char *)positions + 4, "positions lies at address");
    RUN_REFUSED(s[1].t.byte_offset = 1, "slots[1] lies at address");
    RUN_REFUSED(s[2].shape[0] = T + 1, "slots[2] has 5 rows, must have 0..4 (T)");
    RUN_REFUSED(s[2].t.dtype.bits = 32, "slots[2] has dtype int32 (lanes 1), must be int64");
    RUN_REFUSED(s[0].t.ndim = 2, "slots[0] has shape");
    RUN_REFUSED((s[0].t.strides = s[0].strides, s[0].strides[0] = 2), "slots[0] has strides [2]");
    RUN_REFUSED((k.t.strides = k.strides, k.strides[3] = 2), "k has strides [0, 0, 0, 2]");
    reset();
    static const int64_t counts[] = {0, 2, -1, L + 1, INT64_MAX};
    for (size_t i = 0; i < 5; i++)
        assert_refused(RUN(counts[i]), bad, "must be 1 or the number of layers (3)");
    assert_refused(
        ctxkv_store_run(store, &k.t, &v.t, 0, slot_list, L, 0), bad, "positions is NULL");
    assert_refused(ctxkv_store_run(store, &k.t, &v.t, &p.t, 0, L, 0), bad, "slots is NULL");
    assert_refused(ctxkv_store_run(store, 0, &v.t, &p.t, slot_list, L, 0), bad, "k is NULL");
    assert_refused(ctxkv_store_run(store, &k.t, 0, &p.t, slot_list, L, 0), bad, "v is NULL");
    assert_refused(ctxkv_store_faults(store, 0), bad, "faults is NULL");
    assert_true(untouched());
    // No layer has slots; then fewer rows; then one array for all layers.
    const DLTensor *none[L] = {0};
    assert_ok(ctxkv_store_run(store, &k.t, &v.t, &p.t, none, L, 0));
    s[0].shape[0] = 0, s[0].t.data = 0;
    assert_ok(ctxkv_store_run(store, &k.t, &v.t, &p.t, slot_list, 1, 0));
    assert_true(untouched());
    reset();
    assert_ok(RUN(L));
    static uint16_t apart[L][STORAGE];
    memcpy(apart, storage, sizeof storage);
    reset();
    assert_ok(RUN(1));
    assert_memory_equal(apart, storage, sizeof storage);
    ctxkv_store_destroy(store);
}

static void expect_faults(
    ctxkv_store *store, uint64_t count, int kind, int64_t layer, int64_t row, int64_t value,
    int64_t limit) {
    ctxkv_faults f;
    memset(&f, 0xFF, sizeof f);
    assert_ok(ctxkv_store_faults(store, &f));
    assert_int_equal(f.count, count);
    assert_int_equal(f.kind, kind);
    assert_int_equal(f.layer, layer);
    assert_int_equal(f.row, row);
    assert_int_equal(f.value, value);
    assert_int_equal(f.limit, limit);
    assert_ok(ctxkv_store_faults(store, &f)); // reading clears
    assert_int_equal(f.count, 0);
    assert_int_equal(f.kind, CTXKV_FAULT_NONE);
}

static void faults(void **state) {
    (void)state;
    ctxkv_store *store = plan_new(0);
    reset();
    assert_ok(ctxkv_store_bind_caches(store, key_list, value_list, L));
    expect_faults(store, 0, CTXKV_FAULT_NONE, 0, 0, 0, 0);
    // First in (layer, row) order, whatever was met first.
    slots[2][0] = INT64_MAX;
    slots[1][3] = BLOCKS * PAGE;
    slots[1][2] = -1; // no fault, and its position is never read
    positions[2] = 16;
    assert_ok(RUN(L));
    // Position 16 in layers 0 and 2 (row 2), slot 8 in layer 1, slot 2^63-1 in layer 2.
    expect_faults(store, 4, CTXKV_FAULT_POSITION, 0, 2, 16, 16);
    reset();
    slots[1][3] = BLOCKS * PAGE;
    positions[3] = -1; // a bad slot is told before a bad position
    slots[0][3] = slots[2][3] = INT64_MIN;
    assert_ok(RUN(L));
    expect_faults(store, 1, CTXKV_FAULT_SLOT, 1, 3, BLOCKS * PAGE, BLOCKS * PAGE);
    // Runs add up; a later run's earlier row comes first.
    reset();
    slots[2][1] = 1000;
    assert_ok(RUN(L));
    reset();
    slots[1][2] = 2000;
    slots[2][0] = 3000;
    assert_ok(RUN(L));
    expect_faults(store, 3, CTXKV_FAULT_SLOT, 1, 2, 2000, BLOCKS * PAGE);
    // 2^32 and 2^63 - 1 are not narrowed before the check.
    reset();
    slots[0][0] = INT64_C(1) << 32;
    positions[1] = INT64_C(1) << 32;
    slots[0][2] = INT64_MAX;
    assert_ok(RUN(1));
    // Row 0, 1, 2 of each of three layers.
    expect_faults(store, 9, CTXKV_FAULT_SLOT, 0, 0, INT64_C(1) << 32, BLOCKS * PAGE);
    ctxkv_store_destroy(store);
}

static void checked(void **state) {
    (void)state;
    ctxkv_store *store = plan_new(1);
    reset();
    assert_ok(ctxkv_store_bind_caches(store, key_list, value_list, L));
    slots[2][3] = BLOCKS * PAGE;
    assert_refused(RUN(L), bad, "slots of row 3 (layer 2) is 8, must be in 0..7");
    assert_true(untouched());
    reset();
    positions[0] = -1;
    slots[0][0] = -1;
    assert_refused(RUN(L), bad, "positions of row 0 (layer 1) is -1, must be in 0..15");
    assert_true(untouched());
    expect_faults(store, 0, CTXKV_FAULT_NONE, 0, 0, 0, 0);
    reset();
    slots[0][0] = slots[1][0] = slots[2][0] = -1;
    assert_ok(RUN(L));
    assert_false(untouched());
    ctxkv_store_destroy(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(descriptor), cmocka_unit_test(caches),  cmocka_unit_test(operands),
        cmocka_unit_test(faults),     cmocka_unit_test(checked),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
