// SPDX-License-Identifier: Apache-2.0
// Timing of the measurements: a CPU call by call, a GPU by replays of a CUDA graph of many calls.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bench_shape.h"

#define MAX_SAMPLES 1000
#define LEAST_CALLS 8

typedef ctxkv_status (*call)(bench_shape *it, int64_t turn);

// ---- timing ------------------------------------------------------------------------------------
static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

typedef struct timed {
    bench_shape *it;
    call run;
    int64_t turn;
    int calls;            // of a replay
    ctxkv_replay *replay; // NULL on a CPU
} timed;

static bool record_graph(timed *what) {
    bench_shape *it = what->it;
    const bench *all = it->all;
    int64_t sets = it->row_sets > it->weight_sets ? it->row_sets : it->weight_sets;
    what->calls = (int)(sets > LEAST_CALLS ? sets : LEAST_CALLS);
    ctxkv_status status = all->replay->begin(all->place.device, &what->replay, &it->stream);
    for (int i = 0; !status && i < what->calls; ++i) status = what->run(it, i);
    it->stream = NULL;
    if (!status) status = all->replay->end(what->replay);
    if (status) cli_fail_status("bench");
    return !status;
}

static bool sample(timed *what, double *seconds) {
    ctxkv_status status;
    if (what->replay) {
        status = what->it->all->replay->run(what->replay, seconds);
        *seconds /= what->calls;
    } else {
        double start = cli_now();
        status = what->run(what->it, what->turn++);
        *seconds = cli_now() - start;
    }
    if (status) cli_fail_status("bench");
    return !status;
}

// Fills values after a warm-up; how many, 0 after cli_fail.
static int take_samples(timed *what, const char *label, double *values) {
    int count = 0;
    double limit = what->it->all->seconds, start = cli_now(), one;
    for (int i = 0; i < 3 || (cli_now() - start < limit / 4 && i < MAX_SAMPLES); ++i) {
        double begin = cli_now();
        if (!sample(what, &one)) return 0;
        if (i == 0 && cli_now() - begin > limit) break;
    }
    start = cli_now();
    while (count < MAX_SAMPLES && (count < 3 || cli_now() - start < limit)) {
        if (!sample(what, &values[count++])) return 0;
        cli_progress(
            (void *)label, (uint64_t)(1e3 * (cli_now() - start)), (uint64_t)(1e3 * limit) + 1);
    }
    return count;
}

static bool measure(bench_shape *it, call run, bench_result *result) {
    static double values[MAX_SAMPLES];
    const ctxkv_replay_ops *replay = it->all->replay;
    timed what = {.it = it, .run = run};
    int count = 0;
    if (!replay || record_graph(&what)) count = take_samples(&what, result->op, values);
    if (replay) replay->free(what.replay);
    if (!count) return false;
    qsort(values, (size_t)count, sizeof *values, by_value);
    result->samples = count;
    result->calls = what.calls;
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
    result->floor = bench_floor(all, macs, bytes);
    ++all->count;
    return true;
}

// ---- calls -------------------------------------------------------------------------------------
static ctxkv_status call_norms(bench_shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    return ctxkv_norms_run(it->norms, &it->x[set].tensor, &it->normed[set].tensor, it->stream);
}

static ctxkv_status call_projection(bench_shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    ctxkv_projection *plan = it->projections[turn % it->weight_sets];
    return ctxkv_projection_run(plan, &it->normed[set].tensor, &it->kv[set].tensor, it->stream);
}

static ctxkv_status call_store(bench_shape *it, int64_t turn) {
    int64_t set = turn % it->row_sets;
    const DLTensor *slots = &it->slots[set].tensor;
    return ctxkv_store_run(
        it->store, &it->k[set].tensor, it->parts == 2 ? &it->v[set].tensor : NULL,
        &it->positions.tensor, &slots, 1, it->stream);
}

ctxkv_status bench_run_chain(bench_shape *it, ctxkv_chain *chain, int64_t set) {
    const DLTensor *slots = &it->slots[set].tensor;
    return ctxkv_chain_run(chain, &it->x[set].tensor, &it->positions.tensor, &slots, 1, it->stream);
}

static ctxkv_status call_chain(bench_shape *it, int64_t turn) {
    return bench_run_chain(it, it->chains[turn % it->weight_sets], turn % it->row_sets);
}

bool bench_make_chain(bench_shape *it, int64_t set, ctxkv_chain **chain) {
    ctxkv_chain_desc desc;
    ctxkv_chain_desc_init(&desc);
    it->projection_desc[set].max_rows = it->rows;
    desc.norms = &it->norms_desc;
    desc.projection = &it->projection_desc[set];
    desc.store = &it->store_desc;
    desc.max_rows = it->rows;
    bool ok = !ctxkv_chain_create(it->all->place.device, &desc, chain) &&
              !ctxkv_chain_bind_caches(*chain, it->caches.keys, it->caches.values, it->all->layers);
    if (!ok) cli_fail_status("bench");
    return ok;
}

// Bytes of a row: its K and V in all caches, its cosines and sines.
static double stored(const bench_shape *it) {
    const cli_caches *caches = &it->caches;
    return (double)caches->bytes / (double)it->places * (double)caches->layers;
}

static double rotation(const bench_shape *it) {
    const bench *all = it->all;
    double row = (double)all->draft.rotary_dim * (all->table_type == 2 ? 4 : 2);
    return !all->draft.rope ? 0 : all->layer_tables ? row * (double)all->layers : row;
}

// All row sets have been through the norms and the projection before the store is timed.
static bool measure_ops(bench_shape *it) {
    bench *all = it->all;
    double rows = (double)it->rows, L = (double)all->layers, D = (double)all->hidden_size;
    double N = (double)it->width, out = bench_layer_norms(all) ? L : 1, weights = L * N * D;
    double gains = all->family == IO_FAMILY_MUSE ? 1 + L : out;
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
           record(it, "norms", call_norms, 0, 2 * (rows * D * (1 + out) + D * gains)) &&
           record(
               it, "projection", call_projection, rows * weights,
               2 * (weights + rows * D * out + rows * L * N)) &&
           record(
               it, "store", call_store, 0,
               2 * rows * L * N + rows * stored(it) + 8 * rows * (1 + L) + rows * rotation(it));
}

static bool measure_chain(bench_shape *it) {
    bench *all = it->all;
    double rows = (double)it->rows, L = (double)all->layers, D = (double)all->hidden_size;
    double N = (double)it->width;
    for (int64_t i = 0; i < it->weight_sets; ++i) {
        if (!bench_make_chain(it, i, &it->chains[i])) return false;
    }
    return record(
        it, "chain", call_chain, rows * L * N * D, 2 * (L * N * D + rows * D) + rows * stored(it));
}

static void drop_plans(bench_shape *it) {
    ctxkv_norms_destroy(it->norms);
    ctxkv_store_destroy(it->store);
    it->norms = NULL;
    it->store = NULL;
    for (int64_t i = 0; i < BENCH_WEIGHT_SETS; ++i) {
        ctxkv_projection_destroy(it->projections[i]);
        ctxkv_chain_destroy(it->chains[i]);
        it->projections[i] = NULL;
        it->chains[i] = NULL;
    }
}

// ---- one number of heads -----------------------------------------------------------------------
static bool all_rows(bench *all, bench_shape *it, bench_truth *truth) {
    bool ok = true;
    size_t mark = all->place.block_count, host_mark = all->host.block_count;
    for (int i = 0; ok && i < all->row_count; ++i) {
        it->rows = all->rows[i];
        ok = bench_make_rows(it) && (!truth || bench_compare(truth, it)) && measure_ops(it);
        drop_plans(it);
        ok = ok && measure_chain(it);
        drop_plans(it);
        cli_place_release(&all->place, mark);
        cli_place_release(&all->host, host_mark);
    }
    return ok;
}

bool bench_heads(bench *all, int64_t heads) {
    // What cuBLAS gives is its own affair.
    bool checked = !all->unchecked && all->options.projection != CTXKV_PROJECTION_CUBLAS;
    bench_truth truth = {.shape = NULL};
    bench_shape *it = calloc(1, sizeof *it);
    if (!it) {
        cli_fail("out of memory for the operands");
        return false;
    }
    bench_set_heads(it, all, heads);
    bool ok = (!checked || bench_truth_make(&truth, all, heads)) && bench_make_fixed(it) &&
              all_rows(all, it, checked ? &truth : NULL);
    if (checked) bench_truth_free(&truth);
    cli_caches_free(&it->caches);
    cli_place_reset(&all->place);
    cli_place_reset(&all->host);
    free(it);
    return ok;
}
