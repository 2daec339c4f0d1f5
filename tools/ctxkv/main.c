// SPDX-License-Identifier: Apache-2.0
// Entry point: picks the subcommand, and cleans up after signals.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "file.h"

const char *argp_program_version = "ctxkv " CTXKV_VERSION_STRING;

static void on_signal(int number) {
    io_writer_abort_on_signal();
    if (number == SIGBUS) {
        static const char text[] = "ctxkv: a mapped file became shorter while it was read\n";
        ssize_t ignored = write(2, text, sizeof text - 1);
        (void)ignored;
        _exit(2);
    }
    signal(number, SIG_DFL);
    raise(number);
}

static void catch_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGBUS};
    // A file size limit is an error of write() like any other.
    signal(SIGXFSZ, SIG_IGN);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_NODEFER};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) {
        struct sigaction before;
        sigaction(numbers[i], NULL, &before);
        if (before.sa_handler != SIG_IGN) sigaction(numbers[i], &action, NULL);
    }
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

static int dispatch(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : NULL;
    if (!name) return cli_fail("no command given, must be one of those in 'ctxkv --help'");
    if (!strcmp(name, "--help") || !strcmp(name, "-?") || !strcmp(name, "help")) {
        print_help();
        return 0;
    }
    if (!strcmp(name, "--version") || !strcmp(name, "-V")) {
        puts(argp_program_version);
        return 0;
    }
    for (const cli_command *const *command = cli_commands; *command; ++command) {
        if (strcmp(name, (*command)->name)) continue;
        char title[32];
        snprintf(title, sizeof title, "ctxkv %s", name);
        argv[1] = title;
        program_invocation_name = program_invocation_short_name = title;
        return (*command)->run(argc - 1, argv + 1);
    }
    return cli_fail("'%s' is no command, must be one of those in 'ctxkv --help'", name);
}

int main(int argc, char **argv) {
    program_invocation_name = program_invocation_short_name = (char *)"ctxkv";
    catch_signals();
    int status = dispatch(argc, argv);
    if (fflush(stdout) || ferror(stdout)) {
        program_invocation_name = (char *)"ctxkv";
        status = cli_fail("standard output cannot be written: %s", strerror(errno));
    }
    return status;
}
