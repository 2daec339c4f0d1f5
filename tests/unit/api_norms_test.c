// SPDX-License-Identifier: Apache-2.0
// ctxkv_norms: every refusal of create, versions of the descriptor, what create copies.
#include <math.h>

#include "plan_checks.h"

#define HIDDEN 64
#define LAYERS 3

static uint16_t weights[LAYERS * HIDDEN];
static struct tensor hidden_weight, stacked, each[LAYERS];
static const DLTensor *list[LAYERS], *one[1];

static int set_up(void **state) {
    (void)state;
    place = place_open(2);
    fill_bf16(weights, LAYERS * HIDDEN, 3, 0.5f);
    tensor_on(&hidden_weight, &place, weights, BF16, 1, DIMS(HIDDEN), 0);
    one[0] = tensor_on(&stacked, &place, weights, BF16, 2, DIMS(LAYERS, HIDDEN), 0);
    for (int l = 0; l < LAYERS; l++)
        list[l] = tensor_on(&each[l], &place, weights + l * HIDDEN, BF16, 1, DIMS(HIDDEN), 0);
    return 0;
}

static ctxkv_norms_desc good(void) {
    ctxkv_norms_desc d;
    ctxkv_norms_desc_init(&d);
    d.hidden_size = HIDDEN;
    d.num_layers = LAYERS;
    d.hidden.kind = d.layer.kind = CTXKV_NORM_RMS;
    d.hidden_weight = &hidden_weight.t;
    d.layer_weights = one;
    d.layer_weight_count = 1;
    return d;
}

CREATE_OF(norms)
#define REFUSE(assignment, status, text) REFUSE_OF(norms, assignment, status, text)

static void numbers(void **state) {
    (void)state;
    REFUSE(d.size = 16, bad, "desc->size is 16, must be at least");
    REFUSE(d.hidden_size = 0, bad, "hidden_size is 0, must be in 8..32768");
    REFUSE(d.hidden_size = 32776, bad, "hidden_size is 32776, must be in 8..32768");
    REFUSE(d.hidden_size = INT64_MIN, bad, "hidden_size is -9223372036854775808");
    REFUSE(d.hidden_size = 68, bad, "hidden_size is 68, must be a multiple of 8");
    REFUSE(d.num_layers = 0, bad, "num_layers is 0, must be in 1..65535");
    REFUSE(d.num_layers = -1, bad, "num_layers is -1, must be in 1..65535");
    REFUSE(d.num_layers = 65536, bad, "num_layers is 65536, must be in 1..65535");
    REFUSE(d.hidden.kind = (ctxkv_norm_kind)3, bad, "hidden.kind is 3, must be in 0..2");
    REFUSE(d.layer.kind = (ctxkv_norm_kind)9, bad, "layer.kind is 9, must be in 0..2");
    REFUSE(
        d.hidden.kind = CTXKV_NORM_ROW, CTXKV_UNSUPPORTED,
        "hidden_size is 64, must be 8192 for hidden.kind ROW");
    REFUSE(
        d.layer.kind = CTXKV_NORM_ROW, CTXKV_UNSUPPORTED,
        "hidden_size is 64, must be 8192 for layer.kind ROW");
    REFUSE(
        d.hidden.input_scale = 1, CTXKV_UNSUPPORTED,
        "hidden.input_scale is 1, must be 0 for kind RMS");
    REFUSE(d.hidden.eps = -1e-9f, bad, "hidden.eps is -1e-09, must be finite and >= 0");
    REFUSE(d.hidden.eps = NAN, bad, "hidden.eps is ");
    REFUSE(d.layer.eps = INFINITY, bad, "layer.eps is inf, must be finite and >= 0");
    REFUSE(d.hidden.gain_centre = INFINITY, bad, "hidden.gain_centre is inf, must be finite");
    REFUSE(d.layer.gain_centre = NAN, bad, "layer.gain_centre is ");
    REFUSE(d.numerics = (ctxkv_numerics)4, bad, "numerics is 4, must be in 0..3");
    ctxkv_norms_desc d = good();
    d.hidden.eps = 0.0f;
    assert_ok(create(&d));
    d.hidden.eps = -0.0f;
    assert_ok(create(&d));
}

static void weight_tensors(void **state) {
    (void)state;
    REFUSE(
        d.layer_weight_count = 2, bad, "layer_weight_count is 2, must be 0, 1 or num_layers (3)");
    REFUSE(d.layer_weight_count = -1, bad, "layer_weight_count is -1");
    REFUSE(d.layer_weights = 0, bad, "layer_weights is NULL, must be an address");
    REFUSE(
        d.hidden.kind = CTXKV_NORM_ABSENT, bad,
        "hidden_weight is given, must be NULL when hidden.kind is ABSENT");
    REFUSE(
        d.layer.kind = CTXKV_NORM_ABSENT, bad,
        "layer_weight is given, must be NULL when layer.kind is ABSENT");
    struct tensor t;
    tensor_on(&t, &place, weights, BF16, 1, DIMS(HIDDEN - 8), 0);
    REFUSE(
        d.hidden_weight = &t.t, bad, "hidden_weight has shape [56] (1 dimensions), must be [64]");
    tensor_on(&t, &place, weights, I64, 1, DIMS(HIDDEN), 0);
    REFUSE(
        d.hidden_weight = &t.t, bad,
        "hidden_weight has dtype int64 (lanes 1), must be BF16 or FP32");
    tensor_on(&t, &place, weights, BF16, 1, DIMS(HIDDEN), DIMS(2));
    REFUSE(d.hidden_weight = &t.t, bad, "hidden_weight has strides [2], must have stride 1");
    const DLTensor *holes[LAYERS] = {list[0], 0, list[2]};
    REFUSE(
        (d.layer_weights = holes, d.layer_weight_count = LAYERS), bad,
        "layer_weights[1] is NULL, must be a tensor");
    tensor_on(&t, &place, weights, FP32, 1, DIMS(HIDDEN), 0);
    const DLTensor *mixed[LAYERS] = {list[0], list[1], &t.t};
    REFUSE(
        (d.layer_weights = mixed, d.layer_weight_count = LAYERS), bad,
        "layer_weights[2] has another dtype than layer_weights[0]");
    const DLTensor *none[1] = {0};
    REFUSE(d.layer_weights = none, bad, "layer_weights is NULL, must be a tensor");
    ctxkv_norms_desc d = good();
    ctxkv_norms *norms;
    assert_refused(ctxkv_norms_create(0, &d, &norms), bad, "device is NULL");
    assert_refused(ctxkv_norms_create(place.device, 0, &norms), bad, "desc is NULL");
    assert_refused(ctxkv_norms_create(place.device, &d, 0), bad, "norms is NULL");
}

static void versions(void **state) {
    (void)state;
    struct {
        ctxkv_norms_desc old;
        int64_t later[2];
    } next = {.later = {0, 0}};
    next.old = good();
    next.old.size = sizeof next;
    assert_ok(create(&next.old));
    next.later[1] = 5;
    assert_refused(create(&next.old), CTXKV_UNSUPPORTED, "desc has a field at byte");
    assert_non_null(strstr(ctxkv_last_error(), ctxkv_version()));
}

static void run(ctxkv_norms *norms, const uint16_t *x, uint16_t *out, int64_t layers) {
    struct tensor from, to;
    assert_ok(ctxkv_norms_run(
        norms, tensor_on(&from, &place, x, BF16, 2, DIMS(1, HIDDEN), 0),
        tensor_on(&to, &place, out, BF16, 3, DIMS(layers, 1, HIDDEN), 0), 0));
}

// One stacked tensor, L tensors, strided and FP32 weights: the same bits; create has copied them.
static void weight_forms(void **state) {
    (void)state;
    uint16_t x[HIDDEN], want[LAYERS * HIDDEN], got[LAYERS * HIDDEN], apart[LAYERS * (HIDDEN + 5)];
    float wide[LAYERS * HIDDEN];
    struct tensor strided, fp32;
    fill_bf16(x, HIDDEN, 4, 1.0f);
    ctxkv_norms_desc d = good();
    ctxkv_norms *norms;
    assert_ok(ctxkv_norms_create(place.device, &d, &norms));
    run(norms, x, want, LAYERS);
    ctxkv_norms_destroy(norms);
    for (int i = 0; i < LAYERS * HIDDEN; i++) {
        uint32_t bits = (uint32_t)weights[i] << 16;
        memcpy(&wide[i], &bits, 4);
        apart[i / HIDDEN * (HIDDEN + 5) + i % HIDDEN] = weights[i];
    }
    tensor_on(&strided, &place, apart, BF16, 2, DIMS(LAYERS, HIDDEN), DIMS(HIDDEN + 5, 1));
    tensor_on(&fp32, &place, wide, FP32, 2, DIMS(LAYERS, HIDDEN), 0);
    const DLTensor *forms[] = {&strided.t, &fp32.t};
    for (int form = 0; form < 3; form++) {
        d = good();
        d.layer_weights = form < 2 ? &forms[form] : list;
        d.layer_weight_count = form < 2 ? 1 : LAYERS;
        assert_ok(ctxkv_norms_create(place.device, &d, &norms));
        memset(apart, 0xFF, sizeof apart);
        if (form) memset(wide, 0xFF, sizeof wide);
        run(norms, x, got, LAYERS);
        assert_memory_equal(got, want, sizeof want);
        ctxkv_norms_destroy(norms);
    }
    // Both norms absent: x itself, once.
    d = good();
    d.hidden.kind = d.layer.kind = CTXKV_NORM_ABSENT;
    d.hidden_weight = 0;
    d.layer_weight_count = 0;
    assert_ok(ctxkv_norms_create(place.device, &d, &norms));
    run(norms, x, got, 1);
    assert_memory_equal(got, x, sizeof x);
    ctxkv_norms_destroy(norms);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers),
        cmocka_unit_test(weight_tensors),
        cmocka_unit_test(versions),
        cmocka_unit_test(weight_forms),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
