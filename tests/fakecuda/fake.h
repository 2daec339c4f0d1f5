// SPDX-License-Identifier: Apache-2.0
// A CUDA driver and a cuBLAS made of plain memory: counts, records, and fails on demand.
#ifndef CTXKV_TESTS_FAKECUDA_FAKE_H
#define CTXKV_TESTS_FAKECUDA_FAKE_H

#include "device/cublas.h"
#include "device/driver.h"

#define FAKE_LAUNCHES 16
#define FAKE_PARAM_BYTES 32768

struct fake_launch {
    const char *kernel;
    unsigned grid[3], threads, shared, attributes, cluster[2];
    int programmatic; // the attribute's value, -1: absent
    void *stream;
    unsigned char params[FAKE_PARAM_BYTES];
};

// The last tensor map that was described.
struct fake_map {
    int rank;
    const void *address;
    cuuint64_t dims[5], strides[4]; // strides in bytes
    cuuint32_t box[5], steps[5];
    CUtensorMapDataType type;
    CUtensorMapSwizzle swizzle;
    CUtensorMapFloatOOBfill fill;
};

struct fake_state {
    // What it pretends to be.
    int devices, major, minor, version;
    CUresult init;
    CUcontext current; // of the calling thread
    CUdevice current_device;
    bool legacy_capturing, thread_capturing, no_code;
    // A stream that does not wait for the default stream is being captured: nothing tells of it,
    // and some calls end it (as an H200 did, driver 580).
    bool other_capturing, capture_ended;
    bool many_launches; // more than FAKE_LAUNCHES: the record begins anew
    // The call that fails: number fail_at (from 0), or every call of fail_name.
    long fail_at;
    const char *fail_name;
    long fail_after;   // calls of fail_name that still succeed
    size_t most_bytes; // larger allocations fail with out of memory; 0: none
    CUresult fail_with;
    int cublas_fail_with;
    // What happened.
    long calls, named_calls, slow_calls; // slow: whatever a run must not do
    long allocations, streams, libraries, retained, pushed, handles, relaxed;
    long allocated_ever, gemms, gemm_batch, gemm_columns, gemm_rows;
    // CUDA graphs: the stream being recorded, launches on it, what is alive; time in milliseconds.
    CUstream recording;
    long recorded, graphs, events;
    float clock;
    long maps; // described
    struct fake_map map;
    int launches;
    struct fake_launch launch[FAKE_LAUNCHES];
};
extern struct fake_state fake;

extern const struct ctxkv__driver fake_driver;
extern const struct ctxkv__cublas fake_cublas;

// An H200 in good health; nothing fails.
void fake_reset(void);
// Whether everything taken was given back and the caller's context is as it was.
bool fake_clean(void);
// Address of a driver function by name, or NULL.
void *fake_symbol(const char *name);

#endif
