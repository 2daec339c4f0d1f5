// SPDX-License-Identifier: Apache-2.0
#include "tensor_map.h"

#include <string.h>

CUresult ctxkv__tensor_map(
    const struct ctxkv__cuda_device *gpu, ctxkv_tensor_map *map, const void *address, int rank,
    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box) {
    const cuuint32_t steps[CTXKV__MAP_RANK] = {1, 1, 1, 1};
    CUtensorMap m;
    CUresult result = gpu->cu->cuTensorMapEncodeTiled(
        &m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)rank, (void *)(uintptr_t)address, dims,
        strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (!result) memcpy(map, &m, sizeof *map);
    return result;
}
