// SPDX-License-Identifier: Apache-2.0
// Operands, rotation and timing of the measurements.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "generator.h"

#define MAX_SETS 64
#define MAX_SAMPLES 1000
#define BLOCK 16
#define POSITIONS 4096

// Everything of one number of heads. Sets rotate, so that no run finds its operands in the cache.
typedef struct shape {
    bench *all;
    int64_t heads, rows, width; // width: 2*heads*head_dim
    int64_t weight_sets, row_sets, places;
    cli_tensor hidden_gain, layer_gain, k_gain, table, positions, weights[MAX_SETS];
    cli_tensor x[MAX_SETS], normed[MAX_SETS], kv[MAX_SETS], k[MAX_SETS], v[MAX_SETS];
    cli_tensor slots[MAX_SETS];
    const DLTensor *layer_gains[1], *weight_list[MAX_SETS][1];
    cli_caches caches;
    ctxkv_norms_desc norms_desc;
    ctxkv_projection_desc projection_desc[MAX_SETS];
    ctxkv_store_desc store_desc;
    ctxkv_norms *norms;
    ctxkv_store *store;
    ctxkv_projection *projections[MAX_SETS];
    ctxkv_chain *chains[MAX_SETS];
    uint16_t *host_weights, *host_x;
} shape;

typedef ctxkv_status (*call)(shape *it, int64_t turn);

// ---- timing ------------------------------------------------------------------------------------
static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

// A GPU is timed in batches between two waits, a CPU call by call.
static bool sample(shape *it, call run, int64_t *turn, int batch, double *seconds) {
    double start = cli_now();
    for (int i = 0; i < batch; ++i) {
        if (run(it, (*turn)++)) {
            cli_fail_status("bench");
            return false;
        }
    }
    if (!cli_sync(&it->all->place)) return false;
    *seconds = (cli_now() - start) / batch;
    return true;
}

static bool measure(shape *it, call run, bench_result *result) {
    static double values[MAX_SAMPLES];
    int batch = it->all->place.memory ? 20 : 1, count = 0;
    int64_t turn = 0;
    double limit = it->all->seconds, start = cli_now(), one;
    for (int i = 0; i < 3 || (cli_now() - start < limit / 4 && i < MAX_SAMPLES); ++i) {
        if (!sample(it, run, &turn, batch, &one)) return false;
        if (i == 0 && one > limit) break;
    }
    start = cli_now();
    while (count < MAX_SAMPLES && (count < 3 || cli_now() - start < limit)) {
        if (!sample(it, run, &turn, batch, &values[count++])) return false;
        cli_progress(
            (void *)result->op, (uint64_t)(1e3 * (cli_now() - start)), (uint64_t)(1e3 * limit) + 1);
    }
    qsort(values, (size_t)count, sizeof *values, by_value);
    result->samples = count;
    result->median = values[count / 2] * 1e6;
    result->p10 = values[count / 10] * 1e6;
    result->p90 = values[count * 9 / 10] * 1e6;
    return true;
}

static bool record(shape *it, const char *op, call run, double macs, double bytes) {
    bench *all = it->all;
    bench_result *result = &all->results[all->count];
    *result = (bench_result){
        .op = op,
        .heads = it->heads,
        .rows = it->rows,
        .layers = all->layers,
        .hidden_size = all->hidden_size,
        .head_dim = all->head_dim};
    if (!measure(it, run, result)) return false;
    result->gmac = macs / result->median * 1e-3;
    result->gigabytes = bytes / result->median * 1e-3;
    result->share = result->gigabytes / all->copy;
    ++all->count;
    return true;
}

// ---- copy bandwidth ----------------------------------------------------------------------------
typedef struct copy_job {
    uint8_t *to, *from;
    size_t part;
} copy_job;

static void copy_part(void *user, int64_t index) {
    const copy_job *job = user;
    size_t at = (size_t)index * job->part;
    memcpy(job->to + at, job->from + at, job->part);
}

bool bench_copy(bench *all) {
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    size_t size = (size_t)(cache > 0 ? cache : 32 << 20) * 4;
    if (size < 64u << 20) size = 64u << 20;
    if (size > 512u << 20 || all->place.memory) size = 512u << 20;
    all->beyond_cache = size;
    int threads = all->place.memory ? 1 : all->place.info.threads;
    copy_job job = {cli_alloc(&all->place, size), cli_alloc(&all->place, size), 0};
    if (!job.to || !job.from) return false;
    if (!all->place.memory) {
        memset(job.from, 1, size);
        memset(job.to, 2, size);
    }
    job.part = size / (size_t)threads / 4096 * 4096;
    double best = 1e30, start = cli_now();
    for (int i = 0; i < 5 || (cli_now() - start < all->seconds && i < 100); ++i) {
        double begin = cli_now();
        if (all->place.memory) {
            for (int k = 0; k < 10; ++k) {
                if (!cli_copy(&all->place, job.to, job.from, job.part)) return false;
            }
            if (!cli_sync(&all->place)) return false;
        } else {
            cli_parallel(threads, threads, copy_part, &job);
        }
        double took = (cli_now() - begin) / (all->place.memory ? 10 : 1);
        if (i && took < best) best = took;
    }
    all->copy = 2.0 * (double)job.part * threads / best * 1e-9;
    cli_place_reset(&all->place);
    return true;
}

// ---- operands ----------------------------------------------------------------------------------
typedef struct fill {
    uint16_t *to;
    size_t count;
    uint64_t seed;
    float scale;
} fill;

static void fill_slice(void *user, int64_t index) {
    const fill *job = user;
    size_t first = (size_t)index << 18, left = job->count - first;
    io_fill_bf16(job->to + first, left < 1u << 18 ? left : 1u << 18, job->seed, first, job->scale);
}

static uint16_t *values(bench *all, size_t count, uint64_t seed, float scale) {
    fill job = {cli_alloc(&all->host, count * 2), count, seed, scale};
    int64_t slices = (int64_t)((count + (1u << 18) - 1) >> 18);
    if (job.to) cli_parallel(cli_cpus(), slices, fill_slice, &job);
    return job.to;
}

static bool put(
    bench *all, cli_tensor *tensor, const void *host, DLDataType dtype, int rank,
    const int64_t *size) {
    size_t bytes = dtype.bits / 8u;
    for (int i = 0; i < rank; ++i) bytes *= (size_t)size[i];
    void *data = cli_alloc(&all->place, bytes);
    cli_tensor_set(tensor, &all->place, data, dtype, rank, size);
    return data && (!host || cli_to_device(&all->place, data, host, bytes));
}

static int64_t sets_for(const bench *all, double bytes) {
    int64_t sets = (int64_t)((double)all->beyond_cache / bytes) + 1;
    return sets > MAX_SETS ? MAX_SETS : sets;
}

static void describe(shape *it) {
    const bench *all = it->all;
    bool muse = !all->family;
    ctxkv_norms_desc_init(&it->norms_desc);
    it->norms_desc.hidden_size = all->hidden_size;
    it->norms_desc.num_layers = all->layers;
    it->norms_desc.hidden = (ctxkv_norm){muse ? CTXKV_NORM_ROW : CTXKV_NORM_RMS, 1e-5f, 0, 0};
    it->norms_desc.layer = it->norms_desc.hidden;
    it->norms_desc.hidden_weight = &it->hidden_gain.tensor;
    it->layer_gains[0] = &it->layer_gain.tensor;
    if (muse) {
        it->norms_desc.layer_weights = it->layer_gains;
        it->norms_desc.layer_weight_count = 1;
    } else {
        it->norms_desc.layer.kind = CTXKV_NORM_ABSENT;
    }
    it->norms_desc.numerics = (ctxkv_numerics)all->options.numerics;
    ctxkv_store_desc_init(&it->store_desc);
    it->store_desc.num_layers = all->layers;
    it->store_desc.num_kv_heads = it->heads;
    it->store_desc.head_dim = all->head_dim;
    it->store_desc.k_norm = muse ? CTXKV_K_NORM_PLAIN : CTXKV_K_NORM_RMS;
    it->store_desc.k_eps = 1e-5f;
    if (!muse) it->store_desc.k_norm_weight = &it->k_gain.tensor;
    it->store_desc.rope = muse ? CTXKV_ROPE_GPTJ : CTXKV_ROPE_NEOX;
    it->store_desc.cos_sin = &it->table.tensor;
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        ctxkv_projection_desc *desc = &it->projection_desc[i];
        ctxkv_projection_desc_init(desc);
        desc->hidden_size = all->hidden_size;
        desc->num_layers = all->layers;
        desc->num_kv_heads = it->heads;
        desc->head_dim = all->head_dim;
        it->weight_list[i][0] = &it->weights[i].tensor;
        desc->weights = it->weight_list[i];
        desc->weight_count = 1;
        desc->mode = (ctxkv_projection_mode)all->options.projection;
    }
}

// What does not depend on the rows: weights, gains, table, caches.
static bool make_fixed(shape *it) {
    bench *all = it->all;
    size_t count = (size_t)(all->layers * it->width * all->hidden_size);
    const int64_t size[3] = {all->layers, it->width, all->hidden_size};
    const int64_t gains[2] = {all->layers, all->hidden_size};
    const int64_t k_gains[2] = {all->layers, all->head_dim};
    const int64_t table[2] = {POSITIONS, all->head_dim};
    it->weight_sets = sets_for(all, (double)count * 2);
    it->host_weights = values(all, count, 3, 0x1p-5f);
    uint16_t *ones = values(all, (size_t)(all->layers * all->hidden_size), 1, 0.5f);
    uint16_t *rows = values(all, (size_t)(POSITIONS * all->head_dim), 5, 1.0f);
    if (!it->host_weights || !ones || !rows) return false;
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        if (!put(all, &it->weights[i], it->host_weights, CLI_BF16, 3, size)) return false;
    }
    int64_t least = (int64_t)((double)all->beyond_cache / (double)(all->layers * it->width * 2));
    int64_t most = 0;
    for (int i = 0; i < all->row_count; ++i) most = all->rows[i] > most ? all->rows[i] : most;
    it->places = (least > 2 * most ? least : 2 * most) / BLOCK * BLOCK + BLOCK;
    if (!put(all, &it->hidden_gain, ones, CLI_BF16, 1, &all->hidden_size) ||
        !put(all, &it->layer_gain, ones, CLI_BF16, 2, gains) ||
        !put(all, &it->k_gain, ones, CLI_BF16, 2, k_gains) ||
        !put(all, &it->table, rows, CLI_BF16, 2, table) ||
        !cli_caches_make(
            &it->caches, &all->place, all->layers, it->places / BLOCK, it->heads, BLOCK,
            all->head_dim, 0)) {
        return false;
    }
    describe(it);
    return true;
}

static bool make_row_set(shape *it, int64_t set, int64_t *slots) {
    bench *all = it->all;
    int64_t rows = it->rows, width = it->width, half = width / 2;
    bool muse = !all->family;
    const int64_t kv[3] = {all->layers, rows, width};
    const int64_t heads[4] = {all->layers, rows, it->heads, all->head_dim};
    const int64_t strides[4] = {rows * width, width, all->head_dim, 1};
    for (int64_t t = 0; t < rows; ++t) slots[t] = (set * rows + t) % it->places;
    if (!put(all, &it->x[set], it->host_x, CLI_BF16, 2, (int64_t[]){rows, all->hidden_size}) ||
        !put(
            all, &it->normed[set], NULL, CLI_BF16, 3,
            (int64_t[]){muse ? all->layers : 1, rows, all->hidden_size}) ||
        !put(all, &it->kv[set], NULL, CLI_BF16, 3, kv) ||
        !put(all, &it->slots[set], slots, CLI_I64, 1, &rows)) {
        return false;
    }
    const uint16_t *data = it->kv[set].tensor.data;
    cli_tensor_set(&it->k[set], &all->place, data, CLI_BF16, 4, heads);
    cli_tensor_set(&it->v[set], &all->place, data + half, CLI_BF16, 4, heads);
    memcpy(it->k[set].strides, strides, sizeof strides);
    memcpy(it->v[set].strides, strides, sizeof strides);
    return true;
}

static bool make_rows(shape *it) {
    bench *all = it->all;
    int64_t rows = it->rows;
    double bytes =
        (double)rows * 2 * (double)((all->layers + 1) * all->hidden_size + all->layers * it->width);
    it->row_sets = sets_for(all, bytes);
    it->host_x = values(all, (size_t)(rows * all->hidden_size), 0, 1.0f);
    int64_t *numbers = cli_alloc(&all->host, (size_t)rows * sizeof *numbers);
    if (!it->host_x || !numbers) return false;
    io_fill_positions(numbers, (size_t)rows, 4, POSITIONS);
    if (!put(all, &it->positions, numbers, CLI_I64, 1, &rows)) return false;
    for (int64_t i = 0; i < it->row_sets; ++i) {
        if (!make_row_set(it, i, numbers)) return false;
    }
    return true;
}

// ---- calls -------------------------------------------------------------------------------------
static ctxkv_status call_norms(shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    return ctxkv_norms_run(it->norms, &it->x[set].tensor, &it->normed[set].tensor, NULL);
}

static ctxkv_status call_projection(shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    ctxkv_projection *plan = it->projections[turn % it->weight_sets];
    return ctxkv_projection_run(plan, &it->normed[set].tensor, &it->kv[set].tensor, NULL);
}

static ctxkv_status call_store(shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    const DLTensor *slots = &it->slots[set].tensor;
    return ctxkv_store_run(
        it->store, &it->k[set].tensor, &it->v[set].tensor, &it->positions.tensor, &slots, 1, NULL);
}

static ctxkv_status call_chain(shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    const DLTensor *slots = &it->slots[set].tensor;
    return ctxkv_chain_run(
        it->chains[turn % it->weight_sets], &it->x[set].tensor, &it->positions.tensor, &slots, 1,
        NULL);
}

static ctxkv_status make_chain(
    shape *it, ctxkv_device *device, int64_t set, int64_t rows, const cli_caches *caches,
    ctxkv_chain **chain) {
    ctxkv_chain_desc desc;
    ctxkv_chain_desc_init(&desc);
    it->projection_desc[set].max_rows = rows;
    desc.norms = &it->norms_desc;
    desc.projection = &it->projection_desc[set];
    desc.store = &it->store_desc;
    desc.max_rows = rows;
    ctxkv_status status = ctxkv_chain_create(device, &desc, chain);
    if (status) return status;
    return ctxkv_chain_bind_caches(*chain, caches->keys, caches->values, it->all->layers);
}

// All row sets have been through the norms and the projection before the store is timed.
static bool measure_ops(shape *it) {
    bench *all = it->all;
    double rows = (double)it->rows, L = (double)all->layers, D = (double)all->hidden_size;
    double N = (double)it->width, out = all->family ? 1 : L, weights = L * N * D;
    bool ok = !ctxkv_norms_create(all->place.device, &it->norms_desc, &it->norms) &&
              !ctxkv_store_create(all->place.device, &it->store_desc, &it->store) &&
              !ctxkv_store_bind_caches(it->store, it->caches.keys, it->caches.values, all->layers);
    for (int64_t i = 0; ok && i < it->weight_sets; ++i) {
        it->projection_desc[i].max_rows = it->rows;
        ok = !ctxkv_projection_create(
            all->place.device, &it->projection_desc[i], &it->projections[i]);
    }
    if (!ok) cli_fail_status("bench");
    for (int64_t i = 0; ok && i < it->row_sets; ++i) {
        ok = !call_norms(it, i) && !call_projection(it, i);
        if (!ok) cli_fail_status("bench");
    }
    return ok && cli_sync(&all->place) &&
           record(it, "norms", call_norms, 0, 2 * (rows * D * (1 + out) + D * (1 + out))) &&
           record(
               it, "projection", call_projection, rows * weights,
               2 * (weights + rows * D * out + rows * L * N)) &&
           record(
               it, "store", call_store, 0,
               4 * rows * L * N + 8 * rows * (1 + L) + 2 * rows * (double)all->head_dim);
}

static bool measure_chain(shape *it) {
    bench *all = it->all;
    double rows = (double)it->rows, L = (double)all->layers, D = (double)all->hidden_size;
    double N = (double)it->width;
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        if (make_chain(it, all->place.device, i, it->rows, &it->caches, &it->chains[i])) {
            cli_fail_status("bench");
            return false;
        }
    }
    return record(
        it, "chain", call_chain, rows * L * N * D, 2 * (L * N * D + rows * D + rows * L * N));
}

static void drop_plans(shape *it) {
    ctxkv_norms_destroy(it->norms);
    ctxkv_store_destroy(it->store);
    it->norms = NULL;
    it->store = NULL;
    for (int64_t i = 0; i < MAX_SETS; ++i) {
        ctxkv_projection_destroy(it->projections[i]);
        ctxkv_chain_destroy(it->chains[i]);
        it->projections[i] = NULL;
        it->chains[i] = NULL;
    }
}

// ---- nothing is timed that has not just been compared with the scalar tier
// -------------------------
static bool one_row(shape *it, ctxkv_chain **chain, uint16_t *image) {
    bench *all = it->all;
    cli_caches caches;
    if (!cli_caches_make(
            &caches, &all->place, all->layers, 1, it->heads, BLOCK, all->head_dim, 0x5A)) {
        return false;
    }
    const DLTensor *slots = &it->slots[0].tensor;
    bool ok = !make_chain(it, all->place.device, 0, 1, &caches, chain) &&
              !ctxkv_chain_run(*chain, &it->x[0].tensor, &it->positions.tensor, &slots, 1, NULL);
    if (!ok) cli_fail_status("bench");
    ok = ok && cli_sync(&all->place);
    for (int64_t i = 0; ok && i < all->layers; ++i) {
        uint16_t *to = image + (size_t)i * caches.bytes / 2;
        ok = cli_to_host(&all->place, to, caches.storage[i], caches.bytes);
    }
    cli_caches_free(&caches);
    return ok;
}

// The shape's operands for one row on the given device.
static bool image_of(bench *all, int64_t heads, uint16_t *image) {
    shape *it = calloc(1, sizeof *it);
    if (!it) return false;
    *it = (shape){.all = all, .heads = heads, .rows = 1, .width = 2 * heads * all->head_dim};
    size_t keep = all->beyond_cache;
    int kept = all->row_count;
    all->beyond_cache = 1;
    all->row_count = 0;
    ctxkv_chain *chain = NULL;
    bool ok = make_fixed(it) && make_rows(it) && one_row(it, &chain, image);
    ctxkv_chain_destroy(chain);
    cli_caches_free(&it->caches);
    cli_place_reset(&all->place);
    cli_place_reset(&all->host);
    all->beyond_cache = keep;
    all->row_count = kept;
    free(it);
    return ok;
}

static bool compare_with_scalar(bench *all, int64_t heads) {
    size_t count = (size_t)(all->layers * heads * BLOCK * all->head_dim * 2);
    uint16_t *images = calloc(count * 2, sizeof *images);
    bench scalar = *all;
    scalar.options.device = "cpu";
    scalar.options.cpu_mask = CTXKV_CPU_SCALAR;
    scalar.options.projection = CTXKV_PROJECTION_EXACT;
    scalar.host = (cli_place){.where = {kDLCPU, 0}};
    bool ok = images && cli_place_open(&scalar.place, &scalar.options);
    if (ok) {
        ok = image_of(all, heads, images) && image_of(&scalar, heads, images + count);
        cli_place_close(&scalar.place);
        if (ok && memcmp(images, images + count, count * sizeof *images)) {
            ok = false;
            cli_fail(
                "the chain of %" PRId64 " heads differs from the scalar tier: nothing was timed",
                heads);
        }
    }
    free(images);
    return ok;
}

bool bench_heads(bench *all, int64_t heads) {
    // What cuBLAS gives is its own affair.
    bool exact = all->options.projection != CTXKV_PROJECTION_CUBLAS;
    if (exact && !compare_with_scalar(all, heads)) return false;
    shape *it = calloc(1, sizeof *it);
    if (!it) {
        cli_fail("out of memory");
        return false;
    }
    bool ok = true;
    for (int i = 0; ok && i < all->row_count; ++i) {
        memset(it, 0, sizeof *it);
        it->all = all;
        it->heads = heads;
        it->rows = all->rows[i];
        it->width = 2 * heads * all->head_dim;
        ok = make_fixed(it) && make_rows(it) && measure_ops(it);
        drop_plans(it);
        ok = ok && measure_chain(it);
        drop_plans(it);
        cli_caches_free(&it->caches);
        cli_place_reset(&all->place);
        cli_place_reset(&all->host);
    }
    free(it);
    return ok;
}
