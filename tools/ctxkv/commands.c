// SPDX-License-Identifier: Apache-2.0
// The table of subcommands, and the texts that the help and the manual page share.
#include "cli.h"

const char cli_summary[] =
    "The context K/V chain of speculative-decoding drafts, with the same bits everywhere";
const char cli_description[] = "Reads a draft checkpoint and a batch of context rows, and writes "
                               "every layer's KV cache: hidden\n"
                               "norm, layer norms, K/V projection, K norm, RoPE, paged insert. The "
                               "bytes equal those of vLLM's\n"
                               "stock chain on an H200, on every CPU and GPU.";
const char cli_exit_text[] =
    "Exit status: 0 success; 1 a comparison found a difference; 2 wrong arguments, an unreadable\n"
    "file or a failure, told in one line on standard error (then no output file is written).";

const cli_command *const cli_commands[] = {&cli_info,     &cli_synth, &cli_run,      &cli_verify,
                                           &cli_selftest, &cli_bench, &cli_diagnose, NULL};
