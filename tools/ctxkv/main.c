// SPDX-License-Identifier: Apache-2.0
// Entry point: runs the subcommand, and cleans up after signals.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "file.h"

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

int main(int argc, char **argv) {
    program_invocation_name = program_invocation_short_name = (char *)"ctxkv";
    catch_signals();
    const cli_command *command;
    void *args;
    int status = cli_parse(argc, argv, &command, &args);
    if (command) status = command->run(args);
    free(args);
    if (fflush(stdout) || ferror(stdout)) {
        program_invocation_name = (char *)"ctxkv";
        status = cli_fail("standard output cannot be written: %s", strerror(errno));
    }
    return status;
}
