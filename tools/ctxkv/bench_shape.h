// SPDX-License-Identifier: Apache-2.0
// The operands of one number of heads.
#ifndef CTXKV_CLI_BENCH_SHAPE_H
#define CTXKV_CLI_BENCH_SHAPE_H

#include "bench.h"

#define BENCH_WEIGHT_SETS 64
#define BENCH_ROW_SETS 1024
#define BENCH_BLOCK 16
#define BENCH_LAYERS 64
#define BENCH_POSITIONS 4096

// Everything of one number of heads. Sets rotate, so that no run finds its operands in the cache.
typedef struct bench_shape {
    bench *all;
    int64_t heads, rows;
    int64_t parts, width; // projections of a layer, 1 or 2; their columns: parts*heads*head_dim
    int64_t weight_sets, row_sets, places;
    void *stream; // the one being recorded, else NULL
    cli_tensor hidden_gain, layer_gain, k_gain, bias, positions, weights[BENCH_WEIGHT_SETS];
    cli_tensor tables[BENCH_LAYERS], scales[2 * BENCH_LAYERS];
    const DLTensor *table_list[BENCH_LAYERS], *scale_list[2 * BENCH_LAYERS];
    cli_tensor x[BENCH_ROW_SETS], normed[BENCH_ROW_SETS], kv[BENCH_ROW_SETS];
    cli_tensor k[BENCH_ROW_SETS], v[BENCH_ROW_SETS], slots[BENCH_ROW_SETS];
    const DLTensor *layer_gains[1], *weight_list[BENCH_WEIGHT_SETS][1];
    cli_caches caches;
    ctxkv_norms_desc norms_desc;
    ctxkv_projection_desc projection_desc[BENCH_WEIGHT_SETS];
    ctxkv_store_desc store_desc;
    ctxkv_norms *norms;
    ctxkv_store *store;
    ctxkv_projection *projections[BENCH_WEIGHT_SETS];
    ctxkv_chain *chains[BENCH_WEIGHT_SETS];
    uint16_t *host_weights, *host_x;
    int64_t *host_positions;
} bench_shape;

void bench_set_heads(bench_shape *it, bench *all, int64_t heads);
// Whether the layers' norms follow the hidden norm, or stand in its place.
bool bench_layer_norms(const bench *all);
// What does not depend on the rows: weights, gains, table, caches. Then what does. False after
// cli_fail.
bool bench_make_fixed(bench_shape *it);
bool bench_make_rows(bench_shape *it);
// One set of count rows: the bytes of rows of a larger call, at these places of it. Filled up with
// zeros to total where the order of the norm's sums depends on their number.
bool bench_make_picked(bench_shape *it, const int64_t *picked, int64_t count, int64_t total);
bool bench_make_chain(bench_shape *it, int64_t set, ctxkv_chain **chain);
ctxkv_status bench_run_chain(bench_shape *it, ctxkv_chain *chain, int64_t set);

// The same shape on a CPU tier, to compare with.
typedef struct bench_truth {
    bench all;
    bench_shape *shape;
} bench_truth;

// All false after cli_fail.
bool bench_truth_make(bench_truth *truth, const bench *all, int64_t heads);
void bench_truth_free(bench_truth *truth);
// Runs the chain once and compares some of its rows.
bool bench_compare(bench_truth *truth, bench_shape *it);

#endif
