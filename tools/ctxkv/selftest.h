// SPDX-License-Identifier: Apache-2.0
// The golden cases: a table of tests over one device.
#ifndef CTXKV_CLI_SELFTEST_H
#define CTXKV_CLI_SELFTEST_H

#include "csv.h"
#include "place.h"

typedef struct selftest {
    cli_place place; // the device under test
    cli_place host;  // an arena of host memory, emptied after each case
    const char *folder;
    char label[32]; // device or tier
    bool verbose;
    int threads;
    ctxkv_projection_mode projection;
    uint64_t passed, failed;
} selftest;

// One checksum: counts it, and tells it when it is wrong (or --verbose).
void st_check(selftest *st, const char *name, const char *what, uint32_t got, uint32_t want);
// A case that could not run: its checks have failed, for the library's last error.
void st_broken(selftest *st, const char *name, uint64_t checks);
// CRC-32 of bytes in the device's memory; false after an error that was told.
bool st_crc(selftest *st, const void *data, size_t bytes, uint32_t *crc);

// Host memory of the case. Filled by all threads from the generator.
uint16_t *st_bf16(selftest *st, size_t count, uint64_t seed, float scale);
// Kinds n, b, B, f, F of norms.csv. NULL tensor data for n.
bool st_gain(
    selftest *st, cli_tensor *tensor, char kind, int rank, const int64_t *shape, uint64_t seed,
    float centre);
// A tensor over host data brought to the device, or over fresh device memory.
bool st_input(
    selftest *st, cli_tensor *tensor, const void *host, DLDataType dtype, int rank,
    const int64_t *shape);
bool st_output(selftest *st, cli_tensor *tensor, DLDataType dtype, int rank, const int64_t *shape);
// Slots of each layer by the golden rule.
bool st_slots(
    selftest *st, cli_tensor *tensors, const DLTensor **pointers, int64_t layers, int64_t count,
    uint64_t seed, int64_t places);
bool st_positions(
    selftest *st, cli_tensor *tensor, int64_t count, uint64_t seed, int64_t max_position);
// Checks every layer's cache against the words.
void st_caches(selftest *st, const char *name, const cli_caches *caches, const uint32_t *want);

// Every function runs all rows of one table; false after a malformed table, told by cli_fail.
typedef bool (*st_table)(selftest *st, const io_csv *csv);
bool st_norms(selftest *st, const io_csv *csv);
bool st_store(selftest *st, const io_csv *csv);
bool st_chain(selftest *st, const io_csv *csv);
bool st_weighted_norms(selftest *st, const io_csv *csv);
bool st_weighted_store(selftest *st, const io_csv *csv);
bool st_weighted_chain(selftest *st, const io_csv *csv);
bool st_inv_freq(selftest *st, const io_csv *csv);
bool st_rope(selftest *st, const io_csv *csv);
void st_rsqrt(selftest *st);

#define ST_MAX_LAYERS 64

// A row of any table: the columns that are there, defaults for the others.
typedef struct st_row {
    const char *name;
    char hidden, layer;
    int64_t D, H, dim, L, T, R, block_size, num_blocks, max_position, rope, special, seed;
    float eps, hidden_eps, layer_eps, k_eps, hidden_gain, layer_gain;
    uint32_t crc[3], caches[ST_MAX_LAYERS];
} st_row;

// columns: the integers to be read, e.g. "D H T"; floats likewise.
bool st_read(
    const io_csv *csv, size_t row, const char *const *integers, const char *const *numbers,
    st_row *to);

#endif
