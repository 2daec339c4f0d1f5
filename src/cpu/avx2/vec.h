// SPDX-License-Identifier: Apache-2.0
// The named operations of the shared vector code in AVX2 and FMA. A register holds 8 dwords: 8
// pairs of BF16 columns (even low, odd high), or their even or odd values as FP32.
#ifndef CTXKV_AVX2_VEC_H
#define CTXKV_AVX2_VEC_H

#include <immintrin.h>
#include <stdint.h>

#define TIER(name) name##_avx2
#define TIER_BELOW(name) name##_ref
#define WIDTH 8
typedef __m256 vf;
typedef __m256i vi;

static inline vi v_load(const void *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}
static inline void v_store(void *p, vi x) {
    _mm256_storeu_si256((__m256i *)p, x);
}
static inline void v_stream(void *p, vi x) {
    _mm256_stream_si256((__m256i *)p, x);
} // p: aligned
static inline void v_store_float(float *p, vf x) {
    _mm256_storeu_ps(p, x);
}
static inline vf v_load_float(const float *p) {
    return _mm256_loadu_ps(p);
}
static inline vi v_zero(void) {
    return _mm256_setzero_si256();
}
static inline vf v_div(vf a, vf b) {
    return _mm256_div_ps(a, b);
}
static inline vf v_set1(float x) {
    return _mm256_set1_ps(x);
}
static inline vf v_add(vf a, vf b) {
    return _mm256_add_ps(a, b);
}
static inline vf v_mul(vf a, vf b) {
    return _mm256_mul_ps(a, b);
}
static inline vf v_fma(vf a, vf b, vf c) {
    return _mm256_fmadd_ps(a, b, c);
}
// a*b - c with one rounding.
static inline vf v_fms(vf a, vf b, vf c) {
    return _mm256_fmsub_ps(a, b, c);
}
static inline vf v_even(vi x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
static inline vf v_odd(vi x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xFFFF0000u)));
}

// BF16 bits in the high half, to nearest even, NaN as 0x7FFF; the low half is rubbish.
static inline vi v_round(vf x) {
    vi b = _mm256_castps_si256(x);
    vi odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    vf nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    b = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7FFF)), odd);
    return _mm256_castps_si256(_mm256_blendv_ps(
        _mm256_castsi256_ps(b), _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFF0000)), nan));
}
static inline vi v_pack(vf even, vf odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(v_round(even), 16), v_round(odd), 0xAA);
}

// x in a narrower format to nearest even, the sign at bit sign_at: mantissa bits, exponent of the
// least normal number, code that bounds it, code of a NaN.
static inline vi v_narrow(
    vf x, const int mantissa, const int least, const int most, const int nan, const int sign_at) {
    const int shift = 23 - mantissa, tiny = (127 + least) << 23;
    vi b = _mm256_castps_si256(x), size = _mm256_and_si256(b, _mm256_set1_epi32(0x7FFFFFFF));
    vi odd = _mm256_and_si256(_mm256_srli_epi32(size, shift), _mm256_set1_epi32(1));
    vi code = _mm256_add_epi32(size, _mm256_set1_epi32((1 << (shift - 1)) - 1));
    code = _mm256_srli_epi32(_mm256_add_epi32(code, odd), shift);
    code = _mm256_sub_epi32(code, _mm256_set1_epi32((126 + least) << mantissa));
    // Below the normal numbers an addition rounds to their unit.
    vi unit = _mm256_set1_epi32(tiny + (shift << 23));
    vf sum = _mm256_add_ps(_mm256_castsi256_ps(size), _mm256_castsi256_ps(unit));
    vi small = _mm256_sub_epi32(_mm256_castps_si256(sum), unit);
    code = _mm256_blendv_epi8(code, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(tiny), size));
    code = _mm256_min_epi32(code, _mm256_set1_epi32(most));
    vi sign = _mm256_and_si256(_mm256_srli_epi32(b, 31 - sign_at), _mm256_set1_epi32(1 << sign_at));
    return _mm256_blendv_epi8(
        _mm256_or_si256(code, sign), _mm256_set1_epi32(nan),
        _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static inline vi v_join(vi low, vi high, const int at) {
    return _mm256_or_si256(low, _mm256_slli_epi32(high, at));
}
// The low half of each dword.
static inline void v_store_words(void *p, vi x) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(words));
}

// 16 consecutive floats as even and odd ones.
static inline void v_split(const float *p, vf *even, vf *odd) {
    vf a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
    vf low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    *even = _mm256_shuffle_ps(low, high, 0x88);
    *odd = _mm256_shuffle_ps(low, high, 0xDD);
}

// 8 BF16 values widened.
static inline vf v_widen(const void *p) {
    __m128i bits = _mm_loadu_si128((const __m128i *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// 4x4 within 128-bit lanes: r[j] becomes dword j of threads; lane 4L + i holds thread 2i + L.
static inline void v_transpose4(vf r[4]) {
    vf a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
    vf c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
    r[0] = _mm256_shuffle_ps(a, c, 0x44);
    r[1] = _mm256_shuffle_ps(a, c, 0xEE);
    r[2] = _mm256_shuffle_ps(b, d, 0x44);
    r[3] = _mm256_shuffle_ps(b, d, 0xEE);
}
#define THREAD_OF(lane) ((lane) % 4 * 2 + (lane) / 4)

static inline vf v_swap(vf x) {
    return _mm256_permute2f128_ps(x, x, 0x01);
}

// Adjacent threads added as a tree (+1, +2, +4), as the transpose leaves them.
static inline float v_fold_threads(vf s) {
    s = v_add(s, v_swap(s));
    s = v_add(s, _mm256_permute_ps(s, 0xB1));
    s = v_add(s, _mm256_permute_ps(s, 0x4E));
    return _mm256_cvtss_f32(s);
}

// Butterfly over the 32 threads of a warp (xor 16, 8, 4, 2, 1).
static inline float v_fold_warp(const vf g[4]) {
    vf s = v_add(v_add(g[0], g[2]), v_add(g[1], g[3]));
    s = v_add(s, _mm256_permute_ps(s, 0x4E));
    s = v_add(s, _mm256_permute_ps(s, 0xB1));
    s = v_add(s, v_swap(s));
    return _mm256_cvtss_f32(s);
}

// 32 values, the even ones in a[0], a[1], the odd in b[0], b[1], folded by halves (16 .. 1).
static inline float v_fold_pairs(const vf a[2], const vf b[2]) {
    vf even = v_add(a[0], a[1]), odd = v_add(b[0], b[1]);
    vf s = v_add(_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31));
    s = v_add(s, _mm256_permute_ps(s, 0x4E));
    s = v_add(s, _mm256_permute_ps(s, 0xB1));
    s = v_add(s, v_swap(s));
    return _mm256_cvtss_f32(s);
}

#endif
