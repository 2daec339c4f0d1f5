// SPDX-License-Identifier: Apache-2.0
// Projections alone on a CUDA device, against the fake driver.
#include "cuda/decode_params.h"
#include "small_chain.h"

static ctxkv_status make_projection(
    ctxkv_device *device, ctxkv_projection_mode mode, ctxkv_projection **projection) {
    struct tensor b;
    ctxkv_projection_desc d;
    ctxkv_projection_desc_init(&d);
    const DLTensor *w = tensor_on(&b, &gpu, weights, BF16, 3, DIMS(LAYERS, COLUMNS, D), 0);
    d.num_layers = LAYERS;
    d.num_kv_heads = HEADS;
    d.weights = &w;
    d.weight_count = 1;
    d.mode = mode;
    return ctxkv_projection_create(device, &d, projection);
}

static ctxkv_status project(ctxkv_projection *projection, int64_t rows, uint16_t *to) {
    struct tensor b[2];
    fake.launches = 0;
    fake.gemms = 0;
    return ctxkv_projection_run(
        projection, tensor_on(&b[0], &gpu, weights, BF16, 3, DIMS(LAYERS, rows, D), 0),
        tensor_on(&b[1], &gpu, to, BF16, 3, DIMS(LAYERS, rows, COLUMNS), 0), 0);
}

// A projection alone: packed n, then the decode kernel that writes kv; more rows otherwise.
static void projections_alone(void **state) {
    static uint16_t kv[LAYERS * 65 * COLUMNS];
    ctxkv_projection *exact, *automatic;
    assert_ok(make_projection(*state, CTXKV_PROJECTION_EXACT, &exact));
    assert_ok(make_projection(*state, CTXKV_PROJECTION_AUTO, &automatic));
    long before = fake.slow_calls;
    assert_ok(project(exact, 5, kv));
    assert_string_equal(fake.launch[0].kernel, "ctxkv_projection_16");
    assert_ok(project(automatic, 16, kv));
    assert_int_equal(fake.gemms, 0);
    assert_int_equal(fake.launches, 2);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_decode_pack_rows");
    ctxkv_decode_rows_params r;
    ctxkv_decode_params d;
    memcpy(&r, fake.launch[0].params, sizeof r);
    memcpy(&d, fake.launch[1].params, sizeof d);
    assert_non_null(strstr(fake.launch[1].kernel, "ctxkv_decode_n"));
    assert_int_equal(fake.launch[0].grid[1], 16);
    assert_int_equal(fake.launch[0].grid[2], LAYERS);
    assert_ptr_equal(r.x, weights);
    assert_ptr_equal(d.x, r.out);
    assert_int_equal(d.x_layer, r.out_layer);
    assert_ptr_equal(d.kv, kv);
    assert_int_equal(d.kv_layer, 16 * COLUMNS);
    assert_int_equal(d.kv_row, COLUMNS);
    assert_int_equal(d.flags, CTXKV_DECODE_KV);
    assert_ok(project(automatic, 17, kv));
    assert_int_equal(fake.gemms, 1);
    assert_int_equal(fake.slow_calls, before);
    ctxkv_projection_destroy(exact);
    ctxkv_projection_destroy(automatic);
}

// Each call of making a projection fails in turn; without memory for the packed weights it is
// slower.
static void projection_calls_fail(void **state) {
    (void)state;
    const CUresult errors[] = {CUDA_ERROR_UNKNOWN, CUDA_ERROR_OUT_OF_MEMORY};
    long made[2] = {0, 0}, refused[2] = {0, 0};
    for (int e = 0; e < 2; e++)
        for (long n = 0;; n++) {
            ctxkv_device *device;
            ctxkv_projection *projection = 0;
            fake_reset();
            assert_ok(ctxkv_device_open("cuda:0", 0, &device));
            long first = fake.calls;
            fake.fail_at = first + n;
            fake.fail_with = errors[e];
            ctxkv_status status = make_projection(device, CTXKV_PROJECTION_AUTO, &projection);
            bool reached = fake.calls > first + n;
            fake.fail_at = -1;
            status ? refused[e]++ : made[e]++;
            ctxkv_projection_destroy(projection);
            ctxkv_device_close(device);
            assert_true(fake_clean());
            if (!reached) break;
        }
    assert_true(refused[0] > 10 && made[1] > made[0]);
}

// A missing cuBLAS costs a CUBLAS plan its existence.
static void cublas_is_refused_by_name(void **state) {
    ctxkv_projection *projection;
    fake.cublas_fail_with = 1;
    assert_int_equal(make_projection(*state, CTXKV_PROJECTION_CUBLAS, &projection), CTXKV_DRIVER);
    assert_non_null(strstr(ctxkv_last_error(), "cuBLAS"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        OPEN_TEST(projections_alone),
        FAKE_TEST(projection_calls_fail),
        OPEN_TEST(cublas_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
