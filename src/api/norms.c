// SPDX-License-Identifier: Apache-2.0
// ctxkv_norms: checks of the descriptor and of a run's tensors.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "../chain/cuda_backend.h"
#include "desc.h"

void ctxkv_norms_desc_init_sized(ctxkv_norms_desc *desc, size_t size) {
    static const ctxkv_norms_desc defaults = {
        .hidden_size = 8192, .hidden = {.eps = 1e-5f}, .layer = {.eps = 1e-5f}};
    ctxkv__init(desc, size, &defaults, sizeof defaults);
}

static ctxkv_status check_norm(const ctxkv_norm *norm, const char *which, int64_t d, bool weight) {
    char name[48];
    snprintf(name, sizeof name, "%s.kind", which);
    ctxkv_status status =
        ctxkv__range(name, (int64_t)norm->kind, CTXKV_NORM_ROW, CTXKV_NORM_ABSENT);
    if (status) return status;
    if (norm->kind == CTXKV_NORM_ABSENT) {
        if (!weight) return CTXKV_OK;
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "%s_weight is given, must be NULL when %s is ABSENT", which,
            name);
    }
    if (norm->kind == CTXKV_NORM_ROW && d != 8192)
        return ctxkv__fail(
            CTXKV_UNSUPPORTED, "hidden_size is %" PRId64 ", must be 8192 for %s ROW", d, name);
    if (norm->kind == CTXKV_NORM_RMS && norm->input_scale)
        return ctxkv__fail(CTXKV_UNSUPPORTED, "%s.input_scale is 1, must be 0 for kind RMS", which);
    snprintf(name, sizeof name, "%s.eps", which);
    status = ctxkv__eps(name, norm->eps);
    if (status) return status;
    if (norm->gain_centre - norm->gain_centre == 0) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s.gain_centre is %g, must be finite", which,
        (double)norm->gain_centre);
}

static ctxkv_status check_desc(const ctxkv_norms_desc *d) {
    ctxkv_status status = ctxkv__range("num_layers", d->num_layers, 1, CTXKV__MAX_LAYERS);
    if (!status) status = ctxkv__range("hidden_size", d->hidden_size, 8, CTXKV__MAX_HIDDEN);
    if (!status && d->hidden_size % 8)
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "hidden_size is %" PRId64 ", must be a multiple of 8",
            d->hidden_size);
    if (!status) status = check_norm(&d->hidden, "hidden", d->hidden_size, d->hidden_weight);
    if (!status)
        status = check_norm(&d->layer, "layer", d->hidden_size, d->layer_weight_count != 0);
    if (!status)
        status = ctxkv__range(
            "numerics", (int64_t)d->numerics, CTXKV_NUMERICS_STOCK, CTXKV_NUMERICS_INVARIANT);
    int64_t count = d->layer_weight_count;
    if (!status && count != 0 && count != 1 && count != d->num_layers)
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "layer_weight_count is %" PRId64 ", must be 0, 1 or num_layers (%" PRId64 ")", count,
            d->num_layers);
    if (!status && count) status = ctxkv__not_null(d->layer_weights, "layer_weights");
    return status;
}

static ctxkv_status hidden_view(struct ctxkv_norms *plan, const ctxkv_norms_desc *d) {
    if (!d->hidden_weight) return CTXKV_OK;
    struct ctxkv__want want = {plan->device, CTXKV__BF16 | CTXKV__FP32, 1, {d->hidden_size}, true,
                               false};
    return ctxkv__tensor(d->hidden_weight, "hidden_weight", &want, &plan->hidden_weight);
}

static ctxkv_status layer_views(struct ctxkv_norms *plan, const ctxkv_norms_desc *d) {
    int64_t layers = d->num_layers;
    if (!d->layer_weight_count) return CTXKV_OK;
    plan->layer_weights = calloc((size_t)layers, sizeof *plan->layer_weights);
    if (!plan->layer_weights) return ctxkv__no_memory("the layer weights' views");
    // One layer's weight may come as [D] or [1, D].
    bool stacked = d->layer_weight_count == 1 &&
                   (layers > 1 || (d->layer_weights[0] && d->layer_weights[0]->ndim == 2));
    struct ctxkv__want want = {plan->device, CTXKV__BF16 | CTXKV__FP32, 1, {d->hidden_size}, true,
                               false};
    if (stacked) {
        want.ndim = 2;
        want.shape[0] = layers;
        want.shape[1] = d->hidden_size;
        struct ctxkv__view all;
        ctxkv_status status = ctxkv__tensor(d->layer_weights[0], "layer_weights", &want, &all);
        for (int64_t l = 0; !status && l < layers; l++) {
            plan->layer_weights[l] = all;
            plan->layer_weights[l].data += l * all.stride[0] * (all.type == CTXKV__FP32 ? 4 : 2);
        }
        return status;
    }
    for (int64_t l = 0; l < layers; l++) {
        char name[48];
        snprintf(name, sizeof name, "layer_weights[%" PRId64 "]", l);
        ctxkv_status status =
            ctxkv__tensor(d->layer_weights[l], name, &want, &plan->layer_weights[l]);
        if (status) return status;
        if (plan->layer_weights[l].type != plan->layer_weights[0].type)
            return ctxkv__fail(
                CTXKV_INVALID_ARGUMENT, "%s has another dtype than layer_weights[0]", name);
    }
    return CTXKV_OK;
}

static struct ctxkv__norm norm_args(
    const ctxkv_norm *norm, const struct ctxkv__view *weight, const float *gain) {
    bool weighted = weight && weight->data;
    return (struct ctxkv__norm){
        .present = norm->kind != CTXKV_NORM_ABSENT,
        .contract = weighted && (norm->input_scale || weight->type == CTXKV__FP32),
        .input_scale = weighted && norm->input_scale,
        .gain = weighted ? gain : 0,
        .eps = norm->eps,
    };
}

static ctxkv_status cpu_plan(struct ctxkv_norms *plan) {
    const ctxkv_norms_desc *d = &plan->desc;
    int64_t n = d->hidden_size, layers = d->num_layers;
    plan->gains = malloc((size_t)((layers + 1) * n) * sizeof(float));
    if (!plan->gains) return ctxkv__no_memory("the norms' gains");
    if (plan->hidden_weight.data)
        ctxkv__gains(
            plan->hidden_weight.data, plan->hidden_weight.type == CTXKV__FP32, n,
            d->hidden.gain_centre, plan->gains);
    for (int64_t l = 0; plan->layer_weights && l < layers; l++)
        ctxkv__gains(
            plan->layer_weights[l].data, plan->layer_weights[l].type == CTXKV__FP32, n,
            d->layer.gain_centre, plan->gains + (l + 1) * n);
    plan->args = (struct ctxkv__norms_args){
        .hidden_size = n,
        .num_layers = plan->out_layers,
        .hidden = norm_args(&d->hidden, &plan->hidden_weight, plan->gains),
        .layer = norm_args(&d->layer, plan->layer_weights, plan->gains + n),
    };
    return CTXKV_OK;
}

ctxkv_status ctxkv_norms_create(
    ctxkv_device *device, const ctxkv_norms_desc *desc, ctxkv_norms **norms) {
    ctxkv_status status = ctxkv__not_null(norms, "norms");
    if (!status) *norms = 0;
    if (!status) status = ctxkv__not_null(device, "device");
    ctxkv_norms_desc d;
    if (!status) status = ctxkv__desc(&d, sizeof d, sizeof d, desc, "desc");
    if (!status) status = check_desc(&d);
    if (status) return status;
    struct ctxkv_norms *plan = calloc(1, sizeof *plan);
    if (!plan) return ctxkv__no_memory("the norms plan");
    plan->device = device;
    ctxkv__device_retain(device);
    plan->out_layers = d.layer.kind == CTXKV_NORM_ABSENT ? 1 : d.num_layers;
    status = hidden_view(plan, &d);
    if (!status) status = layer_views(plan, &d);
    d.hidden_weight = 0;
    d.layer_weights = 0;
    plan->desc = d;
    if (!status) status = device->cuda ? ctxkv__cuda_norms_create(plan) : cpu_plan(plan);
    free(plan->layer_weights);
    plan->layer_weights = 0;
    if (status)
        ctxkv_norms_destroy(plan);
    else
        *norms = plan;
    return status;
}

void ctxkv_norms_destroy(ctxkv_norms *plan) {
    if (!plan) return;
    if (plan->device->cuda) ctxkv__cuda_norms_destroy(plan);
    free(plan->gains);
    ctxkv__device_release(plan->device);
    free(plan);
}

ctxkv_status ctxkv_norms_run(
    ctxkv_norms *plan, const DLTensor *x, const DLTensor *out, void *stream) {
    ctxkv_status status = ctxkv__not_null(plan, "norms");
    if (status) return status;
    int64_t d = plan->desc.hidden_size;
    struct ctxkv__view from, to;
    struct ctxkv__want want = {plan->device, CTXKV__BF16, 2, {CTXKV__ANY, d}, true, false};
    status = ctxkv__tensor(x, "x", &want, &from);
    if (status) return status;
    struct ctxkv__want want_out = {
        plan->device, CTXKV__BF16, 3, {plan->out_layers, from.shape[0], d}, true, true};
    status = ctxkv__tensor(out, "out", &want_out, &to);
    if (!status) status = ctxkv__no_overlap(&to, "out", &from, "x");
    if (status || from.shape[0] == 0) return status;
    struct ctxkv__norms_call call = {from.data,    from.stride[0], from.shape[0], to.data,
                                     to.stride[0], to.stride[1],   stream};
    if (plan->device->cuda) return ctxkv__cuda_norms_run(plan, &call);
    ctxkv__cpu_norms(plan, &call);
    return CTXKV_OK;
}
