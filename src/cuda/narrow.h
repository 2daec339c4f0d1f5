// SPDX-License-Identifier: Apache-2.0
// FP32 to FP8 in integers, for GPUs without the instruction (before sm_89). Shared by C (for its
// test) and CUDA code.
#ifndef CTXKV_CUDA_NARROW_H
#define CTXKV_CUDA_NARROW_H

#ifdef __CUDACC__
#define CTXKV_NARROW static __device__ __forceinline__
#else
#define CTXKV_NARROW static inline
#endif

// The bits of an FP32 value as a code of 7 bits and a sign: round to nearest even, saturating (an
// infinity, too); a NaN is 0x7F. least: the exponent of the format's smallest normal value; most:
// its largest finite code.
CTXKV_NARROW unsigned ctxkv_narrow(unsigned bits, int mantissa_bits, int least, unsigned most) {
    const unsigned magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7f800000u) return 0x7fu;
    const int field = (int)(magnitude >> 23), below = least + 127 - field;
    unsigned code;
    if (below <= 0) {
        // Rounding carries into the exponent by itself; re-bias, then drop the low bits.
        const int drop = 23 - mantissa_bits;
        const unsigned biased = magnitude - ((unsigned)(least + 126) << 23);
        code = (biased + (1u << (drop - 1)) - 1 + (biased >> drop & 1u)) >> drop;
    } else {
        const int drop = 23 - mantissa_bits + below;
        if (drop > 24) return sign;
        const unsigned significand = (magnitude & 0x7fffffu) | 0x800000u;
        code = (significand + (1u << (drop - 1)) - 1 + (significand >> drop & 1u)) >> drop;
    }
    return sign | (code < most ? code : most);
}

CTXKV_NARROW unsigned ctxkv_narrow_e4m3(unsigned bits) {
    return ctxkv_narrow(bits, 3, -6, 0x7eu);
}
CTXKV_NARROW unsigned ctxkv_narrow_e5m2(unsigned bits) {
    return ctxkv_narrow(bits, 2, -14, 0x7bu);
}

#endif
