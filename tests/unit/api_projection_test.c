// SPDX-License-Identifier: Apache-2.0
// ctxkv_projection: every refusal, and all ways to hand over the weights give the same bits.
#include "plan_checks.h"

#define D 32
#define L 2
#define H 1
#define N 64
#define C (2 * H * N)
#define T 3

static uint16_t weights[L * C * D], normed[L * T * D], bias[L * C];
static struct tensor stacked, bias_tensor;
static const DLTensor *one[1];

static int set_up(void **state) {
    (void)state;
    place = place_open(2);
    fill_bf16(weights, L * C * D, 5, 1.0f);
    fill_bf16(normed, L * T * D, 6, 1.0f);
    fill_bf16(bias, L * C, 7, 1.0f);
    one[0] = tensor_on(&stacked, &place, weights, BF16, 3, DIMS(L, C, D), 0);
    tensor_on(&bias_tensor, &place, bias, BF16, 2, DIMS(L, C), 0);
    return 0;
}

static ctxkv_projection_desc good(void) {
    ctxkv_projection_desc d;
    ctxkv_projection_desc_init(&d);
    d.hidden_size = D;
    d.num_layers = L;
    d.num_kv_heads = H;
    d.head_dim = N;
    d.weights = one;
    d.weight_count = 1;
    d.bias = &bias_tensor.t;
    d.max_rows = 8;
    return d;
}

CREATE_OF(projection)
#define REFUSE(assignment, status, text) REFUSE_OF(projection, assignment, status, text)

static void descriptor(void **state) {
    (void)state;
    REFUSE(d.size = 0, bad, "desc->size is 0, must be at least");
    REFUSE(d.hidden_size = 0, bad, "hidden_size is 0, must be in 16..1048576");
    REFUSE(d.hidden_size = 24, bad, "hidden_size is 24, must be a multiple of 16");
    REFUSE(d.num_layers = 0, bad, "num_layers is 0, must be in 1..65535");
    REFUSE(d.num_layers = INT64_MAX, bad, "num_layers is 9223372036854775807");
    REFUSE(d.num_kv_heads = 0, bad, "num_kv_heads is 0, must be in 1..65535");
    REFUSE(d.num_kv_heads = 65536, bad, "num_kv_heads is 65536");
    REFUSE(d.head_dim = 96, bad, "head_dim is 96, must be 64, 128, 256 or 512");
    REFUSE(d.head_dim = 0, bad, "head_dim is 0");
    REFUSE(d.mode = (ctxkv_projection_mode)3, bad, "mode is 3, must be in 0..2");
    REFUSE(d.mode = CTXKV_PROJECTION_CUBLAS, bad, "mode is CUBLAS on a CPU device");
    REFUSE(d.max_rows = -1, bad, "max_rows is -1, must be in 0..");
    REFUSE(d.weight_count = 0, bad, "weight_count is 0, must be 1, num_layers or 2*num_layers");
    REFUSE(d.weight_count = 3, bad, "weight_count is 3");
    REFUSE(d.weights = 0, bad, "weights is NULL, must be an address");
    const DLTensor *none[1] = {0};
    REFUSE(d.weights = none, bad, "weights[0] is NULL, must be a tensor");
    struct tensor t;
    const DLTensor *other[1] = {&t.t};
    tensor_on(&t, &place, weights, BF16, 3, DIMS(L - 1, C, D), 0);
    REFUSE(
        d.weights = other, bad,
        "weights[0] has shape [1, 128, 32] (3 dimensions), must be [2, 128, 32]");
    tensor_on(&t, &place, weights, BF16, 2, DIMS(C, D), 0);
    REFUSE(
        d.weights = other, bad, "weights[0] has shape [128, 32] (2 dimensions), must be [256, 32]");
    tensor_on(&t, &place, weights, FP32, 3, DIMS(L, C, D), 0);
    REFUSE(d.weights = other, bad, "weights[0] has dtype float32 (lanes 1), must be BF16");
    tensor_on(&t, &place, weights, BF16, 3, DIMS(L, C, D), DIMS(C * D, 1, C));
    REFUSE(d.weights = other, bad, "weights[0] has strides [4096, 1, 128]");
    tensor_on(&t, &place, bias, BF16, 2, DIMS(L, C - 1), 0);
    REFUSE(d.bias = &t.t, bad, "bias has shape [2, 127] (2 dimensions), must be [2, 128]");
    ctxkv_projection_desc d = good();
    ctxkv_projection *p;
    assert_refused(ctxkv_projection_create(0, &d, &p), bad, "device is NULL");
    assert_refused(ctxkv_projection_create(place.device, 0, &p), bad, "desc is NULL");
    assert_refused(ctxkv_projection_create(place.device, &d, 0), bad, "projection is NULL");
}

static ctxkv_projection *plan_new(const DLTensor *const *list, int64_t count) {
    ctxkv_projection_desc d = good();
    ctxkv_projection *p;
    d.weights = list;
    d.weight_count = count;
    assert_ok(ctxkv_projection_create(place.device, &d, &p));
    return p;
}

static void run(ctxkv_projection *p, uint16_t *kv) {
    struct tensor from, to;
    assert_ok(ctxkv_projection_run(
        p, tensor_on(&from, &place, normed, BF16, 3, DIMS(L, T, D), 0),
        tensor_on(&to, &place, kv, BF16, 3, DIMS(L, T, C), 0), 0));
}

static void weight_forms(void **state) {
    (void)state;
    uint16_t want[L * T * C], got[L * T * C];
    static char room[L * C * (D + 3) * 2 + 1];
    ctxkv_projection *p = plan_new(one, 1);
    run(p, want);
    ctxkv_projection_destroy(p);
    struct tensor flat, layers[L], halves[2 * L], strided;
    const DLTensor *flat_list[1], *layer_list[L], *half_list[2 * L], *strided_list[1];
    flat_list[0] = tensor_on(&flat, &place, weights, BF16, 2, DIMS(L * C, D), 0);
    for (int i = 0; i < L; i++)
        layer_list[i] = tensor_on(&layers[i], &place, weights + i * C * D, BF16, 2, DIMS(C, D), 0);
    for (int i = 0; i < 2 * L; i++)
        half_list[i] =
            tensor_on(&halves[i], &place, weights + i * C / 2 * D, BF16, 2, DIMS(C / 2, D), 0);
    for (int r = 0; r < L * C; r++) // an odd address and odd strides
        memcpy(room + 1 + (size_t)r * (D + 3) * 2, weights + r * D, D * 2);
    strided_list[0] =
        tensor_on(&strided, &place, room + 1, BF16, 3, DIMS(L, C, D), DIMS(C * (D + 3), D + 3, 1));
    const struct {
        const DLTensor *const *list;
        int64_t count;
    } forms[] = {{flat_list, 1}, {layer_list, L}, {half_list, 2 * L}, {strided_list, 1}};
    for (size_t i = 0; i < 4; i++) {
        p = plan_new(forms[i].list, forms[i].count);
        memset(got, POISON, sizeof got);
        run(p, got);
        assert_memory_equal(got, want, sizeof want);
        ctxkv_projection_destroy(p);
    }
}

static void operands(void **state) {
    (void)state;
    ctxkv_projection *p = plan_new(one, 1);
    uint16_t want[L * T * C], kv[T * L * C];
    struct tensor from, to;
    run(p, want);
    // Storage [T, L, ...], as the weighted family has it.
    tensor_on(&from, &place, normed, BF16, 3, DIMS(L, T, D), 0);
    tensor_on(&to, &place, kv, BF16, 3, DIMS(L, T, C), DIMS(C, L * C, 1));
    assert_ok(ctxkv_projection_run(p, &from.t, &to.t, 0));
    for (int l = 0; l < L; l++)
        for (int t = 0; t < T; t++)
            assert_memory_equal(kv + (t * L + l) * C, want + (l * T + t) * C, C * 2);
    memset(kv, POISON, sizeof kv);
#define RUN_REFUSED(text) assert_refused(ctxkv_projection_run(p, &from.t, &to.t, 0), bad, text)
    tensor_on(&to, &place, kv, BF16, 3, DIMS(L, T, C), DIMS(C, C, 1));
    RUN_REFUSED("kv has strides [128, 128, 1], must give each element an address of its own");
    tensor_on(&to, &place, kv, BF16, 3, DIMS(L, T - 1, C), 0);
    RUN_REFUSED("kv has shape [2, 2, 128] (3 dimensions), must be [2, 3, 128]");
    tensor_on(&to, &place, normed, BF16, 3, DIMS(L, T, C), 0);
    RUN_REFUSED("kv overlaps normed in memory, must lie apart");
    tensor_on(&to, &place, kv, BF16, 3, DIMS(L, T, C), 0);
    tensor_on(&from, &place, normed, BF16, 3, DIMS(L + 1, T, D), 0);
    RUN_REFUSED("normed has shape [3, 3, 32] (3 dimensions), must be [2, *, 32]");
    tensor_on(&from, &place, normed, BF16, 3, DIMS(L, 9, D), DIMS(0, 0, 1));
    tensor_on(&to, &place, kv, BF16, 3, DIMS(L, 9, C), 0);
    RUN_REFUSED("T is 9, must be in 0..8");
    assert_refused(ctxkv_projection_run(p, 0, &to.t, 0), bad, "normed is NULL");
    assert_refused(ctxkv_projection_run(p, &from.t, 0, 0), bad, "kv is NULL");
    for (int i = 0; i < T * L * C; i++) assert_int_equal(kv[i], 0x5A5A);
    // One input for all layers, as [1, T, D] and by layer stride 0.
    uint16_t shared[L * T * C];
    tensor_on(&from, &place, normed, BF16, 3, DIMS(1, T, D), 0);
    tensor_on(&to, &place, kv, BF16, 3, DIMS(L, T, C), 0);
    assert_ok(ctxkv_projection_run(p, &from.t, &to.t, 0));
    assert_memory_equal(kv, want, T * C * 2);
    tensor_on(&from, &place, normed, BF16, 3, DIMS(L, T, D), DIMS(0, D, 1));
    tensor_on(&to, &place, shared, BF16, 3, DIMS(L, T, C), 0);
    assert_ok(ctxkv_projection_run(p, &from.t, &to.t, 0));
    assert_memory_equal(kv, shared, sizeof shared);
    ctxkv_projection_destroy(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(descriptor),
        cmocka_unit_test(weight_forms),
        cmocka_unit_test(operands),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
