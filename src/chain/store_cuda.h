// SPDX-License-Identifier: Apache-2.0
// The general store's side of a store plan on a CUDA device.
#ifndef CTXKV_CHAIN_STORE_CUDA_H
#define CTXKV_CHAIN_STORE_CUDA_H

#include "cuda_plan.h"

enum ctxkv__kernel ctxkv__cuda_store_general_kernel(int64_t head_dim);
ctxkv_status ctxkv__cuda_store_general_launch(
    const struct ctxkv_store *plan, const struct ctxkv__store_call *call);

#endif
