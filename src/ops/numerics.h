// SPDX-License-Identifier: Apache-2.0
// The named arithmetic of the chain: BF16, fma, the GPU's rsqrt, one tensor-core step (SPEC 3).
#ifndef CTXKV_OPS_NUMERICS_H
#define CTXKV_OPS_NUMERICS_H

#include <stdint.h>
#include <string.h>

static inline uint32_t ctxkv__bits(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}

static inline float ctxkv__float(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}

static inline float ctxkv__fma(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}

static inline float ctxkv__from_bf16(uint16_t h) {
    return ctxkv__float((uint32_t)h << 16);
}

static inline uint16_t ctxkv__to_bf16(float x) {
    uint32_t b = ctxkv__bits(x);
    if ((b & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
    return (uint16_t)((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16);
}

// Operands may lie at any byte address (a file's tensors do), so they are read by copying.
static inline uint16_t ctxkv__load16(const void *p, int64_t i) {
    uint16_t h;
    memcpy(&h, (const char *)p + 2 * i, 2);
    return h;
}

static inline float ctxkv__load_bf16(const void *p, int64_t i) {
    return ctxkv__from_bf16(ctxkv__load16(p, i));
}

static inline void ctxkv__store16(void *p, int64_t i, uint16_t h) {
    memcpy((char *)p + 2 * i, &h, 2);
}

static inline float ctxkv__load_float(const void *p, int64_t i) {
    uint32_t b;
    memcpy(&b, (const char *)p + 4 * i, 4);
    return ctxkv__float(b);
}

static inline float ctxkv__round_bf16(float x) {
    return ctxkv__from_bf16(ctxkv__to_bf16(x));
}

// FP16 and FP8, to nearest even; NaN to 0x7FFF and 0x7F. FP16 overflows to infinity, FP8 saturates
// (infinities too), as cvt.rn.satfinite does.
uint16_t ctxkv__to_fp16(float x);
float ctxkv__from_fp16(uint16_t h);
uint8_t ctxkv__to_e4m3(float x);
uint8_t ctxkv__to_e5m2(float x);

#define CTXKV__NAN_BITS 0x7FFFFFFFu

float ctxkv__rsqrt(float x);     // rsqrt.approx.f32
float ctxkv__rsqrt_ftz(float x); // rsqrt.approx.ftz.f32
// One mma.m16n8k16 step for one output: a and b are 16 BF16 values each, at any address.
float ctxkv__mma16(const void *a, const void *b, float acc);
// The truncated square of the rsqrt model: columns below 19 of the partial products dropped.
uint32_t ctxkv__rsqrt_square(uint32_t x17);

#endif
