// SPDX-License-Identifier: Apache-2.0
// Names the avx2 kernels that replace the tier below.
#include "../cpu.h"

void ctxkv__kernels_avx2(struct ctxkv__kernels *kernels) {
    kernels->norms = ctxkv__norms_avx2;
    kernels->projection = ctxkv__projection_avx2;
    kernels->store = ctxkv__store_avx2;
}
