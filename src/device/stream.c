// SPDX-License-Identifier: Apache-2.0
// Contexts, captures, launches and memory of a CUDA device.
#include "gpu.h"

#include <inttypes.h>
#include <stdio.h>

ctxkv_status ctxkv__gpu_enter(
    const struct ctxkv__cuda_device *gpu, struct ctxkv__gpu_scope *scope) {
    CUcontext current = 0;
    *scope = (struct ctxkv__gpu_scope){0};
    CUresult result = gpu->cu->cuCtxGetCurrent(&current);
    if (!result && current != gpu->context) {
        result = gpu->cu->cuCtxPushCurrent(gpu->context);
        scope->pushed = !result;
    }
    return result ? ctxkv__cu_fail(gpu->cu, result, "making the device's context current")
                  : CTXKV_OK;
}

static ctxkv_status capturing(const char *doing) {
    return ctxkv__fail(
        CTXKV_CAPTURING, "%s while a stream is being captured: do it before the capture begins",
        doing);
}

// In this mode allocating, freeing and waiting for a stream leave captures of other streams whole.
static void relax(const struct ctxkv__cuda_device *gpu, struct ctxkv__gpu_scope *scope) {
    scope->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    scope->relaxed = !gpu->cu->cuThreadExchangeStreamCaptureMode(&scope->mode);
}

ctxkv_status ctxkv__gpu_enter_slow(
    const struct ctxkv__cuda_device *gpu, struct ctxkv__gpu_scope *scope, const char *doing) {
    ctxkv_status status = ctxkv__gpu_enter(gpu, scope);
    if (status) return status;
    // The legacy stream answers for captures of every blocking stream, without disturbing them.
    CUstream streams[] = {CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    for (int i = 0; !status && i < 2; i++) {
        CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
        CUresult result = gpu->cu->cuStreamIsCapturing(streams[i], &state);
        if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
            (!result && state != CU_STREAM_CAPTURE_STATUS_NONE))
            status = capturing(doing);
        else if (result)
            status = ctxkv__cu_fail(gpu->cu, result, doing);
    }
    if (status)
        ctxkv__gpu_leave(gpu, scope);
    else
        relax(gpu, scope);
    return status;
}

ctxkv_status ctxkv__gpu_enter_free(
    const struct ctxkv__cuda_device *gpu, struct ctxkv__gpu_scope *scope) {
    ctxkv_status status = ctxkv__gpu_enter(gpu, scope);
    if (!status) relax(gpu, scope);
    return status;
}

void ctxkv__gpu_leave(const struct ctxkv__cuda_device *gpu, const struct ctxkv__gpu_scope *scope) {
    CUstreamCaptureMode mode = scope->mode;
    if (scope->relaxed) gpu->cu->cuThreadExchangeStreamCaptureMode(&mode);
    CUcontext popped;
    if (scope->pushed) gpu->cu->cuCtxPopCurrent(&popped);
}

void ctxkv__gpu_settle(const struct ctxkv__cuda_device *gpu) {
    gpu->cu->cuStreamSynchronize(CU_STREAM_LEGACY);
}

ctxkv_status ctxkv__gpu_launch(
    const struct ctxkv__cuda_device *gpu, const struct ctxkv__launch *launch) {
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config = {
        .gridDimX = launch->grid[0],
        .gridDimY = launch->grid[1],
        .gridDimZ = launch->grid[2],
        .blockDimX = launch->threads,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = launch->shared,
        .hStream = launch->stream,
        .attrs = attributes,
    };
    if (gpu->programmatic) {
        CUlaunchAttribute *a = &attributes[config.numAttrs++];
        a->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        a->value.programmaticStreamSerializationAllowed = 1;
    }
    if (launch->cluster[0] * launch->cluster[1] > 1) {
        CUlaunchAttribute *a = &attributes[config.numAttrs++];
        a->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        a->value.clusterDim.x = launch->cluster[0];
        a->value.clusterDim.y = launch->cluster[1];
        a->value.clusterDim.z = 1;
    }
    void *params[1] = {(void *)(uintptr_t)launch->params};
    CUresult result = gpu->cu->cuLaunchKernelEx(&config, gpu->kernels[launch->kernel], params, 0);
    return result ? ctxkv__cu_fail(gpu->cu, result, "launching a kernel") : CTXKV_OK;
}

ctxkv_status ctxkv__gpu_alloc(
    const struct ctxkv__cuda_device *gpu, size_t bytes, const char *what, CUdeviceptr *address) {
    *address = 0;
    CUresult result = gpu->cu->cuMemAlloc(address, bytes ? bytes : 1);
    if (!result) return CTXKV_OK;
    *address = 0;
    char doing[160];
    snprintf(
        doing, sizeof doing, "allocating %zu bytes on cuda:%d for %s", bytes, gpu->ordinal, what);
    return ctxkv__cu_fail(gpu->cu, result, doing);
}

void ctxkv__gpu_free(const struct ctxkv__cuda_device *gpu, CUdeviceptr address) {
    if (address) gpu->cu->cuMemFree(address);
}

ctxkv_status ctxkv__gpu_upload(
    const struct ctxkv__cuda_device *gpu, CUdeviceptr to, const void *from, size_t bytes) {
    if (!bytes) return CTXKV_OK;
    CUresult result = gpu->cu->cuMemcpyHtoDAsync(to, from, bytes, gpu->stream);
    if (!result) result = gpu->cu->cuStreamSynchronize(gpu->stream);
    return result ? ctxkv__cu_fail(gpu->cu, result, "copying to the device") : CTXKV_OK;
}

ctxkv_status ctxkv__gpu_download(
    const struct ctxkv__cuda_device *gpu, void *to, CUdeviceptr from, size_t bytes) {
    if (!bytes) return CTXKV_OK;
    CUresult result = gpu->cu->cuMemcpyDtoHAsync(to, from, bytes, gpu->stream);
    if (!result) result = gpu->cu->cuStreamSynchronize(gpu->stream);
    return result ? ctxkv__cu_fail(gpu->cu, result, "copying from the device") : CTXKV_OK;
}
