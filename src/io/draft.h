// SPDX-License-Identifier: Apache-2.0
// A draft's context-chain weights for one tensor-parallel rank, as views of the mapped checkpoint.
#ifndef CTXKV_IO_DRAFT_H
#define CTXKV_IO_DRAFT_H

#include "checkpoint.h"
#include "config.h"
#include "ctxkv/dlpack.h"

typedef struct io_view {
    DLTensor tensor; // shape points at the array below
    int64_t shape[2];
    void *owned; // a copy, where the file's bytes were misaligned or had to be gathered
} io_view;

typedef struct io_draft {
    io_config config;
    io_checkpoint checkpoint;
    int64_t kv_heads, first_head; // of this rank
    int64_t parts;                // projections of a layer: 2, or 1 (K alone)
    io_view hidden;               // [D]; data NULL: weightless
    io_view *layer_norms;         // [L] of [D]; NULL: absent or weightless
    io_view *weights;             // [parts*L] of [kv_heads*head_dim, D]: K0, V0, K1 ...
    io_view bias;                 // [L, parts*kv_heads*head_dim]; data NULL: none
    io_view k_norm;               // [L, head_dim]; data NULL: weightless
} io_draft;

// Heads of rank tp_rank of tp_size, as vLLM divides them.
bool io_tensor_parallel(
    int64_t heads, int64_t tp_size, int64_t tp_rank, int64_t *local, int64_t *first,
    io_error *error);
// Reads folder/config.json and the checkpoint beside it. The result must not be moved.
bool io_draft_open(
    io_draft *draft, const char *folder, int64_t tp_size, int64_t tp_rank, io_error *error);
void io_draft_close(io_draft *draft);

#endif
