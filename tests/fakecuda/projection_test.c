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
#include "cuda/few_params.h"
#include "cuda/few_plan.h"
#include "fake.h"

enum { D = 8192, LAYERS = 2, HEADS = 2, COLUMNS = 2 * HEADS * 64 };

static _Alignas(16) uint16_t weights[LAYERS * COLUMNS * D];

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
    fake.gemms = fake.maps = 0;
    return ctxkv_projection_run(
        projection, gpu_tensor(&b[0], weights, LAYERS, rows, D),
        gpu_tensor(&b[1], to, LAYERS, rows, COLUMNS), 0);
}

// x of so many layers (1: one for all), rows and this distance of rows, on `to`.
static ctxkv_status project_at(
    ctxkv_projection *projection, uint16_t *x, int64_t layers, int64_t rows, int64_t row,
    int64_t layer, uint16_t *to) {
    struct box b[2];
    int64_t strides[] = {layer, row, 1};
    fake.launches = 0;
    fake.gemms = fake.maps = 0;
    gpu_tensor(&b[0], x, layers, rows, D);
    b[0].t.strides = strides;
    return ctxkv_projection_run(
        projection, &b[0].t, gpu_tensor(&b[1], to, LAYERS, rows, COLUMNS), 0);
}

static void is_map(
    const uint16_t *x, uint64_t rows, uint64_t layers, uint64_t row, uint64_t layer,
    const ctxkv_few_params *p) {
    assert_int_equal(fake.maps, 1);
    assert_int_equal(fake.map.rank, 4);
    assert_ptr_equal(fake.map.address, x);
    const uint64_t dims[] = {64, rows, D / 64, layers}, strides[] = {2 * row, 128, 2 * layer};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(fake.map.dims[i], dims[i]);
        assert_int_equal(fake.map.steps[i], 1);
        if (i < 3) assert_int_equal(fake.map.strides[i], strides[i]);
    }
    assert_int_equal(fake.map.box[0], 64);
    assert_int_equal(fake.map.box[1], p->batch_rows);
    assert_int_equal(fake.map.box[2], p->box_lines);
    assert_int_equal(fake.map.box[3], 1);
    assert_int_equal(fake.map.type, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
    assert_int_equal(fake.map.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
    // Zeros where the tensor ends, for they are multiplied.
    assert_int_equal(fake.map.fill, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    // The kernel is given the map that was described.
    assert_int_equal(p->x.opaque[0], fake.maps);
}

// A projection alone of few rows: one launch, of the kernel that reads x as it lies.
static void projections_alone(void **state) {
    (void)state;
    static uint16_t kv[LAYERS * 65 * COLUMNS];
    ctxkv_device *device;
    ctxkv_projection *plans[2];
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_EXACT, &plans[0]), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_AUTO, &plans[1]), CTXKV_OK);
    const long before = fake.slow_calls;
    for (int i = 0; i < 2; i++)
        for (int64_t rows = 1; rows <= 64; rows++) {
            ctxkv_few_params p;
            assert_int_equal(project(plans[i], rows, kv), CTXKV_OK);
            assert_int_equal(fake.gemms, 0);
            assert_int_equal(fake.launches, 1);
            const struct fake_launch *l = &fake.launch[0];
            assert_non_null(strstr(l->kernel, "ctxkv_few_"));
            memcpy(&p, l->params, sizeof p);
            is_map(weights, (uint64_t)rows, LAYERS, D, (uint64_t)rows * D, &p);
            assert_int_equal(p.rows, rows);
            assert_int_equal(p.columns, COLUMNS);
            assert_int_equal(p.chunks, D / 8);
            assert_true(l->grid[1] * (unsigned)p.batch_rows >= rows);
            assert_true(l->grid[0] * (unsigned)p.tile_rows >= COLUMNS);
            assert_int_equal(l->grid[2], LAYERS);
            const bool alone = p.cluster_tiles * p.cluster_batches == 1;
            assert_int_equal(l->cluster[0], alone ? 0 : p.cluster_tiles);
            assert_int_equal(l->cluster[1], alone ? 0 : p.cluster_batches);
            assert_int_equal(l->threads, CTXKV_FEW_THREADS);
            assert_int_equal(l->programmatic, 1);
            assert_ptr_equal(p.kv, kv);
            assert_int_equal(p.kv_layer, rows * COLUMNS);
            assert_int_equal(p.kv_row, rows > 1 ? COLUMNS : 0);
            assert_int_equal(p.x_shared, 0);
            assert_int_equal(p.kv_by2, 0);
        }
    assert_int_equal(project(plans[0], 65, kv), CTXKV_OK);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_projection_64");
    assert_int_equal(project(plans[1], 65, kv), CTXKV_OK);
    assert_int_equal(fake.gemms, 1);
    assert_int_equal(fake.slow_calls, before);
    for (int i = 0; i < 2; i++) ctxkv_projection_destroy(plans[i]);
    ctxkv_device_close(device);
}

// Operands of any stride that a tensor map can say; others go as before.
static void maps_of_operands(void **state) {
    (void)state;
    static uint16_t x[(LAYERS * 65 + 2) * (D + 64)], kv[LAYERS * 65 * COLUMNS + 1];
    ctxkv_device *device;
    ctxkv_projection *exact;
    ctxkv_few_params p;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_EXACT, &exact), CTXKV_OK);
    uint16_t *at = x;
    while ((uintptr_t)at % 16) at++;
    const struct {
        int64_t layers, rows, row, layer, shift, map_row, map_layer; // map_row 0: no map
    } cases[] = {
        {LAYERS, 5, D + 8, 5 * (D + 8), 0, D + 8, 5 * (D + 8)},
        {LAYERS, 5, 5 * D + 64, D + 8, 0, 5 * D + 64, D + 8}, // rows of layers side by side
        {LAYERS, 1, 3, D, 0, D, D},                           // one row: its stride means nothing
        {1, 64, D, 12345, 0, D, D},                           // one x for all layers
        {LAYERS, 5, D, 0, 0, D, D},
        {LAYERS, 5, D + 1, 5 * (D + 1), 0, 0, 0},
        {LAYERS, 5, D, 5 * D + 4, 0, 0, 0},
        {LAYERS, 5, D, 5 * D, 1, 0, 0},
        {LAYERS, 5, 0, D, 0, 0, 0}, // the same row five times
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint16_t *from = at + cases[i].shift;
        assert_int_equal(
            project_at(
                exact, from, cases[i].layers, cases[i].rows, cases[i].row, cases[i].layer, kv),
            CTXKV_OK);
        assert_int_equal(fake.launches, 1);
        const bool general = !strncmp(fake.launch[0].kernel, "ctxkv_projection_", 17);
        assert_int_equal(general, cases[i].map_row == 0);
        if (general) {
            assert_int_equal(fake.maps, 0);
            continue;
        }
        memcpy(&p, fake.launch[0].params, sizeof p);
        const bool shared = cases[i].layers == 1 || cases[i].layer == 0;
        assert_int_equal(p.x_shared, shared);
        is_map(
            from, (uint64_t)cases[i].rows, shared ? 1 : LAYERS, (uint64_t)cases[i].map_row,
            (uint64_t)cases[i].map_layer, &p);
    }
    assert_int_equal(project(exact, 5, kv + 1), CTXKV_OK);
    memcpy(&p, fake.launch[0].params, sizeof p);
    assert_int_equal(p.kv_by2, 1);
    ctxkv_projection_destroy(exact);
    ctxkv_device_close(device);
}

// A map that the driver refuses is an error that says so, and nothing is launched.
static void maps_fail(void **state) {
    (void)state;
    static uint16_t kv[LAYERS * 5 * COLUMNS];
    ctxkv_device *device;
    ctxkv_projection *automatic;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_AUTO, &automatic), CTXKV_OK);
    fake.fail_name = "cuTensorMapEncodeTiled";
    fake.fail_with = CUDA_ERROR_UNKNOWN;
    assert_int_equal(project(automatic, 5, kv), CTXKV_DRIVER);
    assert_non_null(strstr(ctxkv_last_error(), "describing the rows"));
    assert_int_equal(fake.launches, 0);
    fake.fail_name = 0;
    assert_int_equal(project(automatic, 5, kv), CTXKV_OK);
    assert_int_equal(fake.launches, 1);
    ctxkv_projection_destroy(automatic);
    ctxkv_device_close(device);
    // A driver without tensor maps: what there was before.
    static struct ctxkv__driver old;
    old = fake_driver;
    old.cuTensorMapEncodeTiled = 0;
    ctxkv__driver_use(&old);
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    assert_int_equal(make_projection(device, CTXKV_PROJECTION_AUTO, &automatic), CTXKV_OK);
    assert_int_equal(project(automatic, 5, kv), CTXKV_OK);
    assert_int_equal(fake.gemms, 1);
    ctxkv_projection_destroy(automatic);
    ctxkv_device_close(device);
    ctxkv__driver_use(&fake_driver);
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
        cmocka_unit_test_setup_teardown(maps_of_operands, setup, teardown),
        cmocka_unit_test_setup_teardown(maps_fail, setup, teardown),
        cmocka_unit_test_setup_teardown(projection_calls_fail, setup, teardown),
        cmocka_unit_test_setup_teardown(cublas_is_refused_by_name, setup, teardown),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
