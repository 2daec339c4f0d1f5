// SPDX-License-Identifier: Apache-2.0
// ctxkv_store: checks of caches and of a run's tensors; store_desc.c has those of the descriptor.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../chain/cuda_backend.h"
#include "desc.h"

void ctxkv_store_desc_init_sized(ctxkv_store_desc *desc, size_t size) {
    static const ctxkv_store_desc defaults = {.head_dim = 64, .k_eps = 1e-5f, .v_eps = 1e-5f};
    ctxkv__init(desc, size, &defaults, sizeof defaults);
}

#define FIRST_SIZE offsetof(ctxkv_store_desc, k_scales)

static ctxkv_status cpu_plan(struct ctxkv_store *plan) {
    const ctxkv_store_desc *d = &plan->desc;
    plan->worker_faults =
        calloc((size_t)ctxkv__pool_threads(plan->device->pool), sizeof *plan->worker_faults);
    if (!plan->worker_faults) return ctxkv__no_memory("the fault records");
    if (plan->k_weight.data) {
        bool fp32 = plan->k_weight.type == CTXKV__FP32;
        plan->k_gain = malloc((size_t)(d->num_layers * d->head_dim) * sizeof(float));
        if (!plan->k_gain) return ctxkv__no_memory("the K norm's gains");
        for (int64_t l = 0; l < d->num_layers; l++)
            ctxkv__gains(
                plan->k_weight.data + l * plan->k_weight.stride[0] * (fp32 ? 4 : 2), fp32,
                d->head_dim, d->k_gain_centre, plan->k_gain + l * d->head_dim);
    }
    plan->args.k_gain = plan->k_gain;
    return CTXKV_OK;
}

// All but what a run brings; the descriptor's tensors are not kept.
static void fill_args(struct ctxkv_store *plan) {
    ctxkv_store_desc *d = &plan->desc;
    d->k_norm_weight = d->cos_sin = 0;
    d->k_scales = d->v_scales = d->layer_cos_sin = 0;
    struct ctxkv__store_args *args = &plan->args;
    args->num_layers = d->num_layers;
    args->num_heads = d->num_kv_heads;
    args->head_dim = d->head_dim;
    args->k_norm = (enum ctxkv__k_norm_kind)d->k_norm;
    args->k_eps = d->k_eps;
    args->v_norm = d->v_norm == CTXKV_V_NORM_RMS;
    args->v_eps = d->v_eps;
    args->v_scale = d->v_scale;
    args->v_from_k = d->v_from_k;
    args->rope = (enum ctxkv__rope_kind)d->rope;
    args->tables = plan->tables;
    args->cache_kind = (enum ctxkv__cache_kind)d->cache_type;
    args->scales = plan->scales;
}

ctxkv_status ctxkv_store_create(
    ctxkv_device *device, const ctxkv_store_desc *desc, ctxkv_store **store) {
    ctxkv_status status = ctxkv__not_null(store, "store");
    if (!status) *store = 0;
    if (!status) status = ctxkv__not_null(device, "device");
    ctxkv_store_desc d = {0};
    if (!status) status = ctxkv__desc(&d, sizeof d, FIRST_SIZE, desc, "desc");
    if (!status && d.rotary_dim == 0 && !d.layer_cos_sin_count) d.rotary_dim = d.head_dim;
    if (!status) status = ctxkv__store_check(device, &d);
    if (status) return status;
    struct ctxkv_store *plan = calloc(1, sizeof *plan);
    if (!plan) return ctxkv__no_memory("the store plan");
    plan->device = device;
    ctxkv__device_retain(device);
    plan->desc = d;
    size_t layers = (size_t)d.num_layers;
    plan->caches = calloc(layers, sizeof *plan->caches);
    plan->tables = calloc(layers, sizeof *plan->tables);
    plan->scales = calloc(layers, sizeof *plan->scales);
    if (!plan->caches || !plan->tables || !plan->scales)
        status = ctxkv__no_memory("the layers' addresses");
    if (!status) status = ctxkv__store_views(plan, &d);
    if (!status) fill_args(plan);
    if (!status) status = device->cuda ? ctxkv__cuda_store_create(plan) : cpu_plan(plan);
    if (status)
        ctxkv_store_destroy(plan);
    else
        *store = plan;
    return status;
}

void ctxkv_store_destroy(ctxkv_store *plan) {
    if (!plan) return;
    if (plan->device->cuda) ctxkv__cuda_store_destroy(plan);
    ctxkv__lock_destroy(&plan->lock);
    ctxkv__lock_destroy(&plan->run_lock);
    free(plan->worker_faults);
    free(plan->k_gain);
    free(plan->caches);
    free(plan->tables);
    free(plan->scales);
    ctxkv__device_release(plan->device);
    free(plan);
}

static unsigned cache_types(ctxkv_cache_type type) {
    return type == CTXKV_CACHE_FP16       ? CTXKV__FP16
           : type == CTXKV_CACHE_FP8_E4M3 ? CTXKV__E4M3 | CTXKV__U8
           : type == CTXKV_CACHE_FP8_E5M2 ? CTXKV__E5M2 | CTXKV__U8
                                          : CTXKV__BF16;
}

static ctxkv_status cache_view(
    const struct ctxkv_store *plan, const DLTensor *tensor, const char *which, int64_t layer,
    const int64_t *shape, struct ctxkv__view *view) {
    char name[48];
    snprintf(name, sizeof name, "%s[%" PRId64 "]", which, layer);
    struct ctxkv__want want = {
        plan->device,
        cache_types(plan->desc.cache_type),
        4,
        {shape ? shape[0] : CTXKV__ANY, shape ? shape[1] : CTXKV__ANY, plan->desc.num_kv_heads,
         plan->desc.head_dim},
        true,
        true};
    ctxkv_status status = ctxkv__tensor(tensor, name, &want, view);
    if (status) return status;
    int64_t total;
    if (view->shape[1] >= 1 && !__builtin_mul_overflow(view->shape[0], view->shape[1], &total))
        return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s has block_size %" PRId64 ", must be at least 1", name,
        view->shape[1]);
}

ctxkv_status ctxkv_store_bind_caches(
    ctxkv_store *plan, const DLTensor *const *keys, const DLTensor *const *values, int64_t count) {
    ctxkv_status status = ctxkv__not_null(plan, "store");
    if (!status) status = ctxkv__not_null(keys, "keys");
    if (!status) status = ctxkv__not_null(values, "values");
    if (status) return status;
    int64_t layers = plan->desc.num_layers;
    if (count != layers)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "count is %" PRId64 ", must be num_layers (%" PRId64 ")", count,
            layers);
    struct ctxkv__cache *caches = calloc((size_t)layers, sizeof *caches);
    if (!caches) return ctxkv__no_memory("the caches' addresses");
    for (int64_t l = 0; !status && l < layers; l++) {
        struct ctxkv__view k, v;
        status = cache_view(plan, keys[l], "keys", l, 0, &k);
        if (!status) status = cache_view(plan, values[l], "values", l, k.shape, &v);
        if (status) break;
        caches[l] =
            (struct ctxkv__cache){k.data,      v.data,      k.stride[0], k.stride[1], k.stride[2],
                                  v.stride[0], v.stride[1], v.stride[2], k.shape[0],  k.shape[1]};
    }
    if (status) {
        free(caches);
        return status;
    }
    struct ctxkv__cache *old = plan->caches;
    plan->caches = caches;
    if (plan->device->cuda) status = ctxkv__cuda_store_bind(plan);
    if (status) {
        plan->caches = old;
        old = caches;
    } else {
        plan->bound = true;
    }
    free(old);
    return status;
}

static ctxkv_status run_views(
    const struct ctxkv_store *plan, const DLTensor *k, const DLTensor *v,
    struct ctxkv__store_call *call) {
    const ctxkv_store_desc *d = &plan->desc;
    struct ctxkv__view keys, values = {0};
    struct ctxkv__want want = {
        plan->device, CTXKV__BF16, 4, {d->num_layers, CTXKV__ANY, d->num_kv_heads, d->head_dim},
        true,         false};
    ctxkv_status status = ctxkv__tensor(k, "k", &want, &keys);
    if (status) return status;
    want.shape[1] = keys.shape[1];
    if (!d->v_from_k)
        status = ctxkv__tensor(v, "v", &want, &values);
    else if (v)
        status =
            ctxkv__fail(CTXKV_INVALID_ARGUMENT, "v is given, must be NULL in a plan with v_from_k");
    if (status) return status;
    *call = (struct ctxkv__store_call){
        .k = keys.data,
        .v = values.data,
        .k_layer_stride = keys.stride[0],
        .k_row_stride = keys.stride[1],
        .k_head_stride = keys.stride[2],
        .v_layer_stride = values.stride[0],
        .v_row_stride = values.stride[1],
        .v_head_stride = values.stride[2],
        .rows = keys.shape[1],
    };
    return CTXKV_OK;
}

ctxkv_status ctxkv_store_run(
    ctxkv_store *plan, const DLTensor *k, const DLTensor *v, const DLTensor *positions,
    const DLTensor *const *slots, int64_t slot_count, void *stream) {
    ctxkv_status status = ctxkv__not_null(plan, "store");
    if (status) return status;
    int64_t layers = plan->desc.num_layers;
    struct ctxkv__store_call call;
    status = run_views(plan, k, v, &call);
    if (!status)
        status = ctxkv__positions(
            plan->device, positions, plan->desc.rope != CTXKV_ROPE_NONE, call.rows,
            &call.positions);
    if (!status && !plan->bound)
        status = ctxkv__fail(CTXKV_NOT_BOUND, "no caches: call ctxkv_store_bind_caches first");
    if (status) return status;
    struct ctxkv__slots *all =
        malloc((size_t)layers * (sizeof *all + sizeof(int64_t) + sizeof(void *)));
    if (!all) return ctxkv__no_memory("the slots of a run");
    const int64_t **addresses = (const int64_t **)(void *)(all + layers);
    int64_t *rows = (int64_t *)(void *)(addresses + layers);
    status = ctxkv__slot_tensors(plan->device, slots, slot_count, layers, addresses, rows);
    if (!status) status = ctxkv__fill_slots(all, layers, addresses, rows, slot_count, call.rows);
    call.slots = all;
    call.stream = stream;
    if (!status && call.rows)
        status =
            plan->device->cuda ? ctxkv__cuda_store_run(plan, &call) : ctxkv__cpu_store(plan, &call);
    free(all);
    return status;
}

ctxkv_status ctxkv_store_faults(ctxkv_store *plan, ctxkv_faults *faults) {
    ctxkv_status status = ctxkv__not_null(plan, "store");
    if (!status) status = ctxkv__not_null(faults, "faults");
    if (status) return status;
    struct ctxkv__fault_record record = {0};
    if (plan->device->cuda) {
        status = ctxkv__cuda_store_faults(plan, &record);
        if (status) return status;
    } else {
        ctxkv__lock_take(&plan->lock);
        record = plan->faults;
        memset(&plan->faults, 0, sizeof plan->faults);
        ctxkv__lock_give(&plan->lock);
    }
    *faults = (ctxkv_faults){0};
    faults->count = record.count;
    if (!record.count) return CTXKV_OK;
    faults->kind = (int32_t)record.kind;
    faults->layer = record.layer;
    faults->row = record.row;
    faults->value = record.value;
    faults->limit = record.limit;
    return CTXKV_OK;
}
