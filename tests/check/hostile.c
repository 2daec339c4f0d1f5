// SPDX-License-Identifier: Apache-2.0
// Random numbers, hostile values and guarded memory of the harness.
#define _GNU_SOURCE
#include "check.h"

#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "../../src/ops/numerics.h"

uint64_t check_mix(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint64_t check_random(struct check *c) {
    c->state += 0x9E3779B97F4A7C15u;
    return check_mix(c->state, 0);
}

int64_t check_below(struct check *c, int64_t n) {
    return (int64_t)((check_random(c) >> 8) % (uint64_t)n);
}

bool check_chance(struct check *c, int percent) {
    return check_below(c, 100) < percent;
}

int64_t check_pick(struct check *c, const int64_t *list, size_t count) {
    return list[check_below(c, (int64_t)count)];
}

struct parts check_parts(struct check *c, int64_t total) {
    struct parts p = {0};
    int64_t at = 0;
    while (at < total) {
        bool last = p.count == MAX_PARTS - 1 || check_chance(c, 40);
        int64_t end = last ? total : at + 1 + check_below(c, total - at);
        p.begin[p.count] = at;
        p.end[p.count++] = at = end;
    }
    for (int i = p.count - 1; i > 0; i--) {
        int j = (int)check_below(c, i + 1);
        int64_t begin = p.begin[i], end = p.end[i];
        p.begin[i] = p.begin[j];
        p.end[i] = p.end[j];
        p.begin[j] = begin;
        p.end[j] = end;
    }
    return p;
}

unsigned check_float_mode(void) {
#ifdef __SSE__
    return _mm_getcsr() & ~0x3Fu; // without the sticky flags
#else
    return (unsigned)fegetround();
#endif
}

static void fill_guard(uint8_t *p, size_t bytes) {
    // BF16 (and FP32) NaNs with varying payloads at every alignment.
    for (size_t i = 0; i < bytes; i++) p[i] = i & 1 ? 0x7F : (uint8_t)(0xC1 + (i >> 1) % 0x3E);
}

struct area area_new(struct check *c, size_t bytes, size_t align) {
    if (c->on_gpu && align < 2) align = 2; // a GPU's tensors lie on whole elements
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t inner = (bytes + 256 + page - 1) / page * page;
    uint8_t *all =
        mmap(0, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED || mprotect(all + page, inner, PROT_READ | PROT_WRITE)) {
        perror("ctxkv_check: mmap");
        exit(2);
    }
    struct area a = {all + page, inner, 0, bytes};
    size_t off = check_chance(c, 50) ? 0 : (size_t)check_below(c, 128);
    size_t at = check_chance(c, 50) ? (off + align - 1) / align * align
                                    : (inner - bytes - off) / align * align;
    a.data = a.map + at;
    fill_guard(a.map, inner);
    return a;
}

struct area area_copy(const struct area *a) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *all = mmap(
        0, a->map_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED || mprotect(all + page, a->map_bytes, PROT_READ | PROT_WRITE)) {
        perror("ctxkv_check: mmap");
        exit(2);
    }
    memcpy(all + page, a->map, a->map_bytes);
    return (struct area){all + page, a->map_bytes, all + page + (a->data - a->map), a->bytes};
}

void area_free(struct area *a) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (a->map) munmap(a->map - page, a->map_bytes + 2 * page);
    a->map = 0;
}

void area_same(
    struct check *c, const struct area *truth, const struct area *got, const char *what) {
    if (memcmp(truth->map, got->map, truth->map_bytes) == 0) return;
    size_t i = 0, wrong = 0;
    for (size_t k = truth->map_bytes; k-- > 0;)
        if (truth->map[k] != got->map[k]) {
            i = k;
            wrong++;
        }
    int64_t at = (int64_t)i - (truth->data - truth->map);
    bool inside = at >= 0 && at < (int64_t)truth->bytes;
    check_fail(
        c, "%s: %zu bytes differ, the first at byte %lld of %zu%s: is %02x, must be %02x", what,
        wrong, (long long)at, truth->bytes, inside ? "" : " (guard)", got->map[i], truth->map[i]);
}

// ---- hostile values --------------------------------------------------------------------------
enum kind {
    PLAIN,
    ANY_BITS,
    EDGES,
    WIDE,
    HUGE_ONES,
    TINY,
    ZEROS,
    HALFWAY,
    SPREAD_STEP,
    PAST_31_BITS,
    LARGEST,
    SUBNORMAL,
    HIGH,
    SMALL_SQUARES, // whose mean is subnormal
    CANCEL,
    ONE_SPECIAL,
    KINDS
};

static const uint16_t edges[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x8080,
                                 0x3F80, 0xBF80, 0x3FFF, 0x7F7F, 0xFF7F, 0x4049, 0x1E3C};
static const uint16_t specials[] = {0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7FFF, 0xFF8A};
// 1, ulps and half ulps of BF16 beside 1: their sums are halfway cases.
static const uint16_t halves[] = {0x3F80, 0x3B80, 0x3B00, 0x3F81, 0x3C00, 0xBB80, 0x3C40, 0x0000};
#define COUNT(list) (sizeof(list) / sizeof(list)[0])

static uint16_t from_field(uint64_t r, int64_t field) {
    field = field < 0 ? 0 : field > 254 ? 254 : field;
    return (uint16_t)((r & 0x807F) | (uint64_t)field << 7);
}

// Beside LARGEST these lead sums of 16 products past 31 bits: first 1.98, then 16 products of 3.97
// and the same with the other sign, by turns.
static uint16_t past_31_bits(int64_t i, uint16_t base) {
    int64_t step = i / 16;
    uint16_t largest = (uint16_t)(base | 0x7F);
    if (step == 0) return i == 0 ? (uint16_t)(largest - 0x80) : 0;
    return step % 2 ? largest : (uint16_t)(largest ^ 0x8000);
}

static uint16_t value_of(uint64_t r, enum kind kind, int64_t i, int64_t base) {
    switch (kind) {
    case ANY_BITS:
        return (uint16_t)r;
    case EDGES:
        return edges[(r >> 32) % COUNT(edges)];
    case WIDE:
        return from_field(r, 127 + (int64_t)(r >> 32) % 60 - 30);
    case HUGE_ONES:
        return from_field(r, 254 - (int64_t)(r >> 32) % 12);
    case TINY:
        return from_field(r, (int64_t)(r >> 32) % 12);
    case ZEROS:
        return (r >> 32) % 8 ? (uint16_t)(r & 0x8000) : from_field(r, 127);
    case HALFWAY:
        return halves[(r >> 32) % COUNT(halves)];
    case SPREAD_STEP:
        return from_field(r, base + (i / 16) % 7 * 9 - 27);
    case PAST_31_BITS:
        return past_31_bits(i, (uint16_t)(base << 7));
    case LARGEST:
        return (uint16_t)(base << 7 | 0x7F);
    case SUBNORMAL:
        return (uint16_t)(r & 0x807F);
    case HIGH:
        return from_field(r, 175 + (int64_t)(r >> 32) % 40);
    case SMALL_SQUARES:
        return from_field(r, 54 + (int64_t)(r >> 32) % 8);
    case CANCEL:
        return (uint16_t)(base << 7 | (i / 2 * 37 & 0x7F) | (i & 1 ? 0x8000 : 0));
    default:
        return from_field(r, 120 + (int64_t)(r >> 32) % 12);
    }
}

void hostile_largest(struct check *c, void *to, int64_t count) {
    for (int64_t i = 0, base = 100 + check_below(c, 54); i < count; i++)
        ctxkv__store16(to, i, value_of(0, LARGEST, i, base));
}

void hostile_past_31_bits(struct check *c, void *to, int64_t count) {
    for (int64_t i = 0, base = 100 + check_below(c, 54); i < count; i++)
        ctxkv__store16(to, i, value_of(0, PAST_31_BITS, i, base));
}

void hostile_bf16(struct check *c, void *to, int64_t count) {
    // Half of all rows are plain, or the specials would leave little else.
    enum kind kind = check_chance(c, 45) ? PLAIN : (enum kind)check_below(c, KINDS);
    int64_t base = check_chance(c, 70) ? 127 : 1 + check_below(c, 253);
    for (int64_t i = 0; i < count; i++)
        ctxkv__store16(to, i, value_of(check_random(c), kind, i, base));
    if (kind == ONE_SPECIAL && count)
        for (int64_t n = 1 + check_below(c, 2); n > 0; n--)
            ctxkv__store16(
                to, check_below(c, count), specials[check_below(c, (int64_t)COUNT(specials))]);
}

void hostile_f32(struct check *c, float *to, int64_t count) {
    int kind = (int)check_below(c, 6);
    for (int64_t i = 0; i < count; i++) {
        uint64_t r = check_random(c);
        uint32_t near_one = (uint32_t)((r & 0x807FFFFF) | (uint64_t)(125 + (r >> 40) % 4) << 23);
        uint32_t b = kind == 0   ? (uint32_t)r
                     : kind == 1 ? (uint32_t)edges[(r >> 32) % COUNT(edges)] << 16 | (r & 1)
                                 : near_one;
        memcpy(&to[i], &b, 4);
    }
}
