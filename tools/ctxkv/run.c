// SPDX-License-Identifier: Apache-2.0
// ctxkv run: a checkpoint and a context in, every layer's KV cache out.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "crc32.h"
#include "tables.h"

#define ROWS_AT_ONCE 256 // on a CPU
#define ROWS_AT_ONCE_GPU 8192
#define OUTPUT_LIMIT (INT64_C(64) << 30) // without --num-blocks

typedef struct run_args {
    cli_options options;
    const char *model, *context, *out;
    int64_t block_size, num_blocks, tp_size, tp_rank;
    int cache_type; // ctxkv_cache_type
    bool checked;
} run_args;

typedef struct job {
    const run_args *args;
    io_draft draft;
    io_context context;
    cli_place place;
    cli_caches caches;
    ctxkv_chain *chain;
    int64_t blocks;
    cli_tables tables;
    void **images; // each layer's cache in host memory
    ctxkv_faults faults;
} job;

enum { KEY_BLOCK = 300, KEY_BLOCKS, KEY_TP_SIZE, KEY_TP_RANK, KEY_CHECKED, KEY_CACHE };

static error_t parse_end(const run_args *args) {
    const char *option = !args->model ? "--model" : !args->context ? "--context" : "--out";
    if (args->model && args->context && args->out) return 0;
    cli_fail("%s: is missing, must be given", option);
    return CLI_REPORTED;
}

static error_t parse(int key, char *text, struct argp_state *state) {
    run_args *args = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->options;
        state->child_inputs[1] = &args->options;
        state->child_inputs[2] = &args->options;
        return 0;
    case 'm':
        args->model = text;
        return 0;
    case 'c':
        args->context = text;
        return 0;
    case 'o':
        args->out = text;
        return 0;
    case KEY_BLOCK:
        return cli_integer("--block-size", text, 1, 1 << 20, &args->block_size);
    case KEY_BLOCKS:
        return cli_integer("--num-blocks", text, 1, 1 << 30, &args->num_blocks);
    case KEY_TP_SIZE:
        return cli_integer("--tp-size", text, 1, 65536, &args->tp_size);
    case KEY_TP_RANK:
        return cli_integer("--tp-rank", text, 0, 65535, &args->tp_rank);
    case KEY_CACHE:
        return cli_choice("--cache-type", text, cli_cache_names, &args->cache_type);
    case KEY_CHECKED:
        args->checked = true;
        return 0;
    case ARGP_KEY_ARG:
        return cli_extra(text);
    case ARGP_KEY_END:
        return parse_end(args);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {"model", 'm', "DIR", 0, "Checkpoint folder: config.json and model.safetensors or its shards",
     0},
    {"context", 'c', "FILE", 0,
     "Context rows: hidden_states, positions, perhaps slot_mapping and cos_sin_cache", 0},
    {"out", 'o', "FILE", 0, "Cache file to write: kv_cache.0, kv_cache.1, ...", 0},
    {"block-size", KEY_BLOCK, "N", 0, "Rows of a cache block (default 16)", 1},
    {"num-blocks", KEY_BLOCKS, "N", 0, "Blocks of a cache (default: as many as the slots need)", 1},
    {"tp-size", KEY_TP_SIZE, "N", 0, "Tensor-parallel ranks (default 1)", 1},
    {"tp-rank", KEY_TP_RANK, "R", 0, "The rank whose heads are computed (default 0)", 1},
    {"cache-type", KEY_CACHE, "bf16|fp16|fp8_e4m3|fp8_e5m2", 0,
     "What the caches hold (default bf16)", 1},
    {"checked", KEY_CHECKED, NULL, 0,
     "Fail, writing nothing, where a slot or position is out of range, instead of skipping the row",
     1},
    {0}};
static const struct argp_child children[] = {
    {&cli_device_argp, 0, NULL, 0},
    {&cli_numerics_argp, 0, NULL, 0},
    {&cli_projection_argp, 0, NULL, 0},
    {NULL, 0, NULL, 0}};
static const struct argp run_argp = {
    .options = options,
    .parser = parse,
    .children = children,
    .doc =
        "Computes the context K/V chain of a draft checkpoint on a batch of context rows and "
        "writes every layer's cache, [num_blocks, heads, block_size, 2*head_dim] (K, then V), all "
        "of it or nothing. Places that no slot addresses are zero. Prints for each layer "
        "the CRC-32 of its cache and the rows stored, then the rows skipped. Without "
        "slot_mapping row t goes to slot t."};

static const int64_t *slots_of(const io_context *context, int64_t layer) {
    return context->slots + (context->slot_lists > 1 ? layer * context->slot_rows : 0);
}

static bool choose_blocks(job *job) {
    const run_args *args = job->args;
    const io_context *context = &job->context;
    int64_t largest = -1, size = args->block_size;
    for (int64_t i = 0; i < context->slot_lists * context->slot_rows; ++i) {
        if (context->slots[i] > largest) largest = context->slots[i];
    }
    job->blocks = args->num_blocks ? args->num_blocks : largest < 0 ? 1 : largest / size + 1;
    int64_t item = cli_cache_dtype((ctxkv_cache_type)args->cache_type).bits / 8;
    int64_t bytes = size * job->draft.kv_heads * job->draft.config.head_dim * 2 * item;
    bool ok = !__builtin_mul_overflow(bytes, job->draft.config.layers, &bytes) &&
              !__builtin_mul_overflow(bytes, job->blocks, &bytes);
    if (args->num_blocks) {
        if (!ok) cli_fail("--num-blocks: %" PRId64 " blocks overflow 64 bits", job->blocks);
        return ok;
    }
    if (ok && bytes <= OUTPUT_LIMIT) return true;
    cli_fail(
        "%s: slot_mapping's largest slot %" PRId64 " needs %" PRId64
        " blocks, more than 64 GiB: --num-blocks must be given",
        args->context, largest, job->blocks);
    return false;
}

static bool bind(job *job, int64_t chunk) {
    const io_config *config = &job->draft.config;
    const run_args *args = job->args;
    const DLTensor **scales = job->tables.scales;
    const cli_store store = {
        .tables = job->tables.tables,
        .table_count = job->tables.count,
        .cache_type = (ctxkv_cache_type)args->cache_type,
        .k_scales = scales,
        .v_scales = scales ? scales + config->layers : NULL,
        .checked = args->checked};
    job->caches = (cli_caches){
        .layers = config->layers,
        .blocks = job->blocks,
        .heads = job->draft.kv_heads,
        .block_size = args->block_size,
        .dim = config->head_dim,
        .type = store.cache_type};
    if (!cli_caches_make_as(&job->caches, &job->place, 0) ||
        !cli_chain_make(&job->chain, &job->place, &job->draft, &store, &args->options, chunk)) {
        return false;
    }
    if (!ctxkv_chain_bind_caches(
            job->chain, job->caches.keys, job->caches.values, config->layers)) {
        return true;
    }
    cli_fail_status("the caches cannot be bound");
    return false;
}

// Rows [first, first + rows) of the context.
static bool run_rows(job *job, int64_t first, int64_t rows) {
    const io_config *config = &job->draft.config;
    const io_context *context = &job->context;
    int64_t width = config->hidden_size, lists = context->slot_lists;
    int64_t stored = context->slot_rows - first;
    stored = stored < 0 ? 0 : stored > rows ? rows : stored;
    cli_tensor x, positions;
    cli_tensor *slots = calloc((size_t)lists, sizeof *slots);
    const DLTensor **pointers = calloc((size_t)lists, sizeof *pointers);
    size_t row_bytes = (size_t)rows * sizeof(int64_t);
    const uint16_t *hidden = context->hidden + first * width;
    const void *data = cli_share(&job->place, hidden, (size_t)(rows * width) * 2);
    bool ok = slots && pointers && data;
    if (!slots || !pointers) cli_fail("out of memory for the slots' addresses");
    cli_tensor_set(&x, &job->place, data, CLI_BF16, 2, (int64_t[]){rows, width});
    if (ok && context->positions) {
        data = cli_share(&job->place, context->positions + first, row_bytes);
        cli_tensor_set(&positions, &job->place, data, CLI_I64, 1, &rows);
        ok = data != NULL;
    }
    for (int64_t i = 0; ok && i < lists; ++i) {
        const int64_t *list = slots_of(context, i) + (stored ? first : 0);
        data = cli_share(&job->place, list, (size_t)stored * sizeof *list);
        cli_tensor_set(&slots[i], &job->place, data, CLI_I64, 1, &stored);
        pointers[i] = &slots[i].tensor;
        ok = data != NULL;
    }
    if (ok && ctxkv_chain_run(
                  job->chain, &x.tensor, context->positions ? &positions.tensor : NULL, pointers,
                  lists, NULL)) {
        ok = false;
        cli_fail_status("the chain failed");
    }
    free(slots);
    free(pointers);
    return ok && cli_sync(&job->place);
}

static bool before(const ctxkv_faults *a, const ctxkv_faults *b) {
    return a->layer != b->layer ? a->layer < b->layer : a->row < b->row;
}

static bool add_faults(job *job, int64_t first) {
    ctxkv_faults part;
    if (ctxkv_chain_faults(job->chain, &part)) {
        cli_fail_status("the faults cannot be read");
        return false;
    }
    if (!part.count) return true;
    uint64_t count = job->faults.count + part.count;
    part.row += first;
    if (!job->faults.count || before(&part, &job->faults)) job->faults = part;
    job->faults.count = count;
    return true;
}

// A row's bits do not depend on the rows beside it, so pieces give the whole; the Qwen3 family's
// stock order does depend on them: there the rows go in one call.
static bool compute(job *job) {
    const run_args *args = job->args;
    int64_t rows = job->context.rows;
    bool pieces = job->draft.config.family == IO_FAMILY_MUSE ||
                  args->options.numerics == CTXKV_NUMERICS_INVARIANT;
    int64_t most = job->place.memory ? ROWS_AT_ONCE_GPU : ROWS_AT_ONCE;
    int64_t chunk = pieces && rows > most && !args->checked ? most : rows;
    if (!bind(job, chunk ? chunk : 1)) return false;
    for (int64_t first = 0; first < rows || !first; first += chunk ? chunk : 1) {
        int64_t count = rows - first < chunk ? rows - first : chunk;
        cli_progress("computing", (uint64_t)first, (uint64_t)rows + 1);
        if (!run_rows(job, first, count) || !add_faults(job, first)) return false;
    }
    cli_progress_clear();
    return true;
}

static bool fetch(job *job) {
    int64_t layers = job->draft.config.layers;
    job->images = calloc((size_t)layers, sizeof *job->images);
    if (!job->images) {
        cli_fail("out of memory for the caches' addresses");
        return false;
    }
    for (int64_t i = 0; i < layers; ++i) {
        if (!job->place.memory) {
            job->images[i] = job->caches.storage[i];
            continue;
        }
        job->images[i] = malloc(job->caches.bytes);
        if (!job->images[i]) {
            cli_fail("out of memory for a cache of %zu bytes", job->caches.bytes);
            return false;
        }
        if (!cli_to_host(&job->place, job->images[i], job->caches.storage[i], job->caches.bytes)) {
            return false;
        }
    }
    return true;
}

static bool write_out(job *job) {
    static const io_dtype dtypes[] = {IO_BF16, IO_F16, IO_F8_E4M3, IO_F8_E5M2};
    size_t layers = (size_t)job->draft.config.layers;
    io_entry *entries = calloc(layers, sizeof *entries);
    io_error error = {"out of memory for the output's head"};
    bool ok = entries != NULL;
    for (size_t i = 0; ok && i < layers; ++i) {
        io_entry *entry = &entries[i];
        *entry = (io_entry){
            .dtype = dtypes[job->args->cache_type],
            .rank = 4,
            .shape = {job->blocks, job->caches.heads, job->caches.block_size, 2 * job->caches.dim},
            .data = job->images[i]};
        snprintf(entry->name, sizeof entry->name, "kv_cache.%zu", i);
    }
    ok = ok && io_safetensors_write(
                   job->args->out, entries, layers, cli_progress, (void *)"writing", &error);
    if (!ok) cli_fail("%s", error.text);
    free(entries);
    return ok;
}

static int64_t rows_stored(const job *job, int64_t layer) {
    const int64_t *slots = slots_of(&job->context, layer);
    int64_t count = 0, limit = job->blocks * job->args->block_size;
    for (int64_t t = 0; t < job->context.slot_rows; ++t) {
        if (slots[t] < 0 || slots[t] >= limit) continue;
        int64_t position = job->context.positions ? job->context.positions[t] : 0;
        count += !job->draft.config.rope || (position >= 0 && position < job->tables.rows);
    }
    return count;
}

static void report(const job *job) {
    const ctxkv_faults *faults = &job->faults;
    for (int64_t i = 0; i < job->draft.config.layers; ++i) {
        printf(
            "layer %" PRId64 "  crc32 %08x  rows %" PRId64 "\n", i,
            io_crc32(0, job->images[i], job->caches.bytes), rows_stored(job, i));
    }
    if (!faults->count) {
        puts("faults: none");
        return;
    }
    printf(
        "faults: %" PRIu64 " rows skipped; first: layer %" PRId64 ", row %" PRId64 ": %s %" PRId64
        " must be %sbelow %" PRId64 "\n",
        faults->count, faults->layer, faults->row,
        faults->kind == CTXKV_FAULT_SLOT ? "slot" : "position", faults->value,
        faults->kind == CTXKV_FAULT_SLOT ? "" : ">= 0 and ", faults->limit);
}

// Says early whether the output can be written at all.
static bool probe_output(const char *path, io_error *error) {
    io_writer writer;
    if (!io_writer_open(&writer, path, error)) return false;
    io_writer_abort(&writer);
    return true;
}

static int execute(job *job) {
    const run_args *args = job->args;
    io_error error;
    if (args->tp_rank >= args->tp_size) {
        return cli_fail(
            "--tp-rank: is %" PRId64 ", must be below --tp-size %" PRId64, args->tp_rank,
            args->tp_size);
    }
    if (!io_draft_open(&job->draft, args->model, args->tp_size, args->tp_rank, &error) ||
        !io_context_open(&job->context, args->context, &job->draft.config, &error) ||
        !probe_output(args->out, &error)) {
        return cli_fail("%s", error.text);
    }
    bool fp8 = args->cache_type >= CTXKV_CACHE_FP8_E4M3;
    if (job->context.k_scales && !fp8) {
        return cli_fail(
            "%s: k_scales are given, --cache-type is %s, must be fp8_e4m3 or fp8_e5m2",
            args->context, cli_cache_names[args->cache_type]);
    }
    bool ok = choose_blocks(job) && cli_place_open(&job->place, &args->options) &&
              cli_tables_make(
                  &job->tables, &job->place, &job->draft.config, &job->context, args->model,
                  args->context) &&
              compute(job) && fetch(job) && write_out(job);
    if (ok) report(job);
    return ok ? 0 : 2;
}

static void defaults(void *input) {
    run_args *args = input;
    *args = (run_args){.block_size = 16, .tp_size = 1};
    cli_options_init(&args->options);
}

static int run(void *input) {
    job job = {.args = input};
    int status = execute(&job);
    ctxkv_chain_destroy(job.chain);
    for (int64_t i = 0; job.images && job.place.memory && i < job.draft.config.layers; ++i) {
        free(job.images[i]);
    }
    free(job.images);
    cli_tables_free(&job.tables);
    cli_caches_free(&job.caches);
    if (job.place.device) cli_place_close(&job.place);
    io_context_close(&job.context);
    io_draft_close(&job.draft);
    return status;
}

const cli_command cli_run = {"run",     "Compute the KV caches of a checkpoint and a context",
                             &run_argp, sizeof(run_args),
                             defaults,  run};
