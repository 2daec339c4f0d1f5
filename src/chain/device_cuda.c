// SPDX-License-Identifier: Apache-2.0
// Opens and describes CUDA devices.
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../device/cublas.h"
#include "cuda_backend.h"

int ctxkv__cuda_count(void) {
    ctxkv_status status;
    int count = 0;
    const struct ctxkv__driver *cu = ctxkv__driver_get(&status);
    if (!cu) return 0;
    CUresult result = cu->cuDeviceGetCount(&count);
    if (result) {
        ctxkv__cu_fail(cu, result, "counting the GPUs");
        return 0;
    }
    if (!count) ctxkv__fail(CTXKV_NO_DEVICE, "no usable GPU: the driver sees no device");
    return count;
}

static ctxkv_status describe(struct ctxkv__cuda_device *gpu) {
    const struct ctxkv__driver *cu = gpu->cu;
    int major = 0, minor = 0;
    CUresult result = cu->cuDeviceGetName(gpu->name, sizeof gpu->name - 1, gpu->device);
    if (!result)
        result = cu->cuDeviceGetAttribute(
            &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, gpu->device);
    if (!result)
        result = cu->cuDeviceGetAttribute(
            &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, gpu->device);
    if (!result)
        result = cu->cuDeviceGetAttribute(
            &gpu->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, gpu->device);
    if (!result)
        result = cu->cuDeviceGetAttribute(
            &gpu->shared_limit, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, gpu->device);
    if (!result) result = cu->cuDriverGetVersion(&gpu->driver_version);
    gpu->arch = major * 10 + minor;
    return result ? ctxkv__cu_fail(cu, result, "reading the GPU's properties") : CTXKV_OK;
}

// The caller's context of this device when there is one, else the primary context.
static ctxkv_status choose_context(struct ctxkv__cuda_device *gpu) {
    const struct ctxkv__driver *cu = gpu->cu;
    CUcontext current = 0;
    CUdevice device = -1;
    CUresult result = cu->cuCtxGetCurrent(&current);
    if (!result && current) result = cu->cuCtxGetDevice(&device);
    if (!result && current && device == gpu->device) {
        gpu->context = current;
        return CTXKV_OK;
    }
    if (!result) result = cu->cuDevicePrimaryCtxRetain(&gpu->context, gpu->device);
    if (result) return ctxkv__cu_fail(cu, result, "opening the GPU's primary context");
    gpu->retained = true;
    return CTXKV_OK;
}

static ctxkv_status find_device(struct ctxkv__cuda_device *gpu) {
    int count = 0;
    CUresult result = gpu->cu->cuDeviceGetCount(&count);
    if (result) return ctxkv__cu_fail(gpu->cu, result, "counting the GPUs");
    if (!count) return ctxkv__fail(CTXKV_NO_DEVICE, "no usable GPU: the driver sees no device");
    if (gpu->ordinal >= count)
        return ctxkv__fail(
            CTXKV_NO_DEVICE, "device is cuda:%d, must be in cuda:0..cuda:%d", gpu->ordinal,
            count - 1);
    result = gpu->cu->cuDeviceGet(&gpu->device, gpu->ordinal);
    if (result) return ctxkv__cu_fail(gpu->cu, result, "opening the GPU");
    return describe(gpu);
}

static ctxkv_status prepare(struct ctxkv__cuda_device *gpu) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = choose_context(gpu);
    if (!status) status = ctxkv__gpu_enter_slow(gpu, &scope, "opening a CUDA device");
    if (status) return status;
    CUresult result = gpu->cu->cuStreamCreate(&gpu->stream, CU_STREAM_NON_BLOCKING);
    if (result) status = ctxkv__cu_fail(gpu->cu, result, "creating a stream");
    // A build without code for this GPU says so here, not at the first plan.
    if (!status) status = ctxkv__gpu_kernel(gpu, CTXKV__KERNEL_norms_rms);
    ctxkv__gpu_leave(gpu, &scope);
    return status;
}

ctxkv_status ctxkv__cuda_open(ctxkv_device *device, const ctxkv_device_options *options) {
    ctxkv_status status;
    const struct ctxkv__driver *cu = ctxkv__driver_get(&status);
    if (!cu) return status;
    struct ctxkv__cuda_device *gpu = calloc(1, sizeof *gpu);
    if (!gpu) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the device");
    gpu->cu = cu;
    gpu->ordinal = device->ordinal;
    device->gpu = gpu;
    status = find_device(gpu);
    gpu->programmatic = options->programmatic_launch && gpu->arch >= 90;
    gpu->packed = gpu->arch >= 100;
    if (!status && options->cublas_path) {
        gpu->cublas_path = strdup(options->cublas_path);
        if (!gpu->cublas_path)
            status = ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for the path of cuBLAS");
    }
    if (!status) status = prepare(gpu);
    if (status) ctxkv__cuda_close(device);
    return status;
}

void ctxkv__cuda_close(ctxkv_device *device) {
    struct ctxkv__cuda_device *gpu = device->gpu;
    struct ctxkv__gpu_scope scope;
    if (!gpu) return;
    if (gpu->context && !ctxkv__gpu_enter_free(gpu, &scope)) {
        ctxkv__cublas_close(gpu);
        ctxkv__gpu_unload(gpu);
        if (gpu->stream) gpu->cu->cuStreamDestroy(gpu->stream);
        ctxkv__gpu_leave(gpu, &scope);
    }
    if (gpu->retained) gpu->cu->cuDevicePrimaryCtxRelease(gpu->device);
    ctxkv__lock_destroy(&gpu->lock);
    free(gpu->cublas_path);
    free(gpu);
    device->gpu = 0;
}

void ctxkv__cuda_info(const ctxkv_device *device, ctxkv_device_info *info) {
    const struct ctxkv__cuda_device *gpu = device->gpu;
    snprintf(info->name, sizeof info->name, "%s", gpu->name);
    info->cuda_arch = gpu->arch;
    info->driver = gpu->driver_version;
    info->cublas = gpu->cublas_version;
    info->bits_verified = gpu->arch == 90;
}
