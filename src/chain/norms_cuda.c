// SPDX-License-Identifier: Apache-2.0
// The norms on a CUDA device: gains are made when the plan is, the shape is chosen by the rows.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/norms.h"
#include "../ops/numerics.h"
#include "cuda_plan.h"

struct norms_gpu {
    CUdeviceptr memory; // hidden FP32 [D], layers FP32 [L, D], then both as BF16 if that is exact
    size_t bytes;
    const char *hidden32, *layer32, *hidden16, *layer16;
    bool fused;        // both norms by the row kernels, in one launch
    unsigned flags;    // CTXKV_NORMS_*
    unsigned row_kind; // 0 pair, 1 pair_scaled, 2 packed, 3 packed_scaled
    int some_layers;   // layers of a block of the `some` kernels
    bool layer_weight;
};

// Each with FP32 gains next to it. ROW and HALF are `few` where the layers' gains scale the input.
enum row_shape { ROW = 0, HALF = 2, SOME = 4, MANY = 6, ANY = 8, ROW_SHAPES };

#define BOTH(shape, name)                                                                          \
    CTXKV__KERNEL_norms_##shape##16_##name, CTXKV__KERNEL_norms_##shape##32_##name
#define SHAPES(first, second, name)                                                                \
    {                                                                                              \
        BOTH(first, name), BOTH(second, name), BOTH(some, name), BOTH(many, name),                 \
            CTXKV__KERNEL_norms_any_##name                                                         \
    }
static const enum ctxkv__kernel row_kernels[4][ROW_SHAPES] = {
    SHAPES(row, half, pair), SHAPES(few, few, pair_scaled), SHAPES(row, half, packed),
    SHAPES(few, few, packed_scaled)};

ctxkv_status ctxkv__cuda_gains(
    const struct ctxkv__cuda_device *gpu, const struct ctxkv__view *rows, int64_t count, int64_t n,
    float centre, float *gains) {
    char *host = malloc((size_t)n * 4);
    if (!host) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for a copy of the weights");
    ctxkv_status status = CTXKV_OK;
    for (int64_t l = 0; !status && l < count; l++) {
        bool fp32 = rows[l].type == CTXKV__FP32;
        status = ctxkv__gpu_download(
            gpu, host, (CUdeviceptr)(uintptr_t)rows[l].data, (size_t)n * (fp32 ? 4 : 2));
        if (!status) ctxkv__gains(host, fp32, n, centre, gains + l * n);
    }
    free(host);
    return status;
}

static void ones(float *gains, int64_t n) {
    for (int64_t i = 0; i < n; i++) gains[i] = 1.0f;
}

// The gains as BF16, or false when one of them would be rounded.
static bool narrow(const float *gains, int64_t n, uint16_t *to) {
    for (int64_t i = 0; i < n; i++) {
        to[i] = ctxkv__to_bf16(gains[i]);
        if (ctxkv__bits(ctxkv__from_bf16(to[i])) != ctxkv__bits(gains[i])) return false;
    }
    return true;
}

static ctxkv_status make_gains(struct ctxkv_norms *plan, struct norms_gpu *g) {
    const ctxkv_norms_desc *d = &plan->desc;
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    int64_t n = d->hidden_size, all = (d->num_layers + 1) * n;
    float *gains = malloc((size_t)all * 6);
    if (!gains) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the norms' gains");
    uint16_t *halves = (uint16_t *)(gains + all);
    ctxkv_status status = CTXKV_OK;
    ones(gains, all);
    if (plan->hidden_weight.data)
        status = ctxkv__cuda_gains(gpu, &plan->hidden_weight, 1, n, d->hidden.gain_centre, gains);
    if (!status && plan->layer_weights)
        status = ctxkv__cuda_gains(
            gpu, plan->layer_weights, d->num_layers, n, d->layer.gain_centre, gains + n);
    bool half = !status && narrow(gains, all, halves);
    g->bytes = (size_t)all * (half ? 6 : 4);
    if (!status) status = ctxkv__gpu_alloc(gpu, g->bytes, "the norms' gains", &g->memory);
    if (!status) status = ctxkv__gpu_upload(gpu, g->memory, gains, g->bytes);
    free(gains);
    g->hidden32 = (const char *)(uintptr_t)g->memory;
    g->layer32 = g->hidden32 + n * 4;
    g->hidden16 = half ? g->hidden32 + all * 4 : 0;
    g->layer16 = half ? g->hidden16 + n * 2 : 0;
    return status;
}

static bool row_or_absent(const ctxkv_norm *norm) {
    return norm->kind != CTXKV_NORM_RMS;
}

static void choose(const struct ctxkv_norms *plan, struct norms_gpu *g) {
    const ctxkv_norms_desc *d = &plan->desc;
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const struct ctxkv__view *hw = &plan->hidden_weight, *lw = plan->layer_weights;
    bool no_hidden = d->hidden.kind == CTXKV_NORM_ABSENT;
    bool no_layer = d->layer.kind == CTXKV_NORM_ABSENT;
    bool packed =
        d->numerics == CTXKV_NUMERICS_PACKED || (d->numerics != CTXKV_NUMERICS_PAIR && gpu->packed);
    bool scaled = lw && d->layer.input_scale;
    // Two absent norms copy, whatever the bits: that is rms.cu's.
    g->fused = d->hidden_size == 8192 && row_or_absent(&d->hidden) && row_or_absent(&d->layer) &&
               !(no_hidden && no_layer);
    if (hw->data && d->hidden.input_scale) g->flags |= CTXKV_NORMS_HIDDEN_INPUT;
    if (hw->data && (d->hidden.input_scale || hw->type == CTXKV__FP32))
        g->flags |= CTXKV_NORMS_HIDDEN_FUSE;
    if (lw && (scaled || lw->type == CTXKV__FP32)) g->flags |= CTXKV_NORMS_LAYER_FUSE;
    if (no_hidden) g->flags |= CTXKV_NORMS_NO_HIDDEN;
    if (no_layer) g->flags |= CTXKV_NORMS_NO_LAYER;
    g->layer_weight = lw != 0;
    g->row_kind = (packed ? 2u : 0u) + (scaled ? 1u : 0u);
    int64_t room = (gpu->shared_limit - 1024) / (8192 * (g->layer16 ? 2 : 4));
    g->some_layers = (int)(room < d->num_layers ? room : d->num_layers);
}

static ctxkv_status load_kernels(struct ctxkv_norms *plan, const struct norms_gpu *g) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    ctxkv_status status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_norms_rms);
    bool rows = plan->desc.hidden.kind == CTXKV_NORM_ROW || plan->desc.layer.kind == CTXKV_NORM_ROW;
    for (int shape = 0; !status && (rows || g->fused) && shape < ROW_SHAPES; shape++)
        status = ctxkv__gpu_kernel(gpu, row_kernels[g->row_kind][shape]);
    return status;
}

ctxkv_status ctxkv__cuda_norms_create(struct ctxkv_norms *plan) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter_slow(gpu, &scope, "creating a norms plan");
    if (status) return status;
    struct norms_gpu *g = plan->gpu = calloc(1, sizeof *g);
    if (!g) status = ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the norms plan");
    if (!status) ctxkv__gpu_settle(gpu);
    if (!status) status = make_gains(plan, g);
    if (!status) choose(plan, g);
    if (!status) status = load_kernels(plan, g);
    ctxkv__gpu_leave(gpu, &scope);
    return status;
}

void ctxkv__cuda_norms_destroy(struct ctxkv_norms *plan) {
    struct norms_gpu *g = plan->gpu;
    struct ctxkv__gpu_scope scope;
    if (!g) return;
    if (g->memory && !ctxkv__gpu_enter_free(plan->device->gpu, &scope)) {
        ctxkv__gpu_free(plan->device->gpu, g->memory);
        ctxkv__gpu_leave(plan->device->gpu, &scope);
    }
    free(g);
    plan->gpu = 0;
}

size_t ctxkv__cuda_norms_memory(const struct ctxkv_norms *plan) {
    return ((const struct norms_gpu *)plan->gpu)->bytes;
}

struct ctxkv__norms_parts ctxkv__cuda_norms_parts(const struct ctxkv_norms *plan) {
    const struct norms_gpu *g = plan->gpu;
    return (struct ctxkv__norms_parts){
        .hidden32 = g->hidden32,
        .layer32 = g->layer32,
        .hidden16 = g->hidden16,
        .layer16 = g->layer16,
        .hidden_input = (g->flags & CTXKV_NORMS_HIDDEN_INPUT) != 0,
        .layer_weight = g->layer_weight,
        .scaled = (g->row_kind & 1) != 0,
        .packed = g->row_kind >= 2,
        .flags = g->flags,
    };
}

// How a launch is cut: which kernel, the layers of a block, blocks along the three axes.
struct cut {
    enum row_shape shape;
    int64_t layers, blocks, groups, parts;
    unsigned row_groups, shared;
};

// Blocks of the row kernels hold as few layers as leave a third of the multiprocessors free: there
// the next launch begins. Which kernel is fastest for how many rows was measured on an H200
// (docs/op/norms.md).
static struct cut cut_for(
    const struct ctxkv__cuda_device *gpu, const struct norms_gpu *g, int64_t rows, int64_t layers) {
    bool half = g->layer16 != 0, scaled = g->row_kind & 1;
    int64_t all = gpu->multiprocessors, layer_bytes = 8192 * (half ? 2 : 4);
    struct cut c = {ANY, layers, rows < 65536 ? rows : 65536, 1, 1, 1, 0};
    if (g->flags & (CTXKV_NORMS_X_BY2 | CTXKV_NORMS_NO_HIDDEN | CTXKV_NORMS_NO_LAYER)) return c;
    int64_t most = scaled ? 1 : 1 + (gpu->shared_limit - 1024) / layer_bytes;
    c.layers = 1;
    while (c.layers < most && c.layers < layers &&
           rows * ctxkv__ceil_div(layers, c.layers) > all * 7 / 10)
        c.layers++;
    c.groups = ctxkv__ceil_div(layers, c.layers);
    c.shared = (unsigned)((c.layers - 1) * layer_bytes);
    c.shape = ROW;
    if (c.groups <= 65535 && rows * c.groups <= (scaled ? 3 * all : all * 3 / 2)) {
        if (scaled || c.layers > 1 || rows * layers > all / 4) return c;
        c.shape = HALF;
        c.parts = 2;
        return c;
    }
    c = (struct cut){MANY, layers, rows, 1, 1, 1, 0};
    // Three blocks of that kernel fit a multiprocessor; the looping one would begin a second turn.
    bool one_wave = !scaled && rows > 2 * all && rows <= 3 * all;
    if (rows >= 2048 || g->some_layers < 1 || one_wave) return c;
    c.shape = SOME;
    c.layers = g->some_layers;
    c.groups = ctxkv__ceil_div(layers, c.layers);
    c.shared = (unsigned)(c.layers * layer_bytes);
    c.row_groups = rows > all ? 2 : 1;
    c.blocks = ctxkv__ceil_div(rows, c.row_groups);
    if (c.blocks > all) c.blocks = all;
    return c;
}

// Before a kernel whose blocks want to begin beside these: a block a row and layer, which needs no
// shared memory, or halves of a row for all layers, which need little.
static void cut_beside(
    const struct ctxkv__cuda_device *gpu, const struct norms_gpu *g, int64_t rows, int64_t layers,
    struct cut *c) {
    enum { BESIDE = 32 * 1024 };
    if (c->shape != ROW || c->layers == 1 || (g->row_kind & 1) || !g->layer16) return;
    int64_t all = gpu->multiprocessors, halves = (layers - 1) * 8192;
    if (rows * layers <= all * 5 / 4)
        *c = (struct cut){ROW, 1, rows, layers, 1, 1, 0};
    else if (halves <= BESIDE && 2 * rows <= all)
        *c = (struct cut){HALF, layers, rows, 1, 2, 1, (unsigned)halves};
}

static ctxkv_status launch_rows(
    const struct ctxkv_norms *plan, struct norms_gpu g, const struct ctxkv__norms_call *call,
    int64_t layers, const struct ctxkv__lines *lines) {
    const ctxkv_norms_desc *d = &plan->desc;
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    if (!ctxkv__aligned(call->x, 16) || call->x_row_stride % 8) g.flags |= CTXKV_NORMS_X_BY2;
    struct cut cut = cut_for(gpu, &g, call->rows, layers);
    if (lines) cut_beside(gpu, &g, call->rows, layers, &cut);
    bool half = cut.shape != ANY && g.layer16;
    ctxkv_norms_params p = {
        .x = call->x,
        .out = call->out,
        .hidden_gain = half ? g.hidden16 : g.hidden32,
        .layer_gain = half ? g.layer16 : g.layer32,
        .x_row = call->x_row_stride,
        .rows = call->rows,
        .out_layer = call->out_layer_stride / 8,
        .out_row = call->out_row_stride / 8,
        .out_column = 1,
        .layers = (int)layers,
        .layers_per_block = (int)cut.layers,
        .hidden_eps = d->hidden.eps,
        .layer_eps = d->layer.eps,
        .flags = g.flags,
    };
    if (lines) {
        p.flags |= CTXKV_NORMS_NEXT_EARLY;
        p.out_layer = lines->out_layer;
        p.tile_rows = lines->tile_rows;
        p.out_tile = lines->out_tile;
    }
    struct ctxkv__launch launch = {
        .kernel = row_kernels[g.row_kind][cut.shape + (cut.shape != ANY && !half)],
        .grid = {(uint32_t)cut.blocks, (uint32_t)cut.groups, (uint32_t)cut.parts},
        .threads = 256 * cut.row_groups,
        .shared = cut.shared,
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(gpu, &launch);
}

static ctxkv_status launch_rms(
    const struct ctxkv_norms *plan, const struct ctxkv__norms_call *call, const ctxkv_norm *norm,
    const char *gain, const struct ctxkv__lines *lines) {
    int64_t n = plan->desc.hidden_size, vectors = n / 8;
    int64_t together = norm == &plan->desc.layer ? call->rows * plan->out_layers : call->rows;
    bool few =
        norm->kind != CTXKV_NORM_ABSENT &&
        ctxkv__norm_order(norm, plan->desc.numerics, false, together) == CTXKV__ORDER_RMS_1024;
    int64_t most = few ? 1024 : 256, threads = vectors < most ? vectors : most;
    bool by2 = !ctxkv__aligned(call->x, 16) || call->x_row_stride % 8;
    ctxkv_rms_params p = {
        .x = call->x,
        .out = call->out,
        .gain = (const float *)(const void *)gain,
        .x_row = call->x_row_stride,
        .rows = call->rows,
        .out_row = call->out_row_stride / 8,
        .out_column = 1,
        .vectors = (int)vectors,
        .threads = (int)threads,
        .eps = norm->eps,
        .flags =
            (by2 ? CTXKV_NORMS_X_BY2 : 0) | (norm->kind == CTXKV_NORM_ABSENT ? CTXKV_RMS_COPY : 0),
    };
    if (lines) {
        p.tile_rows = lines->tile_rows;
        p.out_tile = lines->out_tile;
    }
    struct ctxkv__launch launch = {
        .kernel = CTXKV__KERNEL_norms_rms,
        .grid = {(uint32_t)call->rows, 1, 1},
        .threads = (uint32_t)(ctxkv__ceil_div(threads, 32) * 32),
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(plan->device->gpu, &launch);
}

// Two steps: the hidden norm into the last layer's output, the layer norms from there.
static ctxkv_status launch_steps(
    const struct ctxkv_norms *plan, const struct norms_gpu *g,
    const struct ctxkv__norms_call *call) {
    const ctxkv_norms_desc *d = &plan->desc;
    int64_t last = plan->out_layers - 1;
    struct ctxkv__norms_call hidden = *call, layer = *call;
    hidden.out = (char *)call->out + last * call->out_layer_stride * 2;
    bool two = d->hidden.kind != CTXKV_NORM_ABSENT && d->layer.kind != CTXKV_NORM_ABSENT;
    ctxkv_status status = CTXKV_OK;
    if (d->hidden.kind == CTXKV_NORM_ROW) {
        struct norms_gpu only = *g;
        only.flags |= CTXKV_NORMS_NO_LAYER;
        status = launch_rows(plan, only, &hidden, 1, 0);
    } else if (d->hidden.kind == CTXKV_NORM_RMS || d->layer.kind == CTXKV_NORM_ABSENT) {
        status = launch_rms(plan, &hidden, &d->hidden, g->hidden32, 0);
    }
    if (two) {
        layer.x = hidden.out;
        layer.x_row_stride = call->out_row_stride;
    }
    if (!status && d->layer.kind == CTXKV_NORM_ROW) {
        struct norms_gpu only = *g;
        only.flags |= CTXKV_NORMS_NO_HIDDEN;
        return launch_rows(plan, only, &layer, d->num_layers, 0);
    }
    for (int64_t l = 0; !status && d->layer.kind == CTXKV_NORM_RMS && l <= last; l++) {
        layer.out = (char *)call->out + l * call->out_layer_stride * 2;
        status = launch_rms(plan, &layer, &d->layer, g->layer32 + l * d->hidden_size * 4, 0);
    }
    return status;
}

static bool one_rms(const struct ctxkv_norms *plan) {
    return plan->desc.hidden.kind == CTXKV_NORM_RMS && plan->desc.layer.kind == CTXKV_NORM_ABSENT;
}

bool ctxkv__cuda_norms_takes_lines(const struct ctxkv_norms *plan) {
    return ((const struct norms_gpu *)plan->gpu)->fused || one_rms(plan);
}

ctxkv_status ctxkv__cuda_norms_launch(
    const struct ctxkv_norms *plan, const struct ctxkv__norms_call *call,
    const struct ctxkv__lines *lines) {
    const struct norms_gpu *g = plan->gpu;
    if (!ctxkv__aligned(call->out, 16) || call->out_row_stride % 8 || call->out_layer_stride % 8)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "out lies at address %p with layer and row strides %" PRId64 ", %" PRId64
            ", must be aligned to 16 bytes with strides that are multiples of 8 on a GPU",
            call->out, call->out_layer_stride, call->out_row_stride);
    if (call->rows > INT32_MAX)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "T is %" PRId64 ", must be at most %d on a GPU", call->rows,
            INT32_MAX);
    if (g->fused) return launch_rows(plan, *g, call, plan->out_layers, lines);
    if (one_rms(plan)) return launch_rms(plan, call, &plan->desc.hidden, g->hidden32, lines);
    return launch_steps(plan, g, call);
}

ctxkv_status ctxkv__cuda_norms_run(struct ctxkv_norms *plan, const struct ctxkv__norms_call *call) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter(plan->device->gpu, &scope);
    if (status) return status;
    status = ctxkv__cuda_norms_launch(plan, call, 0);
    ctxkv__gpu_leave(plan->device->gpu, &scope);
    return status;
}
