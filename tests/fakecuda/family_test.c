// SPDX-License-Identifier: Apache-2.0
// What the Qwen3 family's options become on a CUDA device, against the fake driver; and the integer
// conversions of GPUs without FP8 instructions.
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ctxkv/ctxkv.h"
#include "cuda/narrow.h"
#include "cuda/params.h"
#include "cuda/store_general.h"
#include "fake.h"

enum { D = 4096, LAYERS = 2, HEADS = 3, HEAD = 128, ROWS = 5, FIVE = 5 };

static uint16_t source[LAYERS * ROWS * HEADS * HEAD], x[ROWS * D];
static uint16_t weights[LAYERS * HEADS * HEAD * D], k_weight[LAYERS * HEAD];
static uint16_t five[5 * 256 * D];
static uint16_t kv[ROWS * LAYERS * HEADS * HEAD];
static _Alignas(16) uint8_t cache[LAYERS][2][4 * 16 * HEADS * HEAD + 16];
static _Alignas(16) float table[LAYERS][9 * HEAD];
static float scales[4] = {1, 2, 3, 4};
static int64_t positions[ROWS], slots[ROWS];

struct box {
    DLTensor t;
    int64_t shape[4];
};

static const DLTensor *gpu_tensor(
    struct box *b, void *data, DLDataType type, int ndim, int64_t a, int64_t c, int64_t d,
    int64_t e) {
    const int64_t shape[] = {a, c, d, e};
    memcpy(b->shape, shape, sizeof shape);
    b->t = (DLTensor){data, {kDLCUDA, 0}, ndim, type, b->shape, 0, 0};
    return &b->t;
}
static const DLDataType bf16 = {kDLBfloat, 16, 1}, i64 = {kDLInt, 64, 1}, fp32 = {kDLFloat, 32, 1},
                        byte = {kDLUInt, 8, 1};

static int setup(void **state) {
    ctxkv_device *device;
    fake_reset();
    ctxkv__driver_use(&fake_driver);
    ctxkv__cublas_use(&fake_cublas);
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    *state = device;
    return 0;
}
static int teardown(void **state) {
    ctxkv_device_close(*state);
    bool clean = fake_clean();
    ctxkv__driver_use(0);
    ctxkv__cublas_use(0);
    return clean ? 0 : 1;
}

// FP8 caches with scales, FP32 tables of their own, V made of K: all of it reaches the kernel.
static ctxkv_store *general_store(ctxkv_device *device) {
    struct box b[9];
    ctxkv_store_desc d;
    ctxkv_store *store;
    ctxkv_store_desc_init(&d);
    d.num_layers = LAYERS;
    d.num_kv_heads = HEADS;
    d.head_dim = HEAD;
    d.k_norm = CTXKV_K_NORM_RMS;
    d.k_norm_weight = gpu_tensor(&b[0], k_weight, bf16, 2, LAYERS, HEAD, 0, 0);
    d.rope = CTXKV_ROPE_NEOX;
    const DLTensor *tables[LAYERS] = {
        gpu_tensor(&b[1], table[0], fp32, 2, 9, 64, 0, 0),
        gpu_tensor(&b[2], table[1] + 1, fp32, 2, 7, 32, 0, 0)};
    const DLTensor *k_scales[LAYERS] = {
        gpu_tensor(&b[3], &scales[0], fp32, 1, 1, 0, 0, 0),
        gpu_tensor(&b[4], &scales[1], fp32, 1, 1, 0, 0, 0)};
    const DLTensor *v_scales[LAYERS] = {
        gpu_tensor(&b[5], &scales[2], fp32, 1, 1, 0, 0, 0),
        gpu_tensor(&b[6], &scales[3], fp32, 1, 1, 0, 0, 0)};
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
    assert_int_equal(ctxkv_store_create(device, &d, &store), CTXKV_OK);
    return store;
}

static void a_general_store_arrives(void **state) {
    ctxkv_store *store = general_store(*state);
    struct box b[8];
    const DLTensor *keys[LAYERS], *values[LAYERS];
    for (int l = 0; l < LAYERS; l++) { // the second layer's caches are a byte off
        keys[l] = gpu_tensor(&b[l], cache[l][0] + l, byte, 4, 4, 16, HEADS, HEAD);
        values[l] = gpu_tensor(&b[2 + l], cache[l][1] + l, byte, 4, 4, 16, HEADS, HEAD);
    }
    assert_int_equal(ctxkv_store_bind_caches(store, keys, values, LAYERS), CTXKV_OK);
    fake.launches = 0;
    const DLTensor *k = gpu_tensor(&b[4], source, bf16, 4, LAYERS, ROWS, HEADS, HEAD);
    const DLTensor *at = gpu_tensor(&b[5], positions, i64, 1, ROWS, 0, 0, 0);
    const DLTensor *s = gpu_tensor(&b[6], slots, i64, 1, ROWS, 0, 0, 0);
    assert_int_equal(ctxkv_store_run(store, k, k, at, &s, 1, 0), CTXKV_INVALID_ARGUMENT);
    assert_non_null(strstr(ctxkv_last_error(), "v is given"));
    assert_int_equal(fake.launches, 0);
    assert_int_equal(ctxkv_store_run(store, k, 0, at, &s, 1, 0), CTXKV_OK);
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

// One input for all layers and few columns: cuBLAS would split K, so the exact kernel does it.
static void few_columns_are_exact(void **state) {
    struct box b[3];
    ctxkv_projection_desc d;
    ctxkv_projection *projection;
    ctxkv_projection_desc_init(&d);
    d.hidden_size = D;
    d.num_layers = LAYERS;
    d.num_kv_heads = HEADS;
    d.head_dim = HEAD;
    d.k_only = 1;
    d.bias_add = CTXKV_BIAS_AFTER;
    const DLTensor *w = gpu_tensor(&b[0], weights, bf16, 3, LAYERS, HEADS * HEAD, D, 0);
    d.weights = &w;
    d.weight_count = 1;
    assert_int_equal(ctxkv_projection_create(*state, &d, &projection), CTXKV_OK);
    struct box out;
    const int64_t columns = HEADS * HEAD;
    int64_t stride[] = {columns, LAYERS * columns, 1};
    gpu_tensor(&out, kv, bf16, 3, LAYERS, ROWS, columns, 0);
    out.t.strides = stride;
    fake.gemms = fake.launches = 0;
    const DLTensor *in = gpu_tensor(&b[1], x, bf16, 3, 1, ROWS, D, 0);
    assert_int_equal(ctxkv_projection_run(projection, in, &out.t, 0), CTXKV_OK);
    assert_int_equal(fake.gemms, 0);
    assert_int_equal(fake.launches, 1);
    ctxkv_projection_params p;
    memcpy(&p, fake.launch[0].params, sizeof p);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_projection_16");
    assert_int_equal(fake.launch[0].grid[0], columns / 64);
    assert_int_equal(p.parts, 1);
    assert_int_equal(p.block_columns, columns);
    assert_int_equal(p.flags, CTXKV_PROJECTION_ROUND_FIRST);
    ctxkv_projection_destroy(projection);
}

// Five layers of 256 columns: cuBLAS by the numbers of rows that were compared, windows over the
// rest.
static void measured_batches_are_windows(void **state) {
    static const struct {
        int64_t rows, gemms, each;
    } cases[] = {{63, 0, 0},       {64, 1, 64},       {65, 2, 64},
                 {128, 1, 128},    {1000, 2, 512},    {4096, 1, 4096},
                 {12289, 4, 4096}, {16384, 1, 16384}, {32769, 3, 16384}};
    enum { COLUMNS = 256 };
    // Nothing is read there; more rows than there is memory for lie apart.
    void *far_x = (void *)(uintptr_t)0x100000000000, *far_kv = (void *)(uintptr_t)0x200000000000;
    struct box b[3];
    ctxkv_projection_desc d;
    ctxkv_projection *projection;
    ctxkv_projection_desc_init(&d);
    d.hidden_size = D;
    d.num_layers = FIVE;
    d.num_kv_heads = 1;
    d.head_dim = HEAD;
    const DLTensor *w = gpu_tensor(&b[0], five, bf16, 3, FIVE, COLUMNS, D, 0);
    d.weights = &w;
    d.weight_count = 1;
    assert_int_equal(ctxkv_projection_create(*state, &d, &projection), CTXKV_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t stride[] = {COLUMNS, FIVE * COLUMNS, 1};
        gpu_tensor(&b[1], far_kv, bf16, 3, FIVE, cases[i].rows, COLUMNS, 0);
        b[1].t.strides = stride;
        fake.gemms = fake.gemm_rows = fake.launches = 0;
        const DLTensor *in = gpu_tensor(&b[2], far_x, bf16, 3, 1, cases[i].rows, D, 0);
        assert_int_equal(ctxkv_projection_run(projection, in, &b[1].t, 0), CTXKV_OK);
        assert_int_equal(fake.gemms, cases[i].gemms);
        assert_int_equal(fake.gemm_rows, cases[i].each);
        if (cases[i].gemms) assert_int_equal(fake.gemm_batch, FIVE);
    }
    ctxkv_projection_destroy(projection);
}

// A chain of the family at real shapes: cuBLAS where it was measured faster, else the prefill
// kernels, and these wherever rows or shape are not ones at which cuBLAS is known to be exact.
static void many_rows_by_the_faster_way(void **state) {
    static const struct {
        int64_t heads, hidden, rows;
        int gemms; // 0: the prefill kernels
    } cases[] = {
        {1, 4096, 96, 0},   {1, 4096, 128, 1},  {1, 4096, 129, 0},   {1, 4096, 4096, 1},
        {1, 4096, 5000, 0}, {1, 4096, 8192, 0}, {1, 4096, 16384, 0}, {8, 4096, 65, 1},
        {8, 4096, 1024, 1}, {8, 4096, 2048, 0}, {8, 2560, 16384, 0}, {2, 1024, 65, 0},
        {8, 2304, 130, 0},
    };
    // Nothing is read there.
    char *far = (char *)(uintptr_t)0x100000000000;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct box b[24];
        ctxkv_norms_desc n;
        ctxkv_projection_desc p;
        ctxkv_store_desc s;
        ctxkv_chain_desc c;
        ctxkv_chain *chain;
        ctxkv_norms_desc_init(&n);
        ctxkv_projection_desc_init(&p);
        ctxkv_store_desc_init(&s);
        ctxkv_chain_desc_init(&c);
        const int64_t H = cases[i].heads, T = cases[i].rows, hidden_size = cases[i].hidden;
        n.hidden_size = p.hidden_size = hidden_size;
        n.num_layers = p.num_layers = s.num_layers = FIVE;
        p.num_kv_heads = s.num_kv_heads = H;
        p.head_dim = s.head_dim = HEAD;
        n.hidden.kind = CTXKV_NORM_RMS;
        n.layer.kind = CTXKV_NORM_ABSENT;
        n.hidden_weight = gpu_tensor(&b[0], x, bf16, 1, hidden_size, 0, 0, 0);
        s.k_norm = CTXKV_K_NORM_RMS;
        s.k_norm_weight = gpu_tensor(&b[1], five, bf16, 2, FIVE, HEAD, 0, 0);
        s.rope = CTXKV_ROPE_NEOX;
        s.cos_sin = gpu_tensor(&b[2], table, bf16, 2, 9, HEAD, 0, 0);
        const DLTensor *w = gpu_tensor(&b[3], far, bf16, 3, FIVE, 2 * H * HEAD, hidden_size, 0);
        p.weights = &w;
        p.weight_count = 1;
        c.norms = &n;
        c.projection = &p;
        c.store = &s;
        c.max_rows = T;
        setenv("CTXKV_CHAIN_WAYS", "prefill", 1);
        assert_int_equal(ctxkv_chain_create(*state, &c, &chain), CTXKV_OK);
        unsetenv("CTXKV_CHAIN_WAYS");
        const DLTensor *keys[FIVE], *values[FIVE];
        for (int l = 0; l < FIVE; l++) {
            keys[l] = gpu_tensor(&b[4 + l], far, bf16, 4, 2000, 16, H, HEAD);
            values[l] = gpu_tensor(&b[9 + l], far, bf16, 4, 2000, 16, H, HEAD);
        }
        assert_int_equal(ctxkv_chain_bind_caches(chain, keys, values, FIVE), CTXKV_OK);
        fake.gemms = fake.launches = 0;
        const DLTensor *to = gpu_tensor(&b[14], far, i64, 1, T, 0, 0, 0);
        assert_int_equal(
            ctxkv_chain_run(
                chain, gpu_tensor(&b[15], far, bf16, 2, T, hidden_size, 0, 0),
                gpu_tensor(&b[16], far, i64, 1, T, 0, 0, 0), &to, 1, 0),
            CTXKV_OK);
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
        cmocka_unit_test_setup_teardown(a_general_store_arrives, setup, teardown),
        cmocka_unit_test_setup_teardown(few_columns_are_exact, setup, teardown),
        cmocka_unit_test_setup_teardown(measured_batches_are_windows, setup, teardown),
        cmocka_unit_test_setup_teardown(many_rows_by_the_faster_way, setup, teardown),
        cmocka_unit_test(narrow_equals_the_truth),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
