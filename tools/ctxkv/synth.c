// SPDX-License-Identifier: Apache-2.0
// ctxkv synth: a checkpoint and a context in the real format, made from a seed.
#include "synth.h"

#include <inttypes.h>
#include <stdlib.h>

#include "cli.h"

enum {
    KEY_HEADS = 300,
    KEY_LAYERS,
    KEY_ROWS,
    KEY_SEED,
    KEY_SHARDS,
    KEY_ZERO,
    KEY_NO_AFFINE,
    KEY_NOPE,
    KEY_FAMILY,
    KEY_HIDDEN,
    KEY_DIM,
    KEY_POSITION,
    KEY_ROTARY,
    KEY_GPTJ,
    KEY_BIAS,
    KEY_V_SCALE,
    KEY_FP32,
    KEY_SLOTS,
    KEY_SLIDING,
    KEY_TABLE,
    KEY_TABLES,
    KEY_TYPE,
    KEY_SCALES
};

// What a draft of the family cannot have, or NULL.
static const char *foreign_option(const synth_args *args) {
    bool muse = args->family == IO_FAMILY_MUSE, qwen3 = args->family == IO_FAMILY_QWEN3;
    if (muse && args->rotary_dim) return "--rotary-dim";
    if (muse && args->bias) return "--bias";
    if (muse && args->v_scale != 0) return "--v-scale";
    if (!qwen3 && args->gptj) return "--gptj";
    return !qwen3 && args->window ? "--sliding" : NULL;
}

static error_t parse_end(const synth_args *args) {
    bool muse = args->family == IO_FAMILY_MUSE;
    int64_t dim = args->head_dim ? args->head_dim : args->family == IO_FAMILY_GEMMA4 ? 512 : 128;
    if (!args->folder) {
        cli_fail("DIR: is missing, must name the folder to write");
    } else if (
        muse && ((args->hidden_size && args->hidden_size != 8192) ||
                 (args->head_dim && args->head_dim != 64))) {
        cli_fail("--hidden-size, --head-dim: must be 8192 and 64 for --family muse");
    } else if (foreign_option(args)) {
        cli_fail(
            "%s: must be left out for --family %s", foreign_option(args),
            io_family_name((io_family)args->family));
    } else if (args->hidden_size % 16) {
        cli_fail("--hidden-size: is %" PRId64 ", must be a multiple of 16", args->hidden_size);
    } else if (args->head_dim & (args->head_dim - 1)) {
        cli_fail("--head-dim: is %" PRId64 ", must be 64, 128, 256 or 512", args->head_dim);
    } else if (args->rotary_dim % 2 || args->rotary_dim > dim) {
        cli_fail(
            "--rotary-dim: is %" PRId64 ", must be even and at most --head-dim %" PRId64,
            args->rotary_dim, dim);
    } else {
        return 0;
    }
    return CLI_REPORTED;
}

static error_t parse_switch(int key, synth_args *args) {
    bool *flag = key == KEY_ZERO        ? &args->zero_centered
                 : key == KEY_NO_AFFINE ? &args->no_affine
                 : key == KEY_NOPE      ? &args->nope
                 : key == KEY_GPTJ      ? &args->gptj
                 : key == KEY_BIAS      ? &args->bias
                 : key == KEY_FP32      ? &args->fp32_norms
                 : key == KEY_SLOTS     ? &args->per_layer_slots
                 : key == KEY_TABLE     ? &args->table
                 : key == KEY_TABLES    ? &args->layer_tables
                 : key == KEY_SCALES    ? &args->scales
                                        : NULL;
    if (!flag) return ARGP_ERR_UNKNOWN;
    *flag = true;
    return 0;
}

static error_t parse_value(int key, const char *text, synth_args *args) {
    static const char *const families[] = {"muse", "qwen3", "laguna", "gemma4", NULL};
    static const char *const types[] = {"bf16", "fp16", "fp32", NULL};
    switch (key) {
    case KEY_HEADS:
        return cli_integer("--kv-heads", text, 1, 1024, &args->kv_heads);
    case KEY_LAYERS:
        return cli_integer("--layers", text, 1, 256, &args->layers);
    case KEY_ROWS:
        return cli_integer("--rows", text, 0, 1 << 24, &args->rows);
    case KEY_SEED:
        return cli_integer("--seed", text, 0, INT64_MAX, &args->seed);
    case KEY_SHARDS:
        return cli_integer("--shards", text, 1, 999, &args->shards);
    case KEY_FAMILY:
        return cli_choice("--family", text, families, &args->family);
    case KEY_HIDDEN:
        return cli_integer("--hidden-size", text, 16, 1 << 20, &args->hidden_size);
    case KEY_DIM:
        return cli_integer("--head-dim", text, 64, 512, &args->head_dim);
    case KEY_POSITION:
        return cli_integer("--max-position", text, 1, 1 << 28, &args->max_position);
    case KEY_ROTARY:
        return cli_integer("--rotary-dim", text, 2, 512, &args->rotary_dim);
    case KEY_SLIDING:
        return cli_integer("--sliding", text, 1, 1 << 24, &args->window);
    case KEY_V_SCALE:
        return cli_number("--v-scale", text, 0x1p-20, 0x1p20, &args->v_scale);
    case KEY_TYPE:
        args->table = true;
        return cli_choice("--table-type", text, types, &args->table_type);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *text, struct argp_state *state) {
    synth_args *args = state->input;
    switch (key) {
    case ARGP_KEY_ARG:
        if (state->arg_num) return cli_extra(text);
        args->folder = text;
        return 0;
    case ARGP_KEY_END:
        return parse_end(args);
    default:
        return text ? parse_value(key, text, args) : parse_switch(key, args);
    }
}

static const struct argp_option options[] = {
    {"family", KEY_FAMILY, "muse|qwen3|laguna|gemma4", 0, "Kind of draft (default muse)", 0},
    {"kv-heads", KEY_HEADS, "N", 0, "KV heads (default: muse 16, gemma4 4, others 8)", 0},
    {"layers", KEY_LAYERS, "N", 0, "Draft layers (default 5)", 0},
    {"hidden-size", KEY_HIDDEN, "N", 0,
     "Columns of a row (muse: 8192; default: gemma4 5376, others 4096)", 0},
    {"head-dim", KEY_DIM, "N", 0, "Columns of a head (muse: 64; default: gemma4 512, others 128)",
     0},
    {"rows", KEY_ROWS, "N", 0, "Context rows (default 64)", 0},
    {"seed", KEY_SEED, "N", 0, "Seed of every value (default 1)", 0},
    {"shards", KEY_SHARDS, "N", 0, "Files of the checkpoint, with an index if more than 1", 0},
    {"zero-centered", KEY_ZERO, NULL, 0, "Norm weights to which 1 is added", 1},
    {"no-affine", KEY_NO_AFFINE, NULL, 0, "Norms without weights", 1},
    {"fp32-norms", KEY_FP32, NULL, 0, "Norm weights in FP32", 1},
    {"bias", KEY_BIAS, NULL, 0, "K and V with a bias (not muse)", 1},
    {"v-scale", KEY_V_SCALE, "X", 0, "V times this number (not muse)", 1},
    {"nope", KEY_NOPE, NULL, 0, "No RoPE", 1},
    {"rotary-dim", KEY_ROTARY, "N", 0, "Columns of a head that rotate (not muse; default: all)", 1},
    {"gptj", KEY_GPTJ, NULL, 0, "RoPE of neighbours in place of halves (qwen3)", 1},
    {"max-position", KEY_POSITION, "N", 0, "Positions of the model (default 131072)", 2},
    {"per-layer-slots", KEY_SLOTS, NULL, 0, "slot_mapping of each layer, [L, T]", 2},
    {"sliding", KEY_SLIDING, "N", 0,
     "Every second layer keeps the last N rows only: slot_mapping [L, T] (qwen3)", 2},
    {"table", KEY_TABLE, NULL, 0, "Put the cos/sin table into the context file", 2},
    {"table-type", KEY_TYPE, "bf16|fp16|fp32", 0, "The same, of this type (default bf16)", 2},
    {"layer-tables", KEY_TABLES, NULL, 0, "The same for each layer, with two thetas in turn", 2},
    {"scales", KEY_SCALES, NULL, 0, "Put k_scales and v_scales of FP8 caches there", 2},
    {0}};
static const struct argp synth_argp = {
    .options = options,
    .parser = parse,
    .args_doc = "DIR",
    .doc =
        "Writes config.json, model.safetensors (or shards) and context.safetensors into DIR: the "
        "same bytes for the same options. Refuses a folder holding a checkpoint of another "
        "origin."};

static void defaults(void *input) {
    *(synth_args *)input =
        (synth_args){.layers = 5, .rows = 64, .seed = 1, .shards = 1, .max_position = 131072};
}

static int run(void *input) {
    static const int64_t heads[] = {16, 8, 8, 4}, columns[] = {8192, 4096, 4096, 5376};
    static const int64_t dims[] = {64, 128, 128, 512};
    synth_args *args = input;
    if (!args->kv_heads) args->kv_heads = heads[args->family];
    if (!args->hidden_size) args->hidden_size = columns[args->family];
    if (!args->head_dim) args->head_dim = dims[args->family];
    synth all = {.args = args};
    int status = synth_write(&all);
    for (size_t i = 0; i < all.count; ++i) free((void *)all.tensors[i].entry.data);
    for (size_t i = 0; i < all.written_count; ++i) free(all.written[i]);
    free(all.tensors);
    free(all.written);
    return status;
}

const cli_command cli_synth = {"synth",     "Make a checkpoint and a context from a seed",
                               &synth_argp, sizeof(synth_args),
                               defaults,    run};
