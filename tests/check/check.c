// SPDX-License-Identifier: Apache-2.0
// ctxkv_check: every op of every CPU tier against the scalar truth by bytes; --bench times them.
#define _GNU_SOURCE
#include "check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SKIPPED 77
#define OPS 3
#define TIERS 3
#define SCALAR_TIER 1u

static const struct op *const ops[OPS] = {&check_norms, &check_projection, &check_store};
static const char usage[] =
    "usage: ctxkv_check [--tier scalar|avx2|avx512] [--op norms|projection|store] [--seed N]\n"
    "                   [--cases N] [--case N] [--bench [SECONDS]]\n"
    "Compares each tier with the scalar truth; CTXKV_CPU_MASK names the highest tier, --tier the\n"
    "only one. --case repeats one case of a seed. Exit status: 1 a case failed, 77 the CPU lacks\n"
    "the tier.\n";

struct options {
    const char *tier, *op;
    uint64_t seed;
    long cases, only;
    bool bench;
    double seconds;
};

void check_tell(struct check *c, const char *format, ...) {
    size_t used = strlen(c->told);
    va_list args;
    va_start(args, format);
    vsnprintf(c->told + used, sizeof c->told - used, format, args);
    va_end(args);
}

void check_fail(struct check *c, const char *format, ...) {
    if (c->failed) return; // the first is the one to look at
    c->failed = true;
    check_tell(c, "\n    ");
    size_t used = strlen(c->told);
    va_list args;
    va_start(args, format);
    vsnprintf(c->told + used, sizeof c->told - used, format, args);
    va_end(args);
}

static bool run_case(const struct ctxkv__kernels *tier, size_t op, uint64_t seed, long number) {
    struct check c = {.kernels = *tier};
    c.state = check_mix(check_mix(seed, op), (uint64_t)number);
    ops[op]->one_case(&c);
    if (c.failed)
        printf(
            "FAILED %s %s --seed %llu --case %ld\n    %s\n", ctxkv__cpu_tier_name(tier->tier),
            ops[op]->name, (unsigned long long)seed, number, c.told);
    return !c.failed;
}

// Prints one line and returns the number of cases that failed.
static long run_op(
    const struct ctxkv__kernels *tier, size_t op, const struct options *o, long *passed) {
    long ran = 0, failed = 0;
    for (long i = 0; i < o->cases; i++) {
        if (o->only >= 0 && i != o->only) continue;
        ran++;
        if (!run_case(tier, op, o->seed, i)) failed++;
    }
    printf(
        "%-7s %-10s %ld of %ld cases equal the truth\n", ctxkv__cpu_tier_name(tier->tier),
        ops[op]->name, ran - failed, ran);
    fflush(stdout);
    *passed += ran - failed;
    return failed;
}

static long number(const char *name, const char *text) {
    char *end;
    long value = text ? strtol(text, &end, 0) : -1;
    if (!text || *end || end == text || value < 0) {
        fprintf(
            stderr, "ctxkv_check: %s is \"%s\", must be a number >= 0\n", name, text ? text : "");
        exit(2);
    }
    return value;
}

static struct options parse(int argc, char **argv) {
    struct options o = {.cases = 200, .only = -1, .seconds = 5};
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    o.seed = check_mix((uint64_t)t.tv_sec, (uint64_t)t.tv_nsec) >> 32;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : 0;
        if (!strcmp(name, "--help")) {
            fputs(usage, stdout);
            exit(0);
        } else if (!strcmp(name, "--bench")) {
            o.bench = true;
            if (value && value[0] != '-') o.seconds = (double)number(name, argv[++i]);
            continue;
        } else if (!strcmp(name, "--tier") && value) {
            o.tier = value;
        } else if (!strcmp(name, "--op") && value) {
            o.op = value;
        } else if (!strcmp(name, "--seed")) {
            o.seed = (uint64_t)number(name, value);
        } else if (!strcmp(name, "--cases")) {
            o.cases = number(name, value);
        } else if (!strcmp(name, "--case")) {
            o.only = number(name, value);
        } else {
            fprintf(stderr, "ctxkv_check: unknown argument \"%s\"\n%s", name, usage);
            exit(2);
        }
        i++;
    }
    if (o.only >= o.cases) o.cases = o.only + 1;
    return o;
}

// Tiers of this CPU, lowest first, up to the mask's highest.
static size_t find_tiers(const struct options *o, struct ctxkv__kernels tiers[TIERS]) {
    const char *mask = getenv("CTXKV_CPU_MASK");
    unsigned found = ctxkv__cpu_found(), known = 0;
    size_t count = 0;
    for (unsigned tier = SCALAR_TIER; tier < 1u << TIERS; tier *= 2) {
        const char *name = ctxkv__cpu_tier_name(tier);
        bool wanted = !o->tier || !strcmp(o->tier, name);
        known |= !o->tier || wanted;
        if ((found & tier) && wanted) ctxkv__kernels_init(&tiers[count++], tier * 2 - 1);
        if (mask && !strcmp(mask, name)) break;
    }
    if (!known) {
        fprintf(stderr, "ctxkv_check: no tier \"%s\" (or the mask forbids it)\n%s", o->tier, usage);
        exit(2);
    }
    return count;
}

int main(int argc, char **argv) {
    struct options o = parse(argc, argv);
    struct ctxkv__kernels tiers[TIERS];
    bool fine[TIERS][OPS] = {{false}};
    size_t count = find_tiers(&o, tiers);
    long passed = 0, failed = 0;
    if (count == 0) {
        printf("SKIPPED: this CPU has no %s\n0 passed, 0 failed\n", o.tier);
        return SKIPPED;
    }
    printf("seed %llu\n", (unsigned long long)o.seed);
    for (size_t i = 0; i < count; i++)
        for (size_t op = 0; op < OPS; op++) {
            if (o.op && strcmp(o.op, ops[op]->name) != 0) continue;
            long before = passed, wrong = run_op(&tiers[i], op, &o, &passed);
            failed += wrong;
            fine[i][op] = wrong == 0 && passed > before;
        }
    if (o.bench) bench_run(tiers, fine, count, ops, OPS, o.seconds);
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed || !passed;
}
