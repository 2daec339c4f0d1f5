// SPDX-License-Identifier: Apache-2.0
// A projection alone, of at most 64 rows, by the kernels of few.cu.
#ifndef CTXKV_CHAIN_FEW_PARTS_H
#define CTXKV_CHAIN_FEW_PARTS_H

#include "cuda_plan.h"

struct ctxkv__few;
// Whether the plan's shape is one at which it was found faster than cuBLAS.
bool ctxkv__few_pays(const struct ctxkv_projection *plan);
// NULL without an error where the kernels do not know the plan or there is no room.
ctxkv_status ctxkv__few_create(struct ctxkv_projection *plan, struct ctxkv__few **few);
void ctxkv__few_destroy(const struct ctxkv_projection *plan, struct ctxkv__few *few);
size_t ctxkv__few_memory(const struct ctxkv__few *few);
// Up to 64 rows, and what a tensor map can say of x.
bool ctxkv__few_takes_run(const struct ctxkv__few *few, const struct ctxkv__projection_call *call);
ctxkv_status ctxkv__few_launch(
    const struct ctxkv_projection *plan, const struct ctxkv__few *few,
    const struct ctxkv__projection_call *call);

#endif
