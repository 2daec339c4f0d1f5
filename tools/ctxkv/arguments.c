// SPDX-License-Identifier: Apache-2.0
// Options: values checked one by one, and argp's own errors as one line.
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

// argp tells only that something was wrong; the culprit is the argument before state->next.
typedef struct wrapper {
    const struct argp *argp;
    void *input;
    int next;
} wrapper;

static error_t watch(int key, char *text, struct argp_state *state) {
    wrapper *self = state->input;
    (void)text;
    if (key == ARGP_KEY_INIT) state->child_inputs[0] = self->input;
    if (key == ARGP_KEY_ERROR) self->next = state->next;
    return key == ARGP_KEY_INIT || key == ARGP_KEY_ERROR ? 0 : ARGP_ERR_UNKNOWN;
}

static const struct argp_option *known(const struct argp *argp, const char *name, size_t size) {
    const struct argp_option *option = argp->options;
    for (; option && (option->name || option->key || option->doc); ++option) {
        if (option->name && strlen(option->name) == size && !strncmp(option->name, name, size)) {
            return option;
        }
    }
    for (const struct argp_child *child = argp->children; child && child->argp; ++child) {
        const struct argp_option *found = known(child->argp, name, size);
        if (found) return found;
    }
    return NULL;
}

static int explain(const struct argp *argp, const char *text) {
    size_t size = strcspn(text, "=");
    if (strncmp(text, "--", 2)) return cli_fail("'%s' is no option of this command", text);
    const struct argp_option *option = known(argp, text + 2, size - 2);
    if (option && option->arg && !text[size]) {
        return cli_fail("%.*s: has no value, must be given %s", (int)size, text, option->arg);
    }
    if (option) return cli_fail("%.*s: is a switch, takes no value", (int)size, text);
    return cli_fail("'%.*s' is no option of this command (see --help)", (int)size, text);
}

// argp prints help only when it also prints its own, longer errors, and with it come options that
// sleep or end the process: so help and version are asked for here.
static bool informs(const struct argp *argp, int argc, char **argv) {
    for (int i = 1; i < argc && strcmp(argv[i], "--"); ++i) {
        bool usage = !strcmp(argv[i], "--usage");
        if (!strcmp(argv[i], "--version") || !strcmp(argv[i], "-V")) {
            puts("ctxkv " CTXKV_VERSION_STRING);
            return true;
        }
        if (!usage && strcmp(argv[i], "--help") && strcmp(argv[i], "-?")) continue;
        unsigned what = usage ? ARGP_HELP_USAGE : ARGP_HELP_STD_HELP & ~ARGP_HELP_EXIT_OK;
        argp_help(argp, stdout, what, argv[0]);
        return true;
    }
    return false;
}

// argp_parse with one-line errors; 0, or the exit status.
static int parse_options(const struct argp *argp, int argc, char **argv, void *input) {
    wrapper self = {argp, input, argc};
    struct argp_child children[] = {{argp, 0, NULL, 0}, {NULL, 0, NULL, 0}};
    struct argp outer = {
        .parser = watch, .args_doc = argp->args_doc, .doc = argp->doc, .children = children};
    // The inner argp's own documentation would be printed twice.
    struct argp inner = *argp;
    inner.args_doc = inner.doc = NULL;
    children[0].argp = &inner;
    error_t error = argp_parse(&outer, argc, argv, ARGP_NO_ERRS | ARGP_NO_HELP, NULL, &self);
    if (!error) return 0;
    if (error == CLI_REPORTED) return 2;
    if (error == ENOMEM) return cli_fail("the arguments: out of memory");
    return explain(argp, argv[self.next > 1 ? self.next - 1 : argc - 1]);
}

static void print_help(void) {
    printf(
        "Usage: ctxkv COMMAND [OPTION...]\n%s.\n\n%s\n\nCommands:\n", cli_summary, cli_description);
    for (const cli_command *const *command = cli_commands; *command; ++command) {
        printf("  %-10s %s\n", (*command)->name, (*command)->summary);
    }
    printf(
        "\n`ctxkv COMMAND --help' tells about a command, `ctxkv --version' the version.\n%s\n",
        cli_exit_text);
}

int cli_parse(int argc, char **argv, const cli_command **command, void **args) {
    static char title[32];
    *command = NULL;
    *args = NULL;
    const char *name = argc > 1 ? argv[1] : NULL;
    if (!name) return cli_fail("no command given, must be one of those in 'ctxkv --help'");
    if (!strcmp(name, "--help") || !strcmp(name, "-?") || !strcmp(name, "help")) {
        print_help();
        return 0;
    }
    if (!strcmp(name, "--version") || !strcmp(name, "-V")) {
        puts("ctxkv " CTXKV_VERSION_STRING);
        return 0;
    }
    const cli_command *const *found = cli_commands;
    while (*found && strcmp(name, (*found)->name)) ++found;
    if (!*found) {
        return cli_fail("'%s' is no command, must be one of those in 'ctxkv --help'", name);
    }
    snprintf(title, sizeof title, "ctxkv %s", name);
    argv[1] = title;
    program_invocation_name = program_invocation_short_name = title;
    if (informs((*found)->argp, argc - 1, argv + 1)) return 0;
    void *to = calloc(1, (*found)->args_size);
    if (!to) return cli_fail("the arguments: out of memory");
    if ((*found)->defaults) (*found)->defaults(to);
    int status = parse_options((*found)->argp, argc - 1, argv + 1, to);
    if (status) {
        free(to);
        return status;
    }
    *command = *found;
    *args = to;
    return 0;
}

error_t cli_integer(const char *option, const char *text, int64_t low, int64_t high, int64_t *to) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < low || value > high) {
        cli_fail(
            "%s: is '%s', must be an integer from %" PRId64 " to %" PRId64, option, text, low,
            high);
        return CLI_REPORTED;
    }
    *to = value;
    return 0;
}

error_t cli_number(const char *option, const char *text, double low, double high, double *to) {
    char *end;
    *to = strtod(text, &end);
    if (end != text && !*end && *to >= low && *to <= high) return 0;
    cli_fail("%s: is '%s', must be a number from %g to %g", option, text, low, high);
    return CLI_REPORTED;
}

error_t cli_list(
    const char *option, const char *text, int64_t low, int64_t high, int64_t *to, int limit,
    int *count) {
    *count = 0;
    for (const char *from = text;; ++from) {
        char *end;
        errno = 0;
        long long value = strtoll(from, &end, 10);
        bool last = !*end;
        if (errno || end == from || (*end && *end != ',') || value < low || value > high ||
            *count == limit) {
            cli_fail(
                "%s: is '%s', must be up to %d integers from %" PRId64 " to %" PRId64
                " with commas between",
                option, text, limit, low, high);
            return CLI_REPORTED;
        }
        to[(*count)++] = value;
        if (last) return 0;
        from = end;
    }
}

error_t cli_choice(const char *option, const char *text, const char *const *names, int *to) {
    char all[128] = "";
    for (int i = 0; names[i]; ++i) {
        if (!strcmp(text, names[i])) {
            *to = i;
            return 0;
        }
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", i ? ", " : "", names[i]);
    }
    cli_fail("%s: is '%s', must be one of %s", option, text, all);
    return CLI_REPORTED;
}

error_t cli_extra(const char *text) {
    cli_fail("'%s' is one argument too many", text);
    return CLI_REPORTED;
}

// ---- the options of commands that compute -------------------------------------------------------
enum { KEY_DEVICE = 256, KEY_THREADS, KEY_MASK, KEY_NUMERICS, KEY_PROJECTION };

static const char *const tiers[] = {"scalar", "avx2", "avx512", NULL};
static const char *const numerics[] = {"stock", "pair", "packed", "invariant", NULL};
static const char *const projections[] = {"auto", "exact", "cublas", NULL};

static error_t check_device(const char *text, cli_options *options) {
    int64_t index;
    options->device = text;
    if (!strcmp(text, "auto") || !strcmp(text, "cpu") || !strcmp(text, "cuda")) return 0;
    if (!strncmp(text, "cuda:", 5) && text[5] >= '0' && text[5] <= '9') {
        return cli_integer("--device", text + 5, 0, 1023, &index);
    }
    cli_fail("--device: is '%s', must be auto, cpu or cuda:N", text);
    return CLI_REPORTED;
}

static error_t parse_device(int key, char *text, struct argp_state *state) {
    cli_options *options = state->input;
    int index;
    error_t error;
    switch (key) {
    case KEY_DEVICE:
        return check_device(text, options);
    case KEY_THREADS:
        return cli_integer("--threads", text, 1, 1024, &options->threads);
    case KEY_MASK:
        error = cli_choice("--cpu-mask", text, tiers, &index);
        if (!error) options->cpu_mask = (2u << index) - 1;
        return error;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse_numerics(int key, char *text, struct argp_state *state) {
    cli_options *options = state->input;
    if (key != KEY_NUMERICS) return ARGP_ERR_UNKNOWN;
    return cli_choice("--numerics", text, numerics, &options->numerics);
}

static error_t parse_projection(int key, char *text, struct argp_state *state) {
    cli_options *options = state->input;
    if (key != KEY_PROJECTION) return ARGP_ERR_UNKNOWN;
    return cli_choice("--projection", text, projections, &options->projection);
}

static const struct argp_option device_options[] = {
    {"device", KEY_DEVICE, "auto|cpu|cuda:N", 0,
     "Where to compute; auto takes the first usable GPU, else the CPU", 10},
    {"threads", KEY_THREADS, "N", 0, "CPU threads (default: the CPUs this process may use)", 10},
    {"cpu-mask", KEY_MASK, "scalar|avx2|avx512", 0,
     "Best CPU tier allowed (default: the environment's CTXKV_CPU_MASK, else the best found)", 10},
    {0}};

static const struct argp_option numerics_options[] = {
    {"numerics", KEY_NUMERICS, "stock|pair|packed|invariant", 0,
     "Order of the norms' sums: as vLLM's on this device (default), as on sm_80 to sm_90, as on "
     "sm_100 and later, or independent of the number of rows (Qwen3 kind)",
     10},
    {0}};

static const struct argp_option projection_options[] = {
    {"projection", KEY_PROJECTION, "auto|exact|cublas", 0,
     "exact: one tensor-core chain per output; cublas: whatever cuBLAS gives (GPU); auto: exact, "
     "by cuBLAS where that is known to be equal (default)",
     10},
    {0}};

const struct argp cli_device_argp = {.options = device_options, .parser = parse_device};
const struct argp cli_numerics_argp = {.options = numerics_options, .parser = parse_numerics};
const struct argp cli_projection_argp = {.options = projection_options, .parser = parse_projection};

void cli_options_init(cli_options *options) {
    *options = (cli_options){.device = "auto"};
}

const char *cli_tier_name(uint32_t bit) {
    return bit & CTXKV_CPU_AVX512 ? "avx512" : bit & CTXKV_CPU_AVX2 ? "avx2" : "scalar";
}
