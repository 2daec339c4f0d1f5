// SPDX-License-Identifier: Apache-2.0
// Projections alone on a CUDA device, against the fake driver.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ctxkv/ctxkv.h"
#include "cuda/decode_params.h"
#include "fake.h"

enum { D = 8192, LAYERS = 2, HEADS = 2, COLUMNS = 2 * HEADS * 64 };

static uint16_t weights[LAYERS * COLUMNS * D];

struct box {
    DLTensor t;
    int64_t shape[3];
};

static const DLTensor *gpu_tensor(
    struct box *b, void *data, int64_t layers, int64_t rows, int64_t columns) {
    static const DLDataType bf16 = {kDLBfloat, 16, 1};
    memcpy(b->shape, (int64_t[]){layers, rows, columns}, sizeof b->shape);
    b->t = (DLTensor){data, {kDLCUDA, 0}, 3, bf16, b->shape, 0, 0};
    return &b->t;
}

static int setup(void **state) {
    (void)state;
    fake_reset();
    ctxkv__driver_use(&fake_driver);
    ctxkv__cublas_use(&fake_cublas);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    bool clean = fake_clean();
    ctxkv__driver_use(0);
    ctxkv__cublas_use(0);
    return clean ? 0 : 1;
}

static ctxkv_status make_projection(
    ctxkv_device *device, ctxkv_projection_mode mode, ctxkv_projection **projection) {
    struct box b;
    ctxkv_projection_desc d;
    ctxkv_projection_desc_init(&d);
    const DLTensor *w = gpu_tensor(&b, weights, LAYERS, COLUMNS, D);
    d.num_layers = LAYERS;
    d.num_kv_heads = HEADS;
    d.weights = &w;
    d.weight_count = 1;
    d.mode = mode;
    return ctxkv_projection_create(device, &d, projection);
}

static ctxkv_status project(ctxkv_projection *projection, int64_t rows, uint16_t *to) {
    struct box b[2];
    fake.launches = 0;
    fake.gemms = 0;
    return ctxkv_projection_run(
        projection, gpu_tensor(&b[0], weights, LAYERS, rows, D),
        gpu_tensor(&b[1], to, LAYERS, rows, COLUMNS), 0);
}

// A projection alone: packed n, then the decode kernel that writes kv; more rows otherwise.
static void projections_alone(void **state) {
    (void)state;
    static uint16_t kv[LAYERS * 65 * COLUMNS];
    ctxkv_device *device;
    ctxkv_projection *exact, *automatic;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_EXACT, &exact), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_AUTO, &automatic), CTXKV_OK);
    long before = fake.slow_calls;
    assert_int_equal(project(exact, 5, kv), CTXKV_OK);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_projection_16");
    assert_int_equal(project(automatic, 16, kv), CTXKV_OK);
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
    assert_int_equal(project(automatic, 17, kv), CTXKV_OK);
    assert_int_equal(fake.gemms, 1);
    assert_int_equal(fake.slow_calls, before);
    ctxkv_projection_destroy(exact);
    ctxkv_projection_destroy(automatic);
    ctxkv_device_close(device);
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
            assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
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
    (void)state;
    ctxkv_device *device;
    ctxkv_projection *projection;
    fake.cublas_fail_with = 1;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_CUBLAS, &projection), CTXKV_DRIVER);
    assert_non_null(strstr(ctxkv_last_error(), "cuBLAS"));
    ctxkv_device_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(projections_alone, setup, teardown),
        cmocka_unit_test_setup_teardown(projection_calls_fail, setup, teardown),
        cmocka_unit_test_setup_teardown(cublas_is_refused_by_name, setup, teardown),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
