// SPDX-License-Identifier: Apache-2.0
// A projection of at most 64 rows on sm_90: one kernel reads x by a tensor map made for the run,
// and packed weights that are the plan's.
#include <stdlib.h>

#include "../cuda/few_params.h"
#include "../cuda/few_plan.h"
#include "../device/tensor_map.h"
#include "few_parts.h"

struct ctxkv__few {
    struct ctxkv__few_shape shape;
    int packings;
    struct ctxkv__few_packing packing[CTXKV__FEW_PACKINGS];
    CUdeviceptr weights[CTXKV__FEW_PACKINGS];
    size_t bytes;
};

static struct ctxkv__few_shape shape_of(const struct ctxkv_projection *plan) {
    return (struct ctxkv__few_shape){
        .hidden_size = plan->desc.hidden_size,
        .num_layers = plan->desc.num_layers,
        .columns = plan->args.parts * plan->args.block_columns,
        .multiprocessors = plan->device->gpu->multiprocessors,
        .shared_memory = (size_t)plan->device->gpu->shared_limit,
    };
}

static bool suits(const struct ctxkv_projection *plan) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    struct ctxkv__few_shape shape = shape_of(plan);
    struct ctxkv__few_cut cut;
    bool all = gpu->arch == 90 && gpu->cu->cuTensorMapEncodeTiled && !plan->bias_view.data;
    for (int64_t rows = 1; all && rows <= CTXKV_FEW_MAX_ROWS; rows++)
        all = ctxkv__few_cut(&shape, rows, &cut);
    return all;
}

bool ctxkv__few_pays(const struct ctxkv_projection *plan) {
    struct ctxkv__few_shape shape = shape_of(plan);
    return ctxkv__few_one_wave(&shape);
}

// CTXKV__KERNELS: there is none.
static enum ctxkv__kernel kernel_of(const struct ctxkv__few_cut *cut) {
#define KERNEL(n, s)                                                                               \
    if (!cut->turned && cut->columns == n && cut->steps == s) return CTXKV__KERNEL_few_n##n##_s##s;
    CTXKV_FEW_SHAPES(KERNEL)
#undef KERNEL
#define KERNEL(n, s)                                                                               \
    if (cut->turned && cut->columns == n && cut->steps == s) return CTXKV__KERNEL_few_t##n##_s##s;
    CTXKV_FEW_TURNED_SHAPES(KERNEL)
#undef KERNEL
    return CTXKV__KERNELS;
}

static ctxkv_status load(struct ctxkv__cuda_device *gpu, const struct ctxkv__few_shape *shape) {
    ctxkv_status status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_few_pack);
    for (int rows = 1; !status && rows <= CTXKV_FEW_MAX_ROWS; rows++) {
        struct ctxkv__few_cut cut;
        if (!ctxkv__few_cut(shape, rows, &cut) || kernel_of(&cut) == CTXKV__KERNELS)
            return ctxkv__fail(CTXKV_NO_KERNEL, "no kernel for a projection of %d rows", rows);
        status = ctxkv__gpu_kernel(gpu, kernel_of(&cut));
    }
    return status;
}

static ctxkv_status pack_layer(
    const struct ctxkv_projection *plan, const struct ctxkv__few_packing *packing, int64_t layer,
    CUdeviceptr to) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const int64_t parts = plan->args.parts;
    const struct ctxkv__weight_block *k = &plan->blocks[parts * layer], *v = k + parts - 1;
    ctxkv_few_pack_params p = {
        .k = k->data,
        .v = v->data,
        .out = (void *)(uintptr_t)to,
        .k_row = k->row_stride,
        .v_row = v->row_stride,
        .half = (int)plan->args.block_columns,
        .rows = (int)(parts * plan->args.block_columns),
        .tile_rows = packing->tile_rows,
        .chunks = (int)(plan->desc.hidden_size / 8),
        .by2 = !ctxkv__block_wide(k) || !ctxkv__block_wide(v),
    };
    struct ctxkv__launch launch = {
        .kernel = CTXKV__KERNEL_few_pack,
        .grid =
            {(uint32_t)ctxkv__ceil_div(p.chunks, 256), (uint32_t)packing->tile_rows,
             (uint32_t)packing->tiles},
        .threads = 256,
        .stream = gpu->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(gpu, &launch);
}

static ctxkv_status pack_weights(const struct ctxkv_projection *plan, struct ctxkv__few *f) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const size_t layers = (size_t)plan->desc.num_layers;
    ctxkv_status status = CTXKV_OK;
    for (int i = 0; !status && i < f->packings; i++) {
        const size_t bytes = f->packing[i].layer_bytes * layers;
        status = ctxkv__gpu_alloc(gpu, bytes, "the packed weights", &f->weights[i]);
        for (size_t l = 0; !status && l < layers; l++)
            status = pack_layer(
                plan, &f->packing[i], (int64_t)l, f->weights[i] + l * f->packing[i].layer_bytes);
        f->bytes += bytes;
    }
    CUresult result = gpu->cu->cuStreamSynchronize(gpu->stream);
    if (!status && result) status = ctxkv__cu_fail(gpu->cu, result, "packing the weights");
    return status;
}

ctxkv_status ctxkv__few_create(struct ctxkv_projection *plan, struct ctxkv__few **few) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    *few = 0;
    if (!suits(plan) || !ctxkv__gpu_has_module(gpu, CTXKV__MODULE_few)) return CTXKV_OK;
    struct ctxkv__few *f = calloc(1, sizeof *f);
    if (!f) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the projection plan");
    f->shape = shape_of(plan);
    f->packings = ctxkv__few_packings(&f->shape, f->packing);
    ctxkv__gpu_settle(gpu);
    ctxkv_status status = load(gpu, &f->shape);
    if (!status) status = pack_weights(plan, f);
    if (!status) {
        *few = f;
        return CTXKV_OK;
    }
    ctxkv__few_destroy(plan, f);
    // The plan works without its faster way.
    return status == CTXKV_OUT_OF_MEMORY ? CTXKV_OK : status;
}

void ctxkv__few_destroy(const struct ctxkv_projection *plan, struct ctxkv__few *f) {
    if (!f) return;
    for (int i = 0; i < f->packings; i++) ctxkv__gpu_free(plan->device->gpu, f->weights[i]);
    free(f);
}

size_t ctxkv__few_memory(const struct ctxkv__few *f) {
    return f ? f->bytes : 0;
}

// What a tensor map can say of x: 16-byte aligned, strides of 16 bytes up to 2^40.
bool ctxkv__few_takes_run(const struct ctxkv__few *f, const struct ctxkv__projection_call *call) {
    if (!f || call->rows > CTXKV_FEW_MAX_ROWS) return false;
    const int64_t most = ((int64_t)1 << 39) - 8, row = call->x_row_stride;
    const int64_t layer = call->x_layer_stride;
    return ctxkv__aligned(call->x, 16) &&
           (call->rows == 1 || (row > 0 && row <= most && row % 8 == 0)) && layer >= 0 &&
           layer <= most && layer % 8 == 0;
}

static CUresult map_rows(
    const struct ctxkv_projection *plan, const struct ctxkv__projection_call *call,
    const struct ctxkv__few_cut *cut, ctxkv_tensor_map *map) {
    const int64_t d = plan->desc.hidden_size;
    const int64_t row = call->rows > 1 ? call->x_row_stride : d;
    const int64_t layer = call->x_layer_stride ? call->x_layer_stride : d;
    const cuuint64_t dims[] = {
        64, (cuuint64_t)call->rows, (cuuint64_t)(d / 64),
        call->x_layer_stride ? (cuuint64_t)plan->desc.num_layers : 1};
    const cuuint64_t strides[] = {(cuuint64_t)row * 2, 128, (cuuint64_t)layer * 2};
    const cuuint32_t box[] = {64, (cuuint32_t)cut->batch_rows, (cuuint32_t)cut->box_lines, 1};
    return ctxkv__tensor_map(plan->device->gpu, map, call->x, 4, dims, strides, box);
}

ctxkv_status ctxkv__few_launch(
    const struct ctxkv_projection *plan, const struct ctxkv__few *f,
    const struct ctxkv__projection_call *call) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    struct ctxkv__few_cut cut;
    if (!ctxkv__few_cut(&f->shape, call->rows, &cut))
        return ctxkv__fail(CTXKV_UNSUPPORTED, "the kernels of few rows do not take this shape");
    const int packing = cut.packing.tile_rows != f->packing[0].tile_rows;
    const bool kv4 =
        ctxkv__aligned(call->kv, 4) && !(call->kv_row_stride % 2) && !(call->kv_layer_stride % 2);
    ctxkv_few_params p = {
        .w = (const void *)(uintptr_t)f->weights[packing],
        .kv = call->kv,
        .kv_layer = call->kv_layer_stride,
        .kv_row = call->kv_row_stride,
        .rows = (int)call->rows,
        .columns = (int)f->shape.columns,
        .chunks = cut.chunks,
        .tile_rows = cut.packing.tile_rows,
        .tiles = cut.packing.tiles,
        .batch_rows = cut.batch_rows,
        .cluster_tiles = cut.cluster_tiles,
        .cluster_batches = cut.cluster_batches,
        .box_lines = cut.box_lines,
        .stages = cut.stages,
        .w_first = cut.w_first,
        .x_shared = call->x_layer_stride == 0,
        .kv_by2 = !kv4,
    };
    CUresult result = map_rows(plan, call, &cut, &p.x);
    if (result) return ctxkv__cu_fail(gpu->cu, result, "describing the rows");
    struct ctxkv__launch launch = {
        .kernel = kernel_of(&cut),
        .grid =
            {(uint32_t)cut.packing.tiles, (uint32_t)cut.batch_tiles, (uint32_t)f->shape.num_layers},
        .threads = CTXKV_FEW_THREADS,
        .shared = cut.shared_bytes,
        .cluster = {(uint32_t)cut.cluster_tiles, (uint32_t)cut.cluster_batches},
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(gpu, &launch);
}
