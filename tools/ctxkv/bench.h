// SPDX-License-Identifier: Apache-2.0
// Measurements of ctxkv bench, and their reports.
#ifndef CTXKV_CLI_BENCH_H
#define CTXKV_CLI_BENCH_H

#include "place.h"

typedef struct bench_result {
    const char *op; // "norms", "projection", "store", "chain"
    int64_t heads, rows, layers, hidden_size, head_dim;
    double median, p10, p90; // microseconds
    int samples;
    double gmac, gigabytes, share; // per second, per second, of the copy bandwidth
    double old;                    // median in the file compared with; 0: not there
} bench_result;

typedef struct bench {
    cli_options options;
    int64_t heads[16], rows[16], layers, hidden_size, head_dim;
    int head_count, row_count, family; // 0 muse, 1 qwen3
    const char *json, *compare;
    bool csv;
    double tolerance, seconds;
    cli_place place, host;
    double copy; // GB/s, bytes read plus bytes written
    size_t beyond_cache;
    bench_result *results;
    size_t count;
} bench;

// Fill copy and results; false after cli_fail.
bool bench_copy(bench *all);
bool bench_heads(bench *all, int64_t heads);

void bench_print_header(const bench *all);
void bench_print(const bench *all, const bench_result *result);
bool bench_write_json(const bench *all);
// Reads the old file early, so that a wrong name costs no measuring.
bool bench_load_old(bench *all, void **old);
void bench_match_old(bench_result *result, const void *old);
void bench_free_old(void *old);

#endif
