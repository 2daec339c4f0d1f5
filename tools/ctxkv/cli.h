// SPDX-License-Identifier: Apache-2.0
// What the subcommands share: the command table, options, errors, progress.
#ifndef CTXKV_CLI_H
#define CTXKV_CLI_H

#include <argp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ctxkv/ctxkv.h"
#include "error.h"

typedef struct cli_command {
    const char *name, *summary;
    const struct argp *argp;
    size_t args_size;             // of what argp fills
    void (*defaults)(void *args); // args is zero before; NULL: that will do
    int (*run)(void *args);       // returns the exit status
} cli_command;

// NULL-terminated. main() runs them, the manual page is made from them.
extern const cli_command *const cli_commands[];
extern const cli_command cli_info, cli_synth, cli_run, cli_verify, cli_selftest, cli_bench,
    cli_diagnose;
extern const char cli_summary[], cli_description[], cli_exit_text[];

// Prints "ctxkv NAME: text" as one line on stderr; returns 2, the exit status.
int cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
int cli_fail_status(const char *what); // with the library's last error

// ---- arguments -----------------------------------------------------------------------------
#define CLI_REPORTED ECANCELED // a parser's answer after it has called cli_fail

// The command that the arguments name, and what they say, from calloc. Runs nothing: *command is
// NULL when they are wrong (told; 2 is returned) or asked for help or the version (printed; 0).
int cli_parse(int argc, char **argv, const cli_command **command, void **args);
error_t cli_integer(const char *option, const char *text, int64_t low, int64_t high, int64_t *to);
error_t cli_number(const char *option, const char *text, double low, double high, double *to);
// Comma-separated integers; at most limit of them.
error_t cli_list(
    const char *option, const char *text, int64_t low, int64_t high, int64_t *to, int limit,
    int *count);
// Index of text in the NULL-terminated names.
error_t cli_choice(const char *option, const char *text, const char *const *names, int *to);
error_t cli_extra(const char *text); // a positional argument too many

typedef struct cli_options {
    const char *device; // "auto", "cpu", "cuda:N"
    int64_t threads;
    uint32_t cpu_mask;
    int numerics, projection;
} cli_options;

// Parse --device, --threads and --cpu-mask; --numerics; --projection into a cli_options.
extern const struct argp cli_device_argp, cli_numerics_argp, cli_projection_argp;
void cli_options_init(cli_options *options);
const char *cli_tier_name(uint32_t bit);

// ---- the terminal --------------------------------------------------------------------------
// A bar on stderr when that is a terminal; nothing otherwise. Fits io_progress.
void cli_progress(void *label, uint64_t done, uint64_t total);
void cli_progress_clear(void);
double cli_now(void); // seconds

// Runs work(user, index) for index < count on up to threads threads.
typedef void (*cli_work)(void *user, int64_t index);
void cli_parallel(int threads, int64_t count, cli_work work, void *user);
int cli_cpus(void);

#endif
