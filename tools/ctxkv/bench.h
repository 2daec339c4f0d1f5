// SPDX-License-Identifier: Apache-2.0
// Measurements of ctxkv bench, and their reports.
#ifndef CTXKV_CLI_BENCH_H
#define CTXKV_CLI_BENCH_H

#include "config.h"
#include "place.h"
#include "replay.h"

typedef struct bench_result {
    const char *op; // "norms", "projection", "store", "chain"
    int64_t heads, rows, layers, hidden_size, head_dim;
    double median, p10, p90; // microseconds
    int samples;
    int calls;                     // of one CUDA graph; 0: a CPU
    double gmac, gigabytes, share; // per second, per second, of the copy bandwidth
    double floor;                  // microseconds that moving or multiplying must take
    double old;                    // median in the file compared with; 0: not there
} bench_result;

typedef struct bench {
    cli_options options;
    int64_t heads[16], rows[16], layers, hidden_size, head_dim;
    int head_count, row_count, family; // family: io_family; -1: not given
    io_config draft;                   // what else a draft may have
    int cache_type, table_type;        // ctxkv_cache_type; BF16, FP16, FP32
    bool layer_tables, gptj;
    const char *model, *json, *compare;
    bool csv, unchecked;
    double tolerance, seconds;
    cli_place place, host;
    const ctxkv_replay_ops *replay; // NULL on a CPU
    double copy, read;              // GB/s; of a copy, bytes read plus bytes written
    double rate;                    // 10^9 multiply-adds a second
    double launch;                  // microseconds of a GPU's kernel that does nothing; else 0
    size_t beyond_cache;
    bench_result *results;
    size_t count;
} bench;

// Fill copy, read, rate and launch, then results; false after cli_fail.
bool bench_floors(bench *all);
bool bench_heads(bench *all, int64_t heads);
// Microseconds that so many multiply-adds and bytes take at best on this machine.
double bench_floor(const bench *all, double macs, double bytes);

// The options that are not the family's usual ones, as text; "" for none.
const char *bench_options(const bench *all, char *to, size_t size);
void bench_print_header(const bench *all);
void bench_print(const bench *all, const bench_result *result);
bool bench_write_json(const bench *all);
// Reads the old file early, so that a wrong name costs no measuring.
bool bench_load_old(bench *all, void **old);
void bench_match_old(const bench *all, bench_result *result, const void *old);
// The machine of the old file where it is another one, else NULL.
const char *bench_old_name(const bench *all, const void *old);
void bench_free_old(void *old);

#endif
