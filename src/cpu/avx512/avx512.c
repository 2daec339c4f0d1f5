// SPDX-License-Identifier: Apache-2.0
// Names the avx512 kernels that replace the tier below.
#include "../cpu.h"

void ctxkv__kernels_avx512(struct ctxkv__kernels *kernels) {
    kernels->norms = ctxkv__norms_avx512;
    kernels->projection = ctxkv__projection_avx512;
    kernels->store = ctxkv__store_avx512;
}
