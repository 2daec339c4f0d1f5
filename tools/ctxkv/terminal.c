// SPDX-License-Identifier: Apache-2.0
// Errors, the progress bar, the clock and a parallel loop.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

static bool bar_shown;

int cli_fail(const char *format, ...) {
    char text[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    // Names from files and arguments may hold anything: the message stays one line.
    for (char *c = text; *c; ++c) {
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    }
    cli_progress_clear();
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", program_invocation_name, text);
    return 2;
}

int cli_fail_status(const char *what) {
    return cli_fail("%s: %s", what, ctxkv_last_error());
}

void cli_progress(void *label, uint64_t done, uint64_t total) {
    static double last;
    if (!isatty(2) || !total) return;
    double now = cli_now();
    if (done < total && now - last < 0.05) return;
    last = now;
    char bar[31];
    int filled = (int)(30 * done / total);
    for (int i = 0; i < 30; ++i) bar[i] = i < filled ? '#' : '.';
    bar[30] = 0;
    fprintf(stderr, "\r%-24.24s [%s] %3d %%", (const char *)label, bar, (int)(100 * done / total));
    bar_shown = true;
    if (done >= total) cli_progress_clear();
}

void cli_progress_clear(void) {
    if (bar_shown) fprintf(stderr, "\r\033[K");
    bar_shown = false;
}

double cli_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int cli_cpus(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    return CPU_COUNT(&set);
}

typedef struct loop {
    atomic_llong next;
    int64_t count;
    cli_work work;
    void *user;
} loop;

static void *turn(void *argument) {
    loop *shared = argument;
    for (;;) {
        int64_t index = atomic_fetch_add(&shared->next, 1);
        if (index >= shared->count) return NULL;
        shared->work(shared->user, index);
    }
}

void cli_parallel(int threads, int64_t count, cli_work work, void *user) {
    loop shared = {.count = count, .work = work, .user = user};
    pthread_t handles[63];
    int started = 0;
    if (threads > 64) threads = 64;
    while (started + 1 < threads && started + 1 < count) {
        if (pthread_create(&handles[started], NULL, turn, &shared)) break;
        ++started;
    }
    turn(&shared);
    for (int i = 0; i < started; ++i) pthread_join(handles[i], NULL);
}
