// SPDX-License-Identifier: Apache-2.0
// The decode kernels' host side.
#ifndef CTXKV_CHAIN_DECODE_PARTS_H
#define CTXKV_CHAIN_DECODE_PARTS_H

#include "../cuda/decode_params.h"
#include "../cuda/decode_plan.h"
#include "cuda_plan.h"

struct ctxkv__decode_shape ctxkv__decode_shape_of(const struct ctxkv_projection *plan);
// CTXKV__KERNELS: there is none.
enum ctxkv__kernel ctxkv__decode_kernel(const struct ctxkv__decode_cut *cut);
// Loads every kernel that a run of 1..64 rows may ask for, and decode_pack.
ctxkv_status ctxkv__decode_load(
    struct ctxkv__cuda_device *gpu, const struct ctxkv__decode_shape *shape);
// Enqueues packing all layers' weights; *bytes grows by what *to then holds.
ctxkv_status ctxkv__decode_pack_weights(
    const struct ctxkv_projection *plan, const struct ctxkv__decode_packing *packing,
    CUdeviceptr *to, size_t *bytes);

#endif
