// SPDX-License-Identifier: Apache-2.0
// A projection of at most 64 rows on sm_90: x into packed n, then the decode kernel, which writes
// kv.
#include <stdlib.h>

#include "decode_parts.h"

struct ctxkv__projection_few {
    struct ctxkv__decode_shape shape;
    int packings;
    struct ctxkv__decode_packing packing[CTXKV__DECODE_PACKINGS];
    CUdeviceptr weights[CTXKV__DECODE_PACKINGS], x; // packed
    size_t bytes;
};

static bool suits(const struct ctxkv_projection *plan) {
    struct ctxkv__decode_shape shape = ctxkv__decode_shape_of(plan);
    struct ctxkv__decode_cut cut;
    return plan->device->gpu->arch == 90 && plan->args.parts == 2 && !plan->bias_view.data &&
           ctxkv__decode_takes(&shape) && ctxkv__decode_cut(&shape, 1, &cut) &&
           ctxkv__decode_cut(&shape, CTXKV_DECODE_MAX_ROWS, &cut);
}

static ctxkv_status make_x(const struct ctxkv_projection *plan, struct ctxkv__projection_few *f) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    size_t bytes = ctxkv__decode_x_bytes(&f->shape, CTXKV_DECODE_MAX_ROWS, plan->desc.num_layers);
    ctxkv_status status = ctxkv__gpu_alloc(gpu, bytes, "the packed rows", &f->x);
    if (status) return status;
    f->bytes += bytes;
    // Columns past D, up to a multiple of 64, are multiplied too.
    CUresult result = gpu->cu->cuMemsetD8Async(f->x, 0, bytes, gpu->stream);
    return result ? ctxkv__cu_fail(gpu->cu, result, "clearing the packed rows") : CTXKV_OK;
}

ctxkv_status ctxkv__projection_few_create(
    struct ctxkv_projection *plan, struct ctxkv__projection_few **few) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    *few = 0;
    if (!suits(plan) || !ctxkv__gpu_has_module(gpu, CTXKV__MODULE_decode)) return CTXKV_OK;
    struct ctxkv__projection_few *f = calloc(1, sizeof *f);
    if (!f) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the projection plan");
    f->shape = ctxkv__decode_shape_of(plan);
    f->packings = ctxkv__decode_packings(&f->shape, f->packing);
    ctxkv__gpu_settle(gpu);
    ctxkv_status status = ctxkv__decode_load(gpu, &f->shape);
    if (!status) status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_decode_pack_rows);
    if (!status) status = make_x(plan, f);
    for (int i = 0; !status && i < f->packings; i++)
        status = ctxkv__decode_pack_weights(plan, &f->packing[i], &f->weights[i], &f->bytes);
    CUresult result = gpu->cu->cuStreamSynchronize(gpu->stream);
    if (!status && result) status = ctxkv__cu_fail(gpu->cu, result, "packing the weights");
    if (!status) {
        *few = f;
        return CTXKV_OK;
    }
    ctxkv__projection_few_destroy(plan, f);
    // The plan works without its faster way.
    return status == CTXKV_OUT_OF_MEMORY ? CTXKV_OK : status;
}

void ctxkv__projection_few_destroy(
    const struct ctxkv_projection *plan, struct ctxkv__projection_few *f) {
    if (!f) return;
    for (int i = 0; i < f->packings; i++) ctxkv__gpu_free(plan->device->gpu, f->weights[i]);
    ctxkv__gpu_free(plan->device->gpu, f->x);
    free(f);
}

size_t ctxkv__projection_few_memory(const struct ctxkv__projection_few *f) {
    return f ? f->bytes : 0;
}

static ctxkv_status launch_rows(
    const struct ctxkv_projection *plan, const struct ctxkv__projection_few *f,
    const struct ctxkv__projection_call *call, const struct ctxkv__decode_cut *cut,
    int64_t x_layer) {
    int64_t chunks = plan->desc.hidden_size / 8;
    bool aligned =
        ctxkv__aligned(call->x, 16) && !(call->x_row_stride % 8) && !(call->x_layer_stride % 8);
    ctxkv_decode_rows_params p = {
        .x = call->x,
        .out = (void *)(uintptr_t)f->x,
        .x_layer = call->x_layer_stride,
        .x_row = call->x_row_stride,
        .out_layer = x_layer,
        .chunks = cut->chunks,
        .data_chunks = (int)chunks,
        .batch_rows = cut->batch_rows,
        .by2 = !aligned,
    };
    int64_t copies = call->x_layer_stride ? plan->desc.num_layers : 1;
    struct ctxkv__launch launch = {
        .kernel = CTXKV__KERNEL_decode_pack_rows,
        .grid = {(uint32_t)ctxkv__ceil_div(chunks, 256), (uint32_t)call->rows, (uint32_t)copies},
        .threads = 256,
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(plan->device->gpu, &launch);
}

static ctxkv_status launch_layers(
    const struct ctxkv_projection *plan, const struct ctxkv__projection_few *f,
    const struct ctxkv__projection_call *call, const struct ctxkv__decode_cut *cut, int64_t x_layer,
    int64_t first, int64_t count) {
    int packing = 0;
    while (!ctxkv__decode_same_packing(&cut->packing, &f->packing[packing])) packing++;
    bool kv4 =
        ctxkv__aligned(call->kv, 4) && !(call->kv_row_stride % 2) && !(call->kv_layer_stride % 2);
    ctxkv_decode_params p = {
        .x = (const char *)(uintptr_t)f->x + first * x_layer * 16,
        .w =
            (const char *)(uintptr_t)f->weights[packing] + (size_t)first * cut->packing.layer_bytes,
        .kv = (char *)call->kv + first * call->kv_layer_stride * 2,
        .max_position = -1,
        .x_layer = x_layer,
        .kv_layer = call->kv_layer_stride,
        .kv_row = call->kv_row_stride,
        .rows = (int)call->rows,
        .columns = (int)(2 * plan->args.block_columns),
        .heads = (int)plan->desc.num_kv_heads,
        .head_dim = (int)plan->desc.head_dim,
        .chunks = cut->chunks,
        .tile_rows = cut->packing.tile_rows,
        .tiles = cut->packing.tiles,
        .batch_rows = cut->batch_rows,
        .batch_tiles = cut->batch_tiles,
        .k_tiles = cut->packing.k_tiles,
        .k_columns = cut->packing.k_columns,
        .cluster_tiles = cut->cluster_tiles,
        .cluster_batches = cut->cluster_batches,
        .shares_x = cut->shares_x,
        .k_room = cut->k_room,
        .stages = cut->stages,
        .w_first = cut->w_first,
        .first_layer = (int)first,
        .norm = CTXKV_DECODE_NORM_ABSENT,
        .flags = CTXKV_DECODE_KV | (kv4 ? 0 : CTXKV_DECODE_KV_BY2),
    };
    struct ctxkv__launch launch = {
        .kernel = ctxkv__decode_kernel(cut),
        .grid = {(uint32_t)cut->packing.tiles, (uint32_t)cut->batch_tiles, (uint32_t)count},
        .threads = CTXKV_DECODE_THREADS,
        .shared = cut->shared_bytes,
        .cluster = {(uint32_t)cut->cluster_tiles, (uint32_t)cut->cluster_batches},
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(plan->device->gpu, &launch);
}

ctxkv_status ctxkv__projection_few_launch(
    const struct ctxkv_projection *plan, const struct ctxkv__projection_few *f,
    const struct ctxkv__projection_call *call) {
    int64_t layers = plan->desc.num_layers;
    struct ctxkv__decode_cut cut;
    if (!ctxkv__decode_cut(&f->shape, call->rows, &cut))
        return ctxkv__fail(CTXKV_UNSUPPORTED, "the decode kernels do not take this shape");
    int64_t x_layer =
        call->x_layer_stride ? (int64_t)cut.batch_tiles * cut.chunks * cut.batch_rows : 0;
    ctxkv_status status = launch_rows(plan, f, call, &cut, x_layer);
    for (int64_t first = 0; !status && first < layers; first += CTXKV_DECODE_LAYERS) {
        int64_t left = layers - first;
        status = launch_layers(
            plan, f, call, &cut, x_layer, first,
            left < CTXKV_DECODE_LAYERS ? left : CTXKV_DECODE_LAYERS);
    }
    return status;
}
