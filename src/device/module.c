// SPDX-License-Identifier: Apache-2.0
// The embedded device code: one fatbin a .cu file, loaded when the first plan needs it.
#include "gpu.h"

#include <stdio.h>

#include "archs.h"

// embed.S puts each fatbin between ctxkv__fatbin_NAME and ctxkv__fatbin_NAME_end.
#define CTXKV_MODULE(name) extern const unsigned char ctxkv__fatbin_##name[];
#define CTXKV_KERNEL(module, name, shared)
#include "../cuda/kernels.inc"

static const struct {
    const unsigned char *code;
    const char *name;
} modules[] = {
#define CTXKV_MODULE(name) {ctxkv__fatbin_##name, #name},
#define CTXKV_KERNEL(module, name, shared)
#include "../cuda/kernels.inc"
};

static const struct {
    enum ctxkv__module module;
    const char *name;
    int shared; // bytes of dynamic shared memory it may ask for
} kernels[] = {
#define CTXKV_MODULE(name)
#define CTXKV_KERNEL(module, name, shared) {CTXKV__MODULE_##module, "ctxkv_" #name, shared},
#include "../cuda/kernels.inc"
};

static ctxkv_status no_code(const struct ctxkv__cuda_device *gpu, int module, CUresult result) {
    const char *name = 0;
    gpu->cu->cuGetErrorName(result, &name);
    return ctxkv__fail(
        CTXKV_NO_KERNEL,
        "cuda:%d (%s) is sm_%d with a driver for CUDA %d.%d; the %s kernels of this libctxkv are "
        "built for %s (%s)",
        gpu->ordinal, gpu->name, gpu->arch, gpu->driver_version / 1000,
        gpu->driver_version % 1000 / 10, modules[module].name, CTXKV__ARCHS,
        name ? name : "unknown error");
}

static ctxkv_status load_module(struct ctxkv__cuda_device *gpu, int module) {
    if (gpu->modules[module]) return CTXKV_OK;
    CUresult result =
        gpu->cu->cuLibraryLoadData(&gpu->modules[module], modules[module].code, 0, 0, 0, 0, 0, 0);
    if (!result) return CTXKV_OK;
    gpu->modules[module] = 0;
    switch ((int)result) {
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
        return no_code(gpu, module, result);
    default: {
        char doing[64];
        snprintf(doing, sizeof doing, "loading the %s kernels", modules[module].name);
        return ctxkv__cu_fail(gpu->cu, result, doing);
    }
    }
}

static ctxkv_status load_kernel(struct ctxkv__cuda_device *gpu, int kernel) {
    ctxkv_status status = load_module(gpu, kernels[kernel].module);
    if (status) return status;
    char doing[96];
    snprintf(doing, sizeof doing, "loading kernel %s", kernels[kernel].name);
    const struct ctxkv__driver *cu = gpu->cu;
    CUkernel handle;
    CUfunction function;
    CUresult result =
        cu->cuLibraryGetKernel(&handle, gpu->modules[kernels[kernel].module], kernels[kernel].name);
    // The library may have been accepted with no code that fits: that shows here.
    if (!result) result = cu->cuKernelGetFunction(&function, handle);
    if (result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_INVALID_IMAGE ||
        result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
        return no_code(gpu, kernels[kernel].module, result);
    if (!result && cu->cuFuncLoad) result = cu->cuFuncLoad(function);
    int own = 0, shared = kernels[kernel].shared;
    if (!result && shared)
        result = cu->cuFuncGetAttribute(&own, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function);
    // What the kernel declares itself counts, too.
    if (shared > gpu->shared_limit - own) shared = gpu->shared_limit - own;
    if (!result && shared > 48 * 1024)
        result = cu->cuFuncSetAttribute(
            function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
    if (result) return ctxkv__cu_fail(cu, result, doing);
    gpu->kernels[kernel] = function;
    return CTXKV_OK;
}

ctxkv_status ctxkv__gpu_kernel(struct ctxkv__cuda_device *gpu, enum ctxkv__kernel kernel) {
    ctxkv__lock_take(&gpu->lock);
    ctxkv_status status = gpu->kernels[kernel] ? CTXKV_OK : load_kernel(gpu, kernel);
    ctxkv__lock_give(&gpu->lock);
    return status;
}

bool ctxkv__gpu_has_module(struct ctxkv__cuda_device *gpu, enum ctxkv__module module) {
    ctxkv__lock_take(&gpu->lock);
    ctxkv_status status = load_module(gpu, module);
    ctxkv__lock_give(&gpu->lock);
    return !status;
}

void ctxkv__gpu_unload(struct ctxkv__cuda_device *gpu) {
    for (int m = 0; m < CTXKV__MODULES; m++)
        if (gpu->modules[m]) gpu->cu->cuLibraryUnload(gpu->modules[m]);
}
