// SPDX-License-Identifier: Apache-2.0
// Timing of the measurements, and the check that comes before.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_shape.h"

#define MAX_SAMPLES 1000

typedef ctxkv_status (*call)(bench_shape *it, int64_t turn);

// ---- timing ------------------------------------------------------------------------------------
static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

// A GPU is timed in batches between two waits, a CPU call by call.
static bool sample(bench_shape *it, call run, int64_t *turn, int batch, double *seconds) {
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

static bool measure(bench_shape *it, call run, bench_result *result) {
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

static bool record(bench_shape *it, const char *op, call run, double macs, double bytes) {
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

// ---- calls -------------------------------------------------------------------------------------
static ctxkv_status call_norms(bench_shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    return ctxkv_norms_run(it->norms, &it->x[set].tensor, &it->normed[set].tensor, NULL);
}

static ctxkv_status call_projection(bench_shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    ctxkv_projection *plan = it->projections[turn % it->weight_sets];
    return ctxkv_projection_run(plan, &it->normed[set].tensor, &it->kv[set].tensor, NULL);
}

static ctxkv_status call_store(bench_shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    const DLTensor *slots = &it->slots[set].tensor;
    return ctxkv_store_run(
        it->store, &it->k[set].tensor, &it->v[set].tensor, &it->positions.tensor, &slots, 1, NULL);
}

static ctxkv_status call_chain(bench_shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    const DLTensor *slots = &it->slots[set].tensor;
    return ctxkv_chain_run(
        it->chains[turn % it->weight_sets], &it->x[set].tensor, &it->positions.tensor, &slots, 1,
        NULL);
}

static ctxkv_status make_chain(
    bench_shape *it, ctxkv_device *device, int64_t set, int64_t rows, const cli_caches *caches,
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
static bool measure_ops(bench_shape *it) {
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

static bool measure_chain(bench_shape *it) {
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

static void drop_plans(bench_shape *it) {
    ctxkv_norms_destroy(it->norms);
    ctxkv_store_destroy(it->store);
    it->norms = NULL;
    it->store = NULL;
    for (int64_t i = 0; i < BENCH_SETS; ++i) {
        ctxkv_projection_destroy(it->projections[i]);
        ctxkv_chain_destroy(it->chains[i]);
        it->projections[i] = NULL;
        it->chains[i] = NULL;
    }
}

// ---- nothing is timed that has not just been compared with the scalar tier
// -------------------------
static bool one_row(bench_shape *it, ctxkv_chain **chain, uint16_t *image) {
    bench *all = it->all;
    cli_caches caches;
    if (!cli_caches_make(
            &caches, &all->place, all->layers, 1, it->heads, BENCH_BLOCK, all->head_dim, 0x5A)) {
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
    bench_shape *it = calloc(1, sizeof *it);
    if (!it) return false;
    *it = (bench_shape){.all = all, .heads = heads, .rows = 1, .width = 2 * heads * all->head_dim};
    size_t keep = all->beyond_cache;
    int kept = all->row_count;
    all->beyond_cache = 1;
    all->row_count = 0;
    ctxkv_chain *chain = NULL;
    bool ok = bench_make_fixed(it) && bench_make_rows(it) && one_row(it, &chain, image);
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
    size_t count = (size_t)(all->layers * heads * BENCH_BLOCK * all->head_dim * 2);
    uint16_t *images = calloc(count * 2, sizeof *images);
    bench scalar = *all;
    scalar.options.device = "cpu";
    scalar.options.cpu_mask = CTXKV_CPU_SCALAR;
    scalar.options.projection = CTXKV_PROJECTION_EXACT;
    // Stock means another order of sums on sm_100 and later than on a CPU.
    bool packed = all->place.info.cuda_arch >= 100 && !all->family;
    if (packed && !scalar.options.numerics) scalar.options.numerics = CTXKV_NUMERICS_PACKED;
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
    bench_shape *it = calloc(1, sizeof *it);
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
        ok = bench_make_fixed(it) && bench_make_rows(it) && measure_ops(it);
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
