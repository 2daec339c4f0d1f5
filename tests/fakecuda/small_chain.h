// SPDX-License-Identifier: Apache-2.0
// One small chain on the fake GPU, and its operands.
#ifndef CTXKV_TESTS_FAKECUDA_SMALL_CHAIN_H
#define CTXKV_TESTS_FAKECUDA_SMALL_CHAIN_H

#include "fixture.h"

// Muse Spark's chain, or one of the Qwen3 family (one RMS norm, K norm with gains, NeoX).
enum { D = 8192, LAYERS = 2, HEADS = 2, COLUMNS = 2 * HEADS * 64, BLOCKS = 4, PAGE = 16 };
enum { POSITIONS = 16, BLOCK = HEADS * PAGE * 128, CACHE = BLOCKS * BLOCK };
// Rows that go by the decode kernels, by norms, projection and store, and by the prefill kernels.
enum { FEW_ROWS = 4, PART_ROWS = 100, MOST_ROWS = 4096 };

extern uint16_t x[FEW_ROWS * D], weights[LAYERS * COLUMNS * D], table[POSITIONS * 64];
extern uint16_t cache[LAYERS * CACHE];
extern int64_t positions[FEW_ROWS], slots[FEW_ROWS];

ctxkv_status chain_new(ctxkv_device *device, bool family, ctxkv_chain **chain);
// The first layer's cache lies offset elements further.
ctxkv_status chain_bind(ctxkv_chain *chain, int offset);
// The fake kernels touch nothing, so that more rows than there is memory for are no harm.
ctxkv_status chain_run(ctxkv_chain *chain, int64_t rows, void *stream);

struct parts {
    ctxkv_device *device;
    ctxkv_chain *chain;
};
// cuda:0 and a chain with caches, all of which must work. ways: CTXKV_CHAIN_WAYS while it is made.
struct parts parts_open(bool family, int offset, const char *ways);
void parts_close(struct parts *parts);

#endif
