// SPDX-License-Identifier: Apache-2.0
// ctxkv verify: two cache files, bit by bit.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "safetensors.h"

typedef struct verify_args {
    const char *paths[2];
} verify_args;

static error_t parse(int key, char *text, struct argp_state *state) {
    verify_args *args = state->input;
    switch (key) {
    case ARGP_KEY_ARG:
        if (state->arg_num > 1) return cli_extra(text);
        args->paths[state->arg_num] = text;
        return 0;
    case ARGP_KEY_END:
        if (state->arg_num > 1) return 0;
        cli_fail("%u files given, must be two to compare", state->arg_num);
        return CLI_REPORTED;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp verify_argp = {
    .parser = parse,
    .args_doc = "A B",
    .doc = "Compares two files written by `ctxkv run' bit by bit. Exits with 1 at a difference, "
           "after telling the first one and the counts."};

static bool is_cache(io_dtype dtype) {
    return dtype == IO_BF16 || dtype == IO_F16 || dtype == IO_F8_E4M3 || dtype == IO_F8_E5M2 ||
           dtype == IO_U8;
}

// FP8 may stand as the bytes that it is.
static bool alike(io_dtype a, io_dtype b) {
    bool one = io_dtype_bits(a) == 8 && io_dtype_bits(b) == 8;
    return a == b || (one && (a == IO_U8 || b == IO_U8));
}

// The number of layers kv_cache.0, 1, ... checked; -1 after cli_fail.
static int64_t count_layers(const io_safetensors *file) {
    int64_t layers = 0;
    for (;; ++layers) {
        char name[40];
        snprintf(name, sizeof name, "kv_cache.%" PRId64, layers);
        const io_tensor *tensor = io_safetensors_find(file, name);
        if (!tensor) break;
        if (!is_cache(tensor->dtype) || tensor->rank != 4 || tensor->shape[3] % 2) {
            cli_fail(
                "%s: tensor '%s' is %s %s, must be BF16, F16, F8_E4M3, F8_E5M2 or U8 "
                "[num_blocks, heads, block_size, 2*head_dim]",
                file->path, name, io_dtype_name(tensor->dtype),
                io_shape(tensor->shape, tensor->rank).text);
            return -1;
        }
    }
    if (layers) return layers;
    cli_fail("%s: holds no tensor 'kv_cache.0', must be a file written by ctxkv run", file->path);
    return -1;
}

static uint16_t word(const io_tensor *tensor, uint64_t index) {
    uint16_t value = 0;
    size_t item = (size_t)io_dtype_bits(tensor->dtype) / 8;
    memcpy(&value, tensor->data + item * index, item);
    return value;
}

static uint64_t elements(const io_tensor *tensor) {
    return tensor->bytes * 8 / (uint64_t)io_dtype_bits(tensor->dtype);
}

static void tell_first(int64_t layer, const io_tensor *a, const io_tensor *b, uint64_t index) {
    uint64_t width = (uint64_t)a->shape[3], half = width / 2;
    uint64_t size = (uint64_t)a->shape[2], heads = (uint64_t)a->shape[1];
    int digits = (int)io_dtype_bits(a->dtype) / 4;
    // An element differs, so no extent is 0.
    uint64_t column = index % width, row = index / width; // NOLINT(clang-analyzer-core.DivideZero)
    uint64_t offset = row % size, head = row / size;      // NOLINT(clang-analyzer-core.DivideZero)
    printf(
        "differ: first at layer %" PRId64 ", block %" PRIu64 ", offset %" PRIu64 ", head %" PRIu64
        ", %s, column %" PRIu64 ": A has 0x%0*x, B has 0x%0*x\n",
        layer, head / heads, offset, head % heads, column < half ? "K" : "V",
        column - (column < half ? 0 : half), digits, word(a, index), digits, word(b, index));
}

// Counts differing elements of one layer; tells the first if none was told before.
static uint64_t compare_layer(
    int64_t layer, const io_tensor *a, const io_tensor *b, bool *told, uint64_t parts[2]) {
    uint64_t width = (uint64_t)a->shape[3], total = elements(a), count = 0;
    parts[0] = parts[1] = 0;
    if (!total || !memcmp(a->data, b->data, a->bytes)) return 0;
    for (uint64_t i = 0; i < total; ++i) {
        if (word(a, i) == word(b, i)) continue;
        if (!*told) tell_first(layer, a, b, i);
        *told = true;
        ++count;
        ++parts[i % width >= width / 2];
    }
    return count;
}

static int compare(const io_safetensors *a, const io_safetensors *b) {
    int64_t layers = count_layers(a), others = layers < 0 ? -1 : count_layers(b);
    if (others < 0) return 2;
    if (layers != others) {
        return cli_fail(
            "%s: %" PRId64 " layers, must be %" PRId64 " as in %s", b->path, others, layers,
            a->path);
    }
    char name[40];
    for (int64_t layer = 0; layer < layers; ++layer) {
        snprintf(name, sizeof name, "kv_cache.%" PRId64, layer);
        const io_tensor *left = io_safetensors_find(a, name);
        const io_tensor *right = io_safetensors_find(b, name);
        if (!alike(left->dtype, right->dtype)) {
            return cli_fail(
                "%s: tensor '%s' is %s, must be %s as in %s", b->path, name,
                io_dtype_name(right->dtype), io_dtype_name(left->dtype), a->path);
        }
        if (memcmp(left->shape, right->shape, 4 * sizeof *left->shape)) {
            return cli_fail(
                "%s: tensor '%s' has shape %s, must be %s as in %s", b->path, name,
                io_shape(right->shape, 4).text, io_shape(left->shape, 4).text, a->path);
        }
    }
    uint64_t total = 0, differing = 0;
    bool told = false;
    for (int64_t layer = 0; layer < layers; ++layer) {
        snprintf(name, sizeof name, "kv_cache.%" PRId64, layer);
        const io_tensor *left = io_safetensors_find(a, name);
        uint64_t parts[2];
        uint64_t count = compare_layer(layer, left, io_safetensors_find(b, name), &told, parts);
        if (count) {
            printf(
                "layer %" PRId64 ": %" PRIu64 " of %" PRIu64 " elements differ (K %" PRIu64
                ", V %" PRIu64 ")\n",
                layer, count, elements(left), parts[0], parts[1]);
        }
        total += elements(left);
        differing += count;
    }
    if (!differing) {
        printf("equal: %" PRId64 " layers, %" PRIu64 " elements\n", layers, total);
        return 0;
    }
    printf("%" PRIu64 " of %" PRIu64 " elements differ\n", differing, total);
    return 1;
}

static int run(void *input) {
    const verify_args *args = input;
    io_error error;
    io_safetensors files[2];
    if (!io_safetensors_open(&files[0], args->paths[0], &error)) return cli_fail("%s", error.text);
    if (!io_safetensors_open(&files[1], args->paths[1], &error)) {
        io_safetensors_close(&files[0]);
        return cli_fail("%s", error.text);
    }
    int status = compare(&files[0], &files[1]);
    io_safetensors_close(&files[0]);
    io_safetensors_close(&files[1]);
    return status;
}

const cli_command cli_verify = {
    "verify", "Compare two cache files bit by bit", &verify_argp, sizeof(verify_args), NULL, run};
