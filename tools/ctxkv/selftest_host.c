// SPDX-License-Identifier: Apache-2.0
// Checks of arithmetic that runs on the host: rsqrt, inverse frequencies, cos/sin tables.
#include <stdlib.h>
#include <string.h>

#include "crc32.h"
#include "generator.h"
#include "selftest.h"

#define ROPE_STEP 8192 // positions computed between two checksum steps

void st_rsqrt(selftest *st) {
    for (int ftz = 0; ftz < 2; ++ftz) {
        uint64_t hash = 1469598103934665603u;
        for (uint32_t bits = 0x3F800000; bits <= 0x407FFFFF; ++bits) {
            float x, y;
            uint32_t result;
            memcpy(&x, &bits, sizeof x);
            y = ctxkv_rsqrt(x, ftz);
            memcpy(&result, &y, sizeof result);
            for (int k = 0; k < 4; ++k) {
                hash = (hash ^ (result >> (8 * k) & 255)) * 1099511628211u;
            }
        }
        const uint64_t want = 0xE97CB9514F40C1A6u;
        bool ok = hash == want;
        ok ? ++st->passed : ++st->failed;
        if (!ok) printf("FAIL rsqrt%s: FNV-1a of 2^24 results is wrong\n", ftz ? ", ftz" : "");
    }
}

static bool read_theta(const io_csv *csv, size_t row, float *theta, int64_t *dim) {
    io_error error;
    if (io_csv_number(csv, row, "theta", theta, &error) &&
        io_csv_integer(csv, row, "rotary_dim", 2, 1024, dim, &error)) {
        return true;
    }
    cli_fail("%s", error.text);
    return false;
}

bool st_inv_freq(selftest *st, const io_csv *csv) {
    for (size_t i = 0; i < csv->rows; ++i) {
        float theta, values[512];
        int64_t dim;
        uint32_t want[512];
        io_error error;
        char name[64];
        if (!read_theta(csv, i, &theta, &dim)) return false;
        size_t count = (size_t)dim / 2;
        if (!io_csv_words(csv, i, "inv_freq_bits", want, count, &error)) {
            cli_fail("%s", error.text);
            return false;
        }
        snprintf(name, sizeof name, "inv_freq, theta %g, rotary_dim %d", theta, (int)dim);
        if (ctxkv_rope_inv_freq(theta, dim, values)) {
            st_broken(st, name, 1);
            continue;
        }
        uint32_t got[512];
        memcpy(got, values, count * sizeof *got);
        size_t first = 0;
        while (first + 1 < count && got[first] == want[first]) ++first;
        char what[32];
        snprintf(what, sizeof what, "entry %zu", first);
        st_check(st, name, what, got[first], want[first]);
    }
    return true;
}

// ---- tables ------------------------------------------------------------------------------------
typedef struct rope_case {
    float theta;
    int64_t dim, positions;
    float frequencies[512];
    float *cosine, *sine; // ROPE_STEP rows
    uint16_t *table;
    int64_t first, rows;
    ctxkv_status status;
    uint32_t cos_crc, sin_crc;
    int threads;
} rope_case;

static void rope_row(void *user, int64_t index) {
    rope_case *it = user;
    int64_t half = it->dim / 2, from = index * 256;
    for (int64_t i = from; i < from + 256 && i < it->rows; ++i) {
        if (ctxkv_rope_row(
                it->frequencies, half, it->first + i, it->cosine + i * half, it->sine + i * half)) {
            it->status = CTXKV_INVALID_ARGUMENT;
        }
    }
}

static void rope_rows(rope_case *it) {
    size_t half = (size_t)it->dim / 2;
    for (it->first = 0; it->first < it->positions; it->first += ROPE_STEP) {
        int64_t left = it->positions - it->first;
        it->rows = left < ROPE_STEP ? left : ROPE_STEP;
        cli_parallel(it->threads, (it->rows + 255) / 256, rope_row, it);
        it->cos_crc = io_crc32(it->cos_crc, it->cosine, (size_t)it->rows * half * 4);
        it->sin_crc = io_crc32(it->sin_crc, it->sine, (size_t)it->rows * half * 4);
    }
}

static void rope_part(void *user, int64_t index) {
    rope_case *it = user;
    if (!index) {
        rope_rows(it);
        return;
    }
    int64_t shape[2] = {it->positions, it->dim};
    DLTensor table = {
        .data = it->table,
        .device = {kDLCPU, 0},
        .ndim = 2,
        .dtype = {kDLBfloat, 16, 1},
        .shape = shape};
    if (ctxkv_rope_table(it->theta, it->dim, it->positions, &table)) {
        it->status = CTXKV_INVALID_ARGUMENT;
    }
}

static bool check_rope(selftest *st, rope_case *it, const uint32_t want[3]) {
    char name[96];
    size_t half = (size_t)it->dim / 2;
    snprintf(
        name, sizeof name, "rope, theta %g, rotary_dim %d, %d positions", it->theta, (int)it->dim,
        (int)it->positions);
    it->cosine = cli_alloc(&st->host, ROPE_STEP * half * 4);
    it->sine = cli_alloc(&st->host, ROPE_STEP * half * 4);
    it->table = cli_alloc(&st->host, (size_t)(it->positions * it->dim) * 2);
    it->threads = st->threads;
    if (!it->cosine || !it->sine || !it->table) return false;
    it->status = ctxkv_rope_inv_freq(it->theta, it->dim, it->frequencies);
    if (!it->status) cli_parallel(st->threads, 2, rope_part, it);
    if (it->status) {
        st_broken(st, name, 3);
    } else {
        size_t bytes = (size_t)(it->positions * it->dim) * 2;
        st_check(st, name, "cos", it->cos_crc, want[0]);
        st_check(st, name, "sin", it->sin_crc, want[1]);
        st_check(st, name, "table", io_crc32(0, it->table, bytes), want[2]);
    }
    cli_place_reset(&st->host);
    return true;
}

bool st_rope(selftest *st, const io_csv *csv) {
    static const char *const columns[] = {"crc_cos_fp32", "crc_sin_fp32", "crc_table_bf16"};
    for (size_t i = 0; i < csv->rows; ++i) {
        rope_case it = {0};
        uint32_t want[3];
        io_error error;
        if (!read_theta(csv, i, &it.theta, &it.dim)) return false;
        bool ok = io_csv_integer(csv, i, "positions", 1, 1 << 24, &it.positions, &error);
        for (int k = 0; ok && k < 3; ++k)
            ok = io_csv_words(csv, i, columns[k], &want[k], 1, &error);
        if (!ok) {
            cli_fail("%s", error.text);
            return false;
        }
        if (!check_rope(st, &it, want)) return false;
        cli_progress((void *)"host rope.csv", i + 1, csv->rows);
    }
    return true;
}
