// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of a library built without nvcc: every request says so.
#include "../device/memory.h"
#include "../device/replay.h"
#include "cuda_backend.h"

static ctxkv_status refuse(void) {
    return ctxkv__fail(
        CTXKV_NO_KERNEL, "this libctxkv was built without CUDA code (no nvcc at build time): "
                         "rebuild with the CUDA toolkit, or use device \"cpu\"");
}

int ctxkv__cuda_count(void) {
    refuse();
    return 0;
}

ctxkv_status ctxkv__cuda_open(ctxkv_device *device, const ctxkv_device_options *options) {
    (void)device, (void)options;
    return refuse();
}

const ctxkv_memory_ops *ctxkv_device_memory(const ctxkv_device *device) {
    (void)device;
    return 0;
}

const ctxkv_replay_ops *ctxkv_device_replay(const ctxkv_device *device) {
    (void)device;
    return 0;
}

// No CUDA device can be opened, so nothing below is reached.
void ctxkv__cuda_close(ctxkv_device *device) {
    (void)device;
}
void ctxkv__cuda_info(const ctxkv_device *device, ctxkv_device_info *info) {
    (void)device, (void)info;
}
#define CTXKV__NO_PLAN(op)                                                                         \
    ctxkv_status ctxkv__cuda_##op##_create(struct ctxkv_##op *plan) {                              \
        (void)plan;                                                                                \
        return refuse();                                                                           \
    }                                                                                              \
    void ctxkv__cuda_##op##_destroy(struct ctxkv_##op *plan) {                                     \
        (void)plan;                                                                                \
    }                                                                                              \
    ctxkv_status ctxkv__cuda_##op##_run(                                                           \
        struct ctxkv_##op *plan, const struct ctxkv__##op##_call *call) {                          \
        (void)plan, (void)call;                                                                    \
        return refuse();                                                                           \
    }
CTXKV__NO_PLAN(norms)
CTXKV__NO_PLAN(projection)
CTXKV__NO_PLAN(store)
CTXKV__NO_PLAN(chain)
ctxkv_status ctxkv__cuda_store_bind(struct ctxkv_store *plan) {
    (void)plan;
    return refuse();
}
ctxkv_status ctxkv__cuda_store_faults(
    struct ctxkv_store *plan, struct ctxkv__fault_record *record) {
    (void)plan, (void)record;
    return refuse();
}
size_t ctxkv__cuda_chain_memory(const struct ctxkv_chain *plan) {
    (void)plan;
    return 0;
}
