// SPDX-License-Identifier: Apache-2.0
// The exact projection in AVX-512: 16 columns a register, one tensor-core step (SPEC 3.3) at a
// time.
//
// A tile holds 32 weight rows of one k-chunk as [k/2][32] pairs of BF16, made by a transpose where
// the weights lie. Per step and row: the largest exponent in 16-bit lanes, then each product scaled
// to units of 2^(emax - 25) and cut to int32. Two sums of eight, since sixteen products can pass 31
// bits. What this cannot hold (emax far out, NaN, infinities, a sum past 31 bits) is flagged and
// the chunk redone by the scalar truth for the columns concerned.
#include <immintrin.h>

#define LANES 16
#define FEW_ROWS 4
#include "../projection_vec.inc"

struct scratch {
    __m512i weights[CHUNK / 2][2];   // pairs (even k low, odd k high), columns 0..15, 16..31
    __m512i exponents[CHUNK / 2][2]; // the same as int16
    float x[4][CHUNK];
    int32_t x_exponents[4][CHUNK / 2];
    float acc[ROW_BLOCK][CTXKV__UNIT_COLUMNS];
};
_Static_assert(sizeof(struct scratch) <= CTXKV__PROJECTION_SCRATCH, "scratch");

static inline float (*accumulators(struct scratch *s))[CTXKV__UNIT_COLUMNS] {
    return s->acc;
}

// int16 lanes: the biased exponent of BF16 bits, subnormals as 1, zeros and specials marked.
static inline __m512i exponents_of(__m512i bits) {
    __m512i field = _mm512_and_si512(_mm512_srli_epi16(bits, 7), _mm512_set1_epi16(255));
    // field - 1 is 254 or more (unsigned) for fields 0 and 255 only.
    __mmask32 edge = _mm512_cmpge_epu16_mask(
        _mm512_sub_epi16(field, _mm512_set1_epi16(1)), _mm512_set1_epi16(254));
    if (__builtin_expect(edge != 0, 0)) {
        __mmask32 zero = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x7FFF));
        __mmask32 special = _mm512_cmpeq_epi16_mask(field, _mm512_set1_epi16(255));
        field = _mm512_max_epi16(field, _mm512_set1_epi16(1));
        field = _mm512_mask_mov_epi16(field, zero, _mm512_set1_epi16(ZERO_EXPONENT));
        field = _mm512_mask_mov_epi16(field, special, _mm512_set1_epi16(SPECIAL_EXPONENT));
    }
    return field;
}

// 16 registers of 16 dwords, transposed.
static inline void transpose16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

static void load_tile(
    struct scratch *s, const struct ctxkv__weight_block *block, int64_t first, int columns,
    int64_t k0, int count, bool ahead) {
    for (int half = 0; half < 2; half++) {
        const char *base =
            (const char *)block->data + 2 * ((first + 16 * half) * block->row_stride + k0);
        for (int k = 0; k < count; k += 32) {
            __mmask32 valid = count - k >= 32 ? 0xFFFFFFFFu : 0xFFFFu;
            __m512i r[16];
            for (int i = 0; i < 16; i++) {
                const char *row = base + 2 * (i * block->row_stride + k);
                bool exists = 16 * half + i < columns;
                r[i] = exists ? _mm512_maskz_loadu_epi16(valid, row) : _mm512_setzero_si512();
                if (exists && ahead) _mm_prefetch(row + 2 * AHEAD, _MM_HINT_T1);
            }
            transpose16(r);
            int pairs = valid == 0xFFFFu ? 8 : 16;
            for (int i = 0; i < pairs; i++) {
                s->weights[k / 2 + i][half] = r[i];
                s->exponents[k / 2 + i][half] = exponents_of(r[i]);
            }
        }
    }
}

static void load_x(struct scratch *s, int slot, const char *x, int count) {
    for (int k = 0; k < count; k += 16) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)(x + 2 * k));
        _mm512_storeu_ps(
            &s->x[slot][k],
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
        __m512i e = exponents_of(_mm512_castsi256_si512(bits));
        _mm256_storeu_si256(
            (__m256i *)(void *)&s->x_exponents[slot][k / 2], _mm512_castsi512_si256(e));
    }
}

// Of the rows done together: the extremes of emax, and sums past 31 bits (in the sign bits).
struct watch {
    __m512i lowest, highest, wrong;
};

// One k16 step for `rows` rows (1, 2 or 4) and one half of the columns.
static inline __attribute__((always_inline)) void step(
    const struct scratch *s, int k, int half, const int rows, __m512 *acc, struct watch *watch) {
    __m512i lowest = watch->lowest, highest = watch->highest, wrong = watch->wrong;
    __m512i largest[4], low[4], sum[4];
    __m512 scale[4];
#pragma GCC unroll 8
    for (int p = 0; p < 8; p++) {
        __m512i e = s->exponents[k / 2 + p][half];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512i both = _mm512_adds_epi16(e, _mm512_set1_epi32(s->x_exponents[r][k / 2 + p]));
            largest[r] = p ? _mm512_max_epi16(largest[r], both) : both;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        __m512i products = _mm512_max_epi32(
            _mm512_srai_epi32(_mm512_slli_epi32(largest[r], 16), 16),
            _mm512_srai_epi32(largest[r], 16));
        __m512i field = _mm512_srli_epi32(_mm512_slli_epi32(_mm512_castps_si512(acc[r]), 1), 24);
        __m512i emax = _mm512_max_epi32(products, _mm512_add_epi32(field, _mm512_set1_epi32(127)));
        lowest = _mm512_min_epi32(lowest, emax);
        highest = _mm512_max_epi32(highest, emax);
        scale[r] = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254 + 152), emax), 23));
        sum[r] = _mm512_cvttps_epi32(_mm512_mul_ps(acc[r], scale[r]));
    }
#pragma GCC unroll 8
    for (int p = 0; p < 8; p++) {
        __m512i w = s->weights[k / 2 + p][half];
        __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
        __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xFFFF0000u)));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512 a = _mm512_mul_ps(even, _mm512_set1_ps(s->x[r][k + 2 * p]));
            __m512 b = _mm512_mul_ps(odd, _mm512_set1_ps(s->x[r][k + 2 * p + 1]));
            __m512i c = _mm512_cvttps_epi32(_mm512_mul_ps(a, scale[r]));
            __m512i d = _mm512_cvttps_epi32(_mm512_mul_ps(b, scale[r]));
            if (p == 4) {
                low[r] = sum[r];
                sum[r] = _mm512_add_epi32(c, d);
            } else {
                sum[r] = _mm512_add_epi32(sum[r], _mm512_add_epi32(c, d));
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        __m512i total = _mm512_add_epi32(low[r], sum[r]);
        // Overflow: both terms have the sign that the total has not.
        wrong = _mm512_or_si512(wrong, _mm512_ternarylogic_epi32(low[r], sum[r], total, 0x42));
        __m512 inverse = _mm512_castsi512_ps(
            _mm512_sub_epi32(_mm512_set1_epi32(254 << 23), _mm512_castps_si512(scale[r])));
        acc[r] = _mm512_mul_ps(
            _mm512_cvt_roundepi32_ps(total, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC), inverse);
    }
    *watch = (struct watch){lowest, highest, wrong};
}

static __mmask16 flagged(const struct watch *w) {
    return _mm512_cmplt_epi32_mask(w->lowest, _mm512_set1_epi32(LOWEST)) |
           _mm512_cmpgt_epi32_mask(w->highest, _mm512_set1_epi32(HIGHEST)) |
           _mm512_movepi32_mask(w->wrong);
}

// `rows` rows from row t on, over the tile. False, nothing done: rows > 1 and something was
// flagged.
static inline __attribute__((always_inline)) bool run_rows(
    struct scratch *s, const struct place *at, int64_t t, int64_t row_block, const int rows) {
    const struct ctxkv__projection_args *a = at->args;
    for (int r = 0; r < rows; r++) {
        int64_t offset = at->layer * a->x_layer_stride + (t + r) * a->x_row_stride + at->k0;
        load_x(s, r, (const char *)a->x + 2 * offset, at->count);
    }
    __m512 acc[2][4];
    struct watch watch[2];
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < rows; r++)
            acc[half][r] = _mm512_load_ps(&s->acc[t + r - row_block][16 * half]);
        watch[half] = (struct watch){
            _mm512_set1_epi32(LOWEST), _mm512_set1_epi32(HIGHEST), _mm512_setzero_si512()};
    }
    if (rows == 1) { // both halves side by side hide the chain's latency
        for (int k = 0; k < at->count; k += 16) {
            step(s, k, 0, 1, acc[0], &watch[0]);
            step(s, k, 1, 1, acc[1], &watch[1]);
        }
    } else {
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < at->count; k += 16) step(s, k, half, rows, acc[half], &watch[half]);
    }
    __mmask16 flags[2] = {flagged(&watch[0]), flagged(&watch[1])};
    if (__builtin_expect((flags[0] | flags[1]) != 0, 0)) {
        if (rows > 1) return false;
        for (int half = 0; half < 2; half++) {
            float now[16];
            _mm512_storeu_ps(now, acc[half][0]);
            redo(at, t, half, flags[half], &s->acc[t - row_block][16 * half], now);
            memcpy(&s->acc[t - row_block][16 * half], now, sizeof now);
        }
        return true;
    }
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < rows; r++)
            _mm512_store_ps(&s->acc[t + r - row_block][16 * half], acc[half][r]);
    return true;
}

static void run_tile(struct scratch *s, const struct place *at, int64_t row, int64_t end) {
    for (int64_t t = row; t < end;) {
        int64_t next = t + (end - t >= 4 ? 4 : end - t >= 2 ? 2 : 1);
        bool done = next - t == 4   ? run_rows(s, at, t, row, 4)
                    : next - t == 2 ? run_rows(s, at, t, row, 2)
                                    : run_rows(s, at, t, row, 1);
        // Something was flagged: row by row, so that it costs only the row it is in.
        for (int64_t one = t; !done && one < next; one++) run_rows(s, at, one, row, 1);
        t = next;
    }
}

void ctxkv__projection_avx512(
    const struct ctxkv__projection_args *args, int64_t begin, int64_t end, void *scratch) {
    // One row is bound by memory and latency: the narrower registers measured 5 % faster (Zen 4).
    if (args->rows == 1)
        ctxkv__projection_avx2(args, begin, end, scratch);
    else
        for (int64_t unit = begin; unit < end; unit++) run_unit(args, unit, scratch);
}
