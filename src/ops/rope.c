// SPDX-License-Identifier: Apache-2.0
// CUDA's powf, cosf and sinf in plain FMA and integer arithmetic (SPEC 3.5).
#include "rope.h"
#include "numerics.h"

#include <math.h>

static float scale_by_power_of_two(float x, int n) {
    int half = n / 2;
    float a = ctxkv__float((uint32_t)(half + 127) << 23);
    float b = ctxkv__float((uint32_t)(n - half + 127) << 23);
    return x * a * b;
}

float ctxkv__cuda_powf(float x, float y) {
    if (y == 0.0f) return 1.0f;
    uint32_t b = ctxkv__bits(x);
    uint32_t k = (b - 0x3F3504F3u) & 0xFF800000u;
    float m = ctxkv__float(b - k), e = (float)(int32_t)k * 0x1p-23f;
    float u = m - 1.0f, c = 1.0f / (m + 1.0f);
    float a = (u + u) * c, h = a * a;
    float d = u - a;
    d = d + d;
    d = ctxkv__fma(-a, u, d);
    d = c * d;
    float p = ctxkv__fma(ctxkv__float(0x3A2C32E4u), h, ctxkv__float(0x3B52E7DBu));
    p = ctxkv__fma(p, h, ctxkv__float(0x3C93BB73u));
    p = ctxkv__fma(p, h, ctxkv__float(0x3DF6384Fu));
    p = p * h;
    float log2e = ctxkv__float(0x3FB8AA3Bu);
    float g = ctxkv__fma(a, log2e, e), r = e - g;
    r = ctxkv__fma(a, log2e, r);
    r = ctxkv__fma(d, log2e, r);
    r = ctxkv__fma(a, ctxkv__float(0x32A55E34u), r);
    r = ctxkv__fma(p * 3.0f, d, r);
    r = ctxkv__fma(p, a, r);
    float hi = g + r, lo = r - (hi - g);
    float t = hi * y, z = ctxkv__fma(hi, y, -t);
    z = ctxkv__fma(lo, y, z);
    float n = rintf(t), f = z + (t - n);
    float q = ctxkv__fma(ctxkv__float(0x391FCB8Eu), f, ctxkv__float(0x3AAF85EDu));
    static const uint32_t tail[5] = {
        0x3C1D9856u, 0x3D6357BBu, 0x3E75FDECu, 0x3F317218u, 0x3F800000u};
    for (int i = 0; i < 5; i++) q = ctxkv__fma(q, f, ctxkv__float(tail[i]));
    return scale_by_power_of_two(q, (int)n);
}

// Large arguments: x times 2/pi in 192 bits; returns the remainder and the quadrant.
static float reduce_large(float x, int32_t *quadrant) {
    static const uint32_t two_over_pi[6] = {0x3C439041u, 0xDB629599u, 0xF534DDC0u,
                                            0xFC2757D1u, 0x4E441529u, 0xA2F9836Eu};
    uint32_t b = ctxkv__bits(x), m = (b << 8) | 0x80000000u, w[7];
    int e = (int)((b >> 23) & 0xFF) - 128;
    uint64_t carry = 0;
    for (int i = 0; i < 6; i++) {
        uint64_t product = (uint64_t)two_over_pi[i] * m + carry;
        w[i] = (uint32_t)product;
        carry = product >> 32;
    }
    w[6] = (uint32_t)carry;
    int word = e / 32, shift = e % 32;
    uint32_t hi = w[6 - word], lo = w[5 - word];
    if (shift) {
        hi = (hi << shift) | (lo >> (32 - shift));
        lo = (lo << shift) | (w[4 - word] >> (32 - shift));
    }
    uint32_t q = hi >> 30;
    uint64_t fraction = ((uint64_t)((hi << 2) | (lo >> 30)) << 32) | (uint32_t)(lo << 2);
    int negative = 0;
    if (fraction >> 63) {
        q++;
        fraction = ~fraction;
        negative = 1;
    }
    double scale;
    uint64_t scale_bits = 0x3BF921FB54442D19ull;
    memcpy(&scale, &scale_bits, 8);
    float r = (float)((double)(int64_t)fraction * scale);
    if (negative) r = -r;
    if (b >> 31) {
        r = -r;
        q = 0u - q;
    }
    *quadrant = (int32_t)q;
    return r;
}

static float reduce(float x, int32_t *quadrant) {
    if ((ctxkv__bits(x) & 0x7FFFFFFFu) >= 0x47CE4780u) return reduce_large(x, quadrant);
    float q = rintf(x * ctxkv__float(0x3F22F983u));
    float r = ctxkv__fma(q, ctxkv__float(0xBFC90FDAu), x);
    r = ctxkv__fma(q, ctxkv__float(0xB3A22168u), r);
    r = ctxkv__fma(q, ctxkv__float(0xA7C234C5u), r);
    *quadrant = (int32_t)q;
    return r;
}

static float quadrant_value(float r, int32_t i) {
    float s = r * r, p, a;
    if (i & 1) {
        p = ctxkv__fma(ctxkv__float(0x37CBAC00u), s, ctxkv__float(0xBAB607EDu));
        p = ctxkv__fma(p, s, ctxkv__float(0x3D2AAABBu));
        p = ctxkv__fma(p, s, ctxkv__float(0xBEFFFFFFu));
        a = 1.0f;
    } else {
        p = ctxkv__fma(ctxkv__float(0xB94D4153u), s, ctxkv__float(0x3C0885E4u));
        p = ctxkv__fma(p, s, ctxkv__float(0xBE2AAAA8u));
        a = r;
    }
    float t = ctxkv__fma(s, a, 0.0f), y = ctxkv__fma(p, t, a);
    return i & 2 ? ctxkv__fma(y, -1.0f, 0.0f) : y;
}

float ctxkv__cuda_sinf(float x) {
    int32_t q;
    float r = reduce(x, &q);
    return quadrant_value(r, q);
}

float ctxkv__cuda_cosf(float x) {
    int32_t q;
    float r = reduce(x, &q);
    return quadrant_value(r, q + 1);
}

void ctxkv__rope_inv_freq(float theta, int64_t rotary_dim, float *inv_freq) {
    for (int64_t j = 0; j < rotary_dim / 2; j++)
        inv_freq[j] = 1.0f / ctxkv__cuda_powf(theta, (float)(2 * j) / (float)rotary_dim);
}

void ctxkv__rope_row(
    const float *inv_freq, int64_t count, int64_t position, float *cosine, float *sine) {
    for (int64_t j = 0; j < count; j++) {
        float angle = (float)position * inv_freq[j];
        int32_t q;
        float r = reduce(angle, &q);
        cosine[j] = quadrant_value(r, q + 1);
        sine[j] = quadrant_value(r, q);
    }
}
