// SPDX-License-Identifier: Apache-2.0
// FP32 to and from FP16, FP32 to FP8, as caches and cos/sin tables hold them (docs/op/store.md).
#ifndef CTXKV_CUDA_NARROW_CUH
#define CTXKV_CUDA_NARROW_CUH

#include "narrow.h"
#include "prim.cuh"

static __device__ __forceinline__ float fp16_value(u16 h) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
    return v;
}
// Element 0 of a pair is in the low half. NaN to 0x7FFF, overflow to infinity.
static __device__ __forceinline__ u32 fp16_pack(float low, float high) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
}

// Two FP8 values in 16 bits, element 0 in the low byte; saturating, NaN to 0x7F.
template <bool E5M2> static __device__ __forceinline__ u32 fp8_pack(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 w;
    if (E5M2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(w) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(high), "f"(low));
    return w;
#else
    const u32 a = __float_as_uint(low), b = __float_as_uint(high);
    return E5M2 ? ctxkv_narrow_e5m2(a) | ctxkv_narrow_e5m2(b) << 8
                : ctxkv_narrow_e4m3(a) | ctxkv_narrow_e4m3(b) << 8;
#endif
}
template <bool E5M2>
static __device__ __forceinline__ uint2 fp8_pack8(const float *v, float scale) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = fp8_pack<E5M2>(__fdiv_rn(v[2 * i], scale), __fdiv_rn(v[2 * i + 1], scale));
    return make_uint2(w[0] | w[1] << 16, w[2] | w[3] << 16);
}

#endif
