// SPDX-License-Identifier: Apache-2.0
// ctxkv diagnose: what is wrong with somebody's caches, proved by giving the same bits.
#include <string.h>

#include "cli.h"
#include "diagnose.h"
#include "place.h"

typedef struct diagnose_args {
    const char *model, *context, *cache, *before;
    int64_t tp_size, tp_rank, threads;
    int numerics, cache_type;
    bool json, list;
} diagnose_args;

enum {
    KEY_BEFORE = 400,
    KEY_TP_SIZE,
    KEY_TP_RANK,
    KEY_THREADS,
    KEY_NUMERICS,
    KEY_CACHE,
    KEY_JSON,
    KEY_LIST
};

static error_t parse_end(const diagnose_args *args) {
    const char *option = !args->model ? "--model" : !args->context ? "--context" : "--cache";
    if (args->list || (args->model && args->context && args->cache)) return 0;
    cli_fail("%s: is missing, must be given", option);
    return CLI_REPORTED;
}

static const char *const numerics[] = {"stock", "pair", "packed", "invariant", NULL};

static error_t parse(int key, char *text, struct argp_state *state) {
    diagnose_args *args = state->input;
    switch (key) {
    case 'm':
        args->model = text;
        return 0;
    case 'c':
        args->context = text;
        return 0;
    case 'k':
        args->cache = text;
        return 0;
    case KEY_BEFORE:
        args->before = text;
        return 0;
    case KEY_TP_SIZE:
        return cli_integer("--tp-size", text, 1, 65536, &args->tp_size);
    case KEY_TP_RANK:
        return cli_integer("--tp-rank", text, 0, 65535, &args->tp_rank);
    case KEY_THREADS:
        return cli_integer("--threads", text, 1, 64, &args->threads);
    case KEY_NUMERICS:
        return cli_choice("--numerics", text, numerics, &args->numerics);
    case KEY_CACHE:
        return cli_choice("--cache-type", text, cli_cache_names, &args->cache_type);
    case KEY_JSON:
        args->json = true;
        return 0;
    case KEY_LIST:
        args->list = true;
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
     "Context rows of the call: hidden_states, positions, perhaps slot_mapping and cos_sin_cache",
     0},
    {"cache", 'k', "FILE", 0,
     "What the engine left: kv_cache.0, kv_cache.1, ... as ctxkv run writes them", 0},
    {"before", KEY_BEFORE, "FILE", 0,
     "The caches before the call (default: one value everywhere, found by itself)", 0},
    {"tp-size", KEY_TP_SIZE, "N", 0, "Tensor-parallel ranks (default 1)", 1},
    {"tp-rank", KEY_TP_RANK, "R", 0, "The rank whose caches these are (default 0)", 1},
    {"threads", KEY_THREADS, "N", 0, "CPU threads (default: the CPUs this process may use)", 1},
    {"numerics", KEY_NUMERICS, "stock|pair|packed|invariant", 0,
     "Order of the norms' sums that is right: as vLLM's on sm_90 (default: stock), as on sm_100 "
     "and "
     "later, or independent of the number of rows (Qwen3 kind)",
     1},
    {"cache-type", KEY_CACHE, "bf16|fp16|fp8_e4m3|fp8_e5m2", 0,
     "What the caches hold (default: as the file says, which U8 does not)", 1},
    {"json", KEY_JSON, NULL, 0, "Print the report as JSON (with --list: the table)", 1},
    {"list", KEY_LIST, NULL, 0, "Print the names of the known faults", 1},
    {0}};
static const struct argp diagnose_argp = {
    .options = options,
    .parser = parse,
    .doc = "Compares the caches that an engine left with the chain of the draft, bit by bit. Where "
           "they differ, tells the layers and stages, and looks for the smallest set of known "
           "faults (one or two) with which the chain gives exactly the recorded bytes. Exits with "
           "1 at a difference."};

static int execute(const diagnose_args *args, dg_call *call, dg_result *result) {
    dg_report report;
    call->threads = args->threads ? (int)args->threads : cli_cpus();
    if (call->threads > 64) call->threads = 64;
    if (args->tp_rank >= args->tp_size) {
        return cli_fail(
            "--tp-rank: is %d, must be below --tp-size %d", (int)args->tp_rank, (int)args->tp_size);
    }
    call->numerics = args->numerics;
    call->cache_type = args->cache_type;
    if (!dg_open(
            call, args->model, args->context, args->cache, args->before, args->tp_size,
            args->tp_rank) ||
        !dg_search(call, result) || !dg_report_make(call, result, &report)) {
        return 2;
    }
    bool ok = true;
    if (args->json)
        ok = dg_print_json(call, result, &report);
    else
        dg_print(call, result, &report);
    dg_report_free(&report);
    return !ok ? 2 : result->clean.differs;
}

static void defaults(void *input) {
    *(diagnose_args *)input = (diagnose_args){.tp_size = 1, .cache_type = -1};
}

static int run(void *input) {
    const diagnose_args *args = input;
    if (args->list) return dg_print_list(args->json) ? 0 : 2;
    dg_call call = {0};
    dg_result result = {0};
    // The tier that CTXKV_CPU_MASK allows, as a device would take it.
    ctxkv_device *device;
    ctxkv_device_info info = {.size = sizeof info};
    if (ctxkv_device_open("cpu", NULL, &device)) return cli_fail_status("the CPU");
    ctxkv_device_get_info(device, &info);
    ctxkv_device_close(device);
    ctxkv__kernels_init(&call.kernels, 2 * info.cpu_used - 1);
    int status = execute(args, &call, &result);
    dg_result_free(&result);
    dg_close(&call);
    return status;
}

const cli_command cli_diagnose = {
    "diagnose",     "Say which step of somebody's chain is wrong, and why",
    &diagnose_argp, sizeof(diagnose_args),
    defaults,       run};
