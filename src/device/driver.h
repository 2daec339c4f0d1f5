// SPDX-License-Identifier: Apache-2.0
// The CUDA driver as a table of functions, loaded when a CUDA device is first asked for.
#ifndef CTXKV_DEVICE_DRIVER_H
#define CTXKV_DEVICE_DRIVER_H

#include <cuda.h>
// cuda.h renames functions to their newest versions; the table has the plain names.
#undef cuDeviceGetName
#undef cuDevicePrimaryCtxRelease
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuMemAlloc
#undef cuMemFree
#undef cuMemcpyHtoDAsync
#undef cuMemcpyDtoHAsync
#undef cuMemcpyDtoDAsync
#undef cuMemsetD8Async
#undef cuStreamDestroy
#undef cuStreamIsCapturing
#undef cuStreamSynchronize
#undef cuThreadExchangeStreamCaptureMode
#undef cuLaunchKernelEx
#undef cuCtxGetDevice
#undef cuStreamBeginCapture
#undef cuEventElapsedTime
#undef cuEventDestroy

#include "../api/error.h"

#define CTXKV__DRIVER_FLOOR 12000

struct ctxkv__driver {
#define CTXKV_CU(name, version, required, params) CUresult(CUDAAPI *name) params;
#include "symbols.inc"
#undef CTXKV_CU
};

// The process's driver, loaded and initialised once; NULL with the reason as status and message.
const struct ctxkv__driver *ctxkv__driver_get(ctxkv_status *status);
// Tests: use this table from now on (NULL: the real driver again). It must outlive its devices.
void ctxkv__driver_use(const struct ctxkv__driver *fake);

// Checks a table that is not initialised yet: cuInit, version. Exposed for the tests.
ctxkv_status ctxkv__driver_start(const struct ctxkv__driver *cu);

// A driver error as a sentence: what was being done, the error's name and text.
ctxkv_status ctxkv__cu_fail(const struct ctxkv__driver *cu, CUresult result, const char *doing);

#endif
