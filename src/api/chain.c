// SPDX-License-Identifier: Apache-2.0
// ctxkv_chain: the three plans with one workspace.
#include <inttypes.h>
#include <stdlib.h>

#include "../chain/cuda_backend.h"
#include "desc.h"

void ctxkv_chain_desc_init_sized(ctxkv_chain_desc *desc, size_t size) {
    static const ctxkv_chain_desc defaults = {.max_rows = 0};
    ctxkv__init(desc, size, &defaults, sizeof defaults);
}

void ctxkv_chain_call_init_sized(ctxkv_chain_call *call, size_t size) {
    static const ctxkv_chain_call defaults = {.rows = 0};
    ctxkv__init(call, size, &defaults, sizeof defaults);
}

static ctxkv_status same(const char *a, int64_t x, const char *b, int64_t y) {
    if (x == y) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s is %" PRId64 ", must equal %s (%" PRId64 ")", a, x, b, y);
}

static ctxkv_status check_parts(const struct ctxkv_chain *c) {
    const ctxkv_norms_desc *n = &c->norms->desc;
    const ctxkv_projection_desc *p = &c->projection->desc;
    const ctxkv_store_desc *s = &c->store->desc;
    ctxkv_status status =
        same("projection.hidden_size", p->hidden_size, "norms.hidden_size", n->hidden_size);
    if (!status)
        status = same("projection.num_layers", p->num_layers, "norms.num_layers", n->num_layers);
    if (!status)
        status = same("store.num_layers", s->num_layers, "norms.num_layers", n->num_layers);
    if (!status)
        status =
            same("store.num_kv_heads", s->num_kv_heads, "projection.num_kv_heads", p->num_kv_heads);
    if (!status) status = same("store.head_dim", s->head_dim, "projection.head_dim", p->head_dim);
    if (!status) status = same("store.v_from_k", s->v_from_k, "projection.k_only", p->k_only);
    if (status) return status;
    int64_t columns = 2 * p->num_kv_heads * p->head_dim, per_row, bytes;
    if (__builtin_mul_overflow(n->num_layers, n->hidden_size + columns, &per_row) ||
        __builtin_mul_overflow(per_row, c->max_rows, &bytes) || bytes > INT64_MAX / 64)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "max_rows is %" PRId64 ", too large for the workspace's size",
            c->max_rows);
    return CTXKV_OK;
}

static ctxkv_status cpu_plan(struct ctxkv_chain *plan) {
    ctxkv__cpu_chain_plan(plan);
    plan->workspace = aligned_alloc(256, plan->workspace_size ? plan->workspace_size : 256);
    return plan->workspace ? CTXKV_OK : ctxkv__no_memory("the chain's workspace");
}

ctxkv_status ctxkv_chain_create(
    ctxkv_device *device, const ctxkv_chain_desc *desc, ctxkv_chain **chain) {
    ctxkv_status status = ctxkv__not_null(chain, "chain");
    if (!status) *chain = 0;
    if (!status) status = ctxkv__not_null(device, "device");
    ctxkv_chain_desc d = {0};
    if (!status) status = ctxkv__desc(&d, sizeof d, sizeof d, desc, "desc");
    if (!status) status = ctxkv__not_null(d.norms, "desc->norms");
    if (!status) status = ctxkv__not_null(d.projection, "desc->projection");
    if (!status) status = ctxkv__not_null(d.store, "desc->store");
    if (!status) status = ctxkv__range("max_rows", d.max_rows, 1, INT64_MAX / 4096);
    if (status) return status;
    struct ctxkv_chain *plan = calloc(1, sizeof *plan);
    if (!plan) return ctxkv__no_memory("the chain plan");
    plan->device = device;
    plan->max_rows = d.max_rows;
    ctxkv__device_retain(device);
    status = ctxkv_norms_create(device, d.norms, &plan->norms);
    if (!status) status = ctxkv__projection_create(device, d.projection, true, &plan->projection);
    if (!status) status = ctxkv_store_create(device, d.store, &plan->store);
    if (!status) status = check_parts(plan);
    if (!status) status = device->cuda ? ctxkv__cuda_chain_create(plan) : cpu_plan(plan);
    if (status)
        ctxkv_chain_destroy(plan);
    else
        *chain = plan;
    return status;
}

void ctxkv_chain_destroy(ctxkv_chain *plan) {
    if (!plan) return;
    if (plan->device->cuda)
        ctxkv__cuda_chain_destroy(plan);
    else
        free(plan->workspace);
    ctxkv_norms_destroy(plan->norms);
    ctxkv_projection_destroy(plan->projection);
    ctxkv_store_destroy(plan->store);
    ctxkv__lock_destroy(&plan->lock);
    ctxkv__device_release(plan->device);
    free(plan);
}

ctxkv_status ctxkv_chain_bind_caches(
    ctxkv_chain *chain, const DLTensor *const *keys, const DLTensor *const *values, int64_t count) {
    ctxkv_status status = ctxkv__not_null(chain, "chain");
    return status ? status : ctxkv_store_bind_caches(chain->store, keys, values, count);
}

#define STACK_LAYERS 64

static ctxkv_status check_call(const struct ctxkv_chain *plan, const ctxkv_chain_call *call) {
    ctxkv_status status = ctxkv__range("rows", call->rows, 0, plan->max_rows);
    if (status) return status;
    if (!plan->store->bound)
        return ctxkv__fail(CTXKV_NOT_BOUND, "no caches: call ctxkv_chain_bind_caches first");
    status = ctxkv__not_null(call->slots, "slots");
    if (!status) status = ctxkv__not_null(call->slot_rows, "slot_rows");
    if (status || call->rows == 0) return status;
    status = ctxkv__not_null(call->x, "x");
    if (!status && plan->store->desc.rope != CTXKV_ROPE_NONE)
        status = ctxkv__not_null(call->positions, "positions");
    if (status) return status;
    if ((uintptr_t)call->positions % 8)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "positions lies at address %p, must be aligned to 8 bytes",
            (const void *)call->positions);
    if (plan->device->cuda && (uintptr_t)call->x % 2)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "x lies at address %p, must be aligned to 2 bytes", call->x);
    if ((uintptr_t)call->workspace % 256)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "workspace lies at address %p, must be aligned to 256 bytes",
            call->workspace);
    return CTXKV_OK;
}

ctxkv_status ctxkv_chain_run_call(ctxkv_chain *plan, const ctxkv_chain_call *given) {
    ctxkv_status status = ctxkv__not_null(plan, "chain");
    ctxkv_chain_call call;
    if (!status) status = ctxkv__desc(&call, sizeof call, sizeof call, given, "call");
    if (!status) status = check_call(plan, &call);
    if (status) return status;
    int64_t layers = plan->store->desc.num_layers;
    struct ctxkv__slots few[STACK_LAYERS], *slots = few;
    if (layers > STACK_LAYERS) slots = malloc((size_t)layers * sizeof *slots);
    if (!slots) return ctxkv__no_memory("the slots of a run");
    status =
        ctxkv__fill_slots(slots, layers, call.slots, call.slot_rows, call.slot_count, call.rows);
    struct ctxkv__chain_call run = {call.x, call.x_row_stride, call.rows,  call.positions,
                                    slots,  call.workspace,    call.stream};
    if (!status && call.rows)
        status =
            plan->device->cuda ? ctxkv__cuda_chain_run(plan, &run) : ctxkv__cpu_chain(plan, &run);
    if (slots != few) free(slots);
    return status;
}

ctxkv_status ctxkv_chain_run(
    ctxkv_chain *plan, const DLTensor *x, const DLTensor *positions, const DLTensor *const *slots,
    int64_t slot_count, void *stream) {
    ctxkv_status status = ctxkv__not_null(plan, "chain");
    if (status) return status;
    int64_t layers = plan->store->desc.num_layers;
    struct ctxkv__view view;
    struct ctxkv__want want = {
        plan->device, CTXKV__BF16, 2, {CTXKV__ANY, plan->norms->desc.hidden_size}, true, false};
    status = ctxkv__tensor(x, "x", &want, &view);
    ctxkv_chain_call call = {.size = sizeof call, .slot_count = slot_count, .stream = stream};
    if (!status)
        status = ctxkv__positions(
            plan->device, positions, plan->store->desc.rope != CTXKV_ROPE_NONE, view.shape[0],
            &call.positions);
    if (status) return status;
    const int64_t *few[STACK_LAYERS], **addresses = few;
    int64_t few_rows[STACK_LAYERS], *rows = few_rows;
    void *many = 0;
    if (layers > STACK_LAYERS) {
        many = malloc((size_t)layers * (sizeof *addresses + sizeof *rows));
        if (!many) return ctxkv__no_memory("the slots of a run");
        addresses = many;
        rows = (int64_t *)(void *)(addresses + layers);
    }
    status = ctxkv__slot_tensors(plan->device, slots, slot_count, layers, addresses, rows);
    call.x = view.data;
    call.x_row_stride = view.stride[0];
    call.rows = view.shape[0];
    call.slots = addresses;
    call.slot_rows = rows;
    if (!status) status = ctxkv_chain_run_call(plan, &call);
    free(many);
    return status;
}

size_t ctxkv_chain_workspace_size(const ctxkv_chain *chain) {
    return chain ? chain->workspace_size : 0;
}

ctxkv_status ctxkv_chain_faults(ctxkv_chain *chain, ctxkv_faults *faults) {
    ctxkv_status status = ctxkv__not_null(chain, "chain");
    return status ? status : ctxkv_store_faults(chain->store, faults);
}

size_t ctxkv_chain_memory(const ctxkv_chain *chain) {
    if (!chain) return 0;
    if (chain->device->cuda) return ctxkv__cuda_chain_memory(chain);
    const ctxkv_norms_desc *n = &chain->norms->desc;
    size_t gains = (size_t)((n->num_layers + 1) * n->hidden_size) * sizeof(float);
    size_t tables = (size_t)n->num_layers *
                    (2 * sizeof(struct ctxkv__weight_block) + sizeof(struct ctxkv__cache));
    return chain->workspace_size + gains + tables;
}
