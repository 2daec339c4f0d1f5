// SPDX-License-Identifier: Apache-2.0
// The kernel harness: every tier against the scalar truth by bytes, then its timings.
#ifndef CTXKV_CHECK_H
#define CTXKV_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../src/cpu/cpu.h"
#include "ctxkv/ctxkv.h"

// One case of one op on one tier. The random stream depends on seed, op, case and whether the tier
// is the kernels of a CPU or a device with its plans, which take fewer shapes and more rows.
struct check {
    struct ctxkv__kernels kernels; // under test, unless
    ctxkv_device *device;          // this is
    bool on_gpu;
    int ordinal;
    long number; // of the case
    uint64_t state;
    bool failed;
    char told[512]; // what the case was, then what was wrong
};

uint64_t check_mix(uint64_t seed, uint64_t index);
uint64_t check_random(struct check *c);
int64_t check_below(struct check *c, int64_t n); // 0 .. n-1
bool check_chance(struct check *c, int percent);
int64_t check_pick(struct check *c, const int64_t *list, size_t count);
#define PICK(c, ...)                                                                               \
    check_pick(                                                                                    \
        c, (const int64_t[]){__VA_ARGS__},                                                         \
        sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))
__attribute__((format(printf, 2, 3))) void check_tell(struct check *c, const char *format, ...);
__attribute__((format(printf, 2, 3))) void check_fail(struct check *c, const char *format, ...);

// Memory between two pages that nobody may touch, filled with NaN patterns around the data, which
// lies flush (or some bytes off) with the first or the last of it.
struct area {
    uint8_t *map; // the writable part
    size_t map_bytes;
    uint8_t *data;
    size_t bytes;
};

// align: of the data's address, a power of two; 1 gives odd addresses too.
struct area area_new(struct check *c, size_t bytes, size_t align);
struct area area_copy(const struct area *a); // the same placement and content
void area_free(struct area *a);
// Compares all of both, guards included.
void area_same(struct check *c, const struct area *truth, const struct area *got, const char *what);

// count BF16 values at any address, of a random hostile kind.
void hostile_bf16(struct check *c, void *to, int64_t count);
// Together in one dot product: sums of one step past 31 bits.
void hostile_largest(struct check *c, void *to, int64_t count);
void hostile_past_31_bits(struct check *c, void *to, int64_t count);
void hostile_f32(struct check *c, float *to, int64_t count);

// The parts [0, total) is done in: at most MAX_PARTS ranges, in a random order.
#define MAX_PARTS 4
struct parts {
    int count;
    int64_t begin[MAX_PARTS], end[MAX_PARTS];
};
struct parts check_parts(struct check *c, int64_t total);

// The control bits of the floating-point unit (rounding, flushing).
unsigned check_float_mode(void);

struct timing {
    char name[64];
    double bytes, macs; // of one run
    void (*run)(void *operands, const struct ctxkv__kernels *kernels);
    void *operands;
};

struct op {
    const char *name;
    void (*one_case)(struct check *c);
    // The op's timings, at most max; operands are made on the first call and kept.
    size_t (*timings)(struct timing *list, size_t max);
    long cases; // how many there are, by number, and of devices alone; 0: any number, at random
};

extern const struct op check_norms, check_projection, check_store, check_chain;
void check_chain_end(void); // frees what its cases shared

int bench_run(
    const struct ctxkv__kernels *tiers, const bool (*passed)[3], size_t tier_count,
    const struct op *const *ops, size_t op_count, double seconds);
// Zeroed, page-aligned, never freed; ends the process when there is none.
void *bench_memory(size_t bytes);

#endif
