// SPDX-License-Identifier: Apache-2.0
// The named operations of the shared vector code in AVX-512. A register holds 16 dwords: 16 pairs
// of BF16 columns (even low, odd high), or their even or odd values as FP32.
#ifndef CTXKV_AVX512_VEC_H
#define CTXKV_AVX512_VEC_H

#include <immintrin.h>
#include <stdint.h>

#define TIER(name) name##_avx512
#define TIER_BELOW(name) name##_avx2
#define WIDTH 16
typedef __m512 vf;
typedef __m512i vi;

static inline vi v_load(const void *p) {
    return _mm512_loadu_si512(p);
}
static inline void v_store(void *p, vi x) {
    _mm512_storeu_si512(p, x);
}
static inline void v_stream(void *p, vi x) {
    _mm512_stream_si512(p, x);
} // p: aligned
static inline void v_store_float(float *p, vf x) {
    _mm512_storeu_ps(p, x);
}
static inline vf v_load_float(const float *p) {
    return _mm512_loadu_ps(p);
}
static inline vi v_zero(void) {
    return _mm512_setzero_si512();
}
static inline vf v_div(vf a, vf b) {
    return _mm512_div_ps(a, b);
}
static inline vf v_set1(float x) {
    return _mm512_set1_ps(x);
}
static inline vf v_add(vf a, vf b) {
    return _mm512_add_ps(a, b);
}
static inline vf v_mul(vf a, vf b) {
    return _mm512_mul_ps(a, b);
}
static inline vf v_fma(vf a, vf b, vf c) {
    return _mm512_fmadd_ps(a, b, c);
}
// a*b - c with one rounding.
static inline vf v_fms(vf a, vf b, vf c) {
    return _mm512_fmsub_ps(a, b, c);
}
static inline vf v_even(vi x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
static inline vf v_odd(vi x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000u)));
}

// BF16 bits in the high half, to nearest even, NaN as 0x7FFF; the low half is rubbish.
static inline vi v_round(vf x) {
    vi b = _mm512_castps_si512(x);
    vi odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    b = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_mask_mov_epi32(b, nan, _mm512_set1_epi32(0x7FFF0000));
}
static inline vi v_pack(vf even, vf odd) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(v_round(even), 16), v_round(odd));
}

// x in a narrower format to nearest even, the sign at bit sign_at: mantissa bits, exponent of the
// least normal number, code that bounds it, code of a NaN.
static inline vi v_narrow(
    vf x, const int mantissa, const int least, const int most, const int nan, const int sign_at) {
    const int shift = 23 - mantissa, tiny = (127 + least) << 23;
    vi b = _mm512_castps_si512(x), size = _mm512_and_si512(b, _mm512_set1_epi32(0x7FFFFFFF));
    vi odd = _mm512_and_si512(_mm512_srli_epi32(size, shift), _mm512_set1_epi32(1));
    vi code = _mm512_add_epi32(size, _mm512_set1_epi32((1 << (shift - 1)) - 1));
    code = _mm512_srli_epi32(_mm512_add_epi32(code, odd), shift);
    code = _mm512_sub_epi32(code, _mm512_set1_epi32((126 + least) << mantissa));
    // Below the normal numbers an addition rounds to their unit.
    vi unit = _mm512_set1_epi32(tiny + (shift << 23));
    vf sum = _mm512_add_ps(_mm512_castsi512_ps(size), _mm512_castsi512_ps(unit));
    vi small = _mm512_sub_epi32(_mm512_castps_si512(sum), unit);
    code =
        _mm512_mask_mov_epi32(code, _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(tiny)), small);
    code = _mm512_min_epi32(code, _mm512_set1_epi32(most));
    vi sign = _mm512_and_si512(_mm512_srli_epi32(b, 31 - sign_at), _mm512_set1_epi32(1 << sign_at));
    return _mm512_mask_mov_epi32(
        _mm512_or_si512(code, sign), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
        _mm512_set1_epi32(nan));
}
static inline vi v_join(vi low, vi high, const int at) {
    return _mm512_or_si512(low, _mm512_slli_epi32(high, at));
}
// The low half of each dword.
static inline void v_store_words(void *p, vi x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x));
}

// 32 consecutive floats as even and odd ones.
static inline void v_split(const float *p, vf *even, vf *odd) {
    const vi e = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vf a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    *even = _mm512_permutex2var_ps(a, e, b);
    *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(e, _mm512_set1_epi32(1)), b);
}

// 16 BF16 values widened.
static inline vf v_widen(const void *p) {
    __m256i bits = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// 4x4 within 128-bit lanes: r[j] becomes dword j of threads; lane 4L + i holds thread 4i + L.
static inline void v_transpose4(vf r[4]) {
    vf a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
    vf c = _mm512_unpacklo_ps(r[2], r[3]), d = _mm512_unpackhi_ps(r[2], r[3]);
    r[0] = _mm512_shuffle_ps(a, c, 0x44);
    r[1] = _mm512_shuffle_ps(a, c, 0xEE);
    r[2] = _mm512_shuffle_ps(b, d, 0x44);
    r[3] = _mm512_shuffle_ps(b, d, 0xEE);
}
#define THREAD_OF(lane) ((lane) % 4 * 4 + (lane) / 4)

// Adjacent threads added as a tree (+1, +2, +4, +8), as the transpose leaves them.
static inline float v_fold_threads(vf s) {
    s = v_add(s, _mm512_shuffle_f32x4(s, s, 0xB1));
    s = v_add(s, _mm512_shuffle_f32x4(s, s, 0x4E));
    s = v_add(s, _mm512_permute_ps(s, 0xB1));
    s = v_add(s, _mm512_permute_ps(s, 0x4E));
    return _mm512_cvtss_f32(s);
}

// Butterfly over the 32 threads of a warp (xor 16, 8, 4, 2, 1).
static inline float v_fold_warp(const vf g[2]) {
    vf s = v_add(g[0], g[1]);
    s = v_add(s, _mm512_permute_ps(s, 0x4E));
    s = v_add(s, _mm512_permute_ps(s, 0xB1));
    s = v_add(s, _mm512_shuffle_f32x4(s, s, 0x4E));
    s = v_add(s, _mm512_shuffle_f32x4(s, s, 0xB1));
    return _mm512_cvtss_f32(s);
}

// 32 values, the even ones in a[0], the odd in b[0], folded by halves (16, 8, 4, 2, 1).
static inline float v_fold_pairs(const vf a[1], const vf b[1]) {
    vf even = v_add(a[0], _mm512_shuffle_f32x4(a[0], a[0], 0x4E));
    vf odd = v_add(b[0], _mm512_shuffle_f32x4(b[0], b[0], 0x4E));
    vf s = _mm512_mask_blend_ps(0xFF00, even, odd); // lanes 0..7 even, 8..15 odd
    s = v_add(s, _mm512_shuffle_f32x4(s, s, 0xB1));
    s = v_add(s, _mm512_permute_ps(s, 0x4E));
    s = v_add(s, _mm512_permute_ps(s, 0xB1));
    s = v_add(s, _mm512_shuffle_f32x4(s, s, 0x4E));
    return _mm512_cvtss_f32(s);
}

#endif
