// SPDX-License-Identifier: Apache-2.0
// config.json of a draft: the keys that shape the context chain, checked.
#ifndef CTXKV_IO_CONFIG_H
#define CTXKV_IO_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

typedef enum io_family {
    IO_FAMILY_MUSE,   // Muse Spark DSpark: per-layer norms, GPT-J RoPE
    IO_FAMILY_QWEN3,  // DFlash and DSpark of Qwen3 kind: one norm, weighted K norm, NeoX RoPE
    IO_FAMILY_LAGUNA, // each layer's norm alone, bias after the rounding
    IO_FAMILY_GEMMA4  // K alone: V is the weightless norm of raw K
} io_family;

typedef struct io_config {
    io_family family;
    int64_t hidden_size, layers, attention_heads, kv_heads, head_dim;
    int64_t max_position; // 0: not given
    int64_t rotary_dim;
    float eps;
    float theta;
    float v_scale; // 0: none
    bool affine, zero_centered, rope, bias, neox;
    char rope_scaling[64]; // "" or the type that needs a table handed in
} io_config;

bool io_config_parse(
    io_config *config, const char *data, size_t size, const char *path, io_error *error);
bool io_config_open(io_config *config, const char *path, io_error *error);
const char *io_family_name(io_family family);

#endif
