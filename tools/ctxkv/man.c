// SPDX-License-Identifier: Apache-2.0
// Prints the manual page from the commands' own argp tables.
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

// Text for roff: backslashes, hyphens and leading dots escaped.
static void put(FILE *to, const char *text) {
    bool start = true;
    for (; *text; ++text) {
        if (start && (*text == '.' || *text == '\'')) fputs("\\&", to);
        if (*text == '\\') fputc('\\', to);
        if (*text == '-') fputc('\\', to);
        fputc(*text, to);
        start = *text == '\n';
    }
}

static void put_option(FILE *to, const struct argp_option *option) {
    fputs(".TP\n", to);
    if (option->key > 0 && option->key < 128 && isprint(option->key)) {
        fprintf(to, "\\fB\\-%c\\fR, ", option->key);
    }
    fputs("\\fB\\-\\-", to);
    put(to, option->name);
    fputs("\\fR", to);
    if (option->arg) {
        fputs("=\\fI", to);
        put(to, option->arg);
        fputs("\\fR", to);
    }
    fputc('\n', to);
    put(to, option->doc);
    fputc('\n', to);
}

static void put_options(FILE *to, const struct argp *argp) {
    for (const struct argp_option *o = argp->options; o && o->name; ++o) put_option(to, o);
    for (const struct argp_child *c = argp->children; c && c->argp; ++c) put_options(to, c->argp);
}

static void put_command(FILE *to, const cli_command *command) {
    fputs(".SS \"ctxkv ", to);
    put(to, command->name);
    fputs(" [OPTION...]", to);
    if (command->argp->args_doc) fprintf(to, " %s", command->argp->args_doc);
    fputs("\"\n", to);
    put(to, command->argp->doc);
    fputc('\n', to);
    put_options(to, command->argp);
}

int main(int argc, char **argv) {
    FILE *to = argc > 1 ? fopen(argv[1], "w") : stdout;
    if (!to) return 2;
    fprintf(to, ".TH CTXKV 1 \"\" \"ctxkv %s\" \"User Commands\"\n", CTXKV_VERSION_STRING);
    fputs(".SH NAME\nctxkv \\- ", to);
    put(to, cli_summary);
    fputs("\n.SH SYNOPSIS\n", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) {
        fprintf(
            to, ".B ctxkv %s\n[OPTION...] %s\n.br\n", (*c)->name,
            (*c)->argp->args_doc ? (*c)->argp->args_doc : "");
    }
    fputs(".SH DESCRIPTION\n", to);
    put(to, cli_description);
    fputs("\n.SH COMMANDS\n", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) put_command(to, *c);
    fputs(".SH \"EXIT STATUS\"\n", to);
    put(to, cli_exit_text);
    fputs("\n.SH ENVIRONMENT\n.TP\n.B CTXKV_CPU_MASK\n", to);
    put(to, "scalar, avx2 or avx512: the best CPU tier allowed where --cpu-mask is not given.\n");
    bool ok = !ferror(to) && !fclose(to);
    return ok ? 0 : 2;
}
