// SPDX-License-Identifier: Apache-2.0
// CUDA graphs with timing, and the kernels that measure what the GPU can do at most.
#include "replay.h"

#include <stdlib.h>

#include "../cuda/params.h"
#include "gpu.h"

struct ctxkv_replay {
    struct ctxkv__cuda_device *gpu;
    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
    CUevent before, after;
    bool recording;
};

static bool can_replay(const struct ctxkv__driver *cu) {
    return cu->cuStreamBeginCapture && cu->cuStreamEndCapture && cu->cuGraphInstantiateWithFlags &&
           cu->cuGraphLaunch && cu->cuGraphExecDestroy && cu->cuGraphDestroy && cu->cuEventCreate &&
           cu->cuEventRecord && cu->cuEventSynchronize && cu->cuEventElapsedTime &&
           cu->cuEventDestroy;
}

static void release(ctxkv_replay *replay) {
    struct ctxkv__gpu_scope scope;
    if (!replay) return;
    const struct ctxkv__driver *cu = replay->gpu->cu;
    if (!ctxkv__gpu_enter(replay->gpu, &scope)) {
        if (replay->recording) cu->cuStreamEndCapture(replay->stream, &replay->graph);
        if (replay->exec) cu->cuGraphExecDestroy(replay->exec);
        if (replay->graph) cu->cuGraphDestroy(replay->graph);
        if (replay->before) cu->cuEventDestroy(replay->before);
        if (replay->after) cu->cuEventDestroy(replay->after);
        if (replay->stream) cu->cuStreamDestroy(replay->stream);
        ctxkv__gpu_leave(replay->gpu, &scope);
    }
    free(replay);
}

static ctxkv_status begin(ctxkv_device *device, ctxkv_replay **to, void **stream) {
    struct ctxkv__gpu_scope scope;
    struct ctxkv__cuda_device *gpu = device->gpu;
    const struct ctxkv__driver *cu = gpu->cu;
    *to = 0;
    if (!can_replay(cu))
        return ctxkv__fail(CTXKV_UNSUPPORTED, "the NVIDIA driver cannot record CUDA graphs");
    ctxkv_replay *replay = calloc(1, sizeof *replay);
    if (!replay) return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "out of memory for a CUDA graph");
    replay->gpu = gpu;
    ctxkv_status status = ctxkv__gpu_enter_slow(gpu, &scope, "recording a CUDA graph");
    if (status) {
        free(replay);
        return status;
    }
    CUresult result = cu->cuStreamCreate(&replay->stream, CU_STREAM_NON_BLOCKING);
    if (result) replay->stream = 0;
    if (!result) result = cu->cuEventCreate(&replay->before, CU_EVENT_DEFAULT);
    if (!result) result = cu->cuEventCreate(&replay->after, CU_EVENT_DEFAULT);
    if (!result)
        result = cu->cuStreamBeginCapture(replay->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    replay->recording = !result;
    if (result) status = ctxkv__cu_fail(cu, result, "recording a CUDA graph");
    ctxkv__gpu_leave(gpu, &scope);
    if (status) {
        release(replay);
        return status;
    }
    *to = replay;
    *stream = replay->stream;
    return CTXKV_OK;
}

static ctxkv_status end(ctxkv_replay *replay) {
    struct ctxkv__gpu_scope scope;
    const struct ctxkv__driver *cu = replay->gpu->cu;
    ctxkv_status status = ctxkv__gpu_enter(replay->gpu, &scope);
    if (status) return status;
    CUresult result = cu->cuStreamEndCapture(replay->stream, &replay->graph);
    replay->recording = false;
    if (!result) result = cu->cuGraphInstantiateWithFlags(&replay->exec, replay->graph, 0);
    ctxkv__gpu_leave(replay->gpu, &scope);
    return result ? ctxkv__cu_fail(cu, result, "making a CUDA graph") : CTXKV_OK;
}

static ctxkv_status run(ctxkv_replay *replay, double *seconds) {
    struct ctxkv__gpu_scope scope;
    const struct ctxkv__driver *cu = replay->gpu->cu;
    float milliseconds = 0;
    ctxkv_status status = ctxkv__gpu_enter(replay->gpu, &scope);
    if (status) return status;
    CUresult result = cu->cuEventRecord(replay->before, replay->stream);
    if (!result) result = cu->cuGraphLaunch(replay->exec, replay->stream);
    if (!result) result = cu->cuEventRecord(replay->after, replay->stream);
    if (!result) result = cu->cuEventSynchronize(replay->after);
    if (!result) result = cu->cuEventElapsedTime(&milliseconds, replay->before, replay->after);
    ctxkv__gpu_leave(replay->gpu, &scope);
    *seconds = milliseconds * 1e-3;
    return result ? ctxkv__cu_fail(cu, result, "replaying a CUDA graph") : CTXKV_OK;
}

static const enum ctxkv__kernel kernels[] = {
    CTXKV__KERNEL_floor_read, CTXKV__KERNEL_floor_copy, CTXKV__KERNEL_floor_products};

static ctxkv_status load_floors(ctxkv_device *device) {
    struct ctxkv__gpu_scope scope;
    ctxkv_status status = ctxkv__gpu_enter_slow(device->gpu, &scope, "loading kernels");
    if (status) return status;
    for (int i = 0; i < 3 && !status; i++) status = ctxkv__gpu_kernel(device->gpu, kernels[i]);
    ctxkv__gpu_leave(device->gpu, &scope);
    return status;
}

// One block of products fills an SM's registers; moving wants as many bytes in flight as fit.
static ctxkv_status launch_floor(
    ctxkv_device *device, ctxkv_floor kind, void *to, const void *from, size_t size, void *stream) {
    struct ctxkv__gpu_scope scope;
    bool products = kind == CTXKV_FLOOR_PRODUCTS;
    ctxkv_floor_params params = {
        .from = from,
        .to = to,
        .vectors = products ? 0 : (long long)(size / 16),
        .steps = products ? (int)size : 0};
    struct ctxkv__launch launch = {
        .kernel = kernels[kind],
        .grid = {(uint32_t)device->gpu->multiprocessors * (products ? 1 : 4), 1, 1},
        .threads = CTXKV_FLOOR_THREADS,
        .stream = stream,
        .params = &params};
    ctxkv_status status = ctxkv__gpu_enter(device->gpu, &scope);
    if (status) return status;
    status = ctxkv__gpu_launch(device->gpu, &launch);
    ctxkv__gpu_leave(device->gpu, &scope);
    return status;
}

static double products(const ctxkv_device *device, size_t steps) {
    return (double)device->gpu->multiprocessors * (double)steps * CTXKV_FLOOR_MACS;
}

static size_t cache_bytes(const ctxkv_device *device) {
    int bytes = 0;
    const struct ctxkv__cuda_device *gpu = device->gpu;
    if (gpu->cu->cuDeviceGetAttribute(&bytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, gpu->device))
        return 0;
    return bytes > 0 ? (size_t)bytes : 0;
}

const ctxkv_replay_ops *ctxkv_device_replay(const ctxkv_device *device) {
    static const ctxkv_replay_ops ops = {begin,       end,          run,      release,
                                         load_floors, launch_floor, products, cache_bytes};
    return device->cuda ? &ops : 0;
}
