// SPDX-License-Identifier: Apache-2.0
// The chain on a CUDA device: norms, projection, store, one workspace; a run only launches.
#include <stdlib.h>
#include <string.h>

#include "../device/cublas.h"
#include "chain_ways.h"

struct chain_gpu {
    CUdeviceptr workspace; // the plan's own
    size_t kv_offset, cublas_offset;
    struct ctxkv__prefill *prefill;
    struct ctxkv__decode *decode;
};

bool ctxkv__way_allowed(const char *name) {
    const char *ways = getenv("CTXKV_CHAIN_WAYS");
    return !ways || strstr(ways, name);
}

static size_t padded(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

ctxkv_status ctxkv__cuda_chain_create(struct ctxkv_chain *plan) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const ctxkv_projection_desc *d = &plan->projection->desc;
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter_slow(gpu, &scope, "creating a chain");
    if (status) return status;
    struct chain_gpu *g = plan->gpu = calloc(1, sizeof *g);
    if (!g) status = ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the chain");
    if (!status) {
        size_t rows = (size_t)plan->max_rows, layers = (size_t)d->num_layers;
        size_t columns =
            (size_t)(plan->projection->args.parts * plan->projection->args.block_columns);
        g->kv_offset = padded(rows * (size_t)plan->norms->out_layers * (size_t)d->hidden_size * 2);
        g->cublas_offset = g->kv_offset + padded(rows * layers * columns * 2);
        plan->workspace_size = g->cublas_offset;
        size_t decode = padded(ctxkv__decode_workspace(plan));
        if (plan->workspace_size < decode) plan->workspace_size = decode;
        if (ctxkv__cuda_projection_uses_cublas(plan->projection)) {
            g->cublas_offset = plan->workspace_size;
            plan->workspace_size += CTXKV__CUBLAS_WORKSPACE;
        }
        status =
            ctxkv__gpu_alloc(gpu, plan->workspace_size, "the chain's workspace", &g->workspace);
    }
    if (!status && ctxkv__way_allowed("prefill")) status = ctxkv__prefill_create(plan, &g->prefill);
    if (!status && ctxkv__way_allowed("decode"))
        status = ctxkv__decode_create(plan, ctxkv__way_allowed("fused"), &g->decode);
    ctxkv__gpu_leave(gpu, &scope);
    return status;
}

void ctxkv__cuda_chain_destroy(struct ctxkv_chain *plan) {
    struct chain_gpu *g = plan->gpu;
    struct ctxkv__gpu_scope scope;
    if (!g) return;
    if (!ctxkv__gpu_enter_free(plan->device->gpu, &scope)) {
        ctxkv__gpu_free(plan->device->gpu, g->workspace);
        ctxkv__prefill_destroy(plan, g->prefill);
        ctxkv__decode_destroy(plan, g->decode);
        ctxkv__gpu_leave(plan->device->gpu, &scope);
    }
    free(g);
    plan->gpu = 0;
}

static ctxkv_status launch_parts(
    struct ctxkv_chain *plan, const struct ctxkv__chain_call *call, char *workspace) {
    const struct chain_gpu *g = plan->gpu;
    const ctxkv_projection_desc *d = &plan->projection->desc;
    int64_t half = plan->projection->args.block_columns, layers = d->num_layers;
    int64_t columns = plan->projection->args.parts * half;
    // One input for all layers is one GEMM, whose output has the layers side by side.
    bool shared = plan->norms->out_layers == 1 && layers > 1;
    int64_t kv_layer = shared ? columns : call->rows * columns;
    int64_t kv_row = shared ? layers * columns : columns;
    struct ctxkv__norms_call norms = {
        .x = call->x,
        .x_row_stride = call->rows > 1 ? call->x_row_stride : 0,
        .rows = call->rows,
        .out = workspace,
        .out_layer_stride = call->rows * d->hidden_size,
        .out_row_stride = d->hidden_size,
        .stream = call->stream,
    };
    struct ctxkv__projection_call projection = {
        .x = workspace,
        .x_layer_stride = shared ? 0 : norms.out_layer_stride,
        .x_row_stride = d->hidden_size,
        .rows = call->rows,
        .kv = workspace + g->kv_offset,
        .kv_layer_stride = kv_layer,
        .kv_row_stride = kv_row,
        .stream = call->stream,
    };
    struct ctxkv__store_call store = {
        .k = projection.kv,
        .v = workspace + g->kv_offset + 2 * half,
        .k_layer_stride = kv_layer,
        .k_row_stride = kv_row,
        .k_head_stride = d->head_dim,
        .v_layer_stride = kv_layer,
        .v_row_stride = kv_row,
        .v_head_stride = d->head_dim,
        .rows = call->rows,
        .positions = call->positions,
        .slots = call->slots,
        .stream = call->stream,
    };
    bool cublas = ctxkv__cuda_projection_uses_cublas(plan->projection);
    ctxkv_status status = ctxkv__cuda_norms_launch(plan->norms, &norms, 0);
    if (!status)
        status = ctxkv__cuda_projection_launch(
            plan->projection, &projection, cublas ? workspace + g->cublas_offset : 0);
    return status ? status : ctxkv__cuda_store_launch(plan->store, &store);
}

static ctxkv_status launch(struct ctxkv_chain *plan, const struct ctxkv__chain_call *call) {
    const struct chain_gpu *g = plan->gpu;
    char *workspace = call->workspace ? call->workspace : (char *)(uintptr_t)g->workspace;
    if (ctxkv__decode_takes_run(g->decode, call))
        return ctxkv__decode_launch(plan, g->decode, call, workspace);
    if (ctxkv__prefill_takes(plan, g->prefill, call))
        return ctxkv__prefill_launch(plan, g->prefill, call, workspace);
    return launch_parts(plan, call, workspace);
}

ctxkv_status ctxkv__cuda_chain_run(struct ctxkv_chain *plan, const struct ctxkv__chain_call *call) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter(plan->device->gpu, &scope);
    if (status) return status;
    status = launch(plan, call);
    ctxkv__gpu_leave(plan->device->gpu, &scope);
    return status;
}

size_t ctxkv__cuda_chain_memory(const struct ctxkv_chain *plan) {
    const struct chain_gpu *g = plan->gpu;
    return plan->workspace_size + ctxkv__prefill_memory(g->prefill) +
           ctxkv__decode_memory(g->decode) + ctxkv__cuda_norms_memory(plan->norms) +
           ctxkv__cuda_projection_memory(plan->projection) + ctxkv__cuda_store_memory(plan->store);
}
