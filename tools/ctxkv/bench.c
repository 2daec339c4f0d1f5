// SPDX-License-Identifier: Apache-2.0
// ctxkv bench: how fast each step and the whole chain are on this machine.
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "config.h"
#include "file.h"

enum {
    KEY_HEADS = 300,
    KEY_ROWS,
    KEY_LAYERS,
    KEY_FAMILY,
    KEY_MODEL,
    KEY_HIDDEN,
    KEY_DIM,
    KEY_JSON,
    KEY_CSV,
    KEY_COMPARE,
    KEY_TOLERANCE,
    KEY_SECONDS,
    KEY_UNCHECKED,
    KEY_CACHE,
    KEY_TABLE,
    KEY_TABLES,
    KEY_BIAS,
    KEY_V_SCALE,
    KEY_ROTARY,
    KEY_GPTJ
};

// The shape of a draft; its weights are not read.
static error_t read_model(bench *all) {
    char path[PATH_MAX];
    io_config config;
    io_error error;
    if (all->layers || all->hidden_size || all->head_dim || all->family >= 0 || all->draft.bias ||
        all->draft.rotary_dim || all->draft.v_scale != 0 || all->gptj) {
        cli_fail(
            "--model: gives the shape, must not be given with --family, --layers, --hidden-size, "
            "--head-dim, --bias, --rotary-dim, --v-scale or --gptj");
        return CLI_REPORTED;
    }
    if ((size_t)snprintf(path, sizeof path, "%s/config.json", all->model) >= sizeof path ||
        !io_config_open(&config, path, &error)) {
        cli_fail("--model: %s", error.text);
        return CLI_REPORTED;
    }
    if (config.layers > 64) {
        cli_fail("--model: num_hidden_layers is %" PRId64 ", must be at most 64", config.layers);
        return CLI_REPORTED;
    }
    all->family = (int)config.family;
    all->draft = config;
    all->layers = config.layers;
    all->hidden_size = config.hidden_size;
    all->head_dim = config.head_dim;
    if (!all->head_count) all->heads[all->head_count++] = config.kv_heads;
    return 0;
}

static error_t wrong_rotary(int64_t rotary, int64_t dim) {
    cli_fail(
        "--rotary-dim: is %" PRId64 ", must be even and at most --head-dim %" PRId64, rotary, dim);
    return CLI_REPORTED;
}

static error_t check(bench *all) {
    static const int64_t columns[] = {8192, 4096, 4096, 5376}, dims[] = {64, 128, 128, 512};
    error_t error = all->model ? read_model(all) : 0;
    if (error) return error;
    if (all->family < 0) all->family = IO_FAMILY_MUSE;
    bool muse = all->family == IO_FAMILY_MUSE;
    io_config *draft = &all->draft;
    if (!all->layers) all->layers = 5;
    if (!all->hidden_size) all->hidden_size = columns[all->family];
    if (!all->head_dim) all->head_dim = dims[all->family];
    if (muse && (all->hidden_size != 8192 || all->head_dim != 64)) {
        cli_fail("--hidden-size, --head-dim: must be 8192 and 64 for --family muse");
        return CLI_REPORTED;
    }
    if (muse && !all->model && (draft->bias || draft->rotary_dim || draft->v_scale != 0)) {
        cli_fail("--bias, --rotary-dim, --v-scale: must be left out for --family muse");
        return CLI_REPORTED;
    }
    if (all->gptj && all->family != IO_FAMILY_QWEN3) {
        cli_fail(
            "--gptj: must be left out for --family %s", io_family_name((io_family)all->family));
        return CLI_REPORTED;
    }
    if (!draft->rotary_dim) draft->rotary_dim = all->head_dim;
    if (draft->rotary_dim % 2 || draft->rotary_dim > all->head_dim)
        return wrong_rotary(draft->rotary_dim, all->head_dim);
    if (!all->model) {
        draft->affine = draft->rope = true;
        draft->neox = !muse && !all->gptj;
    }
    draft->family = (io_family)all->family;
    return 0;
}

static error_t parse_draft(int key, const char *text, bench *all) {
    static const char *const families[] = {"muse", "qwen3", "laguna", "gemma4", NULL};
    static const char *const types[] = {"bf16", "fp16", "fp32", NULL};
    double scale;
    error_t error;
    switch (key) {
    case KEY_FAMILY:
        return cli_choice("--family", text, families, &all->family);
    case KEY_HIDDEN:
        return cli_integer("--hidden-size", text, 16, 32768, &all->hidden_size);
    case KEY_DIM:
        return cli_integer("--head-dim", text, 64, 512, &all->head_dim);
    case KEY_CACHE:
        return cli_choice("--cache-type", text, cli_cache_names, &all->cache_type);
    case KEY_TABLE:
        return cli_choice("--table-type", text, types, &all->table_type);
    case KEY_TABLES:
        all->layer_tables = true;
        return 0;
    case KEY_BIAS:
        all->draft.bias = true;
        return 0;
    case KEY_GPTJ:
        all->gptj = true;
        return 0;
    case KEY_ROTARY:
        return cli_integer("--rotary-dim", text, 2, 512, &all->draft.rotary_dim);
    case KEY_V_SCALE:
        error = cli_number("--v-scale", text, 0x1p-20, 0x1p20, &scale);
        if (!error) all->draft.v_scale = (float)scale;
        return error;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *text, struct argp_state *state) {
    bench *all = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &all->options;
        state->child_inputs[1] = &all->options;
        state->child_inputs[2] = &all->options;
        return 0;
    case KEY_HEADS:
        return cli_list("--heads", text, 1, 1024, all->heads, 16, &all->head_count);
    case KEY_ROWS:
        return cli_list("--rows", text, 1, 1 << 20, all->rows, 16, &all->row_count);
    case KEY_LAYERS:
        return cli_integer("--layers", text, 1, 64, &all->layers);
    case KEY_MODEL:
        all->model = text;
        return 0;
    case KEY_JSON:
        all->json = text;
        return 0;
    case KEY_CSV:
        all->csv = true;
        return 0;
    case KEY_COMPARE:
        all->compare = text;
        return 0;
    case KEY_TOLERANCE:
        return cli_number("--tolerance", text, 0, 100, &all->tolerance);
    case KEY_SECONDS:
        return cli_number("--seconds", text, 0.001, 600, &all->seconds);
    case KEY_UNCHECKED:
        all->unchecked = true;
        return 0;
    case ARGP_KEY_ARG:
        return cli_extra(text);
    case ARGP_KEY_END:
        return check(all);
    default:
        return parse_draft(key, text, all);
    }
}

static const struct argp_option options[] = {
    {"heads", KEY_HEADS, "N,...", 0,
     "KV heads of a rank (default: muse 2,16, gemma4 1,4, others 1,8)", 0},
    {"rows", KEY_ROWS, "N,...", 0, "Context rows (default 1,8,64,1024)", 0},
    {"layers", KEY_LAYERS, "N", 0, "Draft layers (default 5)", 0},
    {"family", KEY_FAMILY, "muse|qwen3|laguna|gemma4", 0, "Kind of draft (default muse)", 0},
    {"hidden-size", KEY_HIDDEN, "N", 0,
     "Columns of a row (muse: 8192; default: gemma4 5376, others 4096)", 0},
    {"head-dim", KEY_DIM, "N", 0, "Columns of a head (muse: 64; default: gemma4 512, others 128)",
     0},
    {"bias", KEY_BIAS, NULL, 0, "K and V with a bias (not muse)", 0},
    {"v-scale", KEY_V_SCALE, "X", 0, "V times this number (not muse)", 0},
    {"rotary-dim", KEY_ROTARY, "N", 0, "Columns of a head that rotate (not muse; default: all)", 0},
    {"gptj", KEY_GPTJ, NULL, 0, "RoPE of neighbours in place of halves (qwen3)", 0},
    {"model", KEY_MODEL, "DIR", 0, "Take the shape and these options from this draft's config.json",
     0},
    {"cache-type", KEY_CACHE, "bf16|fp16|fp8_e4m3|fp8_e5m2", 0,
     "What the caches hold; FP8 with a scale for each layer (default bf16)", 0},
    {"table-type", KEY_TABLE, "bf16|fp16|fp32", 0, "Type of the cos/sin table (default bf16)", 0},
    {"layer-tables", KEY_TABLES, NULL, 0, "A cos/sin table for each layer", 0},
    {"json", KEY_JSON, "FILE", 0, "Write the results as JSON, too", 1},
    {"csv", KEY_CSV, NULL, 0, "Print comma-separated values instead of a table", 1},
    {"compare", KEY_COMPARE, "OLD.json", 0,
     "Print the ratio to an earlier --json file; exit with 1 where one is beyond the tolerance", 1},
    {"tolerance", KEY_TOLERANCE, "X", 0, "Share by which a median may grow (default 0.10)", 1},
    {"seconds", KEY_SECONDS, "S", 0, "Time of one measurement (default 0.3)", 1},
    {"no-check", KEY_UNCHECKED, NULL, 0, "Compare nothing first: times of unknown bits", 1},
    {0}};
static const struct argp_child children[] = {
    {&cli_device_argp, 0, NULL, 0},
    {&cli_numerics_argp, 0, NULL, 0},
    {&cli_projection_argp, 0, NULL, 0},
    {NULL, 0, NULL, 0}};
static const struct argp bench_argp = {
    .options = options,
    .parser = parse,
    .children = children,
    .doc =
        "Measures norms, projection, store and the whole chain: medians with p10 and p90, after a "
        "warm-up and after rows of each size were compared with a CPU tier by bytes. A CPU is "
        "timed call by call, a GPU by replays of CUDA graphs of many calls; weights, rows and "
        "slots rotate past the last cache (on a CPU, over at most 64 sets of rows). The floor is "
        "the time that the bytes which must move (weights, inputs, outputs) or the multiply-adds "
        "take at the rates measured in the same run: copying and reading by all threads, fused "
        "multiply-adds (a GPU's BF16 products)."};

static void set_defaults(bench *all) {
    static const int64_t heads[4][2] = {{2, 16}, {1, 8}, {1, 8}, {1, 4}}, rows[] = {1, 8, 64, 1024};
    if (!all->head_count) {
        memcpy(all->heads, heads[all->family], sizeof heads[0]);
        all->head_count = 2;
    }
    if (!all->row_count) {
        memcpy(all->rows, rows, sizeof rows);
        all->row_count = 4;
    }
}

static bool probe_json(const char *path) {
    io_writer writer;
    io_error error;
    if (!path) return true;
    if (!io_writer_open(&writer, path, &error)) {
        cli_fail("--json: %s", error.text);
        return false;
    }
    io_writer_abort(&writer);
    return true;
}

static int finish(bench *all, const void *old) {
    int matched = 0, slower = 0;
    for (size_t i = 0; i < all->count; ++i) {
        matched += all->results[i].old > 0;
        slower += all->results[i].old > 0 &&
                  all->results[i].median > all->results[i].old * (1 + all->tolerance);
    }
    if (!bench_write_json(all)) return 2;
    if (!old) return 0;
    if (!matched) return cli_fail("--compare: %s holds none of these measurements", all->compare);
    if (!all->csv) {
        printf(
            "%d of %d measurements slower than in %s by more than %g %%", slower, matched,
            all->compare, 100 * all->tolerance);
        const char *other = bench_old_name(all, old);
        if (other) printf(" (of another machine: %s)", other);
        putchar('\n');
    }
    return slower ? 1 : 0;
}

static int execute(bench *all) {
    void *old = NULL;
    all->host = (cli_place){.where = {kDLCPU, 0}};
    all->results =
        calloc((size_t)all->head_count * (size_t)all->row_count * 4, sizeof *all->results);
    if (!all->results) return cli_fail("out of memory for the results");
    int status = 2;
    if (probe_json(all->json) && bench_load_old(all, &old) &&
        cli_place_open(&all->place, &all->options)) {
        all->replay = ctxkv_device_replay(all->place.device);
        bool ok = bench_floors(all);
        if (ok) bench_print_header(all);
        size_t shown = 0;
        for (int i = 0; ok && i < all->head_count; ++i) {
            ok = bench_heads(all, all->heads[i]);
            cli_progress_clear();
            for (; ok && shown < all->count; ++shown) {
                bench_match_old(all, &all->results[shown], old);
                bench_print(all, &all->results[shown]);
            }
        }
        if (ok) status = finish(all, old);
        cli_place_reset(&all->host);
        cli_place_close(&all->place);
    }
    bench_free_old(old);
    free(all->results);
    return status;
}

static void defaults(void *input) {
    bench *all = input;
    *all = (bench){.family = -1, .tolerance = 0.1, .seconds = 0.3};
    cli_options_init(&all->options);
}

static int run(void *input) {
    set_defaults(input);
    return execute(input);
}

const cli_command cli_bench = {
    "bench", "Measure each step and the whole chain", &bench_argp, sizeof(bench), defaults, run};
