// SPDX-License-Identifier: Apache-2.0
// Any bytes as a command line: it is parsed, never run. What is refused is told in one line, what
// is accepted in none; only help and the version print.
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define MOST_ARGUMENTS 64

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// Bytes from 0x80 on stand for whole words, so that the fuzzer need not find them letter by letter.
static const char *words[128];

static int collect(const struct argp *argp, int count) {
    static char names[128][32];
    for (const struct argp_option *o = argp->options; o && o->name && count < 128; ++o) {
        snprintf(names[count], sizeof names[count], "--%s", o->name);
        words[count] = names[count];
        ++count;
    }
    for (const struct argp_child *c = argp->children; c && c->argp; ++c) {
        count = collect(c->argp, count);
    }
    return count;
}

static void fill_words(void) {
    static const char *const more[] = {"auto", "cuda:0", "muse",      "qwen3", "scalar", "avx512",
                                       "pair", "exact",  "1,2,3",     "--",    "--help", "--usage",
                                       "-V",   "0x1p-5", "-99999999", "65536"};
    int count = 0;
    for (size_t i = 0; i < sizeof more / sizeof *more; ++i) words[count++] = more[i];
    for (const cli_command *const *c = cli_commands; *c; ++c) words[count++] = (*c)->name;
    for (const cli_command *const *c = cli_commands; *c; ++c) count = collect((*c)->argp, count);
    for (int i = 0; count < 128; ++i, ++count) words[count] = words[i];
}

// Zero bytes end arguments; the arguments are blocks of exactly their size.
static int split(const uint8_t *data, size_t size, char **argv) {
    int argc = 0;
    argv[argc++] = strdup("ctxkv");
    for (size_t at = 0; at < size && argc < MOST_ARGUMENTS; ++at) {
        char text[4096];
        size_t used = 0;
        for (; at < size && data[at]; ++at) {
            const char *word = data[at] < 0x80 ? NULL : words[data[at] - 0x80];
            size_t length = word ? strlen(word) : 1;
            if (used + length >= sizeof text) break;
            memcpy(text + used, word ? word : (const char *)data + at, length);
            used += length;
        }
        text[used] = 0;
        argv[argc++] = strdup(text);
    }
    argv[argc] = NULL;
    return argc;
}

static void check(int status, const cli_command *command, const char *out, const char *err) {
    const char *end = strchr(err, '\n');
    if (status != 0 && status != 2) abort();
    if (status == 0 && *err) abort();
    if (status == 0 && !command != !!*out) abort();
    if (status == 2 && (command || *out || strncmp(err, "ctxkv", 5) || !end || end[1])) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *argv[MOST_ARGUMENTS + 1], *given[MOST_ARGUMENTS + 1], *texts[2];
    size_t sizes[2];
    if (!words[0]) fill_words();
    int argc = split(data, size, argv);
    memcpy(given, argv, sizeof given);
    FILE *out = stdout, *err = stderr;
    stdout = open_memstream(&texts[0], &sizes[0]);
    stderr = open_memstream(&texts[1], &sizes[1]);
    const cli_command *command;
    void *args;
    program_invocation_name = (char *)"ctxkv";
    int status = cli_parse(argc, argv, &command, &args);
    fclose(stdout);
    fclose(stderr);
    stdout = out;
    stderr = err;
    check(status, command, texts[0], texts[1]);
    if (!command != !args) abort();
    free(args), free(texts[0]), free(texts[1]);
    for (int i = 0; i < argc; ++i) free(given[i]);
    return 0;
}
