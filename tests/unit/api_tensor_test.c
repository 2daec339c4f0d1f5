// SPDX-License-Identifier: Apache-2.0
// DLPack operands of norms: every field of a DLTensor that can be wrong, and every layout that is
// right gives the same bits.
#include "checks.h"

#define HIDDEN 64
#define ROWS 3

static struct place place;
static ctxkv_norms *norms;
static uint16_t noise[ROWS * HIDDEN], want[ROWS * HIDDEN], gains[HIDDEN];
static const ctxkv_status bad = CTXKV_INVALID_ARGUMENT;

static int set_up(void **state) {
    (void)state;
    place = place_open(0);
    fill_bf16(noise, ROWS * HIDDEN, 1, 1.0f);
    fill_same(gains, HIDDEN, 0x3F80);
    ctxkv_norms_desc d;
    struct tensor w, x, out;
    ctxkv_norms_desc_init(&d);
    d.hidden_size = HIDDEN;
    d.num_layers = 1;
    d.hidden.kind = CTXKV_NORM_RMS;
    d.layer.kind = CTXKV_NORM_ABSENT;
    d.hidden_weight = tensor_on(&w, &place, gains, BF16, 1, DIMS(HIDDEN), 0);
    if (ctxkv_norms_create(place.device, &d, &norms)) return -1;
    return ctxkv_norms_run(
        norms, tensor_on(&x, &place, noise, BF16, 2, DIMS(ROWS, HIDDEN), 0),
        tensor_on(&out, &place, want, BF16, 3, DIMS(1, ROWS, HIDDEN), 0), 0);
}

static int tear_down(void **state) {
    (void)state;
    ctxkv_norms_destroy(norms);
    place_close(&place);
    return 0;
}

static uint16_t result[ROWS * HIDDEN];

static ctxkv_status run(const DLTensor *x) {
    struct tensor out;
    memset(result, POISON, sizeof result);
    return ctxkv_norms_run(
        norms, x, tensor_on(&out, &place, result, BF16, 3, DIMS(1, ROWS, HIDDEN), 0), 0);
}

static void refused(const DLTensor *x, const char *text) {
    assert_refused(run(x), bad, text);
    for (int i = 0; i < ROWS * HIDDEN; i++) assert_int_equal(result[i], 0x5A5A);
    struct tensor good;
    assert_ok(run(tensor_on(&good, &place, noise, BF16, 2, DIMS(ROWS, HIDDEN), 0)));
    assert_memory_equal(result, want, sizeof want);
}

static DLTensor *fresh(struct tensor *t) {
    tensor_on(t, &place, noise, BF16, 2, DIMS(ROWS, HIDDEN), 0);
    return &t->t;
}

static void wrong_fields(void **state) {
    (void)state;
    struct tensor t;
    refused(0, "x is NULL, must be a tensor");
    fresh(&t)->data = 0;
    refused(&t.t, "x has a NULL data address");
    fresh(&t)->device.device_type = kDLCUDA;
    refused(&t.t, "x lies on device type 2, id 0, must lie in CPU memory");
    fresh(&t)->device.device_type = (DLDeviceType)99;
    refused(&t.t, "x lies on device type 99");
    fresh(&t)->dtype = (DLDataType){kDLFloat, 16, 1};
    refused(&t.t, "x has dtype float16 (lanes 1), must be BF16");
    fresh(&t)->dtype = (DLDataType){kDLBfloat, 16, 2};
    refused(&t.t, "x has dtype bfloat16 (lanes 2), must be BF16");
    fresh(&t)->dtype = (DLDataType){kDLBfloat, 32, 1};
    refused(&t.t, "x has dtype bfloat32");
    fresh(&t)->dtype = (DLDataType){200, 8, 1};
    refused(&t.t, "x has dtype (DLPack code 200) 8 (lanes 1), must be BF16");
    fresh(&t)->ndim = 1;
    refused(&t.t, "x has shape [3] (1 dimensions), must be [*, 64]");
    fresh(&t)->ndim = 0;
    refused(&t.t, "x has shape [] (0 dimensions), must be [*, 64]");
    fresh(&t)->ndim = -1;
    refused(&t.t, "x has shape [?] (-1 dimensions), must be [*, 64]");
    fresh(&t)->ndim = 1000000;
    refused(&t.t, "x has shape [?] (1000000 dimensions)");
    fresh(&t)->shape = 0;
    refused(&t.t, "x has shape [?] (2 dimensions)");
    fresh(&t);
    t.shape[0] = -1;
    refused(&t.t, "x has shape [*, 64]");
    fresh(&t);
    t.shape[0] = INT64_MIN;
    refused(&t.t, "x has shape [-9223372036854775808, 64]");
    fresh(&t);
    t.shape[1] = HIDDEN + 1;
    refused(&t.t, "x has shape [3, 65] (2 dimensions), must be [*, 64]");
    fresh(&t)->byte_offset = UINT64_MAX;
    refused(&t.t, "x has byte_offset 18446744073709551615, must stay within");
    fresh(&t);
    t.shape[0] = INT64_MAX;
    refused(&t.t, "x has strides row-major, must stay within the address space");
}

static void wrong_strides(void **state) {
    (void)state;
    static const int64_t wrong[][2] = {
        {HIDDEN, 2},        {HIDDEN, 0},        {HIDDEN, -1},
        {1, ROWS},          {INT64_MAX, 1},     {INT64_MIN, 1},
        {INT64_MAX / 2, 1}, {INT64_MIN / 2, 1}, {-(INT64_MAX / 40), 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct tensor t;
        tensor_on(&t, &place, noise, BF16, 2, DIMS(ROWS, HIDDEN), wrong[i]);
        refused(&t.t, "x has strides [");
    }
}

// Writes the rows of noise at `first + row*stride` elements and runs from there.
static void layout(int64_t stride, int64_t first, uint64_t byte_offset, int shift) {
    enum { ROOM = 8 * HIDDEN * 2 + 64 };
    char room[ROOM];
    memset(room, 0xFF, sizeof room);
    for (int r = 0; r < ROWS; r++)
        memcpy(
            room + shift + byte_offset + 2 * (first + r * stride), noise + r * HIDDEN, HIDDEN * 2);
    struct tensor t;
    tensor_on(&t, &place, room + shift + 2 * first, BF16, 2, DIMS(ROWS, HIDDEN), DIMS(stride, 1));
    t.t.byte_offset = byte_offset;
    assert_ok(run(&t.t));
    assert_memory_equal(result, want, sizeof want);
}

static void good_layouts(void **state) {
    (void)state;
    layout(HIDDEN, 0, 0, 0);
    layout(HIDDEN, 0, 2, 0);
    layout(HIDDEN, 0, 48, 0);
    layout(HIDDEN, 0, 0, 1); // an odd address: as a tensor inside a file lies
    layout(HIDDEN + 1, 0, 1, 2);
    layout(2 * HIDDEN, 0, 0, 0);
    layout(-2 * HIDDEN, 4 * HIDDEN, 0, 0);
    layout(-HIDDEN, 2 * HIDDEN, 6, 1);
    struct tensor t;
    fresh(&t)->device.device_type = kDLCUDAHost; // pinned host memory
    assert_ok(run(&t.t));
    assert_memory_equal(result, want, sizeof want);
    // The stride of a dimension of size 1 carries no meaning.
    static const int64_t any[] = {0, 1, 77, -5, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < sizeof any / sizeof *any; i++) {
        struct tensor x, out;
        tensor_on(&x, &place, noise, BF16, 2, DIMS(1, HIDDEN), DIMS(any[i], 1));
        tensor_on(&out, &place, result, BF16, 3, DIMS(1, 1, HIDDEN), DIMS(any[i], any[i], 1));
        memset(result, POISON, sizeof result);
        assert_ok(ctxkv_norms_run(norms, &x.t, &out.t, 0));
        assert_memory_equal(result, want, HIDDEN * 2);
        assert_int_equal(result[HIDDEN], 0x5A5A);
    }
    // A row repeated by stride 0 may be read.
    struct tensor same;
    assert_ok(run(tensor_on(&same, &place, noise, BF16, 2, DIMS(ROWS, HIDDEN), DIMS(0, 1))));
    for (int r = 0; r < ROWS; r++) assert_memory_equal(result + r * HIDDEN, want, HIDDEN * 2);
}

static void outputs(void **state) {
    (void)state;
    struct tensor x, out;
    uint16_t room[8 * HIDDEN], image[8 * HIDDEN];
    fresh(&x);
    static const int64_t shared[][3] = {{0, 0, 1}, {0, HIDDEN - 1, 1}, {0, -HIDDEN + 1, 1}};
    for (size_t i = 0; i < 3; i++) {
        memset(room, POISON, sizeof room);
        tensor_on(&out, &place, room + 4 * HIDDEN, BF16, 3, DIMS(1, ROWS, HIDDEN), shared[i]);
        assert_refused(
            ctxkv_norms_run(norms, &x.t, &out.t, 0), bad,
            "must give each element an address of its own");
        for (int j = 0; j < 8 * HIDDEN; j++) assert_int_equal(room[j], 0x5A5A);
    }
    // Rows apart and backwards: only the rows are written.
    static const int64_t steps[] = {HIDDEN + 3, -HIDDEN - 3, HIDDEN};
    for (size_t i = 0; i < 3; i++) {
        memset(room, POISON, sizeof room);
        memset(image, POISON, sizeof image);
        for (int r = 0; r < ROWS; r++)
            memcpy(image + 4 * HIDDEN + r * steps[i], want + r * HIDDEN, HIDDEN * 2);
        tensor_on(
            &out, &place, room + 4 * HIDDEN, BF16, 3, DIMS(1, ROWS, HIDDEN), DIMS(0, steps[i], 1));
        assert_ok(ctxkv_norms_run(norms, &x.t, &out.t, 0));
        assert_memory_equal(room, image, sizeof room);
    }
    // x and out overlapping by one element.
    memset(room, POISON, sizeof room);
    memcpy(room, noise, sizeof noise);
    tensor_on(&x, &place, room, BF16, 2, DIMS(ROWS, HIDDEN), 0);
    tensor_on(&out, &place, room + ROWS * HIDDEN - 1, BF16, 3, DIMS(1, ROWS, HIDDEN), 0);
    assert_refused(
        ctxkv_norms_run(norms, &x.t, &out.t, 0), bad, "out overlaps x in memory, must lie apart");
    assert_memory_equal(room, noise, sizeof noise);
    tensor_on(&out, &place, room + ROWS * HIDDEN, BF16, 3, DIMS(1, ROWS, HIDDEN), 0);
    assert_ok(ctxkv_norms_run(norms, &x.t, &out.t, 0));
    assert_memory_equal(room + ROWS * HIDDEN, want, sizeof want);
    tensor_on(&out, &place, room, BF16, 3, DIMS(1, ROWS + 1, HIDDEN), 0);
    assert_refused(
        ctxkv_norms_run(norms, &x.t, &out.t, 0), bad,
        "out has shape [1, 4, 64] (3 dimensions), must be [1, 3, 64]");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_fields),
        cmocka_unit_test(wrong_strides),
        cmocka_unit_test(good_layouts),
        cmocka_unit_test(outputs),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
