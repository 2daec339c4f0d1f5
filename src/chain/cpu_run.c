// SPDX-License-Identifier: Apache-2.0
// The run order on a CPU: each op cut over the pool, the chain in chunks of rows.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/numerics.h"
#include "plan.h"

enum ctxkv__sum_order ctxkv__norm_order(
    const ctxkv_norm *norm, ctxkv_numerics numerics, bool packed_device, int64_t rows) {
    if (norm->kind == CTXKV_NORM_RMS) {
        bool few = numerics == CTXKV_NUMERICS_INVARIANT || rows < 256;
        return few ? CTXKV__ORDER_RMS_1024 : CTXKV__ORDER_RMS_256;
    }
    if (numerics == CTXKV_NUMERICS_PACKED) return CTXKV__ORDER_PACKED;
    if (numerics == CTXKV_NUMERICS_PAIR) return CTXKV__ORDER_PAIR;
    return packed_device ? CTXKV__ORDER_PACKED : CTXKV__ORDER_PAIR;
}

// From this size on outputs are written past the caches: they would only push other data out, and
// a plain store first reads the line it overwrites.
#define STREAM_NORM_ROWS 32 // rows of all layers
#define STREAM_STORE_BYTES (1 << 20)

// Pieces of work: waking a thread takes about 40 us, so less than that is done by the caller alone.
#define NORM_ROWS 8
#define ALONE_STORE_BYTES (256 << 10)

struct norms_loop {
    ctxkv__norms_fn *fn;
    struct ctxkv__norms_args args;
};

static void norms_part(void *context, int64_t begin, int64_t end, int worker, void *scratch) {
    const struct norms_loop *loop = context;
    (void)worker, (void)scratch;
    loop->fn(&loop->args, begin, end);
}

// total_rows: the rows of the whole call, of which this may be a chunk. In a chain the output is
// read next, so it stays in the caches.
static void run_norms(
    const struct ctxkv_norms *plan, const struct ctxkv__norms_call *call, int64_t total_rows,
    bool in_chain) {
    struct norms_loop loop = {plan->device->kernels.norms, plan->args};
    const ctxkv_norms_desc *desc = &plan->desc;
    loop.args.hidden.order = ctxkv__norm_order(&desc->hidden, desc->numerics, false, total_rows);
    loop.args.layer.order =
        ctxkv__norm_order(&desc->layer, desc->numerics, false, total_rows * plan->out_layers);
    loop.args.x = call->x;
    loop.args.x_row_stride = call->x_row_stride;
    loop.args.out = call->out;
    loop.args.out_layer_stride = call->out_layer_stride;
    loop.args.out_row_stride = call->out_row_stride;
    loop.args.stream = !in_chain && call->rows * loop.args.num_layers >= STREAM_NORM_ROWS;
    ctxkv__pool_loop(plan->device->pool, call->rows, NORM_ROWS, norms_part, &loop);
}

void ctxkv__cpu_norms(const struct ctxkv_norms *plan, const struct ctxkv__norms_call *call) {
    run_norms(plan, call, call->rows, false);
}

struct projection_loop {
    ctxkv__projection_fn *fn;
    struct ctxkv__projection_args args;
};

static void projection_part(void *context, int64_t begin, int64_t end, int worker, void *scratch) {
    const struct projection_loop *loop = context;
    (void)worker;
    loop->fn(&loop->args, begin, end, scratch);
}

void ctxkv__cpu_projection(
    const struct ctxkv_projection *plan, const struct ctxkv__projection_call *call) {
    if (call->rows == 0) return;
    struct projection_loop loop = {plan->device->kernels.projection, plan->args};
    loop.args.rows = call->rows;
    loop.args.x = call->x;
    loop.args.x_layer_stride = call->x_layer_stride;
    loop.args.x_row_stride = call->x_row_stride;
    loop.args.kv = call->kv;
    loop.args.kv_layer_stride = call->kv_layer_stride;
    loop.args.kv_row_stride = call->kv_row_stride;
    int64_t units = ctxkv__projection_units(&loop.args);
    ctxkv__pool_loop(plan->device->pool, units, 1, projection_part, &loop);
}

#define STORE_ROWS 64 // rows of one layer that a worker takes at a time

struct store_loop {
    ctxkv__store_fn *fn;
    struct ctxkv__store_args args;
    int64_t parts_per_layer;
    struct ctxkv__fault_record *faults;
};

static void store_part(void *context, int64_t begin, int64_t end, int worker, void *scratch) {
    const struct store_loop *loop = context;
    (void)scratch;
    for (int64_t part = begin; part < end; part++) {
        int64_t layer = part / loop->parts_per_layer;
        int64_t first = part % loop->parts_per_layer * STORE_ROWS;
        int64_t rows = loop->args.slots[layer].slots ? loop->args.slots[layer].rows : 0;
        int64_t last = rows - first < STORE_ROWS ? rows : first + STORE_ROWS;
        if (first < last) loop->fn(&loop->args, layer, first, last, &loop->faults[worker]);
    }
}

static struct ctxkv__store_args store_args(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call) {
    struct ctxkv__store_args args = plan->args;
    args.positions = call->positions;
    args.k = call->k;
    args.v = call->v;
    args.k_layer_stride = call->k_layer_stride;
    args.k_row_stride = call->k_row_stride;
    args.k_head_stride = call->k_head_stride;
    args.v_layer_stride = call->v_layer_stride;
    args.v_row_stride = call->v_row_stride;
    args.v_head_stride = call->v_head_stride;
    args.caches = plan->caches;
    args.slots = call->slots;
    return args;
}

static ctxkv_status check_rows(const struct ctxkv__store_args *args) {
    for (int64_t l = 0; l < args->num_layers; l++) {
        int64_t rows = args->slots[l].slots ? args->slots[l].rows : 0;
        for (int64_t t = 0; t < rows; t++) {
            struct ctxkv__fault_record fault = {0};
            if (ctxkv__store_row_fate(args, l, t, &fault) != CTXKV__ROW_FAULT) continue;
            bool slot = fault.kind == CTXKV__FAULT_SLOT;
            return ctxkv__fail(
                CTXKV_INVALID_ARGUMENT,
                "%s of row %" PRId64 " (layer %" PRId64 ") is %" PRId64 ", must be in 0..%" PRId64
                " (%s)",
                slot ? "slots" : "positions", t, l, fault.value, fault.limit - 1,
                slot ? "num_blocks * block_size slots" : "rows of the cos/sin table");
        }
    }
    return CTXKV_OK;
}

// row_offset: the place of row 0 of this chunk in the whole call.
static void run_store(
    struct ctxkv_store *plan, const struct ctxkv__store_call *call, int64_t row_offset) {
    struct store_loop loop = {plan->device->kernels.store, store_args(plan, call), 0, 0};
    int workers = ctxkv__pool_threads(plan->device->pool);
    int64_t most = 0;
    for (int64_t l = 0; l < loop.args.num_layers; l++)
        if (call->slots[l].slots && call->slots[l].rows > most) most = call->slots[l].rows;
    if (most == 0) return;
    int64_t row_bytes = 4 * loop.args.num_heads * loop.args.head_dim * loop.args.num_layers;
    loop.args.stream = most >= STREAM_STORE_BYTES / row_bytes;
    loop.parts_per_layer = (most + STORE_ROWS - 1) / STORE_ROWS;
    ctxkv__lock_take(&plan->run_lock);
    loop.faults = plan->worker_faults;
    memset(loop.faults, 0, (size_t)workers * sizeof *loop.faults);
    int64_t parts = loop.args.num_layers * loop.parts_per_layer;
    int64_t grain = most < ALONE_STORE_BYTES / row_bytes ? parts : 1;
    ctxkv__pool_loop(plan->device->pool, parts, grain, store_part, &loop);
    ctxkv__lock_take(&plan->lock);
    for (int w = 0; w < workers; w++) {
        loop.faults[w].row += row_offset;
        ctxkv__fault_merge(&plan->faults, &loop.faults[w]);
    }
    ctxkv__lock_give(&plan->lock);
    ctxkv__lock_give(&plan->run_lock);
}

ctxkv_status ctxkv__cpu_store(struct ctxkv_store *plan, const struct ctxkv__store_call *call) {
    if (plan->desc.checked) {
        struct ctxkv__store_args args = store_args(plan, call);
        ctxkv_status status = check_rows(&args);
        if (status) return status;
    }
    run_store(plan, call, 0);
    return CTXKV_OK;
}

// Rows of one pass: enough to reuse a weight tile, few enough that n stays in a cache.
#define CHAIN_ROWS 128

static size_t round_up(size_t n) {
    return (n + 255) / 256 * 256;
}

void ctxkv__cpu_chain_plan(struct ctxkv_chain *plan) {
    int64_t rows = plan->max_rows < CHAIN_ROWS ? plan->max_rows : CHAIN_ROWS;
    int64_t columns = plan->projection->args.parts * plan->projection->args.block_columns;
    plan->chunk_rows = rows;
    plan->workspace_size =
        round_up((size_t)(plan->norms->out_layers * rows * plan->norms->desc.hidden_size) * 2) +
        round_up((size_t)(plan->projection->desc.num_layers * rows * columns) * 2);
}

static void run_chunk(
    struct ctxkv_chain *plan, const struct ctxkv__chain_call *call, int64_t first, int64_t rows,
    struct ctxkv__slots *slots, char *workspace) {
    int64_t d = plan->norms->desc.hidden_size, n_layers = plan->norms->out_layers;
    int64_t half = plan->projection->args.block_columns;
    int64_t columns = plan->projection->args.parts * half;
    int64_t head_dim = plan->store->desc.head_dim;
    char *kv = workspace + round_up((size_t)(n_layers * plan->chunk_rows * d) * 2);
    const char *x = (const char *)call->x + 2 * first * call->x_row_stride;
    struct ctxkv__norms_call norms = {x, call->x_row_stride, rows, workspace, rows * d, d, 0};
    run_norms(plan->norms, &norms, call->rows, true);
    struct ctxkv__projection_call projection = {
        workspace, n_layers == 1 ? 0 : rows * d, d, rows, kv, rows * columns, columns, 0};
    ctxkv__cpu_projection(plan->projection, &projection);
    for (int64_t l = 0; l < plan->store->desc.num_layers; l++) {
        const struct ctxkv__slots *all = &call->slots[l];
        int64_t left = all->slots ? all->rows - first : 0;
        slots[l].rows = left < 0 ? 0 : left < rows ? left : rows;
        slots[l].slots = slots[l].rows ? all->slots + first : 0;
    }
    struct ctxkv__store_call store = {
        .k = kv,
        .v = kv + 2 * half,
        .k_layer_stride = rows * columns,
        .k_row_stride = columns,
        .k_head_stride = head_dim,
        .v_layer_stride = rows * columns,
        .v_row_stride = columns,
        .v_head_stride = head_dim,
        .rows = rows,
        .positions = call->positions ? call->positions + first : 0,
        .slots = slots,
    };
    run_store(plan->store, &store, first);
}

ctxkv_status ctxkv__cpu_chain(struct ctxkv_chain *plan, const struct ctxkv__chain_call *call) {
    int64_t layers = plan->store->desc.num_layers;
    if (plan->store->desc.checked) {
        struct ctxkv__store_call whole = {.positions = call->positions, .slots = call->slots};
        struct ctxkv__store_args args = store_args(plan->store, &whole);
        ctxkv_status status = check_rows(&args);
        if (status) return status;
    }
    struct ctxkv__slots *slots = malloc((size_t)layers * sizeof *slots);
    if (!slots) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the slots of a run");
    bool own = !call->workspace;
    if (own) ctxkv__lock_take(&plan->lock);
    for (int64_t first = 0; first < call->rows; first += plan->chunk_rows) {
        int64_t rows =
            call->rows - first < plan->chunk_rows ? call->rows - first : plan->chunk_rows;
        run_chunk(plan, call, first, rows, slots, own ? plan->workspace : call->workspace);
    }
    if (own) ctxkv__lock_give(&plan->lock);
    free(slots);
    return CTXKV_OK;
}
