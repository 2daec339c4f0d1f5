// SPDX-License-Identifier: Apache-2.0
// ctxkv_projection: checks of the descriptor and of a run's tensors.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "../chain/cuda_backend.h"
#include "desc.h"

void ctxkv_projection_desc_init_sized(ctxkv_projection_desc *desc, size_t size) {
    static const ctxkv_projection_desc defaults = {.hidden_size = 8192, .head_dim = 64};
    ctxkv__init(desc, size, &defaults, sizeof defaults);
}

#define FIRST_SIZE offsetof(ctxkv_projection_desc, bias_add)

static ctxkv_status check_head_dim(int64_t head_dim) {
    if (head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 512) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "head_dim is %" PRId64 ", must be 64, 128, 256 or 512", head_dim);
}

static ctxkv_status check_desc(const ctxkv_device *device, const ctxkv_projection_desc *d) {
    ctxkv_status status = ctxkv__range("num_layers", d->num_layers, 1, CTXKV__MAX_LAYERS);
    if (!status) status = ctxkv__range("hidden_size", d->hidden_size, 16, 1 << 20);
    if (!status && d->hidden_size % 16)
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "hidden_size is %" PRId64 ", must be a multiple of 16",
            d->hidden_size);
    if (!status) status = ctxkv__range("num_kv_heads", d->num_kv_heads, 1, 65535);
    if (!status) status = check_head_dim(d->head_dim);
    if (!status)
        status =
            ctxkv__range("mode", (int64_t)d->mode, CTXKV_PROJECTION_AUTO, CTXKV_PROJECTION_CUBLAS);
    if (!status && d->mode == CTXKV_PROJECTION_CUBLAS && !device->cuda)
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "mode is CUBLAS on a CPU device, must be AUTO or EXACT there");
    if (!status) status = ctxkv__range("max_rows", d->max_rows, 0, INT64_MAX / 2);
    if (!status)
        status = ctxkv__range("bias_add", (int64_t)d->bias_add, CTXKV_BIAS_FUSED, CTXKV_BIAS_AFTER);
    if (!status) status = ctxkv__range("k_only", d->k_only, 0, 1);
    int64_t count = d->weight_count;
    bool twice = !status && count == 2 * d->num_layers && !d->k_only;
    if (!status && count != 1 && count != d->num_layers && !twice)
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "weight_count is %" PRId64 ", must be 1%s num_layers%s (num_layers = %" PRId64 ")",
            count, d->k_only ? " or" : ",", d->k_only ? "" : " or 2*num_layers", d->num_layers);
    if (!status) status = ctxkv__not_null(d->weights, "weights");
    return status;
}

// Tensor i of weights as rows of D; its first row and row stride.
static ctxkv_status weight_view(
    const struct ctxkv_projection *plan, const ctxkv_projection_desc *d, int64_t i, int64_t rows,
    struct ctxkv__view *view) {
    char name[48];
    snprintf(name, sizeof name, "weights[%" PRId64 "]", i);
    struct ctxkv__want want = {plan->device, CTXKV__BF16, 2, {rows, d->hidden_size}, true, false};
    return ctxkv__tensor(d->weights[i], name, &want, view);
}

static ctxkv_status stacked_blocks(struct ctxkv_projection *plan, const ctxkv_projection_desc *d) {
    int64_t layers = d->num_layers, parts = plan->args.parts, rows = plan->args.block_columns;
    struct ctxkv__view view;
    const DLTensor *tensor = d->weights[0];
    if (tensor && tensor->ndim == 3) {
        struct ctxkv__want want = {
            plan->device, CTXKV__BF16, 3, {layers, parts * rows, d->hidden_size}, true, false};
        ctxkv_status status = ctxkv__tensor(tensor, "weights[0]", &want, &view);
        if (status) return status;
    } else {
        ctxkv_status status = weight_view(plan, d, 0, layers * parts * rows, &view);
        if (status) return status;
        view.stride[1] = view.stride[0];
        view.stride[0] = view.stride[0] * parts * rows;
    }
    for (int64_t b = 0; b < parts * layers; b++) {
        int64_t offset = b / parts * view.stride[0] + b % parts * rows * view.stride[1];
        plan->blocks[b] = (struct ctxkv__weight_block){view.data + 2 * offset, view.stride[1]};
    }
    return CTXKV_OK;
}

static ctxkv_status weight_blocks(struct ctxkv_projection *plan, const ctxkv_projection_desc *d) {
    int64_t layers = d->num_layers, parts = plan->args.parts, rows = plan->args.block_columns;
    plan->blocks = calloc((size_t)(parts * layers), sizeof *plan->blocks);
    plan->args.blocks = plan->blocks;
    if (!plan->blocks) return ctxkv__no_memory("the weights' addresses");
    bool one_layer = layers == 1 && d->weights[0] && d->weights[0]->ndim == 2;
    if (d->weight_count == 1 && !one_layer) return stacked_blocks(plan, d);
    int64_t each = d->weight_count == layers ? parts : 1; // blocks of a tensor
    for (int64_t i = 0; i < d->weight_count; i++) {
        struct ctxkv__view view;
        ctxkv_status status = weight_view(plan, d, i, each * rows, &view);
        if (status) return status;
        for (int64_t part = 0; part < each; part++)
            plan->blocks[each * i + part] = (struct ctxkv__weight_block){
                view.data + 2 * part * rows * view.stride[0], view.stride[0]};
    }
    return CTXKV_OK;
}

static ctxkv_status bias_view(struct ctxkv_projection *plan, const ctxkv_projection_desc *d) {
    int64_t columns = plan->args.parts * plan->args.block_columns;
    if (!d->bias) return CTXKV_OK;
    struct ctxkv__want want = {plan->device, CTXKV__BF16, 2, {d->num_layers, columns}, true, false};
    return ctxkv__tensor(d->bias, "bias", &want, &plan->bias_view);
}

static ctxkv_status cpu_plan(struct ctxkv_projection *plan) {
    const struct ctxkv__view *bias = &plan->bias_view;
    int64_t columns = plan->args.parts * plan->args.block_columns;
    if (!bias->data) return CTXKV_OK;
    plan->bias = malloc((size_t)(plan->desc.num_layers * columns) * sizeof(float));
    if (!plan->bias) return ctxkv__no_memory("the bias");
    for (int64_t l = 0; l < plan->desc.num_layers; l++)
        ctxkv__gains(
            bias->data + 2 * l * bias->stride[0], false, columns, 0.0f, plan->bias + l * columns);
    plan->args.bias = plan->bias;
    return CTXKV_OK;
}

ctxkv_status ctxkv_projection_create(
    ctxkv_device *device, const ctxkv_projection_desc *desc, ctxkv_projection **projection) {
    return ctxkv__projection_create(device, desc, false, projection);
}

ctxkv_status ctxkv__projection_create(
    ctxkv_device *device, const ctxkv_projection_desc *desc, bool in_chain,
    ctxkv_projection **projection) {
    ctxkv_status status = ctxkv__not_null(projection, "projection");
    if (!status) *projection = 0;
    if (!status) status = ctxkv__not_null(device, "device");
    ctxkv_projection_desc d;
    if (!status) status = ctxkv__desc(&d, sizeof d, FIRST_SIZE, desc, "desc");
    if (!status) status = check_desc(device, &d);
    if (status) return status;
    struct ctxkv_projection *plan = calloc(1, sizeof *plan);
    if (!plan) return ctxkv__no_memory("the projection plan");
    plan->device = device;
    plan->in_chain = in_chain;
    ctxkv__device_retain(device);
    plan->args = (struct ctxkv__projection_args){
        .hidden_size = d.hidden_size,
        .num_layers = d.num_layers,
        .parts = d.k_only ? 1 : 2,
        .block_columns = d.num_kv_heads * d.head_dim,
        .round_first = d.bias_add == CTXKV_BIAS_AFTER,
    };
    status = weight_blocks(plan, &d);
    if (!status) status = bias_view(plan, &d);
    d.weights = 0;
    d.bias = 0;
    plan->desc = d;
    if (!status) status = device->cuda ? ctxkv__cuda_projection_create(plan) : cpu_plan(plan);
    if (status)
        ctxkv_projection_destroy(plan);
    else
        *projection = plan;
    return status;
}

void ctxkv_projection_destroy(ctxkv_projection *plan) {
    if (!plan) return;
    if (plan->device->cuda) ctxkv__cuda_projection_destroy(plan);
    free(plan->bias);
    free(plan->blocks);
    ctxkv__device_release(plan->device);
    free(plan);
}

ctxkv_status ctxkv_projection_run(
    ctxkv_projection *plan, const DLTensor *normed, const DLTensor *kv, void *stream) {
    ctxkv_status status = ctxkv__not_null(plan, "projection");
    if (status) return status;
    const ctxkv_projection_desc *d = &plan->desc;
    int64_t columns = plan->args.parts * plan->args.block_columns;
    struct ctxkv__view from, to;
    bool shared = normed && normed->ndim == 3 && normed->shape && normed->shape[0] == 1;
    struct ctxkv__want want = {
        plan->device, CTXKV__BF16, 3, {shared ? 1 : d->num_layers, CTXKV__ANY, d->hidden_size},
        true,         false};
    status = ctxkv__tensor(normed, "normed", &want, &from);
    if (status) return status;
    struct ctxkv__want want_kv = {
        plan->device, CTXKV__BF16, 3, {d->num_layers, from.shape[1], columns}, true, true};
    status = ctxkv__tensor(kv, "kv", &want_kv, &to);
    if (!status) status = ctxkv__no_overlap(&to, "kv", &from, "normed");
    if (!status && d->max_rows) status = ctxkv__range("T", from.shape[1], 0, d->max_rows);
    if (status || from.shape[1] == 0) return status;
    struct ctxkv__projection_call call = {from.data, from.stride[0], from.stride[1], from.shape[1],
                                          to.data,   to.stride[0],   to.stride[1],   stream};
    if (plan->device->cuda) return ctxkv__cuda_projection_run(plan, &call);
    ctxkv__cpu_projection(plan, &call);
    return CTXKV_OK;
}
