// SPDX-License-Identifier: Apache-2.0
// The GPU's approximate rsqrt and its tensor-core step in integers; exact models (SPEC 3.2, 3.3).
#include "numerics.h"

static const int32_t rsqrt_segments[128][3] = {
#include "rsqrt_table.inc"
};

uint32_t ctxkv__rsqrt_square(uint32_t x) {
    // In units of 2^19. Among bits 9 and up only bit 9's own square is dropped, which a shift does.
    // Of a lower bit i the pairs with bit 18 - i and up remain, and pair (i, j) is worth 2^(i+j+1).
    uint32_t high = x >> 9, sum = (high * high) >> 1;
    for (uint32_t i = 2; i < 9; i++) sum += (high >> (9 - i)) & (0u - ((x >> i) & 1u));
    return sum;
}

// x: a positive normal number, or a subnormal's normalised significand with its exponent.
static float rsqrt_normal(int exponent, uint32_t mantissa) {
    int odd = exponent & 1;
    int k = (exponent - odd) / 2;
    if (!odd && mantissa == 0) return ctxkv__float((uint32_t)(127 - k) << 23);
    const int32_t *c = rsqrt_segments[odd * 64 + (mantissa >> 17)];
    int64_t x = mantissa & 0x1FFFF;
    int64_t square = ctxkv__rsqrt_square((uint32_t)x);
    int64_t p = ((int64_t)c[0] * 16384 - c[1] * x + c[2] * square * 4 - 1) >> 16;
    return ctxkv__float(((uint32_t)(126 - k) << 23) | ((uint32_t)p & 0x7FFFFF));
}

static float rsqrt_any(float x, int ftz) {
    uint32_t b = ctxkv__bits(x), magnitude = b & 0x7FFFFFFFu, sign = b >> 31;
    if (magnitude > 0x7F800000u) return ctxkv__float(CTXKV__NAN_BITS);
    if (magnitude == 0 || (ftz && magnitude < 0x00800000u))
        return ctxkv__float(sign ? 0xFF800000u : 0x7F800000u);
    if (sign) return ctxkv__float(CTXKV__NAN_BITS);
    if (magnitude == 0x7F800000u) return 0.0f;
    if (magnitude >= 0x00800000u)
        return rsqrt_normal((int)(magnitude >> 23) - 127, magnitude & 0x7FFFFF);
    int shift = __builtin_clz(magnitude) - 8;
    return rsqrt_normal(-126 - shift, (magnitude << shift) & 0x7FFFFF);
}

float ctxkv__rsqrt(float x) {
    return rsqrt_any(x, 0);
}

float ctxkv__rsqrt_ftz(float x) {
    return rsqrt_any(x, 1);
}

// ---- narrow formats --------------------------------------------------------------------------
// |x| (not NaN) as a code of exponent field and mantissa, rounded to nearest even, not yet bounded:
// codes of one format are in the order of their values.
static uint32_t narrow(uint32_t magnitude, int mantissa_bits, int least_exponent) {
    int field = (int)(magnitude >> 23), exponent = (field ? field : 1) - 127;
    uint32_t significand = (magnitude & 0x7FFFFFu) | (field ? 0x800000u : 0);
    int shift = 23 - mantissa_bits, below = least_exponent - exponent;
    if (below > 0) shift += below;
    if (shift > 25) return 0;
    uint32_t half = 1u << (shift - 1), odd = (significand >> shift) & 1u;
    uint32_t rounded = (significand + half - 1 + odd) >> shift;
    return below > 0 ? rounded : ((uint32_t)-below << mantissa_bits) + rounded;
}

uint16_t ctxkv__to_fp16(float x) {
    uint32_t b = ctxkv__bits(x), magnitude = b & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7FFF;
    uint32_t code = narrow(magnitude, 10, -14);
    return (uint16_t)((b >> 31 << 15) | (code < 0x7C00u ? code : 0x7C00u));
}

float ctxkv__from_fp16(uint16_t h) {
    uint32_t sign = (uint32_t)(h >> 15) << 31, field = (h >> 10) & 31u, mantissa = h & 0x3FFu;
    if (field == 31) return ctxkv__float(sign | 0x7F800000u | mantissa << 13);
    if (field) return ctxkv__float(sign | (field + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return ctxkv__float(sign | ctxkv__bits(tiny));
}

static uint8_t to_fp8(float x, int mantissa_bits, int least_exponent, uint32_t most) {
    uint32_t b = ctxkv__bits(x), magnitude = b & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7F;
    uint32_t code = narrow(magnitude, mantissa_bits, least_exponent);
    return (uint8_t)((b >> 31 << 7) | (code < most ? code : most));
}

uint8_t ctxkv__to_e4m3(float x) {
    return to_fp8(x, 3, -6, 0x7E);
}

uint8_t ctxkv__to_e5m2(float x) {
    return to_fp8(x, 2, -14, 0x7B);
}

// ---- mma16 -----------------------------------------------------------------------------------
// A finite term is significand * 2^(exponent - point), point = 14 for products and 23 for acc.
struct term {
    int64_t significand; // signed
    int exponent;
};

// What is less than this far down is cut as if something were here: 1,824 of 1,824 sums of an H200,
// wgmma and mma.sync, that differ from those without this limit (docs/numerics.md).
#define LEAST_EMAX (-133)

static int bf16_exponent(uint16_t h) {
    int e = (h >> 7) & 0xFF;
    return e ? e - 127 : -126;
}

static int bf16_significand(uint16_t h) {
    return (h & 0x7F) | ((h >> 7) & 0xFF ? 0x80 : 0);
}

static int64_t align(struct term t, int point, int emax) {
    // To units of 2^(emax - 25), truncated toward zero.
    if (t.significand == 0) return 0; // its exponent is not part of emax
    int left = 25 - point - (emax - t.exponent);
    int64_t magnitude = t.significand < 0 ? -t.significand : t.significand;
    magnitude = left >= 0 ? magnitude << left : left > -64 ? magnitude >> -left : 0;
    return t.significand < 0 ? -magnitude : magnitude;
}

static float compose(int64_t sum, int emax) {
    if (sum == 0) return 0.0f;
    uint32_t sign = sum < 0 ? 0x80000000u : 0;
    uint64_t magnitude = (uint64_t)(sum < 0 ? -sum : sum);
    int top = 63 - __builtin_clzll(magnitude);
    int exponent = top + emax - 25;
    if (exponent > 127) return ctxkv__float(sign | 0x7F800000u);
    if (exponent < -126) { // units of 2^-149
        int right = -(emax - 25 + 149);
        magnitude = right <= 0 ? magnitude << -right : right < 64 ? magnitude >> right : 0;
        if (magnitude == 0) return 0.0f; // the sign goes too: 129 of 129 such sums on an H200
        return ctxkv__float(sign | (uint32_t)magnitude);
    }
    magnitude = top > 23 ? magnitude >> (top - 23) : magnitude << (23 - top);
    return ctxkv__float(
        sign | ((uint32_t)(exponent + 127) << 23) | ((uint32_t)magnitude & 0x7FFFFFu));
}

static int is_nan16(uint16_t h) {
    return (h & 0x7FFF) > 0x7F80;
}
static int is_inf16(uint16_t h) {
    return (h & 0x7FFF) == 0x7F80;
}
static int is_zero16(uint16_t h) {
    return (h & 0x7FFF) == 0;
}

// Bit 0: +inf seen, bit 1: -inf seen, bit 2: NaN.
static int special_bits(uint16_t a, uint16_t b) {
    if (is_nan16(a) || is_nan16(b)) return 4;
    if (!is_inf16(a) && !is_inf16(b)) return 0;
    if (is_zero16(a) || is_zero16(b)) return 4;
    return (a ^ b) & 0x8000 ? 2 : 1;
}

float ctxkv__mma16(const void *a, const void *b, float acc) {
    struct term terms[16];
    uint32_t acc_bits = ctxkv__bits(acc);
    int count = 0, special = 0, emax = -100000;
    for (int i = 0; i < 16; i++) {
        uint16_t x = ctxkv__load16(a, i), y = ctxkv__load16(b, i);
        special |= special_bits(x, y);
        if (is_zero16(x) || is_zero16(y)) continue;
        int64_t product = (int64_t)bf16_significand(x) * bf16_significand(y);
        terms[count].significand = (x ^ y) & 0x8000 ? -product : product;
        terms[count].exponent = bf16_exponent(x) + bf16_exponent(y);
        if (terms[count].exponent > emax) emax = terms[count].exponent;
        count++;
    }
    if ((acc_bits & 0x7FFFFFFFu) > 0x7F800000u) special |= 4;
    if ((acc_bits & 0x7FFFFFFFu) == 0x7F800000u) special |= acc_bits >> 31 ? 2 : 1;
    if (special) {
        if (special == 1) return ctxkv__float(0x7F800000u);
        if (special == 2) return ctxkv__float(0xFF800000u);
        return ctxkv__float(CTXKV__NAN_BITS);
    }
    struct term carried = {acc_bits & 0x7FFFFFu, -126};
    int field = (int)((acc_bits >> 23) & 0xFF);
    if (field) {
        carried.significand |= 0x800000;
        carried.exponent = field - 127;
    }
    if (carried.significand && carried.exponent > emax) emax = carried.exponent;
    if (acc_bits >> 31) carried.significand = -carried.significand;
    if (emax < LEAST_EMAX) emax = LEAST_EMAX;
    int64_t sum = align(carried, 23, emax);
    for (int i = 0; i < count; i++) sum += align(terms[i], 14, emax);
    return compose(sum, emax);
}
