// SPDX-License-Identifier: Apache-2.0
// ctxkv selftest: does this machine give the H200's bits?
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "golden_data.h"
#include "selftest.h"

typedef struct selftest_args {
    cli_options options;
    const char *golden;
    bool all_tiers, verbose;
} selftest_args;

static error_t parse(int key, char *text, struct argp_state *state) {
    selftest_args *args = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->options;
        state->child_inputs[1] = &args->options;
        return 0;
    case 'g':
        args->golden = text;
        return 0;
    case 'a':
        args->all_tiers = true;
        return 0;
    case 'v':
        args->verbose = true;
        return 0;
    case ARGP_KEY_ARG:
        return cli_extra(text);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {"golden", 'g', "DIR", 0, "Folder of golden csv files (default: those built in)", 0},
    {"all-tiers", 'a', NULL, 0, "Every CPU tier that this machine has, one after the other", 0},
    {"verbose", 'v', NULL, 0, "Tell the checks that passed, too", 0},
    {0}};
static const struct argp_child children[] = {
    {&cli_device_argp, 0, NULL, 0}, {&cli_projection_argp, 0, NULL, 0}, {NULL, 0, NULL, 0}};
static const struct argp selftest_argp = {
    .options = options,
    .parser = parse,
    .children = children,
    .doc = "Generates the inputs of the golden cases, computes them on this machine and compares "
           "the checksums with those of vLLM's stock chain on an H200. Ends with `N passed, N "
           "failed'; exits with 1 if any failed."};

// ---- tables ------------------------------------------------------------------------------------
typedef struct st_entry {
    const char *file;
    st_table run;
    bool host_only; // arithmetic that no device takes part in: done once
} st_entry;

static const st_entry tables[] = {
    {"inv_freq.csv", st_inv_freq, true},
    {"rope.csv", st_rope, true},
    {"norms.csv", st_norms, false},
    {"store.csv", st_store, false},
    {"chain.csv", st_chain, false},
    {"weighted_norms.csv", st_weighted_norms, false},
    {"weighted_store.csv", st_weighted_store, false},
    {"weighted_chain.csv", st_weighted_chain, false}};

#define TABLES (sizeof tables / sizeof *tables)

static bool load_folder(io_csv *csv, const char *folder, const char *file, bool *there) {
    io_error error;
    io_map map;
    char *path = io_join(folder, file);
    *there = false;
    bool ok = path ? io_exists(path, there, &error)
                   : io_fail(&error, "%s/%s: out of memory for its path", folder, file);
    if (ok && *there) {
        ok = io_map_open(&map, path, &error);
        if (ok) {
            ok = io_csv_parse(csv, (const char *)map.data, map.size, path, &error);
            io_map_close(&map);
        }
    }
    if (!ok) cli_fail("%s", error.text);
    free(path);
    return ok;
}

static bool load_built_in(io_csv *csv, const char *file, bool *there) {
    io_error error;
    const golden_file *item = golden_files;
    while (item->name && strcmp(item->name, file)) ++item;
    *there = item->name != NULL;
    if (!*there) return true;
    if (io_csv_parse(csv, (const char *)item->data, item->size, file, &error)) return true;
    cli_fail("%s", error.text);
    return false;
}

typedef struct golden {
    io_csv csv[TABLES];
    bool there[TABLES];
} golden;

static bool load_all(golden *all, const char *folder) {
    size_t found = 0;
    struct stat status;
    if (folder && stat(folder, &status)) {
        cli_fail("--golden: %s: %s", folder, strerror(errno));
        return false;
    }
    for (size_t i = 0; i < TABLES; ++i) {
        bool ok = folder ? load_folder(&all->csv[i], folder, tables[i].file, &all->there[i])
                         : load_built_in(&all->csv[i], tables[i].file, &all->there[i]);
        if (!ok) return false;
        found += all->there[i];
    }
    if (!found) cli_fail("--golden: %s holds no golden csv file (norms.csv, ...)", folder);
    return found > 0;
}

static bool run_table(selftest *st, const golden *all, size_t index) {
    uint64_t passed = st->passed, failed = st->failed;
    double start = cli_now();
    if (!tables[index].run(st, &all->csv[index])) return false;
    cli_progress_clear();
    printf(
        "%-8s %-20s %4" PRIu64 " passed %4" PRIu64 " failed  %6.2f s\n",
        tables[index].host_only ? "host" : st->label, tables[index].file, st->passed - passed,
        st->failed - failed, cli_now() - start);
    fflush(stdout);
    return true;
}

static bool run_host(selftest *st, const golden *all) {
    double start = cli_now();
    uint64_t passed = st->passed, failed = st->failed;
    st_rsqrt(st);
    printf(
        "%-8s %-20s %4" PRIu64 " passed %4" PRIu64 " failed  %6.2f s\n", "host", "rsqrt, 2^24",
        st->passed - passed, st->failed - failed, cli_now() - start);
    for (size_t i = 0; i < TABLES; ++i) {
        if (all->there[i] && tables[i].host_only && !run_table(st, all, i)) return false;
    }
    return true;
}

static bool run_device(selftest *st, const golden *all, const cli_options *options) {
    if (!cli_place_open(&st->place, options)) return false;
    bool cpu = !st->place.memory, ok = true;
    snprintf(
        st->label, sizeof st->label, "%s",
        cpu ? cli_tier_name(st->place.info.cpu_used) : options->device);
    if (!cpu && !strcmp(options->device, "auto")) snprintf(st->label, sizeof st->label, "cuda:0");
    for (size_t i = 0; ok && i < TABLES; ++i) {
        if (all->there[i] && !tables[i].host_only) ok = run_table(st, all, i);
    }
    cli_place_reset(&st->host);
    cli_place_close(&st->place);
    return ok;
}

static bool run_tiers(selftest *st, const golden *all, cli_options options) {
    options.device = "cpu";
    for (uint32_t bit = CTXKV_CPU_SCALAR; bit <= CTXKV_CPU_AVX512; bit *= 2) {
        options.cpu_mask = 2 * bit - 1;
        cli_place probe;
        if (!cli_place_open(&probe, &options)) return false;
        bool found = probe.info.cpu_used == bit;
        cli_place_close(&probe);
        if (!found) {
            printf("%-8s skipped: this CPU does not have it\n", cli_tier_name(bit));
        } else if (!run_device(st, all, &options)) {
            return false;
        }
    }
    return true;
}

static void defaults(void *input) {
    cli_options_init(&((selftest_args *)input)->options);
}

static int run(void *input) {
    const selftest_args *args = input;
    selftest st = {
        .host = {.where = {kDLCPU, 0}},
        .folder = args->golden,
        .verbose = args->verbose,
        .projection = (ctxkv_projection_mode)args->options.projection,
        .threads = args->options.threads ? (int)args->options.threads : cli_cpus()};
    golden all = {.there = {false}};
    bool ok = load_all(&all, args->golden) && run_host(&st, &all) &&
              (args->all_tiers ? run_tiers(&st, &all, args->options)
                               : run_device(&st, &all, &args->options));
    for (size_t i = 0; i < TABLES; ++i) io_csv_free(&all.csv[i]);
    if (!ok) return 2;
    printf("%" PRIu64 " passed, %" PRIu64 " failed\n", st.passed, st.failed);
    return st.failed || !st.passed ? 1 : 0;
}

const cli_command cli_selftest = {"selftest",     "Compare this machine's bits with the H200's",
                                  &selftest_argp, sizeof(selftest_args),
                                  defaults,       run};
