// SPDX-License-Identifier: Apache-2.0
// A batch of context rows: hidden_states, positions, slot_mapping, perhaps cos_sin_cache.
#ifndef CTXKV_IO_CONTEXT_H
#define CTXKV_IO_CONTEXT_H

#include "config.h"
#include "safetensors.h"

typedef struct io_context {
    io_safetensors file;
    int64_t rows;                     // T
    const uint16_t *hidden;           // [T, D]
    const int64_t *positions;         // [T]; NULL when not given
    const int64_t *slots;             // [slot_lists, slot_rows]
    int64_t slot_lists, slot_rows;    // 1 or L lists; 0..T-1 when not given
    const void *cos_sin;              // [table_lists, table_rows, rotary_dim]; NULL when not given
    io_dtype table_dtype;             // BF16, F16 or F32
    int64_t table_lists, table_rows;  // 1 or L tables
    const float *k_scales, *v_scales; // [L], of FP8 caches; NULL when not given
    void *owned[6];
} io_context;

bool io_context_open(
    io_context *context, const char *path, const io_config *config, io_error *error);
// The same from memory, which must outlive the result.
bool io_context_parse(
    io_context *context, const uint8_t *data, size_t size, const char *path,
    const io_config *config, io_error *error);
void io_context_close(io_context *context);

#endif
