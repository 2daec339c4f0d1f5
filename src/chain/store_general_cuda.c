// SPDX-License-Identifier: Apache-2.0
// The store by the general kernels, for plans that store_cuda.c's do not know.
#include <inttypes.h>
#include <string.h>

#include "../cuda/store_general.h"
#include "store_cuda.h"

enum { THREADS = 128 };

static bool tables_differ(const struct ctxkv_store *plan) {
    const struct ctxkv__table *t = plan->tables;
    for (int64_t l = 1; l < plan->desc.num_layers; l++)
        if (t[l].data != t[0].data || t[l].max_position != t[0].max_position ||
            t[l].rotary_dim != t[0].rotary_dim)
            return true;
    return false;
}

bool ctxkv__cuda_store_is_general(const struct ctxkv_store *plan) {
    const ctxkv_store_desc *d = &plan->desc;
    bool values = d->v_norm != CTXKV_V_NORM_ABSENT || d->v_scale != 0 || d->v_from_k;
    bool turns = d->rope != CTXKV_ROPE_NONE &&
                 (plan->args.table_type != CTXKV__TABLE_BF16 ||
                  plan->tables[0].rotary_dim != d->head_dim || tables_differ(plan));
    return d->cache_type != CTXKV_CACHE_BF16 || values || turns;
}

enum ctxkv__kernel ctxkv__cuda_store_general_kernel(int64_t head_dim) {
    return head_dim == 64    ? CTXKV__KERNEL_store_general_64
           : head_dim == 128 ? CTXKV__KERNEL_store_general_128
           : head_dim == 256 ? CTXKV__KERNEL_store_general_256
                             : CTXKV__KERNEL_store_general_512;
}

// Eight elements of a head are written at once where they always lie on a multiple of their size.
static bool cache_wide(const struct ctxkv__cache *c, ctxkv_cache_type type) {
    return ctxkv__cache_wide(c, type == CTXKV_CACHE_BF16 || type == CTXKV_CACHE_FP16 ? 16 : 8);
}

static bool source_wide(const struct ctxkv_store *plan, const struct ctxkv__store_call *call) {
    bool k = ctxkv__aligned(call->k, 16) && !(call->k_layer_stride % 8) &&
             !(call->k_row_stride % 8) && !(call->k_head_stride % 8);
    bool v = plan->desc.v_from_k || (ctxkv__aligned(call->v, 16) && !(call->v_layer_stride % 8) &&
                                     !(call->v_row_stride % 8) && !(call->v_head_stride % 8));
    return k && v;
}

static ctxkv_general_layer layer_of(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, int64_t l) {
    const struct ctxkv__cache *c = &plan->caches[l];
    const struct ctxkv__table *table = &plan->tables[l];
    const struct ctxkv__slots *slots = &call->slots[l];
    const float *gain = ctxkv__cuda_store_k_gain(plan);
    const ctxkv_store_desc *d = &plan->desc;
    bool table_wide = table->rotary_dim % 16 == 0 && ctxkv__aligned(table->data, 16);
    return (ctxkv_general_layer){
        .k_src = (const char *)call->k + l * call->k_layer_stride * 2,
        .v_src = d->v_from_k ? 0 : (const char *)call->v + l * call->v_layer_stride * 2,
        CTXKV__OF_CACHE(c),
        .slots = (const long long *)slots->slots,
        .k_weight = gain ? gain + l * d->head_dim : 0,
        .table = table->data,
        .k_scale = plan->scales[l].k,
        .v_scale = plan->scales[l].v,
        .max_position = table->max_position,
        .rows = slots->slots ? slots->rows : 0,
        .rotary_dim = (int)table->rotary_dim,
        .flags = (table_wide ? CTXKV_GENERAL_TABLE_WIDE : 0) |
                 (cache_wide(c, d->cache_type) ? CTXKV_GENERAL_CACHE_WIDE : 0),
    };
}

static void fill_common(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, ctxkv_store_general *p) {
    const ctxkv_store_desc *d = &plan->desc;
    memset(p, 0, offsetof(ctxkv_store_general, layer));
    p->k_row = call->k_row_stride;
    p->k_head = call->k_head_stride;
    p->v_row = d->v_from_k ? 0 : call->v_row_stride;
    p->v_head = d->v_from_k ? 0 : call->v_head_stride;
    p->positions = (const long long *)call->positions;
    p->faults = ctxkv__cuda_store_faults_at(plan);
    p->heads = (int)d->num_kv_heads;
    p->norm = (unsigned)d->k_norm;
    p->rope = (unsigned)d->rope;
    p->table_type = (unsigned)plan->args.table_type;
    p->cache_type = (unsigned)d->cache_type;
    p->flags = (source_wide(plan, call) ? 0 : CTXKV_GENERAL_SRC_BY2) |
               (d->v_norm == CTXKV_V_NORM_RMS ? CTXKV_GENERAL_V_NORM : 0) |
               (d->v_scale != 0 ? CTXKV_GENERAL_V_SCALE : 0) |
               (d->v_from_k ? CTXKV_GENERAL_V_FROM_K : 0);
    p->k_eps = d->k_eps;
    p->v_eps = d->v_eps;
    p->v_scale = d->v_scale;
}

ctxkv_status ctxkv__cuda_store_general_launch(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call) {
    const ctxkv_store_desc *d = &plan->desc;
    int64_t layers = d->num_layers, lanes = d->head_dim / 8 < 32 ? d->head_dim / 8 : 32;
    ctxkv_store_general p;
    fill_common(plan, call, &p);
    for (int64_t first = 0; first < layers; first += CTXKV_GENERAL_LAYERS) {
        int64_t left = layers - first;
        int64_t count = left < CTXKV_GENERAL_LAYERS ? left : CTXKV_GENERAL_LAYERS, most = 0;
        for (int64_t l = 0; l < count; l++) {
            p.layer[l] = layer_of(plan, call, first + l);
            if (p.layer[l].rows > most) most = p.layer[l].rows;
        }
        if (!most) continue;
        p.first_layer = (int)first;
        int64_t blocks = ctxkv__ceil_div(most * d->num_kv_heads, THREADS / lanes);
        if (blocks > INT32_MAX)
            return ctxkv__fail(
                CTXKV_INVALID_ARGUMENT,
                "T is %" PRId64 ", too large for one launch of %" PRId64 " heads", most,
                d->num_kv_heads);
        struct ctxkv__launch launch = {
            .kernel = ctxkv__cuda_store_general_kernel(d->head_dim),
            .grid = {(uint32_t)blocks, (uint32_t)count, 1},
            .threads = THREADS,
            .stream = call->stream,
            .params = &p,
        };
        ctxkv_status status = ctxkv__gpu_launch(plan->device->gpu, &launch);
        if (status) return status;
    }
    return CTXKV_OK;
}
