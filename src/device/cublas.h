// SPDX-License-Identifier: Apache-2.0
// cuBLAS, loaded when a projection needs it: a few functions in a table.
#ifndef CTXKV_DEVICE_CUBLAS_H
#define CTXKV_DEVICE_CUBLAS_H

#include "gpu.h"

#define CTXKV__CUBLAS_WORKSPACE ((size_t)32 << 20)

struct ctxkv__cublas {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*version)(void *handle, int *version);
    int (*set_stream)(void *handle, void *stream);
    int (*set_workspace)(void *handle, void *workspace, size_t bytes);
    int (*gemm_strided_batched)(
        void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
        const void *a, int a_type, int lda, long long stride_a, const void *b, int b_type, int ldb,
        long long stride_b, const void *beta, void *c, int c_type, int ldc, long long stride_c,
        int batch, int compute, int algorithm);
    const char *(*text)(int status); // may be NULL
};

// The process's cuBLAS: a copy already loaded, else the option, CTXKV_CUBLAS, the usual names.
ctxkv_status ctxkv__cublas_get(const char *path, const struct ctxkv__cublas **cublas);
// Tests: use this table (NULL: the real one again).
void ctxkv__cublas_use(const struct ctxkv__cublas *fake);
// A handle of this device, and back: destroying one would wait for the device, which ends every
// capture, so that they are kept for later plans until the device is closed.
int ctxkv__cublas_take(
    const struct ctxkv__cublas *b, struct ctxkv__cuda_device *gpu, void **handle);
void ctxkv__cublas_give(
    const struct ctxkv__cublas *b, struct ctxkv__cuda_device *gpu, void *handle);
void ctxkv__cublas_close(struct ctxkv__cuda_device *gpu);
ctxkv_status ctxkv__cublas_fail(const struct ctxkv__cublas *b, int result, const char *doing);

#endif
