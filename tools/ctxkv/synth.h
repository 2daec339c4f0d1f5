// SPDX-License-Identifier: Apache-2.0
// What ctxkv synth makes: a draft's tensors and config.json, and a batch of context rows.
#ifndef CTXKV_CLI_SYNTH_H
#define CTXKV_CLI_SYNTH_H

#include <jansson.h>

#include "config.h"
#include "safetensors.h"

#define SYNTH_MARK "made_by_ctxkv_synth" // in config.json

typedef struct synth_args {
    const char *folder;
    int64_t kv_heads, layers, rows, seed, shards, hidden_size, head_dim, max_position;
    int64_t rotary_dim, window; // window: rows that a sliding layer keeps; 0: no such layers
    double v_scale;             // 0: none
    int family;                 // io_family
    int table_type;             // 0 BF16, 1 FP16, 2 FP32
    bool zero_centered, no_affine, nope, gptj, bias, fp32_norms;
    bool per_layer_slots, table, layer_tables, scales;
} synth_args;

typedef struct synth_tensor {
    io_entry entry;
    uint64_t seed;
    bool gain;
    float scale; // of values, or the gain's centre
} synth_tensor;

typedef struct synth {
    const synth_args *args;
    synth_tensor *tensors;
    size_t count;
    char **written;
    size_t written_count;
} synth;

bool synth_slides(const synth_args *args, int64_t layer);
float synth_theta(const synth_args *args, int64_t layer); // of the layer's table
// Names, shapes and memory of the checkpoint's tensors; false after cli_fail.
bool synth_plan(synth *all);
void synth_fill(void *user, int64_t index); // one of them, a cli_work
// Called after io_json_begin.
json_t *synth_config(const synth_args *args);
// The context's tensors, SYNTH_CONTEXT at most, whose data the caller frees, also after false: out
// of memory.
#define SYNTH_CONTEXT 6
bool synth_context(const synth_args *args, io_entry *entries, size_t *count);

// Writes everything; the exit status.
int synth_write(synth *all);

#endif
