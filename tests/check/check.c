// SPDX-License-Identifier: Apache-2.0
// ctxkv_check: every op of every CPU tier, or of a device's plans, against the scalar truth by
// bytes;
// --bench times the tiers.
#define _GNU_SOURCE
#include "check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SKIPPED 77
#define OPS 4
#define TIERS 3
#define SCALAR_TIER 1u

static const struct op *const ops[OPS] = {
    &check_norms, &check_projection, &check_store, &check_chain};
static const char usage[] =
    "usage: ctxkv_check [--tier scalar|avx2|avx512|cpu|cuda:N] [--op "
    "norms|projection|store|chain]\n"
    "                   [--seed N] [--cases N] [--case N] [--bench [SECONDS]]\n"
    "Compares each tier with the scalar truth; CTXKV_CPU_MASK names the highest tier, --tier the\n"
    "only one. cpu and cuda:N are devices: their plans do the cases, and whole chains are "
    "compared\n"
    "with the CPU's. --case repeats one case of a seed. Exit status: 1 a case failed, 77 the "
    "machine\n"
    "lacks the tier.\n";

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

// What is under test: a CPU tier's kernels, or a device.
struct tier {
    struct ctxkv__kernels kernels;
    ctxkv_device *device;
    const char *name;
};

static bool run_case(const struct tier *tier, size_t op, uint64_t seed, long number) {
    struct check c = {.kernels = tier->kernels, .device = tier->device, .number = number};
    if (tier->device && !strncmp(tier->name, "cuda", 4)) {
        c.on_gpu = true;
        c.ordinal = tier->name[4] ? atoi(tier->name + 5) : 0;
    }
    c.state = check_mix(check_mix(seed, op), (uint64_t)number);
    ops[op]->one_case(&c);
    if (c.failed)
        printf(
            "FAILED %s %s --seed %llu --case %ld\n    %s\n", tier->name, ops[op]->name,
            (unsigned long long)seed, number, c.told);
    return !c.failed;
}

// Prints one line and returns the number of cases that failed.
static long run_op(const struct tier *tier, size_t op, const struct options *o, long *passed) {
    long ran = 0, failed = 0, cases = o->cases;
    if (ops[op]->cases && cases > ops[op]->cases) cases = ops[op]->cases;
    for (long i = 0; i < cases; i++) {
        if (o->only >= 0 && i != o->only) continue;
        ran++;
        if (!run_case(tier, op, o->seed, i)) failed++;
    }
    printf(
        "%-7s %-10s %ld of %ld cases equal the truth\n", tier->name, ops[op]->name, ran - failed,
        ran);
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

// The device that --tier names; NULL for any other name. Ends the process when it is not there.
static ctxkv_device *find_device(const char *name) {
    ctxkv_device *device = 0;
    if (!name || (strncmp(name, "cuda", 4) != 0 && strcmp(name, "cpu") != 0)) return 0;
    if (!ctxkv_device_open(name, 0, &device)) return device;
    printf("SKIPPED: no %s: %s\n0 passed, 0 failed\n", name, ctxkv_last_error());
    exit(SKIPPED);
}

// Tiers of this CPU, lowest first, up to the mask's highest; or the one device.
static size_t find_tiers(const struct options *o, struct tier tiers[TIERS]) {
    const char *mask = getenv("CTXKV_CPU_MASK");
    unsigned found = ctxkv__cpu_found(), known = 0;
    size_t count = 0;
    if ((tiers[0].device = find_device(o->tier))) {
        tiers[0].name = o->tier;
        return 1;
    }
    for (unsigned tier = SCALAR_TIER; tier < 1u << TIERS; tier *= 2) {
        const char *name = ctxkv__cpu_tier_name(tier);
        bool wanted = !o->tier || !strcmp(o->tier, name);
        known |= !o->tier || wanted;
        if ((found & tier) && wanted) {
            ctxkv__kernels_init(&tiers[count].kernels, tier * 2 - 1);
            tiers[count++].name = name;
        }
        if (mask && !strcmp(mask, name)) break;
    }
    if (!known) {
        fprintf(stderr, "ctxkv_check: no tier \"%s\" (or the mask forbids it)\n%s", o->tier, usage);
        exit(2);
    }
    return count;
}

static void bench(const struct tier *tiers, const bool (*fine)[OPS], size_t count, double seconds) {
    struct ctxkv__kernels kernels[TIERS];
    bool passed[TIERS][3];
    for (size_t i = 0; i < count; i++) {
        kernels[i] = tiers[i].kernels;
        memcpy(passed[i], fine[i], sizeof passed[i]);
    }
    bench_run(kernels, (const bool(*)[3])passed, count, ops, 3, seconds);
}

int main(int argc, char **argv) {
    struct options o = parse(argc, argv);
    struct tier tiers[TIERS] = {{{0}, 0, 0}};
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
            if (ops[op]->cases && !tiers[i].device) continue; // whole chains are a device's
            long before = passed, wrong = run_op(&tiers[i], op, &o, &passed);
            failed += wrong;
            fine[i][op] = wrong == 0 && passed > before;
        }
    if (o.bench && !tiers[0].device) bench(tiers, fine, count, o.seconds);
    printf("%ld passed, %ld failed\n", passed, failed);
    if (tiers[0].device) check_chain_end();
    ctxkv_device_close(tiers[0].device);
    return failed || !passed;
}
