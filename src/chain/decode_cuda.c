// SPDX-License-Identifier: Apache-2.0
// The chain by the decode kernels, for at most 64 rows on sm_90: norms written as packed n, then
// one kernel that projects exactly from packed weights and stores. The weights' copy is the plan's.
#include <stdlib.h>
#include <string.h>

#include "../cuda/decode_params.h"
#include "../cuda/decode_plan.h"
#include "chain_ways.h"
#include "cuda_plan.h"

enum { PACKINGS = CTXKV__DECODE_PACKINGS + 1 };

struct ctxkv__decode {
    struct ctxkv__decode_shape shape;
    int packings;
    struct ctxkv__decode_packing packing[PACKINGS];
    CUdeviceptr weights[PACKINGS];
    bool fuses; // one kernel may do the whole chain
    size_t bytes, room_offset;
    int64_t x_layers;
    unsigned flags; // CTXKV_DECODE_TABLE_BY2
};

static struct ctxkv__decode_shape shape_of(const struct ctxkv_projection *plan) {
    const ctxkv_projection_desc *p = &plan->desc;
    return (struct ctxkv__decode_shape){
        .hidden_size = p->hidden_size,
        .num_layers = p->num_layers,
        .num_heads = p->num_kv_heads,
        .head_dim = p->head_dim,
        .multiprocessors = plan->device->gpu->multiprocessors,
        .shared_memory = (size_t)plan->device->gpu->shared_limit,
    };
}

static bool suits(const struct ctxkv_chain *plan) {
    const ctxkv_projection_desc *p = &plan->projection->desc;
    struct ctxkv__decode_shape shape = shape_of(plan->projection);
    struct ctxkv__decode_cut cut;
    // A D that is no multiple of 64 would need columns of zeros in every caller's workspace.
    bool sound = plan->device->gpu->arch == 90 && p->hidden_size % 64 == 0 &&
                 p->mode != CTXKV_PROJECTION_CUBLAS && !plan->projection->bias_view.data &&
                 plan->projection->args.parts == 2 && !ctxkv__cuda_store_is_general(plan->store) &&
                 ctxkv__cuda_norms_takes_lines(plan->norms);
    return sound && ctxkv__decode_takes(&shape) && ctxkv__decode_cut(&shape, 1, &cut) &&
           ctxkv__decode_cut(&shape, CTXKV_DECODE_MAX_ROWS, &cut);
}

static size_t padded(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

// Packed n, then the room of the one kernel.
static size_t layout(const struct ctxkv_chain *plan, size_t *room) {
    struct ctxkv__decode_shape shape = shape_of(plan->projection);
    *room = padded(ctxkv__decode_x_bytes(&shape, plan->max_rows, plan->norms->out_layers));
    return *room + padded(ctxkv__decode_room_bytes(&shape, plan->max_rows));
}

size_t ctxkv__decode_workspace(const struct ctxkv_chain *plan) {
    size_t room;
    return suits(plan) ? layout(plan, &room) : 0;
}

static ctxkv_status pack_layer(
    const struct ctxkv_projection *plan, const struct ctxkv__decode_packing *packing, int64_t layer,
    CUdeviceptr to) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const struct ctxkv__weight_block *k = &plan->blocks[2 * layer], *v = k + 1;
    int64_t d = plan->desc.hidden_size;
    int chunks = (int)ctxkv__ceil_div(d, 64) * 8; // zeros past D
    ctxkv_decode_pack_params p = {
        .k = k->data,
        .v = v->data,
        .out = (void *)(uintptr_t)to,
        .k_row = k->row_stride,
        .v_row = v->row_stride,
        .half = (int)plan->args.block_columns,
        .tile_rows = packing->tile_rows,
        .tiles = packing->tiles,
        .k_tiles = packing->k_tiles,
        .k_columns = packing->k_columns,
        .chunks = chunks,
        .data_chunks = (int)(d / 8),
        .by2 = !ctxkv__block_wide(k) || !ctxkv__block_wide(v),
    };
    struct ctxkv__launch launch = {
        .kernel = CTXKV__KERNEL_decode_pack,
        .grid =
            {(uint32_t)ctxkv__ceil_div(chunks, 256), (uint32_t)packing->tile_rows,
             (uint32_t)packing->tiles},
        .threads = 256,
        .stream = gpu->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(gpu, &launch);
}

// Enqueues packing all layers' weights; *bytes grows by what *to then holds.
static ctxkv_status pack_weights(
    const struct ctxkv_projection *plan, const struct ctxkv__decode_packing *packing,
    CUdeviceptr *to, size_t *bytes) {
    size_t layers = (size_t)plan->desc.num_layers, all = packing->layer_bytes * layers;
    ctxkv_status status = ctxkv__gpu_alloc(plan->device->gpu, all, "the packed weights", to);
    for (size_t l = 0; !status && l < layers; l++)
        status = pack_layer(plan, packing, (int64_t)l, *to + l * packing->layer_bytes);
    *bytes += all;
    return status;
}

// CTXKV__KERNELS: there is none.
static enum ctxkv__kernel kernel_of(const struct ctxkv__decode_cut *cut) {
#define FUSED(rows, every, s)                                                                      \
    if (cut->fused && cut->batch_rows == rows && cut->local == every && cut->steps == s)           \
        return CTXKV__KERNEL_decode_fused_r##rows##_l##every##_s##s;
    CTXKV_DECODE_FUSED_SHAPES(FUSED)
#undef FUSED
#define KERNEL(n, s)                                                                               \
    if (!cut->fused && cut->columns == n && cut->steps == s)                                       \
        return CTXKV__KERNEL_decode_n##n##_s##s;
    CTXKV_DECODE_SHAPES(KERNEL)
#undef KERNEL
    return CTXKV__KERNELS;
}

// Every kernel that a run of 1..64 rows may ask for, and decode_pack.
static ctxkv_status load(struct ctxkv__cuda_device *gpu, const struct ctxkv__decode_shape *shape) {
    ctxkv_status status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_decode_pack);
    for (int rows = 1; !status && rows <= CTXKV_DECODE_MAX_ROWS; rows++) {
        struct ctxkv__decode_cut cut;
        if (!ctxkv__decode_cut(shape, rows, &cut) || kernel_of(&cut) == CTXKV__KERNELS)
            return ctxkv__fail(CTXKV_NO_KERNEL, "no decode kernel for %d rows", rows);
        status = ctxkv__gpu_kernel(gpu, kernel_of(&cut));
    }
    return status;
}

// The row norms without input scale of the layers, in the order of sm_90, with gains of BF16.
static bool knows_norms(const struct ctxkv_chain *plan) {
    struct ctxkv__norms_parts parts = ctxkv__cuda_norms_parts(plan->norms);
    const ctxkv_norms_desc *n = &plan->norms->desc;
    return n->hidden.kind == CTXKV_NORM_ROW && n->layer.kind == CTXKV_NORM_ROW && parts.layer16 &&
           !parts.scaled && !parts.packed;
}

// The one kernel's packing, unless it is one of the others, and its kernels.
static ctxkv_status add_fused(const struct ctxkv_chain *plan, struct ctxkv__decode *d) {
    struct ctxkv__decode_packing packing;
    ctxkv_status status = CTXKV_OK;
    d->fuses = knows_norms(plan) && ctxkv__decode_fused_packing(&d->shape, &packing);
    if (!d->fuses) return CTXKV_OK;
    int i = 0;
    while (i < d->packings && !ctxkv__decode_same_packing(&d->packing[i], &packing)) i++;
    d->packing[i] = packing;
    if (i == d->packings) d->packings++;
    for (int rows = 1; !status && rows <= CTXKV_DECODE_MAX_ROWS; rows++) {
        struct ctxkv__decode_cut cut;
        if (!ctxkv__decode_fused_cut(&d->shape, rows, &cut)) continue;
        if (kernel_of(&cut) == CTXKV__KERNELS)
            return ctxkv__fail(CTXKV_NO_KERNEL, "no kernel for a chain of %d rows", rows);
        status = ctxkv__gpu_kernel(plan->device->gpu, kernel_of(&cut));
    }
    return status;
}

ctxkv_status ctxkv__decode_create(
    struct ctxkv_chain *plan, bool fuse, struct ctxkv__decode **decode) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    *decode = 0;
    if (!suits(plan) || !ctxkv__gpu_has_module(gpu, CTXKV__MODULE_decode)) return CTXKV_OK;
    struct ctxkv__decode *d = calloc(1, sizeof *d);
    if (!d) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the decode plan");
    d->shape = shape_of(plan->projection);
    d->packings = ctxkv__decode_packings(&d->shape, d->packing);
    d->x_layers = plan->norms->out_layers;
    layout(plan, &d->room_offset);
    if (plan->store->tables[0].data && !ctxkv__aligned(plan->store->tables[0].data, 16))
        d->flags |= CTXKV_DECODE_TABLE_BY2;
    ctxkv__gpu_settle(gpu);
    ctxkv_status status = load(gpu, &d->shape);
    if (!status && fuse) status = add_fused(plan, d);
    for (int i = 0; !status && i < d->packings; i++)
        status = pack_weights(plan->projection, &d->packing[i], &d->weights[i], &d->bytes);
    CUresult result = gpu->cu->cuStreamSynchronize(gpu->stream);
    if (!status && result) status = ctxkv__cu_fail(gpu->cu, result, "packing the weights");
    if (!status) {
        *decode = d;
        return CTXKV_OK;
    }
    ctxkv__decode_destroy(plan, d);
    // The chain works without its faster way.
    return status == CTXKV_OUT_OF_MEMORY ? CTXKV_OK : status;
}

void ctxkv__decode_destroy(const struct ctxkv_chain *plan, struct ctxkv__decode *d) {
    if (!d) return;
    for (int i = 0; i < PACKINGS; i++) ctxkv__gpu_free(plan->device->gpu, d->weights[i]);
    free(d);
}

size_t ctxkv__decode_memory(const struct ctxkv__decode *d) {
    return d ? d->bytes : 0;
}

bool ctxkv__decode_takes_run(const struct ctxkv__decode *d, const struct ctxkv__chain_call *call) {
    return d && call->rows <= CTXKV_DECODE_MAX_ROWS;
}

// False when none of these layers stores anything.
static bool fill_layers(
    const struct ctxkv_chain *plan, const struct ctxkv__chain_call *call, int64_t first,
    int64_t count, ctxkv_decode_params *p) {
    const float *gain = ctxkv__cuda_store_k_gain(plan->store);
    bool any = false;
    for (int64_t i = 0; i < count; i++) {
        const struct ctxkv__cache *c = &plan->store->caches[first + i];
        const struct ctxkv__slots *s = &call->slots[first + i];
        p->layer[i] = (ctxkv_decode_layer){
            CTXKV__OF_CACHE(c),
            .slots = (const long long *)s->slots,
            .k_weight = gain ? gain + (first + i) * plan->store->desc.head_dim : 0,
            .rows = s->slots ? s->rows : 0,
        };
        any |= p->layer[i].rows > 0;
        if (!ctxkv__cache_wide(c, 16)) p->flags |= CTXKV_DECODE_CACHE_BY2;
    }
    return any;
}

static void fill_norms(
    const struct ctxkv_chain *plan, const struct ctxkv__chain_call *call, ctxkv_decode_params *p) {
    const ctxkv_norms_desc *n = &plan->norms->desc;
    struct ctxkv__norms_parts parts = ctxkv__cuda_norms_parts(plan->norms);
    p->x = call->x;
    p->x_row = call->rows > 1 ? call->x_row_stride : 0;
    p->hidden_gain = parts.hidden16;
    p->layer_gain = parts.layer16;
    p->hidden_eps = n->hidden.eps;
    p->layer_eps = n->layer.eps;
    p->norm_flags = parts.flags;
}

static ctxkv_status launch_layers(
    const struct ctxkv_chain *plan, const struct ctxkv__decode *d,
    const struct ctxkv__chain_call *call, const struct ctxkv__decode_cut *cut, char *workspace,
    int64_t first, int64_t count) {
    const ctxkv_store_desc *s = &plan->store->desc;
    int64_t half = plan->projection->args.block_columns, heads = s->num_kv_heads;
    int64_t x_layer = (int64_t)cut->batch_tiles * cut->chunks * cut->batch_rows;
    int packing = 0;
    while (!ctxkv__decode_same_packing(&d->packing[packing], &cut->packing)) packing++;
    bool shared = d->x_layers == 1;
    ctxkv_decode_params p = {
        .x = workspace + (shared ? 0 : first * x_layer * 16),
        .w = (const void
                  *)(uintptr_t)(d->weights[packing] + (size_t)first * cut->packing.layer_bytes),
        .room = cut->fused ? workspace + d->room_offset : 0,
        .positions = (const long long *)call->positions,
        .cos_sin = plan->store->tables[0].data,
        .faults = ctxkv__cuda_store_faults_at(plan->store),
        .max_position = s->rope == CTXKV_ROPE_NONE ? -1 : plan->store->tables[0].max_position,
        .x_layer = shared ? 0 : x_layer,
        .rows = (int)call->rows,
        .columns = (int)(2 * half),
        .heads = (int)heads,
        .head_dim = (int)s->head_dim,
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
        .norm = (unsigned)s->k_norm,
        .rope = (unsigned)s->rope,
        .flags = d->flags,
        .eps = s->k_eps,
    };
    if (cut->fused) fill_norms(plan, call, &p);
    // A launch that stores nothing would not wait for the kernels before it either.
    if (!fill_layers(plan, call, first, count, &p)) return CTXKV_OK;
    struct ctxkv__launch launch = {
        .kernel = kernel_of(cut),
        .grid = {(uint32_t)cut->packing.tiles, (uint32_t)cut->batch_tiles, (uint32_t)count},
        .threads = cut->fused ? CTXKV_DECODE_FUSED_THREADS : CTXKV_DECODE_THREADS,
        .shared = cut->shared_bytes,
        .stream = call->stream,
        .params = &p,
    };
    if (!cut->fused) { // there it is compiled in
        launch.cluster[0] = (uint32_t)cut->cluster_tiles;
        launch.cluster[1] = (uint32_t)cut->cluster_batches;
    }
    return ctxkv__gpu_launch(plan->device->gpu, &launch);
}

ctxkv_status ctxkv__decode_launch(
    const struct ctxkv_chain *plan, const struct ctxkv__decode *d,
    const struct ctxkv__chain_call *call, char *workspace) {
    int64_t layers = plan->projection->desc.num_layers;
    struct ctxkv__decode_cut cut;
    bool fits = d->fuses && ctxkv__aligned(call->x, 16) && call->x_row_stride % 8 == 0;
    if (fits && ctxkv__decode_fused_cut(&d->shape, call->rows, &cut))
        return launch_layers(plan, d, call, &cut, workspace, 0, layers);
    if (!ctxkv__decode_cut(&d->shape, call->rows, &cut))
        return ctxkv__fail(CTXKV_UNSUPPORTED, "the decode kernels do not take this shape");
    struct ctxkv__lines lines = {
        .tile_rows = cut.batch_rows,
        .out_tile = (int64_t)cut.chunks * cut.batch_rows,
        .out_layer = (int64_t)cut.batch_tiles * cut.chunks * cut.batch_rows,
    };
    struct ctxkv__norms_call norms = {
        .x = call->x,
        .x_row_stride = call->rows > 1 ? call->x_row_stride : 0,
        .rows = call->rows,
        .out = workspace,
        .stream = call->stream,
    };
    ctxkv_status status = ctxkv__cuda_norms_launch(plan->norms, &norms, &lines);
    for (int64_t first = 0; !status && first < layers; first += CTXKV_DECODE_LAYERS) {
        int64_t left = layers - first;
        status = launch_layers(
            plan, d, call, &cut, workspace, first,
            left < CTXKV_DECODE_LAYERS ? left : CTXKV_DECODE_LAYERS);
    }
    return status;
}
