// SPDX-License-Identifier: Apache-2.0
// The projection on a CUDA device: cuBLAS where it is known to equal the exact chain, else mma.
#include <inttypes.h>
#include <stdlib.h>

#include "../device/cublas.h"
#include "../ops/norms.h"
#include "few_parts.h"

struct projection_gpu {
    CUdeviceptr blocks; // ctxkv_projection_block [L*parts]
    CUdeviceptr bias;   // FP32 [L, N]
    bool aligned;       // every weight row lies on 16 bytes
    bool even;          // layers lie at one distance, V rows behind K rows: one strided batch
    int64_t layer_stride;
    const struct ctxkv__cublas *cublas; // NULL: not used
    void *handle;
    CUdeviceptr workspace;   // for runs without one of their own
    struct ctxkv__lock lock; // around the handle's stream and workspace
    void *stream_set, *workspace_set;
    struct ctxkv__few *few; // NULL: not there
    size_t bytes;
};

enum { TRANSPOSE = 1, PLAIN = 0, BF16 = 14, COMPUTE_32F = 68, DEFAULT_ALGORITHM = 99 };

// Columns of a layer.
static int64_t columns_of(const struct ctxkv_projection *plan) {
    return plan->args.parts * plan->args.block_columns;
}

static void inspect(const struct ctxkv_projection *plan, struct projection_gpu *g) {
    const struct ctxkv__weight_block *b = plan->blocks;
    int64_t layers = plan->desc.num_layers, parts = plan->args.parts;
    int64_t block = plan->args.block_columns;
    g->aligned = g->even = true;
    for (int64_t i = 0; i < parts * layers; i++) {
        if (!ctxkv__aligned(b[i].data, 16) || b[i].row_stride % 8) g->aligned = false;
        if (b[i].row_stride != b[0].row_stride) g->even = false;
    }
    int64_t row = b[0].row_stride * 2;
    const char *first = b[0].data;
    int64_t step = layers > 1 ? (const char *)b[parts].data - first : parts * block * row;
    for (int64_t i = 0; i < parts * layers; i++)
        if ((const char *)b[i].data != first + i / parts * step + i % parts * block * row)
            g->even = false;
    if (step % 2 || b[0].row_stride < plan->desc.hidden_size) g->even = false;
    g->layer_stride = step / 2;
}

// Shapes whose cuBLAS results were measured to equal the exact chain on sm_90 (SPEC 3.3, 5): one
// GEMM of all layers, and a batch of one per layer, each with an input of its own.
static bool one_gemm_equals(const struct ctxkv_projection *plan, const struct projection_gpu *g) {
    int64_t d = plan->desc.hidden_size, n = columns_of(plan);
    return plan->desc.num_layers * n >= 5120 &&
           (d == 2048 || d == 2560 || d == 4096 || d == 5120) &&
           g->layer_stride == n * plan->blocks[0].row_stride;
}
static bool batch_equals(const struct ctxkv_projection *plan, bool shared) {
    int64_t d = plan->desc.hidden_size, n = columns_of(plan), layers = plan->desc.num_layers;
    return !shared && d == 8192 && layers >= 2 && layers <= 8 && n >= 128 && n <= 2048;
}
// One input for all layers and few columns, where one GEMM would split K: a batch of these numbers
// of rows gave the exact bits (bench/results/h200_qwen3.json); other numbers were not measured.
static const int64_t batch_rows[] = {16384, 4096, 2048, 1024, 512, 256, 128, 64};
enum { BATCHES = sizeof batch_rows / sizeof *batch_rows };
static bool shared_batch_equals(const struct ctxkv_projection *plan) {
    return plan->desc.hidden_size == 4096 && columns_of(plan) == 256 &&
           plan->desc.num_layers == 5 && plan->args.parts == 2;
}
static bool known_equal(
    const struct ctxkv_projection *plan, const struct projection_gpu *g, bool shared) {
    if (plan->device->gpu->arch != 90 || !g->even || !g->aligned || g->bias) return false;
    return batch_equals(plan, shared) ||
           (shared && (one_gemm_equals(plan, g) || shared_batch_equals(plan)));
}

static ctxkv_status open_cublas(struct ctxkv_projection *plan, struct projection_gpu *g) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    const struct ctxkv__cublas *b;
    ctxkv_status status = ctxkv__cublas_get(gpu->cublas_path, &b);
    if (status) return status;
    int version = 0, result = ctxkv__cublas_take(b, gpu, &g->handle);
    if (result) return ctxkv__cublas_fail(b, result, "creating a cuBLAS handle");
    status = ctxkv__gpu_alloc(gpu, CTXKV__CUBLAS_WORKSPACE, "cuBLAS's workspace", &g->workspace);
    if (status) {
        ctxkv__cublas_give(b, gpu, g->handle);
        return status;
    }
    if (!b->version(g->handle, &version)) gpu->cublas_version = version;
    g->bytes += CTXKV__CUBLAS_WORKSPACE;
    g->cublas = b;
    return CTXKV_OK;
}

static ctxkv_status upload_blocks(struct ctxkv_projection *plan, struct projection_gpu *g) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    size_t count = (size_t)(plan->desc.num_layers * plan->args.parts),
           bytes = count * sizeof(ctxkv_projection_block);
    ctxkv_projection_block *host = malloc(bytes);
    if (!host) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the weights' addresses");
    for (size_t i = 0; i < count; i++)
        host[i] = (ctxkv_projection_block){plan->blocks[i].data, plan->blocks[i].row_stride};
    ctxkv_status status = ctxkv__gpu_alloc(gpu, bytes, "the weights' addresses", &g->blocks);
    if (!status) status = ctxkv__gpu_upload(gpu, g->blocks, host, bytes);
    g->bytes += bytes;
    free(host);
    return status;
}

static ctxkv_status upload_bias(struct ctxkv_projection *plan, struct projection_gpu *g) {
    const struct ctxkv__cuda_device *gpu = plan->device->gpu;
    int64_t n = columns_of(plan), layers = plan->desc.num_layers;
    if (!plan->bias_view.data) return CTXKV_OK;
    size_t bytes = (size_t)(layers * n) * 4;
    float *host = malloc(bytes);
    if (!host) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the bias");
    ctxkv__gpu_settle(gpu);
    ctxkv_status status = CTXKV_OK;
    for (int64_t l = 0; !status && l < layers; l++) {
        struct ctxkv__view row = plan->bias_view;
        row.data += 2 * l * row.stride[0];
        status = ctxkv__cuda_gains(gpu, &row, 1, n, 0.0f, host + l * n);
    }
    if (!status) status = ctxkv__gpu_alloc(gpu, bytes, "the bias", &g->bias);
    if (!status) status = ctxkv__gpu_upload(gpu, g->bias, host, bytes);
    g->bytes += bytes;
    free(host);
    return status;
}

// It costs a copy of the weights or two: not for a chain, which has its own.
static bool wants_few(const struct ctxkv_projection *plan, const struct projection_gpu *g) {
    return plan->desc.mode != CTXKV_PROJECTION_CUBLAS && !plan->in_chain &&
           (!g->cublas || ctxkv__few_pays(plan)) && ctxkv__way_allowed("decode");
}

ctxkv_status ctxkv__cuda_projection_create(struct ctxkv_projection *plan) {
    struct ctxkv__cuda_device *gpu = plan->device->gpu;
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter_slow(gpu, &scope, "creating a projection plan");
    if (status) return status;
    struct projection_gpu *g = plan->gpu = calloc(1, sizeof *g);
    if (!g) status = ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the projection plan");
    if (!status) inspect(plan, g);
    if (!status) status = upload_blocks(plan, g);
    if (!status) status = upload_bias(plan, g);
    if (!status) status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_projection_16);
    if (!status) status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_projection_64);
    ctxkv_projection_mode mode = plan->desc.mode;
    if (!status && mode == CTXKV_PROJECTION_CUBLAS) {
        if (g->bias)
            status = ctxkv__fail(
                CTXKV_UNSUPPORTED, "bias is given, must be NULL for mode CUBLAS (use EXACT)");
        else
            status = open_cublas(plan, g);
    }
    // Without cuBLAS an AUTO plan has the same bits, slower: a failure here is none of the plan's.
    if (!status && mode == CTXKV_PROJECTION_AUTO &&
        (known_equal(plan, g, false) || known_equal(plan, g, true)))
        (void)open_cublas(plan, g);
    if (!status && wants_few(plan, g)) status = ctxkv__few_create(plan, &g->few);
    ctxkv__gpu_leave(gpu, &scope);
    return status;
}

void ctxkv__cuda_projection_destroy(struct ctxkv_projection *plan) {
    struct projection_gpu *g = plan->gpu;
    struct ctxkv__gpu_scope scope;
    if (!g) return;
    if (!ctxkv__gpu_enter_free(plan->device->gpu, &scope)) {
        if (g->cublas) ctxkv__cublas_give(g->cublas, plan->device->gpu, g->handle);
        ctxkv__gpu_free(plan->device->gpu, g->blocks);
        ctxkv__gpu_free(plan->device->gpu, g->bias);
        ctxkv__gpu_free(plan->device->gpu, g->workspace);
        ctxkv__few_destroy(plan, g->few);
        ctxkv__gpu_leave(plan->device->gpu, &scope);
    }
    ctxkv__lock_destroy(&g->lock);
    free(g);
    plan->gpu = 0;
}

size_t ctxkv__cuda_projection_memory(const struct ctxkv_projection *plan) {
    const struct projection_gpu *g = plan->gpu;
    return g->bytes + ctxkv__few_memory(g->few);
}

bool ctxkv__cuda_projection_uses_cublas(const struct ctxkv_projection *plan) {
    return ((const struct projection_gpu *)plan->gpu)->cublas != 0;
}

enum ctxkv__projection_way ctxkv__cuda_projection_way(
    const struct ctxkv_projection *plan, int64_t rows, bool shared) {
    const struct projection_gpu *g = plan->gpu;
    if (!g->cublas || !known_equal(plan, g, shared)) return CTXKV__PROJECTION_MMA;
    if (!shared || one_gemm_equals(plan, g)) return CTXKV__PROJECTION_CUBLAS;
    int i = 0;
    while (i < BATCHES && batch_rows[i] > rows) i++;
    if (i == BATCHES) return CTXKV__PROJECTION_MMA;
    bool even = rows == batch_rows[i] || (rows % batch_rows[i] == 0 && batch_rows[i] >= 4096);
    return even ? CTXKV__PROJECTION_CUBLAS : CTXKV__PROJECTION_WINDOWS;
}

static int gemm(
    const struct ctxkv_projection *plan, const struct projection_gpu *g,
    const struct ctxkv__projection_call *call, const char *w, int64_t w_layer, int64_t first,
    int64_t columns, int64_t layer, int64_t layers) {
    static const float one = 1.0f, zero = 0.0f;
    const char *x = (const char *)call->x + layer * call->x_layer_stride * 2;
    char *kv = (char *)call->kv + (layer * call->kv_layer_stride + first) * 2;
    int k = (int)plan->desc.hidden_size;
    return g->cublas->gemm_strided_batched(
        g->handle, TRANSPOSE, PLAIN, (int)columns, (int)call->rows, k, &one, w, BF16,
        (int)plan->blocks[0].row_stride, w_layer, x, BF16, (int)call->x_row_stride,
        call->x_layer_stride, &zero, kv, BF16, (int)call->kv_row_stride, call->kv_layer_stride,
        (int)layers, COMPUTE_32F, DEFAULT_ALGORITHM);
}

// Windows of a measured number of rows, the last one over the end of the one before: a row that is
// written twice gets the same bits.
static int gemm_windows(
    const struct ctxkv_projection *plan, const struct projection_gpu *g,
    const struct ctxkv__projection_call *call) {
    struct ctxkv__projection_call part = *call;
    int i = 0, result = 0;
    while (batch_rows[i] > call->rows) i++;
    part.rows = batch_rows[i];
    for (int64_t row = 0; !result && row < call->rows; row += part.rows) {
        int64_t first = row + part.rows < call->rows ? row : call->rows - part.rows;
        part.x = (const char *)call->x + first * call->x_row_stride * 2;
        part.kv = (char *)call->kv + first * call->kv_row_stride * 2;
        result = gemm(
            plan, g, &part, plan->blocks[0].data, g->layer_stride, 0, columns_of(plan), 0,
            plan->desc.num_layers);
    }
    return result;
}

static ctxkv_status run_cublas(
    struct ctxkv_projection *plan, struct projection_gpu *g,
    const struct ctxkv__projection_call *call, void *workspace) {
    int64_t layers = plan->desc.num_layers, parts = plan->args.parts;
    int64_t block = plan->args.block_columns, columns = parts * block;
    const struct ctxkv__weight_block *b = plan->blocks;
    bool one_gemm = g->even && call->x_layer_stride == 0 && call->kv_layer_stride == columns &&
                    g->layer_stride == columns * b[0].row_stride;
    bool windows = plan->desc.mode == CTXKV_PROJECTION_AUTO && call->x_layer_stride == 0 &&
                   shared_batch_equals(plan);
    if (!workspace) workspace = (void *)(uintptr_t)g->workspace;
    ctxkv__lock_take(&g->lock);
    int result = 0;
    if (call->stream != g->stream_set || workspace != g->workspace_set) {
        g->workspace_set = 0;
        result = g->cublas->set_stream(g->handle, call->stream);
        // Setting the stream takes the workspace away.
        if (!result)
            result = g->cublas->set_workspace(g->handle, workspace, CTXKV__CUBLAS_WORKSPACE);
        if (!result) g->stream_set = call->stream, g->workspace_set = workspace;
    }
    if (!result && windows)
        result = gemm_windows(plan, g, call);
    else if (!result && one_gemm)
        result = gemm(plan, g, call, b[0].data, 0, 0, layers * columns, 0, 1);
    else if (!result && g->even)
        result = gemm(plan, g, call, b[0].data, g->layer_stride, 0, columns, 0, layers);
    else
        for (int64_t i = 0; !result && i < parts * layers; i++)
            result = gemm(plan, g, call, b[i].data, 0, i % parts * block, block, i / parts, 1);
    ctxkv__lock_give(&g->lock);
    return result ? ctxkv__cublas_fail(g->cublas, result, "projecting with cuBLAS") : CTXKV_OK;
}

static ctxkv_status run_exact(
    const struct ctxkv_projection *plan, const struct projection_gpu *g,
    const struct ctxkv__projection_call *call) {
    bool few = call->rows <= 16;
    int64_t tiles = ctxkv__ceil_div(call->rows, few ? 16 : 64);
    int64_t columns = columns_of(plan) / 64;
    if (tiles * columns > INT32_MAX)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "T is %" PRId64 ", too large for one launch of %" PRId64 " columns", call->rows,
            columns_of(plan));
    bool x16 =
        ctxkv__aligned(call->x, 16) && !(call->x_row_stride % 8) && !(call->x_layer_stride % 8);
    bool kv4 =
        ctxkv__aligned(call->kv, 4) && !(call->kv_row_stride % 2) && !(call->kv_layer_stride % 2);
    ctxkv_projection_params p = {
        .x = call->x,
        .kv = call->kv,
        .x_layer = call->x_layer_stride,
        .x_row = call->x_row_stride,
        .kv_layer = call->kv_layer_stride,
        .kv_row = call->kv_row_stride,
        .blocks = (const ctxkv_projection_block *)(uintptr_t)g->blocks,
        .bias = (const float *)(uintptr_t)g->bias,
        .rows = call->rows,
        .k = (int)plan->desc.hidden_size,
        .block_columns = (int)plan->args.block_columns,
        .flags = (x16 && g->aligned ? 0 : CTXKV_PROJECTION_BY2) |
                 (kv4 ? 0 : CTXKV_PROJECTION_KV_BY2) |
                 (plan->args.round_first ? CTXKV_PROJECTION_ROUND_FIRST : 0),
        .parts = (int)plan->args.parts,
    };
    struct ctxkv__launch launch = {
        .kernel = few ? CTXKV__KERNEL_projection_16 : CTXKV__KERNEL_projection_64,
        .grid = {(uint32_t)(tiles * columns), (uint32_t)plan->desc.num_layers, 1},
        .threads = 128,
        .stream = call->stream,
        .params = &p,
    };
    return ctxkv__gpu_launch(plan->device->gpu, &launch);
}

// Whether this run's operands are ones that cuBLAS takes in 32-bit sizes with aligned rows.
static bool cublas_fits(
    const struct ctxkv_projection *plan, const struct projection_gpu *g,
    const struct ctxkv__projection_call *call) {
    bool aligned = ctxkv__aligned(call->x, 16) && ctxkv__aligned(call->kv, 16) &&
                   !(call->x_row_stride % 8) && !(call->x_layer_stride % 8) &&
                   !(call->kv_row_stride % 8) && !(call->kv_layer_stride % 8);
    int64_t least_x = call->rows > 1 ? call->x_row_stride : plan->desc.hidden_size;
    int64_t least_kv = call->rows > 1 ? call->kv_row_stride : columns_of(plan);
    bool fits = call->rows <= INT32_MAX && call->x_row_stride <= INT32_MAX &&
                call->kv_row_stride <= INT32_MAX && least_x >= plan->desc.hidden_size &&
                least_kv >= columns_of(plan) && call->x_layer_stride >= 0 &&
                call->kv_layer_stride >= 0;
    bool shared = call->x_layer_stride == 0 && plan->desc.num_layers > 1;
    bool one = one_gemm_equals(plan, g) && call->kv_layer_stride == columns_of(plan);
    // As the chain lays them out, and no other way.
    bool batch = shared_batch_equals(plan) && call->rows >= 64 &&
                 call->x_row_stride == plan->desc.hidden_size &&
                 call->kv_layer_stride == columns_of(plan) &&
                 call->kv_row_stride == plan->desc.num_layers * columns_of(plan);
    if (plan->desc.mode == CTXKV_PROJECTION_CUBLAS) return fits;
    return fits && aligned && known_equal(plan, g, shared) &&
           (batch_equals(plan, shared) || one || batch);
}

ctxkv_status ctxkv__cuda_projection_launch(
    struct ctxkv_projection *plan, const struct ctxkv__projection_call *given, void *workspace) {
    struct projection_gpu *g = plan->gpu;
    struct ctxkv__projection_call call = *given;
    // One row has no stride of its own; cuBLAS wants a leading dimension all the same.
    if (call.rows == 1) {
        call.x_row_stride = plan->desc.hidden_size;
        call.kv_row_stride =
            plan->desc.num_layers > 1 && call.kv_layer_stride > 0 && call.x_layer_stride == 0
                ? plan->desc.num_layers * call.kv_layer_stride
                : columns_of(plan);
    }
    bool cublas = g->cublas && cublas_fits(plan, g, &call);
    if (ctxkv__few_takes_run(g->few, given)) return ctxkv__few_launch(plan, g->few, given);
    if (cublas) return run_cublas(plan, g, &call, workspace);
    if (plan->desc.mode == CTXKV_PROJECTION_CUBLAS)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "normed or kv has strides (rows %" PRId64 ", %" PRId64 ") that cuBLAS does not take, "
            "must be at least the row's length and below 2^31; or use mode EXACT",
            given->x_row_stride, given->kv_row_stride);
    return run_exact(plan, g, &call);
}

ctxkv_status ctxkv__cuda_projection_run(
    struct ctxkv_projection *plan, const struct ctxkv__projection_call *call) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter(plan->device->gpu, &scope);
    if (status) return status;
    status = ctxkv__cuda_projection_launch(plan, call, 0);
    ctxkv__gpu_leave(plan->device->gpu, &scope);
    return status;
}
