// SPDX-License-Identifier: Apache-2.0
// Timings of the harness: only of what passed in this process, rounds interleaved, the best kept.
#define _GNU_SOURCE
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MAX_LINES 64
#define COPY_BYTES ((size_t)48 << 20)

struct line {
    struct timing timing;
    const struct ctxkv__kernels *kernels;
    double best;
};

void *bench_memory(size_t bytes) {
    void *p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        perror("ctxkv_check: mmap");
        exit(2);
    }
    return p;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void copy(void *p, const struct ctxkv__kernels *kernels) {
    (void)kernels;
    memcpy(p, (char *)p + COPY_BYTES, COPY_BYTES);
}

static void measure(struct line *line) {
    double start = now();
    line->timing.run(line->timing.operands, line->kernels);
    double took = now() - start;
    if (line->best == 0 || took < line->best) line->best = took;
}

static void report(const struct line *line, double copied) {
    const struct timing *t = &line->timing;
    double rate = t->bytes / line->best;
    printf(
        "%-7s %-36s %10.1f us %7.2f GB/s %5.0f %% of copy",
        line->kernels ? ctxkv__cpu_tier_name(line->kernels->tier) : "", t->name, line->best * 1e6,
        rate * 1e-9, 100 * rate / copied);
    if (t->macs > 0) printf(" %7.2f GMAC/s", t->macs / line->best * 1e-9);
    printf("\n");
}

int bench_run(
    const struct ctxkv__kernels *tiers, const bool (*passed)[3], size_t tier_count,
    const struct op *const *ops, size_t op_count, double seconds) {
    static struct line lines[MAX_LINES];
    size_t count = 1;
    char *memory = bench_memory(2 * COPY_BYTES);
    memset(memory, 1, 2 * COPY_BYTES);
    lines[0].timing = (struct timing){"memcpy 48 MiB", 2.0 * COPY_BYTES, 0, copy, memory};
    for (size_t i = 0; i < tier_count; i++) {
        if (tiers[i].tier == 1) continue; // the truth is not made to be fast
        for (size_t o = 0; o < op_count; o++) {
            struct timing list[8];
            if (!passed[i][o]) {
                printf(
                    "%-7s %-36s not timed: it did not pass\n", ctxkv__cpu_tier_name(tiers[i].tier),
                    ops[o]->name);
                continue;
            }
            size_t n = ops[o]->timings(list, 8);
            for (size_t k = 0; k < n && count < MAX_LINES; k++)
                lines[count++] = (struct line){list[k], &tiers[i], 0};
        }
    }
    double end = now() + seconds;
    for (int round = 0; round < 3 || now() < end; round++)
        for (size_t i = 0; i < count; i++) {
            // Short ones are repeated, so that one disturbance does not spoil a round.
            double stop = now() + 0.02;
            do measure(&lines[i]);
            while (now() < stop);
        }
    double copied = lines[0].timing.bytes / lines[0].best;
    for (size_t i = 0; i < count; i++) report(&lines[i], copied);
    return 0;
}
