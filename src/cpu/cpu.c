// SPDX-License-Identifier: Apache-2.0
// CPU detection and the choice of a tier.
#include "cpu.h"

#include "../../include/ctxkv/ctxkv.h"

unsigned ctxkv__cpu_found(void) {
    unsigned found = CTXKV_CPU_SCALAR;
#if defined(CTXKV_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found |= CTXKV_CPU_AVX2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            found |= CTXKV_CPU_AVX512;
    }
#endif
    return found;
}

const char *ctxkv__cpu_tier_name(unsigned tier) {
    return tier == CTXKV_CPU_AVX512 ? "avx512" : tier == CTXKV_CPU_AVX2 ? "avx2" : "scalar";
}

void ctxkv__kernels_init(struct ctxkv__kernels *kernels, unsigned mask) {
    kernels->tier = CTXKV_CPU_SCALAR;
    kernels->norms = ctxkv__norms_ref;
    kernels->projection = ctxkv__projection_ref;
    kernels->store = ctxkv__store_ref;
#if defined(CTXKV_X86)
    unsigned allowed = ctxkv__cpu_found();
    if (mask) allowed &= mask;
    if (!(allowed & CTXKV_CPU_AVX2)) return;
    kernels->tier = CTXKV_CPU_AVX2;
    ctxkv__kernels_avx2(kernels);
    if (!(allowed & CTXKV_CPU_AVX512)) return;
    kernels->tier = CTXKV_CPU_AVX512;
    ctxkv__kernels_avx512(kernels);
#else
    (void)mask;
#endif
}
