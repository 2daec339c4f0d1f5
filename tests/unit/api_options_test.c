// SPDX-License-Identifier: Apache-2.0
// The Qwen3 family's options: every refusal, callers of the first version, and what each option
// does to the bits, against values worked out here.
#include <math.h>
#include <stddef.h>

#include "plan_checks.h"

#define L 2
#define H 2
#define N 64
#define T 3
#define D 32
#define BLOCKS 2
#define PAGE 4
#define PLACES (BLOCKS * PAGE * H * N)

static uint16_t kv[2 * L * T * H * N], weights[L * 2 * H * N * D], bias[L * 2 * H * N], gain[L * N];
static char tables[L][16 * N * 4];
static float scales[2 * L];
static int64_t positions[T] = {0, 5, 9}, slots[T] = {1, 6, 2};
static char keys_at[L][PLACES * 2], values_at[L][PLACES * 2];

// Tensors of one store plan; the lists point at them.
static struct store_tensors {
    struct tensor k, v, p, slots, gain, table[L], scale[2 * L], keys[L], values[L];
    const DLTensor *tables[L], *k_scales[L], *v_scales[L], *key_list[L], *value_list[L];
    const DLTensor *slot_list[1];
} s;

static enum type fp8_or(ctxkv_cache_type type, enum type eight) {
    return type == CTXKV_CACHE_BF16 ? BF16 : type == CTXKV_CACHE_FP16 ? FP16 : eight;
}

static void reset(enum type cache, enum type table) {
    tensor_on(&s.k, &place, kv, BF16, 4, DIMS(L, T, H, N), 0);
    tensor_on(&s.v, &place, kv + L * T * H * N, BF16, 4, DIMS(L, T, H, N), 0);
    tensor_on(&s.p, &place, positions, I64, 1, DIMS(T), 0);
    tensor_on(&s.gain, &place, gain, BF16, 2, DIMS(L, N), 0);
    s.slot_list[0] = tensor_on(&s.slots, &place, slots, I64, 1, DIMS(T), 0);
    memset(keys_at, POISON, sizeof keys_at);
    memset(values_at, POISON, sizeof values_at);
    for (int l = 0; l < L; l++) {
        s.tables[l] = tensor_on(&s.table[l], &place, tables[l], table, 2, DIMS(16, N), 0);
        s.k_scales[l] = tensor_on(&s.scale[l], &place, &scales[l], FP32, 1, DIMS(1), 0);
        s.v_scales[l] = tensor_on(&s.scale[L + l], &place, &scales[L + l], FP32, 0, DIMS(1), 0);
        s.key_list[l] =
            tensor_on(&s.keys[l], &place, keys_at[l], cache, 4, DIMS(BLOCKS, PAGE, H, N), 0);
        s.value_list[l] =
            tensor_on(&s.values[l], &place, values_at[l], cache, 4, DIMS(BLOCKS, PAGE, H, N), 0);
    }
}

static int set_up(void **state) {
    (void)state;
    place = place_open(2);
    fill_bf16(kv, 2 * L * T * H * N, 8, 4.0f);
    fill_bf16(weights, L * 2 * H * N * D, 9, 1.0f);
    fill_bf16(bias, L * 2 * H * N, 10, 1.0f);
    fill_bf16(gain, L * N, 11, 1.0f);
    for (int i = 0; i < 2 * L; i++) scales[i] = 0.5f + (float)i * 0.3f;
    reset(BF16, BF16);
    return 0;
}

static ctxkv_store_desc good(void) {
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = L;
    d.num_kv_heads = H;
    d.k_norm = CTXKV_K_NORM_ABSENT;
    return d;
}

CREATE_OF(store)
#define REFUSE(assignment, text)                                                                   \
    do {                                                                                           \
        reset(BF16, BF16);                                                                         \
        REFUSE_OF(store, assignment, bad, text);                                                   \
    } while (0)
#define WITH_TABLES d.rope = CTXKV_ROPE_NEOX, d.layer_cos_sin = s.tables, d.layer_cos_sin_count = L
#define WITH_SCALES                                                                                \
    d.cache_type = CTXKV_CACHE_FP8_E4M3, d.k_scales = s.k_scales, d.v_scales = s.v_scales,         \
    d.scale_count = L

static void store_refusals(void **state) {
    (void)state;
    ctxkv_store_desc d = good();
    assert_ok(create(&d));
    REFUSE(d.cache_type = (ctxkv_cache_type)4, "cache_type is 4, must be in 0..3");
    REFUSE(d.v_norm = (ctxkv_v_norm)2, "v_norm is 2, must be in 0..1");
    REFUSE(d.v_eps = -1.0f, "v_eps is -1, must be finite and >= 0");
    REFUSE(d.v_scale = INFINITY, "v_scale is inf, must be finite");
    REFUSE(d.v_scale = NAN, "v_scale is ");
    REFUSE(d.v_from_k = 2, "v_from_k is 2, must be in 0..1");
    REFUSE(d.k_gain_centre = INFINITY, "k_gain_centre is inf, must be finite");
    REFUSE(
        (WITH_SCALES, d.cache_type = CTXKV_CACHE_BF16),
        "scale_count is 2, must be 0 unless cache_type is FP8");
    REFUSE((WITH_SCALES, d.scale_count = 1), "scale_count is 1, must be 0 or num_layers (2)");
    REFUSE((WITH_SCALES, d.k_scales = 0), "k_scales is NULL, must be an address");
    REFUSE((WITH_SCALES, d.v_scales = 0), "v_scales is NULL, must be an address");
    REFUSE((WITH_SCALES, s.k_scales[1] = 0), "k_scales[1] is NULL, must be a tensor");
    REFUSE((WITH_SCALES, s.scale[L].t.dtype.bits = 64), "v_scales[0] has dtype float64");
    REFUSE(
        (WITH_SCALES, s.scale[0].shape[0] = H),
        "k_scales[0] has shape [2] (1 dimensions), must be [1]");
    REFUSE((WITH_SCALES, s.scale[0].t.data = 0), "k_scales[0] has a NULL data address");
    REFUSE(
        (WITH_TABLES, d.cos_sin = s.tables[0]),
        "layer_cos_sin is given, must be left out when cos_sin is given");
    REFUSE(
        (WITH_TABLES, d.rope = CTXKV_ROPE_NONE),
        "layer_cos_sin is given, must be NULL when rope is NONE");
    REFUSE(
        (WITH_TABLES, d.layer_cos_sin_count = 3),
        "layer_cos_sin_count is 3, must be 0 or num_layers (2)");
    REFUSE((WITH_TABLES, d.layer_cos_sin = 0), "layer_cos_sin is NULL, must be an address");
    REFUSE((WITH_TABLES, s.tables[1] = 0), "layer_cos_sin[1] is NULL, must be a tensor");
    REFUSE(
        (WITH_TABLES, s.table[1].t.dtype.bits = 32, s.table[1].t.dtype.code = kDLFloat),
        "layer_cos_sin[1] has another dtype than layer_cos_sin[0]");
    REFUSE(
        (WITH_TABLES, s.table[0].shape[1] = N + 2),
        "layer_cos_sin[0] has 66 columns (rotary_dim), must be even and in 2..head_dim (64)");
    REFUSE((WITH_TABLES, s.table[0].shape[1] = 31), "layer_cos_sin[0] has 31 columns");
    REFUSE(
        (WITH_TABLES, d.rotary_dim = 32),
        "layer_cos_sin[0] has shape [16, 64] (2 dimensions), must be [*, 32]");
    REFUSE((WITH_TABLES, d.rotary_dim = 66), "rotary_dim is 66, must be even");
}

static ctxkv_projection_desc good_projection(struct tensor *w, const DLTensor **list) {
    ctxkv_projection_desc d;
    ctxkv_projection_desc_init(&d);
    d.hidden_size = D;
    d.num_layers = L;
    d.num_kv_heads = H;
    list[0] = tensor_on(w, &place, weights, BF16, 3, DIMS(L, H * N, D), 0);
    d.weights = list;
    d.weight_count = 1;
    d.k_only = 1;
    return d;
}

static void projection_refusals(void **state) {
    (void)state;
    struct tensor w, b;
    const DLTensor *list[1];
    ctxkv_projection *p;
    ctxkv_projection_desc d = good_projection(&w, list);
    tensor_on(&b, &place, bias, BF16, 2, DIMS(L, 2 * H * N), 0);
#define REFUSED(text)                                                                              \
    do {                                                                                           \
        assert_refused(ctxkv_projection_create(place.device, &d, &p), bad, text);                  \
        d = good_projection(&w, list);                                                             \
    } while (0)
    d.bias_add = (ctxkv_bias_add)2;
    REFUSED("bias_add is 2, must be in 0..1");
    d.k_only = -1;
    REFUSED("k_only is -1, must be in 0..1");
    d.weight_count = 2 * L;
    REFUSED("weight_count is 4, must be 1 or num_layers (num_layers = 2)");
    w.shape[1] = 2 * H * N;
    REFUSED("weights[0] has shape [2, 256, 32] (3 dimensions), must be [2, 128, 32]");
    d.bias = &b.t;
    REFUSED("bias has shape [2, 256] (2 dimensions), must be [2, 128]");
}

static void chain_refusals(void **state) {
    (void)state;
    struct tensor w;
    const DLTensor *list[1];
    ctxkv_projection_desc p = good_projection(&w, list);
    ctxkv_store_desc store = good();
    ctxkv_norms_desc n;
    ctxkv_norms_desc_init(&n);
    n.hidden_size = D, n.num_layers = L;
    n.hidden.kind = CTXKV_NORM_RMS, n.layer.kind = CTXKV_NORM_ABSENT;
    ctxkv_chain_desc d = {sizeof d, &n, &p, &store, 8};
    ctxkv_chain *chain;
    assert_refused(
        ctxkv_chain_create(place.device, &d, &chain), bad,
        "store.v_from_k is 0, must equal projection.k_only (1)");
    store.v_from_k = 1;
    assert_ok(ctxkv_chain_create(place.device, &d, &chain));
    ctxkv_chain_destroy(chain);
}

// A caller built against the first version hands over a shorter struct with rubbish behind it.
static void first_version(void **state) {
    (void)state;
    ctxkv_store_desc d = good();
    memset(
        (char *)&d + offsetof(ctxkv_store_desc, k_scales), 0xEE,
        sizeof d - offsetof(ctxkv_store_desc, k_scales));
    assert_refused(create(&d), bad, "layer_cos_sin_count is -");
    d.size = offsetof(ctxkv_store_desc, k_scales);
    assert_ok(create(&d));
    d.size--;
    assert_refused(create(&d), bad, "must be at least");
    struct tensor w;
    const DLTensor *list[1];
    ctxkv_projection *p;
    ctxkv_projection_desc q = good_projection(&w, list);
    w.shape[1] = 2 * H * N;
    q.bias_add = (ctxkv_bias_add)77, q.k_only = 77;
    q.size = offsetof(ctxkv_projection_desc, bias_add);
    assert_ok(ctxkv_projection_create(place.device, &q, &p));
    ctxkv_projection_destroy(p);
}

static void run_store(const ctxkv_store_desc *d, enum type cache) {
    ctxkv_store *store;
    reset(cache, BF16);
    assert_ok(ctxkv_store_create(place.device, d, &store));
    assert_ok(ctxkv_store_bind_caches(store, s.key_list, s.value_list, L));
    assert_ok(ctxkv_store_run(
        store, &s.k.t, d->v_from_k ? 0 : &s.v.t, d->rope ? &s.p.t : 0, s.slot_list, 1, 0));
    ctxkv_store_destroy(store);
}

static float widen(uint16_t h) {
    uint32_t b = (uint32_t)h << 16;
    float x;
    memcpy(&x, &b, 4);
    return x;
}

static float raw(int part, int l, int t, int h, int i) {
    return widen(kv[(((part * L + l) * T + t) * H + h) * N + i]);
}

static size_t place_of(int t, int h, int i) {
    return (size_t)((slots[t] * H + h) * N + i);
}

// Every type of cache holds the conversion of the BF16 value, K and V by their layer's scales; FP8
// under either name of its dtype.
static void cache_types(void **state) {
    (void)state;
    static const enum type own[] = {BF16, FP16, E4M3, E5M2};
    for (int named = 0; named < 2; named++) {
        for (int type = 0; type < 4; type++) {
            ctxkv_cache_type cache = (ctxkv_cache_type)type;
            ctxkv_store_desc d = good();
            bool fp8 = type >= 2;
            d.cache_type = cache;
            if (fp8) d.k_scales = s.k_scales, d.v_scales = s.v_scales, d.scale_count = L;
            run_store(&d, named ? own[type] : fp8_or(cache, U8));
            for (int at = 0; at < L * T * H * N; at++) {
                int l = at / (T * H * N), t = at / (H * N) % T, h = at / N % H, i = at % N;
                for (int part = 0; part < 2; part++) {
                    char *to = part ? values_at[l] : keys_at[l];
                    float x = raw(part, l, t, h, i), scale = scales[part * L + l];
                    uint16_t want = type == 0   ? ctxkv_bf16(x)
                                    : type == 1 ? ctxkv_fp16(x)
                                                : ctxkv_fp8(x / scale, cache);
                    uint16_t got = 0;
                    size_t item = fp8 ? 1 : 2;
                    memcpy(&got, to + place_of(t, h, i) * item, item);
                    assert_int_equal(got, want);
                }
            }
        }
    }
    ctxkv_store *store;
    ctxkv_store_desc d = good();
    d.cache_type = CTXKV_CACHE_FP8_E5M2;
    reset(E4M3, BF16);
    assert_ok(ctxkv_store_create(place.device, &d, &store));
    assert_refused(
        ctxkv_store_bind_caches(store, s.key_list, s.value_list, L), bad,
        "must be FP8 e5m2 or uint8");
    assert_refused(
        ctxkv_store_run(store, &s.k.t, &s.v.t, 0, s.slot_list, 1, 0), CTXKV_NOT_BOUND, "no caches");
    ctxkv_store_destroy(store);
}

// V: scaled; made of raw K; normed without a weight (which a K norm of gain 1 equals).
static void values_of(void **state) {
    (void)state;
    ctxkv_store_desc d = good();
    d.v_scale = 0.612f;
    run_store(&d, BF16);
    for (int i = 0; i < N; i++) {
        uint16_t got;
        memcpy(&got, values_at[1] + 2 * place_of(2, 1, i), 2);
        assert_int_equal(got, ctxkv_bf16(raw(1, 1, 2, 1, i) * 0.612f));
    }
    d.v_scale = 0;
    d.v_from_k = 1;
    run_store(&d, BF16);
    assert_memory_equal(values_at, keys_at, sizeof keys_at);
    d.v_norm = CTXKV_V_NORM_RMS;
    d.v_eps = d.k_eps = 1e-6f;
    d.k_norm = CTXKV_K_NORM_RMS;
    run_store(&d, BF16);
    assert_memory_equal(values_at, keys_at, sizeof keys_at);
    uint16_t first;
    memcpy(&first, keys_at[0] + 2 * place_of(0, 0, 0), 2);
    assert_int_not_equal(first, ctxkv_bf16(raw(0, 0, 0, 0, 0)));
    ctxkv_store *store;
    assert_ok(ctxkv_store_create(place.device, &d, &store));
    assert_ok(ctxkv_store_bind_caches(store, s.key_list, s.value_list, L));
    assert_refused(
        ctxkv_store_run(store, &s.k.t, &s.v.t, 0, s.slot_list, 1, 0), bad,
        "v is given, must be NULL in a plan with v_from_k");
    ctxkv_store_destroy(store);
}

// (1 + w) is a weight of 1 + w; a centre without a weight is nothing.
static void gain_centre(void **state) {
    (void)state;
    static float sums[L * N];
    static char want[sizeof keys_at];
    struct tensor fp32;
    ctxkv_store_desc d = good();
    d.k_norm = CTXKV_K_NORM_RMS;
    for (int i = 0; i < L * N; i++) sums[i] = widen(gain[i]) + 1.0f;
    tensor_on(&fp32, &place, sums, FP32, 2, DIMS(L, N), 0);
    d.k_norm_weight = &fp32.t;
    run_store(&d, BF16);
    memcpy(want, keys_at, sizeof want);
    d.k_norm_weight = &s.gain.t;
    d.k_gain_centre = 1.0f;
    run_store(&d, BF16);
    assert_memory_equal(want, keys_at, sizeof want);
    d.k_norm_weight = 0;
    run_store(&d, BF16);
    memcpy(want, keys_at, sizeof want);
    d.k_gain_centre = 0;
    run_store(&d, BF16);
    assert_memory_equal(want, keys_at, sizeof want);
}

// A table for each layer is that layer's; FP32 and FP16 tables are used as they are, and a narrower
// one leaves the rest of the head alone.
static void layer_tables(void **state) {
    (void)state;
    ctxkv_store_desc d = good();
    for (int l = 0; l < L; l++)
        for (int i = 0; i < 16 * 8; i++) {
            float x = cosf((float)(i + 31 * l)) * 1.0009765625f;
            memcpy(tables[l] + 4 * i, &x, 4);
        }
    reset(BF16, FP32);
    WITH_TABLES;
    ctxkv_store *store;
    for (int l = 0; l < L; l++) s.table[l].shape[1] = 8;
    s.table[1].shape[0] = 9; // position 9 is past layer 1's table
    assert_ok(ctxkv_store_create(place.device, &d, &store));
    assert_ok(ctxkv_store_bind_caches(store, s.key_list, s.value_list, L));
    assert_ok(ctxkv_store_run(store, &s.k.t, &s.v.t, &s.p.t, s.slot_list, 1, 0));
    ctxkv_faults f;
    assert_ok(ctxkv_store_faults(store, &f));
    assert_int_equal(f.count, 1);
    assert_int_equal(f.layer, 1);
    assert_int_equal(f.row, 2);
    assert_int_equal(f.limit, 9);
    ctxkv_store_destroy(store);
    for (int l = 0; l < L; l++)
        for (int i = 0; i < N; i++) {
            float table[8], want = raw(0, l, 1, 0, i);
            memcpy(table, tables[l] + 5 * 8 * 4, sizeof table);
            if (i < 4) want = fmaf(want, table[i], -(raw(0, l, 1, 0, i + 4) * table[4 + i]));
            if (i >= 4 && i < 8) want = fmaf(want, table[i - 4], raw(0, l, 1, 0, i - 4) * table[i]);
            uint16_t got;
            memcpy(&got, keys_at[l] + 2 * place_of(1, 0, i), 2);
            assert_int_equal(got, ctxkv_bf16(want));
        }
}

// BF16(BF16(acc) + bias) beside BF16(acc + bias), from a run without bias; K alone is K's half.
static void projections(void **state) {
    (void)state;
    enum { C = 2 * H * N, ALL = L * T * C };
    static uint16_t x[T * D], fused[ALL], after[ALL], none[ALL], half[ALL / 2];
    struct tensor w, b, from, to;
    const DLTensor *list[1];
    ctxkv_projection_desc d = good_projection(&w, list);
    fill_bf16(x, T * D, 12, 1.0f);
    tensor_on(&from, &place, x, BF16, 3, DIMS(1, T, D), 0);
    tensor_on(&w, &place, weights, BF16, 3, DIMS(L, C, D), 0);
    d.k_only = 0;
    uint16_t *outs[] = {none, fused, after};
    for (int i = 0; i < 3; i++) {
        ctxkv_projection *p;
        if (i) d.bias = tensor_on(&b, &place, bias, BF16, 2, DIMS(L, C), 0);
        d.bias_add = i == 2 ? CTXKV_BIAS_AFTER : CTXKV_BIAS_FUSED;
        assert_ok(ctxkv_projection_create(place.device, &d, &p));
        tensor_on(&to, &place, outs[i], BF16, 3, DIMS(L, T, C), 0);
        assert_ok(ctxkv_projection_run(p, &from.t, &to.t, 0));
        ctxkv_projection_destroy(p);
    }
    int differ = 0;
    for (int i = 0; i < ALL; i++) {
        float shift = widen(bias[i / (T * C) * C + i % C]);
        assert_int_equal(after[i], ctxkv_bf16(widen(none[i]) + shift));
        differ += after[i] != fused[i];
    }
    assert_true(differ > 0);
    // The same K rows, handed over alone.
    struct tensor rows[L];
    const DLTensor *rows_list[L];
    ctxkv_projection *p;
    for (int l = 0; l < L; l++)
        rows_list[l] = tensor_on(&rows[l], &place, weights + l * C * D, BF16, 2, DIMS(C / 2, D), 0);
    d.weights = rows_list, d.weight_count = L, d.bias = 0, d.k_only = 1;
    assert_ok(ctxkv_projection_create(place.device, &d, &p));
    tensor_on(&to, &place, half, BF16, 3, DIMS(L, T, C / 2), 0);
    assert_ok(ctxkv_projection_run(p, &from.t, &to.t, 0));
    ctxkv_projection_destroy(p);
    for (int i = 0; i < L * T; i++) assert_memory_equal(half + i * C / 2, none + i * C, C);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(store_refusals), cmocka_unit_test(projection_refusals),
        cmocka_unit_test(chain_refusals), cmocka_unit_test(first_version),
        cmocka_unit_test(cache_types),    cmocka_unit_test(values_of),
        cmocka_unit_test(gain_centre),    cmocka_unit_test(layer_tables),
        cmocka_unit_test(projections),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
