// SPDX-License-Identifier: Apache-2.0
// The store on a CUDA device: one launch for all layers, the layers' table in its parameters.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/norms.h"
#include "store_cuda.h"

struct store_gpu {
    CUdeviceptr faults; // ctxkv_fault_record
    CUdeviceptr k_gain; // FP32 [L, head_dim]
    size_t bytes;
    bool general;     // by store_general_cuda.c
    bool fast;        // a kernel that knows this kind of store exists
    bool fast_caches; // and the bound caches suit it
    unsigned flags;   // CTXKV_STORE_TABLE_BY2
    enum ctxkv__kernel fast_kernel, any_kernel;
};

#define THREADS 128

static bool fast_kind(const ctxkv_store_desc *d, enum ctxkv__kernel *kernel) {
    if (d->head_dim == 64 && d->k_norm == CTXKV_K_NORM_PLAIN && d->rope != CTXKV_ROPE_NEOX) {
        *kernel = d->rope == CTXKV_ROPE_GPTJ ? CTXKV__KERNEL_store_gptj : CTXKV__KERNEL_store_plain;
        return true;
    }
    *kernel = d->head_dim == 64    ? CTXKV__KERNEL_store_neox_64
              : d->head_dim == 128 ? CTXKV__KERNEL_store_neox_128
              : d->head_dim == 256 ? CTXKV__KERNEL_store_neox_256
                                   : CTXKV__KERNEL_store_neox_512;
    return d->k_norm == CTXKV_K_NORM_RMS && d->rope == CTXKV_ROPE_NEOX;
}

static ctxkv_status make_gain(struct ctxkv_store *plan, struct store_gpu *g) {
    const ctxkv_store_desc *d = &plan->desc;
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    if (d->k_norm != CTXKV_K_NORM_RMS) return CTXKV_OK;
    size_t bytes = (size_t)(d->num_layers * d->head_dim) * 4;
    float *host = malloc(bytes);
    if (!host) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the K norm's gains");
    ctxkv__gpu_settle(gpu);
    ctxkv_status status = CTXKV_OK;
    for (int64_t i = 0; i < d->num_layers * d->head_dim; i++) host[i] = 1.0f; // weightless
    for (int64_t l = 0; !status && plan->k_weight.data && l < d->num_layers; l++) {
        struct ctxkv__view row = plan->k_weight;
        row.data += l * row.stride[0] * (row.type == CTXKV__FP32 ? 4 : 2);
        status =
            ctxkv__cuda_gains(gpu, &row, 1, d->head_dim, d->k_gain_centre, host + l * d->head_dim);
    }
    if (!status) status = ctxkv__gpu_alloc(gpu, bytes, "the K norm's gains", &g->k_gain);
    if (!status) status = ctxkv__gpu_upload(gpu, g->k_gain, host, bytes);
    g->bytes += bytes;
    free(host);
    return status;
}

ctxkv_status ctxkv__cuda_store_create(struct ctxkv_store *plan) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const ctxkv_store_desc *d = &plan->desc;
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter_slow(gpu, &scope, "creating a store plan");
    if (status) return status;
    static const ctxkv_fault_record none;
    struct store_gpu *g = plan->gpu = calloc(1, sizeof *g);
    if (!g) status = ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the store plan");
    if (!status) status = ctxkv__gpu_alloc(gpu, sizeof none, "the fault record", &g->faults);
    if (!status) status = ctxkv__gpu_upload(gpu, g->faults, &none, sizeof none);
    if (!status) status = make_gain(plan, g);
    if (!status) {
        g->bytes += sizeof none;
        g->general = ctxkv__cuda_store_is_general(plan);
        g->fast = !g->general && fast_kind(d, &g->fast_kernel);
        g->any_kernel = d->head_dim == 64    ? CTXKV__KERNEL_store_any_64
                        : d->head_dim == 128 ? CTXKV__KERNEL_store_any_128
                        : d->head_dim == 256 ? CTXKV__KERNEL_store_any_256
                                             : CTXKV__KERNEL_store_any_512;
        if (plan->tables[0].data && !ctxkv__aligned(plan->tables[0].data, 16))
            g->flags |= CTXKV_STORE_TABLE_BY2;
        if (g->general) g->any_kernel = ctxkv__cuda_store_general_kernel(d->head_dim);
        status = ctxkv__gpu_kernel(gpu, g->any_kernel);
    }
    if (!status && g->fast) status = ctxkv__gpu_kernel(gpu, g->fast_kernel);
    ctxkv__gpu_leave(gpu, &scope);
    return status;
}

void ctxkv__cuda_store_destroy(struct ctxkv_store *plan) {
    struct store_gpu *g = plan->gpu;
    struct ctxkv__gpu_scope scope;
    if (!g) return;
    if (!ctxkv__gpu_enter_free(plan->device->gpu, &scope)) {
        ctxkv__gpu_free(plan->device->gpu, g->faults);
        ctxkv__gpu_free(plan->device->gpu, g->k_gain);
        ctxkv__gpu_leave(plan->device->gpu, &scope);
    }
    free(g);
    plan->gpu = 0;
}

size_t ctxkv__cuda_store_memory(const struct ctxkv_store *plan) {
    return ((const struct store_gpu *)plan->gpu)->bytes;
}

ctxkv_fault_record *ctxkv__cuda_store_faults_at(const struct ctxkv_store *plan) {
    return (ctxkv_fault_record *)(uintptr_t)((const struct store_gpu *)plan->gpu)->faults;
}

const float *ctxkv__cuda_store_k_gain(const struct ctxkv_store *plan) {
    return (const float *)(uintptr_t)((const struct store_gpu *)plan->gpu)->k_gain;
}

// A stride that counts in units of 16 bytes and fits 32 bits.
static bool wide_stride(int64_t stride) {
    return stride >= 0 && stride % 8 == 0 && stride / 8 <= UINT32_MAX;
}

static bool cache_fast(const struct ctxkv__cache *c) {
    return ctxkv__cache_wide(c, 16) && wide_stride(c->k_block_stride) &&
           wide_stride(c->k_page_stride) && wide_stride(c->k_head_stride) &&
           wide_stride(c->v_block_stride) && wide_stride(c->v_page_stride) &&
           wide_stride(c->v_head_stride) && c->num_blocks * c->block_size <= UINT32_MAX;
}

ctxkv_status ctxkv__cuda_store_bind(struct ctxkv_store *plan) {
    struct store_gpu *g = plan->gpu;
    g->fast_caches = true;
    for (int64_t l = 0; l < plan->desc.num_layers; l++)
        if (!cache_fast(&plan->caches[l])) g->fast_caches = false;
    return CTXKV_OK;
}

static int log2_or_minus(int64_t n) {
    return n & (n - 1) ? -1 : __builtin_ctzll((unsigned long long)n);
}

static ctxkv_store_fast_layer fast_layer(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, int64_t l) {
    const struct ctxkv__cache *c = &plan->caches[l];
    const float *gain = ctxkv__cuda_store_k_gain(plan);
    return (ctxkv_store_fast_layer){
        .k_src = (const char *)call->k + l * call->k_layer_stride * 2,
        .v_src = (const char *)call->v + l * call->v_layer_stride * 2,
        .k = c->k,
        .v = c->v,
        .slots = (const long long *)call->slots[l].slots,
        .k_weight = gain ? gain + l * plan->desc.head_dim : 0,
        .slot_count = c->num_blocks * c->block_size,
        .rows = call->slots[l].slots ? (unsigned)call->slots[l].rows : 0,
        .block_size = (unsigned)c->block_size,
        .block_shift = log2_or_minus(c->block_size),
        .k_block = (unsigned)(c->k_block_stride / 8),
        .k_page = (unsigned)(c->k_page_stride / 8),
        .k_head = (unsigned)(c->k_head_stride / 8),
        .v_block = (unsigned)(c->v_block_stride / 8),
        .v_page = (unsigned)(c->v_page_stride / 8),
        .v_head = (unsigned)(c->v_head_stride / 8),
    };
}

static ctxkv_store_layer any_layer(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, int64_t l) {
    const struct ctxkv__cache *c = &plan->caches[l];
    const float *gain = ctxkv__cuda_store_k_gain(plan);
    return (ctxkv_store_layer){
        .k_src = (const char *)call->k + l * call->k_layer_stride * 2,
        .v_src = (const char *)call->v + l * call->v_layer_stride * 2,
        CTXKV__OF_CACHE(c),
        .slots = (const long long *)call->slots[l].slots,
        .k_weight = gain ? gain + l * plan->desc.head_dim : 0,
        .rows = call->slots[l].slots ? call->slots[l].rows : 0,
        .by2 = !ctxkv__cache_wide(c, 16),
    };
}

static bool source_aligned(const struct ctxkv__store_call *call) {
    return ctxkv__aligned(call->k, 16) && ctxkv__aligned(call->v, 16) &&
           !(call->k_layer_stride % 8) && !(call->k_row_stride % 8) && !(call->k_head_stride % 8) &&
           !(call->v_layer_stride % 8) && !(call->v_row_stride % 8) && !(call->v_head_stride % 8);
}

static bool run_fast(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, int64_t most_rows) {
    const struct store_gpu *g = plan->gpu;
    return g->fast && g->fast_caches && !g->flags && source_aligned(call) &&
           plan->desc.num_layers <= CTXKV_STORE_FEW && wide_stride(call->k_row_stride) &&
           wide_stride(call->k_head_stride) && wide_stride(call->v_row_stride) &&
           wide_stride(call->v_head_stride) && call->rows <= UINT32_MAX / 2 &&
           most_rows * plan->desc.num_kv_heads <= UINT32_MAX - 4096;
}

// Bytes of K and V from which writes past the second-level cache were faster on an H200.
#define PAST_BYTES (INT64_C(32) << 20)

static unsigned past(const struct ctxkv_store *plan, const struct ctxkv__store_call *call) {
    const ctxkv_store_desc *d = &plan->desc;
    int64_t bytes = d->num_layers * d->num_kv_heads * d->head_dim * 4;
    return call->rows >= PAST_BYTES / bytes ? CTXKV_STORE_PAST : 0;
}

static ctxkv_store_common common(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, int64_t unit) {
    const ctxkv_store_desc *d = &plan->desc;
    const struct store_gpu *g = plan->gpu;
    return (ctxkv_store_common){
        .k_row = call->k_row_stride / unit,
        .k_head = call->k_head_stride / unit,
        .v_row = call->v_row_stride / unit,
        .v_head = call->v_head_stride / unit,
        .positions = (const long long *)call->positions,
        .cos_sin = plan->tables[0].data,
        .max_position = d->rope == CTXKV_ROPE_NONE ? -1 : plan->tables[0].max_position,
        .faults = (ctxkv_fault_record *)(uintptr_t)g->faults,
        .heads = (int)d->num_kv_heads,
        .rope = (unsigned)d->rope,
        .norm = (unsigned)d->k_norm,
        .flags = g->flags | (source_aligned(call) ? 0 : CTXKV_STORE_SRC_BY2) | past(plan, call),
        .eps = d->k_eps,
    };
}

static int64_t most_rows_of(const struct ctxkv__slots *slots, int64_t count) {
    int64_t most = 0;
    for (int64_t l = 0; l < count; l++)
        if (slots[l].slots && slots[l].rows > most) most = slots[l].rows;
    return most;
}

static ctxkv_status launch(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, enum ctxkv__kernel kernel,
    int64_t rows, int64_t layers, const void *params) {
    const ctxkv_store_desc *d = &plan->desc;
    int64_t lanes = d->head_dim / 8 < 32 ? d->head_dim / 8 : 32, groups = THREADS / lanes;
    int64_t blocks = ctxkv__ceil_div(rows * d->num_kv_heads, groups);
    if (blocks > INT32_MAX)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "T is %" PRId64 ", too large for one launch of %" PRId64 " heads", rows,
            d->num_kv_heads);
    struct ctxkv__launch launch = {
        .kernel = kernel,
        .grid = {(uint32_t)blocks, (uint32_t)layers, 1},
        .threads = THREADS,
        .stream = call->stream,
        .params = params,
    };
    return ctxkv__gpu_launch(plan->device->gpu, &launch);
}

static ctxkv_status launch_fast(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call, int64_t most_rows) {
    const struct store_gpu *g = plan->gpu;
    int64_t layers = plan->desc.num_layers;
    ctxkv_store_fast p;
    p.c = common(plan, call, 8);
    for (int64_t l = 0; l < layers; l++) p.layer[l] = fast_layer(plan, call, l);
    return launch(plan, call, g->fast_kernel, most_rows, layers, &p);
}

ctxkv_status ctxkv__cuda_store_launch(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call) {
    const struct store_gpu *g = plan->gpu;
    int64_t layers = plan->desc.num_layers, most = most_rows_of(call->slots, layers);
    if (!most) return CTXKV_OK;
    if (g->general) return ctxkv__cuda_store_general_launch(plan, call);
    if (run_fast(plan, call, most)) return launch_fast(plan, call, most);
    ctxkv_store_any p;
    for (int64_t first = 0; first < layers; first += CTXKV_STORE_MANY) {
        int64_t count = layers - first < CTXKV_STORE_MANY ? layers - first : CTXKV_STORE_MANY;
        most = most_rows_of(call->slots + first, count);
        if (!most) continue;
        p.c = common(plan, call, 1);
        p.c.first_layer = (int)first;
        for (int64_t l = 0; l < count; l++) p.layer[l] = any_layer(plan, call, first + l);
        ctxkv_status status = launch(plan, call, g->any_kernel, most, count, &p);
        if (status) return status;
    }
    return CTXKV_OK;
}

ctxkv_status ctxkv__cuda_store_run(struct ctxkv_store *plan, const struct ctxkv__store_call *call) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter(plan->device->gpu, &scope);
    if (status) return status;
    status = ctxkv__cuda_store_launch(plan, call);
    ctxkv__gpu_leave(plan->device->gpu, &scope);
    return status;
}

ctxkv_status ctxkv__cuda_store_faults(
    struct ctxkv_store *plan, struct ctxkv__fault_record *record) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const struct store_gpu *g = plan->gpu;
    struct ctxkv__gpu_scope scope;
    ctxkv_fault_record found = {0};
    static const ctxkv_fault_record none;
    ctxkv_status status = ctxkv__gpu_enter_slow(gpu, &scope, "reading the faults");
    if (status) return status;
    ctxkv__lock_take(&plan->lock);
    CUresult result = gpu->cu->cuCtxSynchronize();
    if (result) status = ctxkv__cu_fail(gpu->cu, result, "waiting for the device");
    if (!status) status = ctxkv__gpu_download(gpu, &found, g->faults, sizeof found);
    if (!status && found.count) status = ctxkv__gpu_upload(gpu, g->faults, &none, sizeof none);
    ctxkv__lock_give(&plan->lock);
    ctxkv__gpu_leave(gpu, &scope);
    if (status || !found.count) return status;
    *record = (struct ctxkv__fault_record){
        .count = found.count,
        .kind = found.kind == CTXKV_FAULT_KIND_SLOT ? CTXKV__FAULT_SLOT : CTXKV__FAULT_POSITION,
        .layer = found.layer,
        .row = found.row,
        .value = found.value,
        .limit = plan->tables[found.layer].max_position,
    };
    const struct ctxkv__cache *c = &plan->caches[found.layer];
    if (record->kind == CTXKV__FAULT_SLOT) record->limit = c->num_blocks * c->block_size;
    return CTXKV_OK;
}
