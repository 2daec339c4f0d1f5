// SPDX-License-Identifier: Apache-2.0
// The operands of one number of heads.
#ifndef CTXKV_CLI_BENCH_SHAPE_H
#define CTXKV_CLI_BENCH_SHAPE_H

#include "bench.h"

#define BENCH_SETS 64
#define BENCH_BLOCK 16

// Everything of one number of heads. Sets rotate, so that no run finds its operands in the cache.
typedef struct bench_shape {
    bench *all;
    int64_t heads, rows, width; // width: 2*heads*head_dim
    int64_t weight_sets, row_sets, places;
    cli_tensor hidden_gain, layer_gain, k_gain, table, positions, weights[BENCH_SETS];
    cli_tensor x[BENCH_SETS], normed[BENCH_SETS], kv[BENCH_SETS], k[BENCH_SETS], v[BENCH_SETS];
    cli_tensor slots[BENCH_SETS];
    const DLTensor *layer_gains[1], *weight_list[BENCH_SETS][1];
    cli_caches caches;
    ctxkv_norms_desc norms_desc;
    ctxkv_projection_desc projection_desc[BENCH_SETS];
    ctxkv_store_desc store_desc;
    ctxkv_norms *norms;
    ctxkv_store *store;
    ctxkv_projection *projections[BENCH_SETS];
    ctxkv_chain *chains[BENCH_SETS];
    uint16_t *host_weights, *host_x;
} bench_shape;

// What does not depend on the rows: weights, gains, table, caches. Then what does. False after
// cli_fail.
bool bench_make_fixed(bench_shape *it);
bool bench_make_rows(bench_shape *it);

#endif
