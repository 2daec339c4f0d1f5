// SPDX-License-Identifier: Apache-2.0
// A CUDA driver and a cuBLAS made of plain memory.
#include "fake.h"

#include "cuda/decode_params.h"
#include "cuda/few_params.h"
#include "cuda/params.h"
#include "cuda/prefill_params.h"
#include "cuda/store_general.h"

#include <stdlib.h>
#include <string.h>

#define MOST_KERNELS 256

struct fake_state fake;
static CUcontext stack[8];
static char names[MOST_KERNELS][64];
static int name_count;

void fake_reset(void) {
    memset(&fake, 0, sizeof fake);
    fake.devices = 1;
    fake.major = 9;
    fake.version = 13000;
    fake.fail_at = -1;
}

bool fake_clean(void) {
    return !fake.allocations && !fake.streams && !fake.libraries && !fake.retained &&
           !fake.pushed && !fake.handles && !fake.relaxed && !fake.graphs && !fake.events &&
           !fake.recording;
}

static bool fails(const char *name) {
    long call = fake.calls++;
    if (call == fake.fail_at) return true;
    return fake.fail_name && !strcmp(fake.fail_name, name) && fake.named_calls++ >= fake.fail_after;
}
#define STEP(name)                                                                                 \
    do {                                                                                           \
        if (fails(#name)) return fake.fail_with;                                                   \
    } while (0)
#define SLOW(name)                                                                                 \
    fake.slow_calls++;                                                                             \
    STEP(name)

// A call that ends captures unless the thread has relaxed its mode, and one that always does.
#define UNLESS_RELAXED()                                                                           \
    do {                                                                                           \
        if (fake.other_capturing && !fake.relaxed) {                                               \
            fake.capture_ended = true;                                                             \
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;                                          \
        }                                                                                          \
    } while (0)
static void ends_captures(void) {
    if (fake.other_capturing) fake.capture_ended = true;
}

static CUresult f_cuInit(unsigned flags) {
    (void)flags;
    STEP(cuInit);
    return fake.init;
}
static CUresult f_cuDriverGetVersion(int *version) {
    STEP(cuDriverGetVersion);
    *version = fake.version;
    return 0;
}
static CUresult f_cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return 0;
}
static CUresult f_cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "the fake driver was told to fail";
    return 0;
}
static CUresult f_cuDeviceGetCount(int *count) {
    STEP(cuDeviceGetCount);
    *count = fake.devices;
    return 0;
}
static CUresult f_cuDeviceGet(CUdevice *device, int ordinal) {
    STEP(cuDeviceGet);
    *device = ordinal;
    return 0;
}
static CUresult f_cuDeviceGetName(char *name, int size, CUdevice device) {
    (void)device;
    STEP(cuDeviceGetName);
    strncpy(name, "Fake GPU", (size_t)size);
    return 0;
}
static CUresult f_cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    (void)device;
    STEP(cuDeviceGetAttribute);
    *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? fake.major
             : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? fake.minor
             : which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? 132
                                                                     : 232448;
    return 0;
}
static CUresult f_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    STEP(cuDevicePrimaryCtxRetain);
    *context = (CUcontext)(uintptr_t)(0x1000 + device);
    fake.retained++;
    return 0;
}
static CUresult f_cuDevicePrimaryCtxRelease(CUdevice device) {
    (void)device;
    fake.retained--;
    return 0;
}
static CUresult f_cuCtxGetCurrent(CUcontext *context) {
    STEP(cuCtxGetCurrent);
    *context = fake.current;
    return 0;
}
static CUresult f_cuCtxGetDevice(CUdevice *device) {
    STEP(cuCtxGetDevice);
    *device = fake.current_device;
    return 0;
}
static CUresult f_cuCtxPushCurrent(CUcontext context) {
    STEP(cuCtxPushCurrent);
    stack[fake.pushed++] = fake.current;
    fake.current = context;
    return 0;
}
static CUresult f_cuCtxPopCurrent(CUcontext *context) {
    *context = fake.current;
    fake.current = stack[--fake.pushed];
    return 0;
}
static CUresult f_cuCtxSynchronize(void) {
    SLOW(cuCtxSynchronize);
    ends_captures();
    return fake.other_capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : 0;
}
static CUresult f_cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    SLOW(cuMemAlloc);
    UNLESS_RELAXED();
    if (fake.most_bytes && bytes > fake.most_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)(uintptr_t)memory;
    fake.allocations++;
    fake.allocated_ever++;
    return 0;
}
static CUresult f_cuMemFree(CUdeviceptr address) {
    fake.slow_calls++;
    UNLESS_RELAXED();
    free((void *)(uintptr_t)address);
    fake.allocations--;
    return 0;
}
static CUresult f_cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n, CUstream stream) {
    (void)stream;
    SLOW(cuMemcpyHtoDAsync);
    memcpy((void *)(uintptr_t)to, from, n);
    return 0;
}
static CUresult f_cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n, CUstream stream) {
    (void)stream;
    SLOW(cuMemcpyDtoHAsync);
    memcpy(to, (void *)(uintptr_t)from, n);
    return 0;
}
static CUresult f_cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    (void)stream;
    SLOW(cuMemcpyDtoDAsync);
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, n);
    return 0;
}
static CUresult f_cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
    (void)stream;
    SLOW(cuMemsetD8Async);
    memset((void *)(uintptr_t)to, value, n);
    return 0;
}
static CUresult f_cuStreamCreate(CUstream *stream, unsigned flags) {
    (void)flags;
    SLOW(cuStreamCreate);
    *stream = (CUstream)(uintptr_t)0x2000;
    fake.streams++;
    return 0;
}
static CUresult f_cuStreamDestroy(CUstream stream) {
    (void)stream;
    fake.streams--;
    return 0;
}
static CUresult f_cuStreamSynchronize(CUstream stream) {
    (void)stream;
    SLOW(cuStreamSynchronize);
    UNLESS_RELAXED();
    return 0;
}
static CUresult f_cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    (void)mode;
    SLOW(cuStreamBeginCapture);
    if (!stream || fake.recording) return CUDA_ERROR_ILLEGAL_STATE;
    fake.recording = stream;
    fake.recorded = 0;
    return 0;
}
static CUresult f_cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    if (stream != fake.recording) return CUDA_ERROR_ILLEGAL_STATE;
    fake.recording = 0;
    *graph = 0;
    SLOW(cuStreamEndCapture);
    *graph = (CUgraph)(uintptr_t)0x4000;
    fake.graphs++;
    return 0;
}
static CUresult f_cuGraphInstantiateWithFlags(
    CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    (void)flags;
    SLOW(cuGraphInstantiateWithFlags);
    if (graph != (CUgraph)(uintptr_t)0x4000) return CUDA_ERROR_INVALID_HANDLE;
    // A replay takes a millisecond a launch.
    *exec = (CUgraphExec)(uintptr_t)(0x5000 + fake.recorded);
    fake.graphs++;
    return 0;
}
static CUresult f_cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    STEP(cuGraphLaunch);
    if (!exec || !stream) return CUDA_ERROR_INVALID_HANDLE;
    fake.clock += (float)((uintptr_t)exec - 0x5000);
    return 0;
}
static CUresult f_cuGraphExecDestroy(CUgraphExec exec) {
    (void)exec;
    fake.graphs--;
    return 0;
}
static CUresult f_cuGraphDestroy(CUgraph graph) {
    (void)graph;
    fake.graphs--;
    return 0;
}
static CUresult f_cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    SLOW(cuEventCreate);
    float *at = calloc(1, sizeof *at);
    *event = (CUevent)(void *)at;
    fake.events++;
    return 0;
}
static CUresult f_cuEventRecord(CUevent event, CUstream stream) {
    (void)stream;
    STEP(cuEventRecord);
    *(float *)(void *)event = fake.clock;
    return 0;
}
static CUresult f_cuEventSynchronize(CUevent event) {
    (void)event;
    STEP(cuEventSynchronize);
    return 0;
}
static CUresult f_cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    STEP(cuEventElapsedTime);
    *milliseconds = *(float *)(void *)to - *(float *)(void *)from;
    return 0;
}
static CUresult f_cuEventDestroy(CUevent event) {
    free(event);
    fake.events--;
    return 0;
}
static CUresult f_cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    STEP(cuStreamIsCapturing);
    if (stream == CU_STREAM_LEGACY && fake.legacy_capturing)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = stream == CU_STREAM_PER_THREAD && fake.thread_capturing
                  ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                  : CU_STREAM_CAPTURE_STATUS_NONE;
    return 0;
}
static CUresult f_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    // Going back cannot fail: there would be nothing left to do.
    if (*mode == CU_STREAM_CAPTURE_MODE_RELAXED) STEP(cuThreadExchangeStreamCaptureMode);
    CUstreamCaptureMode old =
        fake.relaxed ? CU_STREAM_CAPTURE_MODE_RELAXED : CU_STREAM_CAPTURE_MODE_GLOBAL;
    fake.relaxed = *mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    *mode = old;
    return 0;
}
static CUresult f_cuLibraryLoadData(
    CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values, unsigned jit_count,
    CUlibraryOption *options, void **values, unsigned count) {
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    SLOW(cuLibraryLoadData);
    if (fake.no_code) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    *library = (CUlibrary)(uintptr_t)code;
    fake.libraries++;
    return 0;
}
static CUresult f_cuLibraryUnload(CUlibrary library) {
    (void)library;
    UNLESS_RELAXED();
    fake.libraries--;
    return 0;
}
static CUresult f_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    (void)library;
    SLOW(cuLibraryGetKernel);
    int i = 0;
    while (i < name_count && strcmp(names[i], name)) i++;
    if (i == MOST_KERNELS) return CUDA_ERROR_NOT_FOUND;
    if (i == name_count) strncpy(names[name_count++], name, sizeof names[0] - 1);
    *kernel = (CUkernel)(void *)names[i];
    return 0;
}
static CUresult f_cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    SLOW(cuKernelGetFunction);
    *function = (CUfunction)(void *)kernel;
    return 0;
}
static CUresult f_cuFuncLoad(CUfunction function) {
    (void)function;
    SLOW(cuFuncLoad);
    return 0;
}
enum { OWN_SHARED = 3000 }; // what every kernel declares for itself

static CUresult f_cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    (void)function;
    SLOW(cuFuncGetAttribute);
    *value = which == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? OWN_SHARED : 0;
    return 0;
}
static CUresult f_cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    (void)function, (void)which;
    SLOW(cuFuncSetAttribute);
    return value > 232448 - OWN_SHARED ? CUDA_ERROR_INVALID_VALUE : 0;
}
// The size of a kernel's one parameter, by the beginning of its name.
static size_t param_bytes(const char *kernel) {
    static const struct {
        const char *start;
        size_t bytes;
    } sizes[] = {
        {"ctxkv_norms_rms", sizeof(ctxkv_rms_params)},
        {"ctxkv_norms_", sizeof(ctxkv_norms_params)},
        {"ctxkv_projection_", sizeof(ctxkv_projection_params)},
        {"ctxkv_store_any", sizeof(ctxkv_store_any)},
        {"ctxkv_store_general", sizeof(ctxkv_store_general)},
        {"ctxkv_store_", sizeof(ctxkv_store_fast)},
        {"ctxkv_prenorm", sizeof(ctxkv_prenorm_params)},
        {"ctxkv_prefill_", sizeof(ctxkv_prefill_params)},
        {"ctxkv_decode_pack", sizeof(ctxkv_decode_pack_params)},
        {"ctxkv_decode_n", sizeof(ctxkv_decode_params)},
        {"ctxkv_decode_fused_", sizeof(ctxkv_decode_params)},
        {"ctxkv_few_pack", sizeof(ctxkv_few_pack_params)},
        {"ctxkv_few_", sizeof(ctxkv_few_params)},
        {"ctxkv_floor_", sizeof(ctxkv_floor_params)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!strncmp(kernel, sizes[i].start, strlen(sizes[i].start))) return sizes[i].bytes;
    return 0;
}

static CUresult f_cuLaunchKernelEx(
    const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    (void)extra;
    STEP(cuLaunchKernelEx);
    if (fake.recording && config->hStream != fake.recording) return CUDA_ERROR_ILLEGAL_STATE;
    if (fake.recording) fake.recorded++;
    if (fake.launches == FAKE_LAUNCHES && fake.many_launches) fake.launches = 0;
    if (fake.launches == FAKE_LAUNCHES) return CUDA_ERROR_OUT_OF_MEMORY;
    if (config->sharedMemBytes > 232448 - OWN_SHARED) return CUDA_ERROR_INVALID_VALUE;
    struct fake_launch *l = &fake.launch[fake.launches++];
    *l = (struct fake_launch){
        .kernel = (const char *)(void *)function,
        .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
        .threads = config->blockDimX * config->blockDimY * config->blockDimZ,
        .shared = config->sharedMemBytes,
        .attributes = config->numAttrs,
        .programmatic = -1,
        .stream = config->hStream,
    };
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            l->programmatic = config->attrs[i].value.programmaticStreamSerializationAllowed;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            l->cluster[0] = config->attrs[i].value.clusterDim.x;
            l->cluster[1] = config->attrs[i].value.clusterDim.y;
        }
    size_t bytes = param_bytes(l->kernel);
    memcpy(l->params, params[0], bytes);
    return 0;
}
static CUresult f_cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    (void)interleave, (void)promotion;
    STEP(cuTensorMapEncodeTiled);
    struct fake_map m = {
        .rank = (int)rank, .address = address, .type = type, .swizzle = swizzle, .fill = fill};
    // What a driver asks of them.
    bool sane = !((uintptr_t)address % 16) && rank >= 1 && rank <= 5 && box[0] * 2 <= 128;
    for (cuuint32_t i = 0; i < rank; i++) {
        m.dims[i] = dims[i], m.box[i] = box[i], m.steps[i] = element_strides[i];
        sane = sane && dims[i] >= 1 && dims[i] <= (cuuint64_t)1 << 32 && box[i] >= 1 &&
               box[i] <= 256 && element_strides[i] == 1;
        if (i + 1 == rank) break;
        m.strides[i] = strides[i];
        sane = sane && strides[i] > 0 && !(strides[i] % 16) && strides[i] < (cuuint64_t)1 << 40;
    }
    if (!sane) return CUDA_ERROR_INVALID_VALUE;
    fake.map = m;
    fake.maps++;
    memset(map, 0, sizeof *map);
    memcpy(map, &fake.maps, sizeof fake.maps);
    return 0;
}

const struct ctxkv__driver fake_driver = {
#define CTXKV_CU(name, version, required, params) .name = f_##name,
#include "device/symbols.inc"
#undef CTXKV_CU
};

void *fake_symbol(const char *name) {
    void *address = 0;
#define CTXKV_CU(symbol, version, required, params)                                                \
    if (!strcmp(name, #symbol)) memcpy(&address, &fake_driver.symbol, sizeof address);
#include "device/symbols.inc"
#undef CTXKV_CU
    return address;
}

static int b_create(void **handle) {
    fake.slow_calls++;
    if (fake.other_capturing && !fake.relaxed) return 1;
    if (fake.cublas_fail_with) return fake.cublas_fail_with;
    *handle = (void *)(uintptr_t)0x3000;
    fake.handles++;
    return 0;
}
static int b_destroy(void *handle) {
    (void)handle;
    ends_captures();
    fake.handles--;
    return 0;
}
static int b_version(void *handle, int *version) {
    (void)handle;
    *version = 130100;
    return 0;
}
static int b_set_stream(void *handle, void *stream) {
    (void)handle, (void)stream;
    return 0;
}
static int b_set_workspace(void *handle, void *workspace, size_t bytes) {
    (void)handle, (void)bytes;
    return workspace ? 0 : 7;
}
static int b_gemm(
    void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
    const void *a, int a_type, int lda, long long stride_a, const void *b, int b_type, int ldb,
    long long stride_b, const void *beta, void *c, int c_type, int ldc, long long stride_c,
    int batch, int compute, int algorithm) {
    (void)handle, (void)k, (void)alpha, (void)a, (void)stride_a, (void)b, (void)stride_b;
    (void)beta, (void)c, (void)stride_c, (void)algorithm;
    if (fake.cublas_fail_with) return fake.cublas_fail_with;
    bool sane = transpose_a == 1 && transpose_b == 0 && a_type == 14 && b_type == 14 &&
                c_type == 14 && compute == 68 && lda >= k && ldb >= k && ldc >= m;
    fake.gemms++;
    fake.gemm_batch = batch;
    fake.gemm_columns = m;
    fake.gemm_rows = n;
    return sane ? 0 : 7;
}
const struct ctxkv__cublas fake_cublas = {b_create,        b_destroy, b_version, b_set_stream,
                                          b_set_workspace, b_gemm,    0};
