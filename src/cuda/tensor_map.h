// SPDX-License-Identifier: Apache-2.0
// A tensor map as the driver encodes it, for structs shared by the host and the kernels.
#ifndef CTXKV_CUDA_TENSOR_MAP_H
#define CTXKV_CUDA_TENSOR_MAP_H

#ifdef __CUDACC__
#define CTXKV_TENSOR_MAP_ALIGN __align__(64)
#else
#define CTXKV_TENSOR_MAP_ALIGN _Alignas(64)
#endif
typedef struct {
    CTXKV_TENSOR_MAP_ALIGN unsigned long long opaque[16];
} ctxkv_tensor_map;

#endif
