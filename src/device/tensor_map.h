// SPDX-License-Identifier: Apache-2.0
// Tensor maps over BF16 operands: boxes that are 64 columns wide, in the swizzle of 128 bytes.
#ifndef CTXKV_DEVICE_TENSOR_MAP_H
#define CTXKV_DEVICE_TENSOR_MAP_H

#include "../cuda/tensor_map.h"
#include "gpu.h"

enum { CTXKV__MAP_RANK = 4 };

// Only where the driver has cuTensorMapEncodeTiled. Host work alone: also inside a capture. dims
// and box have `rank` numbers, the first of the columns; strides, in bytes, one less.
CUresult ctxkv__tensor_map(
    const struct ctxkv__cuda_device *gpu, ctxkv_tensor_map *map, const void *address, int rank,
    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box);

#endif
