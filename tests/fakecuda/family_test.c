// SPDX-License-Identifier: Apache-2.0
// What the Qwen3 family's options become on a CUDA device, against the fake driver; and the integer
// conversions of GPUs without FP8 instructions.
#define _POSIX_C_SOURCE 200809L
#include "cuda/few_params.h"
#include "cuda/narrow.h"
#include "cuda/params.h"
#include "cuda/store_general.h"
#include "fixture.h"

enum { D = 4096, LAYERS = 2, HEADS = 3, HEAD = 128, ROWS = 5, FIVE = 5 };

static uint16_t source[LAYERS * ROWS * HEADS * HEAD];
static _Alignas(16) uint16_t x[ROWS * D + 1];
static uint16_t weights[LAYERS * HEADS * HEAD * D], k_weight[LAYERS * HEAD];
static uint16_t five[5 * 256 * D];
static uint16_t kv[ROWS * LAYERS * HEADS * HEAD];
static _Alignas(16) uint8_t cache[LAYERS][2][4 * 16 * HEADS * HEAD + 16];
static _Alignas(16) float table[LAYERS][9 * HEAD];
static float scales[4] = {1, 2, 3, 4};
static int64_t positions[ROWS], slots[ROWS];

// FP8 caches with scales, FP32 tables of their own, V made of K: all of it reaches the kernel.
static ctxkv_store *general_store(ctxkv_device *device) {
    struct tensor b[9];
    ctxkv_store_desc d;
    ctxkv_store *store;
    ctxkv_store_desc_init(&d);
    d.num_layers = LAYERS;
    d.num_kv_heads = HEADS;
    d.head_dim = HEAD;
    d.k_norm = CTXKV_K_NORM_RMS;
    d.k_norm_weight = tensor_on(&b[0], &gpu, k_weight, BF16, 2, DIMS(LAYERS, HEAD), 0);
    d.rope = CTXKV_ROPE_NEOX;
    const DLTensor *tables[LAYERS] = {
        tensor_on(&b[1], &gpu, table[0], FP32, 2, DIMS(9, 64), 0),
        tensor_on(&b[2], &gpu, table[1] + 1, FP32, 2, DIMS(7, 32), 0)};
    const DLTensor *k_scales[LAYERS] = {
        tensor_on(&b[3], &gpu, &scales[0], FP32, 1, DIMS(1), 0),
        tensor_on(&b[4], &gpu, &scales[1], FP32, 1, DIMS(1), 0)};
    const DLTensor *v_scales[LAYERS] = {
        tensor_on(&b[5], &gpu, &scales[2], FP32, 1, DIMS(1), 0),
        tensor_on(&b[6], &gpu, &scales[3], FP32, 1, DIMS(1), 0)};
    d.layer_cos_sin = tables;
    d.layer_cos_sin_count = LAYERS;
    d.k_scales = k_scales;
    d.v_scales = v_scales;
    d.scale_count = LAYERS;
    d.cache_type = CTXKV_CACHE_FP8_E5M2;
    d.v_norm = CTXKV_V_NORM_RMS;
    d.v_eps = 0.25f;
    d.v_scale = -2.0f;
    d.v_from_k = 1;
    assert_ok(ctxkv_store_create(device, &d, &store));
    return store;
}

static void a_general_store_arrives(void **state) {
    ctxkv_store *store = general_store(*state);
    struct tensor b[8];
    const DLTensor *keys[LAYERS], *values[LAYERS];
    for (int l = 0; l < LAYERS; l++) { // the second layer's caches are a byte off
        keys[l] = tensor_on(&b[l], &gpu, cache[l][0] + l, U8, 4, DIMS(4, 16, HEADS, HEAD), 0);
        values[l] = tensor_on(&b[2 + l], &gpu, cache[l][1] + l, U8, 4, DIMS(4, 16, HEADS, HEAD), 0);
    }
    assert_ok(ctxkv_store_bind_caches(store, keys, values, LAYERS));
    fake.launches = 0;
    const DLTensor *k = tensor_on(&b[4], &gpu, source, BF16, 4, DIMS(LAYERS, ROWS, HEADS, HEAD), 0);
    const DLTensor *at = tensor_on(&b[5], &gpu, positions, I64, 1, DIMS(ROWS), 0);
    const DLTensor *s = tensor_on(&b[6], &gpu, slots, I64, 1, DIMS(ROWS), 0);
    assert_int_equal(ctxkv_store_run(store, k, k, at, &s, 1, 0), CTXKV_INVALID_ARGUMENT);
    assert_non_null(strstr(ctxkv_last_error(), "v is given"));
    assert_int_equal(fake.launches, 0);
    assert_ok(ctxkv_store_run(store, k, 0, at, &s, 1, 0));
    assert_int_equal(fake.launches, 1);
    const struct fake_launch *launch = &fake.launch[0];
    assert_string_equal(launch->kernel, "ctxkv_store_general_128");
    assert_int_equal(launch->grid[0], (ROWS * HEADS + 7) / 8); // 16 lanes a head
    assert_int_equal(launch->grid[1], LAYERS);
    ctxkv_store_general p;
    memcpy(&p, launch->params, sizeof p);
    assert_int_equal(p.cache_type, CTXKV_GENERAL_CACHE_E5M2);
    assert_int_equal(p.table_type, CTXKV_GENERAL_TABLE_FP32);
    assert_int_equal(
        p.flags, CTXKV_GENERAL_V_NORM | CTXKV_GENERAL_V_SCALE | CTXKV_GENERAL_V_FROM_K);
    assert_true(p.v_eps == 0.25f && p.v_scale == -2.0f);
    assert_int_equal(p.layer[0].flags, CTXKV_GENERAL_TABLE_WIDE | CTXKV_GENERAL_CACHE_WIDE);
    assert_int_equal(p.layer[1].flags, 0);
    assert_int_equal(p.layer[0].max_position, 9);
    assert_int_equal(p.layer[1].max_position, 7);
    assert_int_equal(p.layer[1].rotary_dim, 32);
    assert_ptr_equal(p.layer[1].table, table[1] + 1);
    assert_ptr_equal(p.layer[1].k, cache[1][0] + 1);
    assert_ptr_equal(p.layer[1].k_scale, &scales[1]);
    assert_ptr_equal(p.layer[0].v_scale, &scales[2]);
    assert_int_equal(p.layer[1].slot_count, 64);
    ctxkv_store_destroy(store);
}

// What d says, of heads of HEAD and one weight [layers, columns, D].
static ctxkv_projection *projection_new(
    ctxkv_device *device, ctxkv_projection_desc d, const uint16_t *weight, int64_t columns) {
    struct tensor b;
    ctxkv_projection *projection;
    const DLTensor *w = tensor_on(&b, &gpu, weight, BF16, 3, DIMS(d.num_layers, columns, D), 0);
    d.hidden_size = D;
    d.head_dim = HEAD;
    d.weights = &w;
    d.weight_count = 1;
    assert_ok(ctxkv_projection_create(device, &d, &projection));
    return projection;
}

// One input for all layers and few columns: cuBLAS would split K, so the exact kernels do it, that
// of few rows where it can read x.
static void few_columns_are_exact(void **state) {
    struct tensor b[2];
    ctxkv_projection_desc d;
    ctxkv_projection_desc_init(&d);
    d.num_layers = LAYERS;
    d.num_kv_heads = HEADS;
    d.k_only = 1;
    d.bias_add = CTXKV_BIAS_AFTER;
    ctxkv_projection *projection = projection_new(*state, d, weights, HEADS * HEAD);
    const int64_t columns = HEADS * HEAD;
    const DLTensor *in = tensor_on(&b[0], &gpu, x, BF16, 3, DIMS(1, ROWS, D), 0);
    const DLTensor *out = tensor_on(
        &b[1], &gpu, kv, BF16, 3, DIMS(LAYERS, ROWS, columns), DIMS(columns, LAYERS * columns, 1));
    fake.gemms = fake.launches = 0;
    assert_ok(ctxkv_projection_run(projection, in, out, 0));
    assert_int_equal(fake.launches, 1);
    ctxkv_few_params few;
    memcpy(&few, fake.launch[0].params, sizeof few);
    assert_non_null(strstr(fake.launch[0].kernel, "ctxkv_few_"));
    assert_int_equal(few.columns, columns);
    assert_int_equal(few.x_shared, 1);
    assert_int_equal(fake.map.dims[3], 1);
    in = tensor_on(&b[0], &gpu, x + 1, BF16, 3, DIMS(1, ROWS, D), 0);
    fake.launches = 0;
    assert_ok(ctxkv_projection_run(projection, in, out, 0));
    assert_int_equal(fake.gemms, 0);
    assert_int_equal(fake.launches, 1);
    ctxkv_projection_params p;
    memcpy(&p, fake.launch[0].params, sizeof p);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_projection_16");
    assert_int_equal(fake.launch[0].grid[0], columns / 64);
    assert_int_equal(p.parts, 1);
    assert_int_equal(p.block_columns, columns);
    assert_int_equal(p.flags, CTXKV_PROJECTION_BY2 | CTXKV_PROJECTION_ROUND_FIRST);
    ctxkv_projection_destroy(projection);
}

// Five layers of 256 columns, above 64 rows: cuBLAS by the numbers of rows that were compared,
// windows over the rest.
static void measured_batches_are_windows(void **state) {
    static const struct {
        int64_t rows, gemms, each;
    } cases[] = {{63, 0, 0},       {64, 0, 0},        {65, 2, 64},
                 {128, 1, 128},    {1000, 2, 512},    {4096, 1, 4096},
                 {12289, 4, 4096}, {16384, 1, 16384}, {32769, 3, 16384}};
    enum { COLUMNS = 256 };
    // Nothing is read there; more rows than there is memory for lie apart.
    void *far_x = (void *)(uintptr_t)0x100000000000, *far_kv = (void *)(uintptr_t)0x200000000000;
    struct tensor b[2];
    ctxkv_projection_desc d;
    ctxkv_projection_desc_init(&d);
    d.num_layers = FIVE;
    d.num_kv_heads = 1;
    ctxkv_projection *projection = projection_new(*state, d, five, COLUMNS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t rows = cases[i].rows;
        fake.gemms = fake.gemm_rows = fake.launches = 0;
        const DLTensor *in = tensor_on(&b[0], &gpu, far_x, BF16, 3, DIMS(1, rows, D), 0);
        const DLTensor *out = tensor_on(
            &b[1], &gpu, far_kv, BF16, 3, DIMS(FIVE, rows, COLUMNS),
            DIMS(COLUMNS, FIVE * COLUMNS, 1));
        assert_ok(ctxkv_projection_run(projection, in, out, 0));
        assert_int_equal(fake.gemms, cases[i].gemms);
        assert_int_equal(fake.gemm_rows, cases[i].each);
        if (cases[i].gemms) assert_int_equal(fake.gemm_batch, FIVE);
    }
    ctxkv_projection_destroy(projection);
}

// Nothing is read there.
static char *const far = (char *)(uintptr_t)0x100000000000;

// A chain of the family with its caches, by the ways that CTXKV_CHAIN_WAYS=prefill leaves it.
static ctxkv_chain *family_chain(
    ctxkv_device *device, int64_t heads, int64_t hidden_size, int64_t most_rows) {
    struct tensor b[4], k[FIVE], v[FIVE];
    struct chain_descs d;
    ctxkv_chain *chain;
    chain_descs_init(&d, hidden_size, FIVE, heads, most_rows);
    d.projection.head_dim = d.store.head_dim = HEAD;
    d.norms.hidden.kind = CTXKV_NORM_RMS;
    d.norms.layer.kind = CTXKV_NORM_ABSENT;
    d.norms.hidden_weight = tensor_on(&b[0], &gpu, x, BF16, 1, DIMS(hidden_size), 0);
    d.store.k_norm = CTXKV_K_NORM_RMS;
    d.store.k_norm_weight = tensor_on(&b[1], &gpu, five, BF16, 2, DIMS(FIVE, HEAD), 0);
    d.store.rope = CTXKV_ROPE_NEOX;
    d.store.cos_sin = tensor_on(&b[2], &gpu, table, BF16, 2, DIMS(9, HEAD), 0);
    const DLTensor *w =
        tensor_on(&b[3], &gpu, far, BF16, 3, DIMS(FIVE, 2 * heads * HEAD, hidden_size), 0);
    d.projection.weights = &w;
    d.projection.weight_count = 1;
    setenv("CTXKV_CHAIN_WAYS", "prefill", 1);
    assert_ok(ctxkv_chain_create(device, &d.chain, &chain));
    unsetenv("CTXKV_CHAIN_WAYS");
    const DLTensor *keys[FIVE], *values[FIVE];
    for (int l = 0; l < FIVE; l++) {
        keys[l] = tensor_on(&k[l], &gpu, far, BF16, 4, DIMS(2000, 16, heads, HEAD), 0);
        values[l] = tensor_on(&v[l], &gpu, far, BF16, 4, DIMS(2000, 16, heads, HEAD), 0);
    }
    assert_ok(ctxkv_chain_bind_caches(chain, keys, values, FIVE));
    return chain;
}

// Real shapes: cuBLAS where it was measured faster, else the prefill kernels, and these wherever
// rows or shape are not ones at which cuBLAS is known to be exact.
static void many_rows_by_the_faster_way(void **state) {
    static const struct {
        int64_t heads, hidden, rows;
        int gemms; // 0: the prefill kernels
    } cases[] = {
        {1, 4096, 96, 0},   {1, 4096, 128, 1},   {1, 4096, 129, 0},   {1, 4096, 4096, 1},
        {1, 4096, 5000, 0}, {1, 4096, 8192, 2},  {1, 4096, 16384, 0}, {1, 4096, 20480, 0},
        {8, 4096, 65, 1},   {8, 4096, 2304, 1},  {1, 4096, 63, 0},    {8, 4096, 1024, 1},
        {8, 4096, 2048, 0}, {8, 2560, 16384, 0}, {2, 1024, 65, 0},    {8, 2304, 130, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tensor b[3];
        const int64_t T = cases[i].rows, hidden_size = cases[i].hidden;
        ctxkv_chain *chain = family_chain(*state, cases[i].heads, hidden_size, T);
        fake.gemms = fake.launches = 0;
        const DLTensor *to = tensor_on(&b[0], &gpu, far, I64, 1, DIMS(T), 0);
        assert_ok(ctxkv_chain_run(
            chain, tensor_on(&b[1], &gpu, far, BF16, 2, DIMS(T, hidden_size), 0),
            tensor_on(&b[2], &gpu, far, I64, 1, DIMS(T), 0), &to, 1, 0));
        assert_int_equal(fake.gemms, cases[i].gemms);
        assert_int_equal(fake.launches, 2);
        assert_int_equal(strstr(fake.launch[1].kernel, "_rms128") != 0, !cases[i].gemms);
        ctxkv_chain_destroy(chain);
    }
}

// Every BF16 value with noise below it, and the halfway cases of every FP8 value.
static void narrow_equals_the_truth(void **state) {
    (void)state;
    for (uint32_t high = 0; high < 1u << 16; high++)
        for (uint32_t low = 0; low < 1u << 16; low += low < 2 ? 1 : 0x7FFF) {
            uint32_t bits = high << 16 | low;
            float value;
            memcpy(&value, &bits, 4);
            assert_int_equal(ctxkv_narrow_e4m3(bits), ctxkv_fp8(value, CTXKV_CACHE_FP8_E4M3));
            assert_int_equal(ctxkv_narrow_e5m2(bits), ctxkv_fp8(value, CTXKV_CACHE_FP8_E5M2));
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        OPEN_TEST(a_general_store_arrives),        OPEN_TEST(few_columns_are_exact),
        OPEN_TEST(measured_batches_are_windows),   OPEN_TEST(many_rows_by_the_faster_way),
        cmocka_unit_test(narrow_equals_the_truth),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
