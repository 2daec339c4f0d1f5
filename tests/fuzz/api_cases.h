// SPDX-License-Identifier: Apache-2.0
// What the fuzzers of the public API share: the two devices compared, and plans' operands.
#ifndef CTXKV_TESTS_FUZZ_API_CASES_H
#define CTXKV_TESTS_FUZZ_API_CASES_H

#include "api_arrays.h"

extern struct place fast, plain; // the best tier on three threads; the scalar truth on one

void open_places(void); // once

#define CHECK(call)                                                                                \
    do {                                                                                           \
        if (call) die("%s", #call);                                                                \
    } while (0)

void same(const void *a, const void *b, size_t bytes, const char *what);

// Makes one thing wrong in a tensor whose shape is not free to vary; such a call is refused.
void spoil(struct input *in, struct tensor *t);

// Norms of d columns without weights; row: the row norm.
ctxkv_norms_desc norms_desc(struct input *in, int64_t d, int64_t layers, bool row);

#define MAX_L 3
struct store_case {
    ctxkv_store_desc desc;
    int64_t rows, table_rows, slot_count, blocks[MAX_L], page[MAX_L], slot_rows[MAX_L];
    enum type table_type, cache;
    uint16_t *k, *v, *table, *gain;
    int64_t *positions, *slots[MAX_L];
};

// K norm, RoPE, their tensors and the number of slot arrays; rows, layers, heads and head_dim are
// set before (a plain K norm makes head_dim 64).
void store_options(struct input *in, struct store_case *c);
// Positions, cache sizes and slots, good and bad, each slot of a layer at most once.
void store_places(struct input *in, struct store_case *c);
size_t store_bytes(const struct store_case *c, int64_t layer); // of one layer's K and V
void store_free(struct store_case *c);
// Dies unless f is what that many equal runs must report.
void expect_faults(const struct store_case *c, const ctxkv_faults *f, uint64_t runs);

#endif
