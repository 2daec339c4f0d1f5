// SPDX-License-Identifier: Apache-2.0
// The chain by the prefill kernels: one pre-kernel for h and r, then one kernel that makes each
// layer's rows in registers, projects them exactly and stores them. In the family of SPEC 5 all
// layers read the hidden norm's rows as they lie. For many rows, on sm_90.
#include <stdlib.h>
#include <string.h>

#include "../cuda/prefill_plan.h"
#include "../device/tensor_map.h"
#include "chain_ways.h"

enum { BOXES = 2, MOST_HIDDEN = 8192 };

struct ctxkv__prefill {
    CUdeviceptr maps[BOXES]; // tensor maps over the weights, boxes of 32 and of 64 rows
    CUdeviceptr gains;       // the layers' gains as the kernels read them; 0: weightless
    ctxkv_prefill_input input;
    bool always; // also where another way was measured faster
    size_t bytes;
};

static const int boxes[BOXES] = {32, 64};

// What Muse Spark's chain has: rows made of h, r and gains, weightless K norm, GPT-J or no RoPE.
static bool is_muse(const struct ctxkv_chain *plan) {
    const ctxkv_norms_desc *n = &plan->norms->desc;
    const ctxkv_store_desc *s = &plan->store->desc;
    struct ctxkv__norms_parts parts = ctxkv__cuda_norms_parts(plan->norms);
    return n->hidden_size == MOST_HIDDEN && n->hidden.kind == CTXKV_NORM_ROW &&
           n->layer.kind == CTXKV_NORM_ROW && !parts.packed && !parts.scaled && s->head_dim == 64 &&
           s->k_norm == CTXKV_K_NORM_PLAIN && s->rope != CTXKV_ROPE_NEOX;
}

// What the family of SPEC 5 has: one normed input for all layers, K norm with gains, NeoX or no
// RoPE. The norms are the plan's own kernels. The ring walks 256 columns at a time: steps of zeros
// behind the last column could still change the sign or the last bit of a sum below 2^-126.
static bool is_family(const struct ctxkv_chain *plan) {
    const ctxkv_store_desc *s = &plan->store->desc;
    return plan->norms->out_layers == 1 && plan->norms->desc.hidden_size % 256 == 0 &&
           (s->head_dim == 64 || s->head_dim == 128) && s->k_norm == CTXKV_K_NORM_RMS &&
           ctxkv__cuda_store_k_gain(plan->store) && s->rope != CTXKV_ROPE_GPTJ;
}

static bool suits(const struct ctxkv_chain *plan) {
    const ctxkv_projection_desc *p = &plan->projection->desc;
    bool sound = (is_muse(plan) || is_family(plan)) && p->mode != CTXKV_PROJECTION_CUBLAS &&
                 !plan->projection->bias_view.data && plan->projection->args.parts == 2 &&
                 !ctxkv__cuda_store_is_general(plan->store);
    for (int64_t i = 0; sound && i < 2 * p->num_layers; i++) {
        const struct ctxkv__weight_block *b = &plan->projection->blocks[i];
        sound = ctxkv__block_wide(b) && b->row_stride > 0;
    }
    return sound && ctxkv__aligned(plan->store->tables[0].data, 16) &&
           plan->device->gpu->arch == 90 && plan->device->gpu->cu->cuTensorMapEncodeTiled;
}

static ctxkv_status weight_maps(const struct ctxkv_chain *plan, struct ctxkv__prefill *f) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const ctxkv_projection_desc *p = &plan->projection->desc;
    size_t count = 2 * (size_t)p->num_layers, bytes = count * sizeof(ctxkv_tensor_map);
    ctxkv_tensor_map *host = aligned_alloc(64, bytes);
    if (!host) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the weights' tensor maps");
    ctxkv_status status = CTXKV_OK;
    for (int b = 0; !status && b < BOXES; b++) {
        for (size_t i = 0; !status && i < count; i++) {
            const struct ctxkv__weight_block *w = &plan->projection->blocks[i];
            const cuuint64_t dims[] = {
                (cuuint64_t)p->hidden_size, (cuuint64_t)plan->projection->args.block_columns};
            const cuuint64_t stride[] = {(cuuint64_t)w->row_stride * 2};
            const cuuint32_t box[] = {64, (cuuint32_t)boxes[b]};
            CUresult result = ctxkv__tensor_map(gpu, &host[i], w->data, 2, dims, stride, box);
            if (result) status = ctxkv__cu_fail(gpu->cu, result, "describing the weights");
        }
        if (!status) status = ctxkv__gpu_alloc(gpu, bytes, "tensor maps", &f->maps[b]);
        if (!status) status = ctxkv__gpu_upload(gpu, f->maps[b], host, bytes);
        f->bytes += bytes;
    }
    free(host);
    return status;
}

static ctxkv_status packed_gains(const struct ctxkv_chain *plan, struct ctxkv__prefill *f) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    int64_t d = plan->norms->desc.hidden_size, layers = plan->norms->desc.num_layers;
    struct ctxkv__norms_parts parts = ctxkv__cuda_norms_parts(plan->norms);
    if (!parts.layer_weight) return CTXKV_OK;
    size_t bytes = (size_t)(layers * d) * 4;
    float *gains = malloc(2 * bytes);
    if (!gains) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the layers' gains");
    float *packed = gains + layers * d;
    ctxkv_status status =
        ctxkv__gpu_download(gpu, gains, (CUdeviceptr)(uintptr_t)parts.layer32, bytes);
    for (int64_t l = 0; !status && l < layers; l++)
        ctxkv__prefill_pack_gains(packed + l * d, gains + l * d, d);
    if (!status) status = ctxkv__gpu_alloc(gpu, bytes, "the layers' gains", &f->gains);
    if (!status) status = ctxkv__gpu_upload(gpu, f->gains, packed, bytes);
    f->bytes += bytes;
    free(gains);
    return status;
}

// CTXKV__KERNELS where the shape's columns do not hold a head.
static enum ctxkv__kernel kernel_of(int shape, ctxkv_prefill_input input) {
#define SHAPE(id, groups, n, rows, cols, stages)                                                   \
    {CTXKV__KERNEL_prefill_##id##_ready, CTXKV__KERNEL_prefill_##id##_scaled,                      \
     CTXKV__KERNEL_prefill_##id##_gained, CTXKV__KERNEL_prefill_##id##_rms64},
    static const enum ctxkv__kernel kernels[][4] = {
#include "../cuda/prefill_shapes.inc"
    };
#undef SHAPE
#define SHAPE(id, groups, n, rows, cols, stages) CTXKV__KERNEL_prefill_##id##_rms128,
#define CTXKV_PREFILL_WIDE_SHAPES
    static const enum ctxkv__kernel wide[] = {
#include "../cuda/prefill_shapes.inc"
    };
#undef SHAPE
    if (input != CTXKV_PREFILL_RMS128) return kernels[shape][input];
    const int narrow = ctxkv__prefill_shape_count() - (int)(sizeof wide / sizeof *wide);
    return shape < narrow ? CTXKV__KERNELS : wide[shape - narrow];
}

static ctxkv_prefill_input input_of(
    const struct ctxkv_chain *plan, const struct ctxkv__prefill *f) {
    if (is_family(plan))
        return plan->store->desc.head_dim == 128 ? CTXKV_PREFILL_RMS128 : CTXKV_PREFILL_RMS64;
    return f->gains ? CTXKV_PREFILL_GAINED : CTXKV_PREFILL_SCALED;
}

ctxkv_status ctxkv__prefill_create(struct ctxkv_chain *plan, struct ctxkv__prefill **prefill) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    *prefill = 0;
    const char *ways = getenv("CTXKV_CHAIN_WAYS");
    if (!suits(plan) || !ctxkv__gpu_has_module(gpu, CTXKV__MODULE_prefill)) return CTXKV_OK;
    struct ctxkv__prefill *f = calloc(1, sizeof *f);
    if (!f) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the prefill plan");
    ctxkv_status status = weight_maps(plan, f);
    bool muse = is_muse(plan);
    if (!status && muse) status = packed_gains(plan, f);
    if (!status && muse) status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_prenorm);
    f->input = input_of(plan, f);
    f->always = ways && strstr(ways, "prefill-always");
    for (int i = 0; !status && i < ctxkv__prefill_shape_count(); i++)
        if (kernel_of(i, f->input) != CTXKV__KERNELS)
            status = ctxkv__gpu_kernel(gpu, kernel_of(i, f->input));
    if (status) {
        ctxkv__prefill_destroy(plan, f);
        return status;
    }
    *prefill = f;
    return CTXKV_OK;
}

void ctxkv__prefill_destroy(const struct ctxkv_chain *plan, struct ctxkv__prefill *f) {
    if (!f) return;
    for (int b = 0; b < BOXES; b++) ctxkv__gpu_free(plan->device->gpu, f->maps[b]);
    ctxkv__gpu_free(plan->device->gpu, f->gains);
    free(f);
}

size_t ctxkv__prefill_memory(const struct ctxkv__prefill *f) {
    return f ? f->bytes : 0;
}

bool ctxkv__prefill_takes(
    const struct ctxkv_chain *plan, const struct ctxkv__prefill *f,
    const struct ctxkv__chain_call *call) {
    static const ctxkv_prefill_other others[] = {
        [CTXKV__PROJECTION_MMA] = CTXKV_PREFILL_OR_EXACT,
        [CTXKV__PROJECTION_CUBLAS] = CTXKV_PREFILL_OR_CUBLAS,
        [CTXKV__PROJECTION_WINDOWS] = CTXKV_PREFILL_OR_WINDOWS,
    };
    const ctxkv_projection_desc *p = &plan->projection->desc;
    if (!f) return false;
    // The norms' own kernels take any x; the pre-kernel reads 16 bytes at once.
    bool family = f->input >= CTXKV_PREFILL_RMS64, shared = family && p->num_layers > 1;
    if (!family && (!ctxkv__aligned(call->x, 16) || call->x_row_stride % 8)) return false;
    return f->always ||
           ctxkv__prefill_pays(
               call->rows, p->hidden_size, p->num_layers, p->num_kv_heads, f->input,
               others[ctxkv__cuda_projection_way(plan->projection, call->rows, shared)]);
}

static ctxkv_status launch_prenorm(
    const struct ctxkv_chain *plan, const struct ctxkv__chain_call *call, void *h, float *scale) {
    const ctxkv_norms_desc *n = &plan->norms->desc;
    struct ctxkv__norms_parts parts = ctxkv__cuda_norms_parts(plan->norms);
    ctxkv_prenorm_params p = {
        .x = call->x,
        .h = h,
        .row_scale = scale,
        .gain = parts.hidden16 ? parts.hidden16 : parts.hidden32,
        .x_row = call->rows > 1 ? call->x_row_stride : 0,
        .h_row = n->hidden_size,
        .gain_fp32 = !parts.hidden16,
        .gain_input = parts.hidden_input,
        .hidden_eps = n->hidden.eps,
        .layer_eps = n->layer.eps,
    };
    struct ctxkv__launch launch = {
        .kernel = CTXKV__KERNEL_prenorm,
        .grid = {(uint32_t)call->rows, 1, 1},
        .threads = 256,
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(plan->device->gpu, &launch);
}

static void fill_layers(
    const struct ctxkv_chain *plan, const struct ctxkv__chain_call *call, int64_t first,
    int64_t count, ctxkv_prefill_params *p) {
    for (int64_t i = 0; i < count; i++) {
        const struct ctxkv__cache *c = &plan->store->caches[first + i];
        const struct ctxkv__slots *s = &call->slots[first + i];
        p->layer[i] = (ctxkv_prefill_layer){
            CTXKV__OF_CACHE(c),
            .slots = (const long long *)s->slots,
            .rows = s->slots ? s->rows : 0,
        };
        if (!ctxkv__cache_wide(c, 16)) p->flags |= CTXKV_PREFILL_BY2;
    }
}

static ctxkv_status launch_layers(
    const struct ctxkv_chain *plan, const struct ctxkv__prefill *f,
    const struct ctxkv__chain_call *call, const void *h, const float *scale, int64_t first,
    int64_t count) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const ctxkv_projection_desc *d = &plan->projection->desc;
    ctxkv_prefill_choice choice;
    if (!ctxkv__prefill_choose(
            call->rows, d->hidden_size, count, d->num_kv_heads, gpu->multiprocessors, f->input,
            &choice))
        return ctxkv__fail(CTXKV_UNSUPPORTED, "T is too large for the prefill kernels");
    const ctxkv_prefill_shape *shape = ctxkv__prefill_shape_at(choice.shape);
    ctxkv_prefill_params p;
    memset(&p, 0, offsetof(ctxkv_prefill_params, layer));
    const cuuint64_t bytes = (cuuint64_t)d->hidden_size * 2, rows = (cuuint64_t)call->rows;
    const cuuint64_t dims[] = {(cuuint64_t)d->hidden_size, rows, 1},
                     stride[] = {bytes, bytes * rows};
    const cuuint32_t box[] = {64, (cuuint32_t)shape->row_box, 1};
    CUresult result = ctxkv__tensor_map(gpu, &p.a, h, 3, dims, stride, box);
    if (result) return ctxkv__cu_fail(gpu->cu, result, "describing the rows");
    p.w_maps = (const ctxkv_tensor_map *)(uintptr_t)f->maps[shape->weight_box == boxes[1]];
    p.row_scale = scale;
    p.gains = (const float *)(uintptr_t)f->gains;
    p.positions = (const long long *)call->positions;
    p.cos_sin = plan->store->tables[0].data;
    p.k_gain = ctxkv__cuda_store_k_gain(plan->store);
    p.a_shared = 1; // h, or the rows that all layers have
    p.faults = ctxkv__cuda_store_faults_at(plan->store);
    p.max_position = plan->store->tables[0].max_position;
    p.rows = call->rows;
    p.first_layer = (int)first;
    p.heads = (int)d->num_kv_heads;
    p.k_blocks = ctxkv__prefill_k_blocks(d->hidden_size);
    p.w_rows = (int)plan->projection->args.block_columns;
    p.column_tiles = choice.column_tiles;
    p.row_tiles = choice.row_tiles;
    p.group = choice.group;
    p.k_eps = plan->store->desc.k_eps;
    fill_layers(plan, call, first, count, &p);
    struct ctxkv__launch launch = {
        .kernel = kernel_of(choice.shape, f->input),
        .grid = {choice.grid, 1, 1},
        .threads = (uint32_t)shape->threads,
        .shared = (uint32_t)shape->shared,
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(gpu, &launch);
}

ctxkv_status ctxkv__prefill_launch(
    const struct ctxkv_chain *plan, const struct ctxkv__prefill *f,
    const struct ctxkv__chain_call *call, char *workspace) {
    int64_t layers = plan->projection->desc.num_layers;
    // h takes one layer's room of the normed rows, r follows it.
    size_t h_bytes = (size_t)call->rows * (size_t)plan->norms->desc.hidden_size * 2;
    float *scale = (float *)(void *)(workspace + h_bytes);
    ctxkv_status status;
    if (f->input >= CTXKV_PREFILL_RMS64) {
        struct ctxkv__norms_call norms = {
            .x = call->x,
            .x_row_stride = call->rows > 1 ? call->x_row_stride : 0,
            .rows = call->rows,
            .out = workspace,
            .out_layer_stride = call->rows * plan->norms->desc.hidden_size,
            .out_row_stride = plan->norms->desc.hidden_size,
            .stream = call->stream,
        };
        status = ctxkv__cuda_norms_launch(plan->norms, &norms, 0);
    } else {
        status = launch_prenorm(plan, call, workspace, scale);
    }
    for (int64_t first = 0; !status && first < layers; first += CTXKV_PREFILL_LAYERS) {
        int64_t left = layers - first;
        status = launch_layers(
            plan, f, call, workspace, scale, first,
            left < CTXKV_PREFILL_LAYERS ? left : CTXKV_PREFILL_LAYERS);
    }
    return status;
}
