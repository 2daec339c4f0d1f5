// SPDX-License-Identifier: Apache-2.0
// Loads libcuda.so.1 and resolves the functions of symbols.inc, each at a pinned version.
#include "driver.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

#include "../api/lock.h"

static struct ctxkv__driver real;
static const struct ctxkv__driver *in_use;
static ctxkv_status load_status;
static char load_message[400];
static bool loaded;
static struct ctxkv__lock load_lock;

typedef CUresult(CUDAAPI *get_proc_fn)(
    const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

ctxkv_status ctxkv__cu_fail(const struct ctxkv__driver *cu, CUresult result, const char *doing) {
    const char *name = 0, *text = 0;
    if (cu->cuGetErrorName) cu->cuGetErrorName(result, &name);
    if (cu->cuGetErrorString) cu->cuGetErrorString(result, &text);
    ctxkv_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? CTXKV_OUT_OF_MEMORY : CTXKV_DRIVER;
    if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ||
        result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        status = CTXKV_CAPTURING;
    return ctxkv__fail(
        status, "%s: %s (%d): %s", doing, name ? name : "unknown CUDA error", (int)result,
        text ? text : "no description");
}

// Errors of cuInit that mean "nothing to work with here".
static ctxkv_status init_failed(const struct ctxkv__driver *cu, CUresult result) {
    switch ((int)result) {
    case 34: // CUDA_ERROR_STUB_LIBRARY
        return ctxkv__fail(
            CTXKV_NO_DEVICE,
            "no usable GPU: the libcuda.so.1 found is the toolkit's stub, not a driver");
    case CUDA_ERROR_NO_DEVICE:
        return ctxkv__fail(CTXKV_NO_DEVICE, "no usable GPU: the NVIDIA driver sees no device");
    case 35: // insufficient driver
        return ctxkv__fail(
            CTXKV_NO_DEVICE,
            "no usable GPU: the kernel's NVIDIA driver is older than libcuda.so.1");
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        return ctxkv__fail(
            CTXKV_NO_DEVICE,
            "no usable GPU: the NVIDIA driver in the kernel and libcuda.so.1 differ in version");
    default:
        ctxkv__cu_fail(cu, result, "no usable GPU: cuInit failed");
        return CTXKV_NO_DEVICE;
    }
}

ctxkv_status ctxkv__driver_start(const struct ctxkv__driver *cu) {
    CUresult result = cu->cuInit(0);
    if (result) return init_failed(cu, result);
    int version = 0;
    result = cu->cuDriverGetVersion(&version);
    if (result) return ctxkv__cu_fail(cu, result, "reading the driver's version");
    if (version >= CTXKV__DRIVER_FLOOR) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_NO_DEVICE, "the NVIDIA driver supports CUDA %d.%d, must be at least %d.%d",
        version / 1000, version % 1000 / 10, CTXKV__DRIVER_FLOOR / 1000,
        CTXKV__DRIVER_FLOOR % 1000 / 10);
}

static ctxkv_status resolve(get_proc_fn get_proc, struct ctxkv__driver *cu) {
    CUdriverProcAddressQueryResult found;
    void *address;
#define CTXKV_CU(name, version, required, params)                                                  \
    address = 0;                                                                                   \
    if (get_proc(#name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &found) || !address) {     \
        if (required)                                                                              \
            return ctxkv__fail(                                                                    \
                CTXKV_NO_DEVICE,                                                                   \
                "the NVIDIA driver has no %s of CUDA %d.%d, must be at least "                     \
                "version 12.0",                                                                    \
                #name, version / 1000, version % 1000 / 10);                                       \
        address = 0;                                                                               \
    }                                                                                              \
    memcpy(&cu->name, &address, sizeof address);
#include "symbols.inc"
#undef CTXKV_CU
    return CTXKV_OK;
}

static ctxkv_status load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        return ctxkv__fail(
            CTXKV_NO_DEVICE, "no NVIDIA driver: libcuda.so.1 cannot be loaded (%.200s)",
            why ? why : "unknown reason");
    }
    void *address = dlsym(library, "cuGetProcAddress_v2");
    if (!address)
        return ctxkv__fail(
            CTXKV_NO_DEVICE, "the NVIDIA driver is older than CUDA 12.0, must be at least 12.0");
    get_proc_fn get_proc;
    memcpy(&get_proc, &address, sizeof address);
    ctxkv_status status = resolve(get_proc, &real);
    // The library stays loaded: its threads and handlers may outlive any close.
    return status ? status : ctxkv__driver_start(&real);
}

const struct ctxkv__driver *ctxkv__driver_get(ctxkv_status *status) {
    ctxkv__lock_take(&load_lock);
    if (!in_use && !loaded) {
        load_status = load();
        if (load_status) strncpy(load_message, ctxkv_last_error(), sizeof load_message - 1);
        loaded = true;
    }
    const struct ctxkv__driver *cu = in_use ? in_use : load_status ? 0 : &real;
    ctxkv__lock_give(&load_lock);
    *status = CTXKV_OK;
    if (!cu)
        *status = ctxkv__fail(load_status, "%s", load_message);
    else if (cu == in_use)
        *status = ctxkv__driver_start(cu);
    return *status ? 0 : cu;
}

void ctxkv__driver_use(const struct ctxkv__driver *fake) {
    ctxkv__lock_take(&load_lock);
    in_use = fake;
    ctxkv__lock_give(&load_lock);
}
