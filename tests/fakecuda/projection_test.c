// SPDX-License-Identifier: Apache-2.0
// Projections alone on a CUDA device, against the fake driver.
#include "cuda/few_params.h"
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
    fake.gemms = fake.maps = 0;
    return ctxkv_projection_run(
        projection, tensor_on(&b[0], &gpu, weights, BF16, 3, DIMS(LAYERS, rows, D), 0),
        tensor_on(&b[1], &gpu, to, BF16, 3, DIMS(LAYERS, rows, COLUMNS), 0), 0);
}

// x of so many layers (1: one for all), rows and this distance of rows, on `to`.
static ctxkv_status project_at(
    ctxkv_projection *projection, uint16_t *x, int64_t layers, int64_t rows, int64_t row,
    int64_t layer, uint16_t *to) {
    struct tensor b[2];
    fake.launches = 0;
    fake.gemms = fake.maps = 0;
    return ctxkv_projection_run(
        projection, tensor_on(&b[0], &gpu, x, BF16, 3, DIMS(layers, rows, D), DIMS(layer, row, 1)),
        tensor_on(&b[1], &gpu, to, BF16, 3, DIMS(LAYERS, rows, COLUMNS), 0), 0);
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

static void is_launch(const struct fake_launch *l, int64_t rows, const uint16_t *kv) {
    ctxkv_few_params p;
    memcpy(&p, l->params, sizeof p);
    assert_non_null(strstr(l->kernel, "ctxkv_few_"));
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

// A projection alone of few rows: one launch, of the kernel that reads x as it lies.
static void projections_alone(void **state) {
    static _Alignas(4) uint16_t kv[LAYERS * 65 * COLUMNS];
    ctxkv_projection *plans[2];
    assert_ok(make_projection(*state, CTXKV_PROJECTION_EXACT, &plans[0]));
    assert_ok(make_projection(*state, CTXKV_PROJECTION_AUTO, &plans[1]));
    const long before = fake.slow_calls;
    for (int i = 0; i < 2; i++)
        for (int64_t rows = 1; rows <= 64; rows++) {
            assert_ok(project(plans[i], rows, kv));
            assert_int_equal(fake.gemms, 0);
            assert_int_equal(fake.launches, 1);
            is_launch(&fake.launch[0], rows, kv);
        }
    assert_ok(project(plans[0], 65, kv));
    assert_string_equal(fake.launch[0].kernel, "ctxkv_projection_64");
    assert_ok(project(plans[1], 65, kv));
    assert_int_equal(fake.gemms, 1);
    assert_int_equal(fake.slow_calls, before);
    for (int i = 0; i < 2; i++) ctxkv_projection_destroy(plans[i]);
}

// Operands of any stride that a tensor map can say; others go as before.
static void maps_of_operands(void **state) {
    static _Alignas(16) uint16_t from[LAYERS * 65 * (D + 64)], kv[LAYERS * 65 * COLUMNS + 1];
    static const struct {
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
    ctxkv_projection *exact;
    ctxkv_few_params p;
    assert_ok(make_projection(*state, CTXKV_PROJECTION_EXACT, &exact));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const bool shared = cases[i].layers == 1 || cases[i].layer == 0, map = cases[i].map_row;
        uint16_t *at = from + cases[i].shift;
        assert_ok(project_at(
            exact, at, cases[i].layers, cases[i].rows, cases[i].row, cases[i].layer, kv));
        assert_int_equal(fake.launches, 1);
        const char *kernel = fake.launch[0].kernel;
        assert_non_null(strstr(kernel, map ? "ctxkv_few_" : "ctxkv_projection_"));
        assert_int_equal(fake.maps, map);
        if (!map) continue;
        memcpy(&p, fake.launch[0].params, sizeof p);
        assert_int_equal(p.x_shared, shared);
        is_map(
            at, (uint64_t)cases[i].rows, shared ? 1 : LAYERS, (uint64_t)cases[i].map_row,
            (uint64_t)cases[i].map_layer, &p);
    }
    assert_ok(project(exact, 5, kv + 1));
    memcpy(&p, fake.launch[0].params, sizeof p);
    assert_int_equal(p.kv_by2, 1);
    ctxkv_projection_destroy(exact);
}

// A map that the driver refuses is an error that says so, and nothing is launched.
static void maps_fail(void **state) {
    static uint16_t kv[LAYERS * 5 * COLUMNS];
    ctxkv_projection *automatic;
    assert_ok(make_projection(*state, CTXKV_PROJECTION_AUTO, &automatic));
    fake.fail_name = "cuTensorMapEncodeTiled";
    fake.fail_with = CUDA_ERROR_UNKNOWN;
    assert_int_equal(project(automatic, 5, kv), CTXKV_DRIVER);
    assert_non_null(strstr(ctxkv_last_error(), "describing the rows"));
    assert_int_equal(fake.launches, 0);
    fake.fail_name = 0;
    assert_ok(project(automatic, 5, kv));
    assert_int_equal(fake.launches, 1);
    ctxkv_projection_destroy(automatic);
}

// A driver without tensor maps: cuBLAS, or the kernel for any shape.
static void no_maps(void **state) {
    (void)state;
    static uint16_t kv[LAYERS * 5 * COLUMNS];
    static struct ctxkv__driver old;
    ctxkv_device *device;
    ctxkv_projection *plan;
    old = fake_driver;
    old.cuTensorMapEncodeTiled = 0;
    ctxkv__driver_use(&old);
    assert_ok(ctxkv_device_open("cuda:0", 0, &device));
    for (int exact = 0; exact < 2; exact++) {
        assert_ok(
            make_projection(device, exact ? CTXKV_PROJECTION_EXACT : CTXKV_PROJECTION_AUTO, &plan));
        assert_ok(project(plan, 5, kv));
        assert_int_equal(fake.gemms, !exact);
        assert_int_equal(fake.launches, exact);
        ctxkv_projection_destroy(plan);
    }
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
        OPEN_TEST(maps_of_operands),
        OPEN_TEST(maps_fail),
        FAKE_TEST(no_maps),
        FAKE_TEST(projection_calls_fail),
        OPEN_TEST(cublas_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
