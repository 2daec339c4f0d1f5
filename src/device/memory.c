// SPDX-License-Identifier: Apache-2.0
// Device memory for the command line and the tests.
#include "memory.h"

#include "gpu.h"

static ctxkv_status alloc(ctxkv_device *device, size_t bytes, void **address) {
    struct ctxkv__gpu_scope scope;
    CUdeviceptr memory = 0;
    *address = 0;
    ctxkv_status status = ctxkv__gpu_enter_slow(device->gpu, &scope, "allocating memory");
    if (status) return status;
    status = ctxkv__gpu_alloc(device->gpu, bytes, "the caller", &memory);
    ctxkv__gpu_leave(device->gpu, &scope);
    *address = (void *)(uintptr_t)memory;
    return status;
}

static void release(ctxkv_device *device, void *address) {
    struct ctxkv__gpu_scope scope;
    if (ctxkv__gpu_enter_free(device->gpu, &scope)) return;
    ctxkv__gpu_free(device->gpu, (CUdeviceptr)(uintptr_t)address);
    ctxkv__gpu_leave(device->gpu, &scope);
}

static ctxkv_status move(
    ctxkv_device *device, void *to, const void *from, size_t bytes, bool upload) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter_slow(device->gpu, &scope, "copying memory");
    if (status) return status;
    // Work already given to other streams comes first.
    CUresult result = device->gpu->cu->cuCtxSynchronize();
    if (result)
        status = ctxkv__cu_fail(device->gpu->cu, result, "waiting for the device");
    else if (upload)
        status = ctxkv__gpu_upload(device->gpu, (CUdeviceptr)(uintptr_t)to, from, bytes);
    else
        status = ctxkv__gpu_download(device->gpu, to, (CUdeviceptr)(uintptr_t)from, bytes);
    ctxkv__gpu_leave(device->gpu, &scope);
    return status;
}

static ctxkv_status to_device(ctxkv_device *device, void *to, const void *from, size_t bytes) {
    return move(device, to, from, bytes, true);
}

static ctxkv_status to_host(ctxkv_device *device, void *to, const void *from, size_t bytes) {
    return move(device, to, from, bytes, false);
}

static ctxkv_status copy(ctxkv_device *device, void *to, const void *from, size_t bytes) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter(device->gpu, &scope);
    if (status) return status;
    CUresult result = device->gpu->cu->cuMemcpyDtoDAsync(
        (CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from, bytes, 0);
    ctxkv__gpu_leave(device->gpu, &scope);
    return result ? ctxkv__cu_fail(device->gpu->cu, result, "copying on the device") : CTXKV_OK;
}

static ctxkv_status sync(ctxkv_device *device) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter(device->gpu, &scope);
    if (status) return status;
    CUresult result = device->gpu->cu->cuCtxSynchronize();
    ctxkv__gpu_leave(device->gpu, &scope);
    return result ? ctxkv__cu_fail(device->gpu->cu, result, "waiting for the device") : CTXKV_OK;
}

const ctxkv_memory_ops *ctxkv_device_memory(const ctxkv_device *device) {
    static const ctxkv_memory_ops ops = {alloc, release, to_device, to_host, copy, sync};
    return device->cuda ? &ops : 0;
}
