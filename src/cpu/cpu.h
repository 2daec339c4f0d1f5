// SPDX-License-Identifier: Apache-2.0
// CPU tiers: the scalar truth first, overwritten upwards by what the CPU has and the mask allows.
#ifndef CTXKV_CPU_CPU_H
#define CTXKV_CPU_CPU_H

#include "../ops/norms.h"
#include "../ops/projection.h"
#include "../ops/store.h"

struct ctxkv__kernels {
    unsigned tier; // CTXKV_CPU_* bit of the best tier in use
    ctxkv__norms_fn *norms;
    ctxkv__projection_fn *projection;
    ctxkv__store_fn *store;
};

// CTXKV_CPU_* bits that this CPU has (scalar always).
unsigned ctxkv__cpu_found(void);
const char *ctxkv__cpu_tier_name(unsigned tier);
// The kernels of the best tier in found & mask; mask 0 means all.
void ctxkv__kernels_init(struct ctxkv__kernels *kernels, unsigned mask);

// Each defined in its tier's folder; sets what that tier has.
void ctxkv__kernels_avx2(struct ctxkv__kernels *kernels);
void ctxkv__kernels_avx512(struct ctxkv__kernels *kernels);

ctxkv__norms_fn ctxkv__norms_avx2, ctxkv__norms_avx512;
ctxkv__projection_fn ctxkv__projection_avx2, ctxkv__projection_avx512;
ctxkv__store_fn ctxkv__store_avx2, ctxkv__store_avx512;

#endif
