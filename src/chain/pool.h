// SPDX-License-Identifier: Apache-2.0
// A small thread pool owned by the device: one loop at a time, the caller is worker 0.
#ifndef CTXKV_CHAIN_POOL_H
#define CTXKV_CHAIN_POOL_H

#include <stddef.h>
#include <stdint.h>

struct ctxkv__pool;

// Does part [begin, end) of a loop. scratch is the worker's own, 64-byte aligned.
typedef void ctxkv__loop_fn(void *context, int64_t begin, int64_t end, int worker, void *scratch);

// threads >= 1. NULL when memory is short; fewer threads when the system refuses them.
struct ctxkv__pool *ctxkv__pool_create(int threads, size_t scratch_bytes);
void ctxkv__pool_destroy(struct ctxkv__pool *pool);
int ctxkv__pool_threads(const struct ctxkv__pool *pool);
// Cuts [0, count) in pieces of at most grain and returns when all are done. Floating point runs in
// the default mode (round to nearest, subnormals kept) whatever the caller's mode is.
void ctxkv__pool_loop(
    struct ctxkv__pool *pool, int64_t count, int64_t grain, ctxkv__loop_fn *fn, void *context);

#endif
