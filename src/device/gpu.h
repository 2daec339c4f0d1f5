// SPDX-License-Identifier: Apache-2.0
// One CUDA device: its context, kernels, and the few things plans do with it.
#ifndef CTXKV_DEVICE_GPU_H
#define CTXKV_DEVICE_GPU_H

#include <stdbool.h>
#include <stdint.h>

#include "../api/lock.h"
#include "../chain/device.h"
#include "../cuda/decode_params.h"
#include "../cuda/few_params.h"
#include "driver.h"

enum ctxkv__module {
#define CTXKV_MODULE(name) CTXKV__MODULE_##name,
#define CTXKV_KERNEL(module, name, shared)
#include "../cuda/kernels.inc"
    CTXKV__MODULES
};
enum ctxkv__kernel {
#define CTXKV_MODULE(name)
#define CTXKV_KERNEL(module, name, shared) CTXKV__KERNEL_##name,
#include "../cuda/kernels.inc"
    CTXKV__KERNELS
};

struct ctxkv__cuda_device {
    const struct ctxkv__driver *cu;
    CUdevice device;
    CUcontext context;
    bool retained; // context is the primary one, retained by us
    int ordinal, arch, multiprocessors, driver_version, shared_limit;
    bool programmatic; // programmatic dependent launch
    bool packed;       // the stock norms of this architecture sum in `packed` order
    char name[96];
    CUstream stream; // for copies when plans are made
    struct ctxkv__lock lock;
    CUlibrary modules[CTXKV__MODULES];
    CUfunction kernels[CTXKV__KERNELS];
    char *cublas_path; // the option, or NULL
    int cublas_version;
    struct ctxkv__spare *spare_handles; // of cuBLAS, from plans destroyed
};

struct ctxkv__gpu_scope {
    bool pushed, relaxed;
    CUstreamCaptureMode mode;
};

// Makes the device's context current until leave; the caller's is untouched.
ctxkv_status ctxkv__gpu_enter(const struct ctxkv__cuda_device *gpu, struct ctxkv__gpu_scope *scope);
// The same for slow work: refused during a capture of which the driver tells (of a stream that
// waits for the default stream), harmless to every other.
ctxkv_status ctxkv__gpu_enter_slow(
    const struct ctxkv__cuda_device *gpu, struct ctxkv__gpu_scope *scope, const char *doing);
// The same for giving back what a plan held: never refused.
ctxkv_status ctxkv__gpu_enter_free(
    const struct ctxkv__cuda_device *gpu, struct ctxkv__gpu_scope *scope);
void ctxkv__gpu_leave(const struct ctxkv__cuda_device *gpu, const struct ctxkv__gpu_scope *scope);

// Waits for what the default stream still does to the weights a plan is about to read. (Waiting for
// the whole context would break another thread's capture.)
void ctxkv__gpu_settle(const struct ctxkv__cuda_device *gpu);

// Resolves and loads a kernel. Only inside enter_slow.
ctxkv_status ctxkv__gpu_kernel(struct ctxkv__cuda_device *gpu, enum ctxkv__kernel kernel);
// Whether this build has the module for this GPU; loads it. Only inside enter_slow.
bool ctxkv__gpu_has_module(struct ctxkv__cuda_device *gpu, enum ctxkv__module module);
void ctxkv__gpu_unload(struct ctxkv__cuda_device *gpu);

struct ctxkv__launch {
    enum ctxkv__kernel kernel;
    uint32_t grid[3], threads, shared;
    uint32_t cluster[2]; // blocks of a cluster along x and y; 0: none
    void *stream;
    const void *params; // the kernel's one parameter
};
ctxkv_status ctxkv__gpu_launch(
    const struct ctxkv__cuda_device *gpu, const struct ctxkv__launch *launch);

// Device memory; the copies wait. Only inside enter_slow.
ctxkv_status ctxkv__gpu_alloc(
    const struct ctxkv__cuda_device *gpu, size_t bytes, const char *what, CUdeviceptr *address);
void ctxkv__gpu_free(const struct ctxkv__cuda_device *gpu, CUdeviceptr address);
ctxkv_status ctxkv__gpu_upload(
    const struct ctxkv__cuda_device *gpu, CUdeviceptr to, const void *from, size_t bytes);
ctxkv_status ctxkv__gpu_download(
    const struct ctxkv__cuda_device *gpu, void *to, CUdeviceptr from, size_t bytes);

#endif
