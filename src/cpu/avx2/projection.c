// SPDX-License-Identifier: Apache-2.0
// The exact projection in AVX2: 8 columns a register, one tensor-core step (SPEC 3.3) at a time.
//
// A tile holds 32 weight rows of one k-chunk as [k/2][32] pairs of BF16, made by a transpose where
// the weights lie. Per step and row: the largest exponent in 16-bit lanes, then each product scaled
// to units of 2^(emax - 25) and cut to int32. Two sums of eight, since sixteen products can pass 31
// bits. What this cannot hold (emax far out, NaN, infinities, a sum past 31 bits) is flagged and
// the chunk redone by the scalar truth for the columns concerned. The loops run with MXCSR rounding
// toward zero, for the one conversion back that needs it; everything else in them is exact.
#include <immintrin.h>

#define LANES 8
#define FEW_ROWS 2
#define PARTS 4 // registers of 8 columns
#include "../projection_vec.inc"

struct scratch {
    __m256i weights[CHUNK / 2][PARTS];   // pairs (even k low, odd k high), 8 columns each
    __m256i exponents[CHUNK / 2][PARTS]; // the same as int16
    float x[2][CHUNK];
    int32_t x_exponents[2][CHUNK / 2];
    float acc[ROW_BLOCK][CTXKV__UNIT_COLUMNS];
};
_Static_assert(sizeof(struct scratch) <= CTXKV__PROJECTION_SCRATCH, "scratch");

static inline float (*accumulators(struct scratch *s))[CTXKV__UNIT_COLUMNS] {
    return s->acc;
}

// int16 lanes: the biased exponent of BF16 bits, subnormals as 1, zeros and specials marked.
static inline __m256i exponents_of(__m256i bits) {
    const __m256i nothing = _mm256_setzero_si256(), all = _mm256_set1_epi16(255);
    __m256i field = _mm256_and_si256(_mm256_srli_epi16(bits, 7), all);
    __m256i low = _mm256_cmpeq_epi16(field, nothing), high = _mm256_cmpeq_epi16(field, all);
    __m256i edge = _mm256_or_si256(low, high);
    if (__builtin_expect(!_mm256_testz_si256(edge, edge), 0)) {
        __m256i zero = _mm256_cmpeq_epi16(_mm256_slli_epi16(bits, 1), nothing);
        field = _mm256_max_epi16(field, _mm256_set1_epi16(1));
        field = _mm256_blendv_epi8(field, _mm256_set1_epi16(ZERO_EXPONENT), zero);
        field = _mm256_blendv_epi8(field, _mm256_set1_epi16(SPECIAL_EXPONENT), high);
    }
    return field;
}

// 8 registers of 8 dwords, transposed.
static inline void transpose8(__m256i r[8]) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    memcpy(r, t, sizeof t);
}

static void load_tile(
    struct scratch *s, const struct ctxkv__weight_block *block, int64_t first, int columns,
    int64_t k0, int count, bool ahead) {
    for (int part = 0; part < PARTS; part++) {
        const char *base =
            (const char *)block->data + 2 * ((first + 8 * part) * block->row_stride + k0);
        for (int k = 0; k < count; k += 16) {
            __m256i r[8];
            for (int i = 0; i < 8; i++) {
                const char *row = base + 2 * (i * block->row_stride + k);
                bool exists = 8 * part + i < columns;
                r[i] = exists ? _mm256_loadu_si256((const __m256i *)(const void *)row)
                              : _mm256_setzero_si256();
                if (exists && ahead && k % 32 == 0) _mm_prefetch(row + 2 * AHEAD, _MM_HINT_T1);
            }
            transpose8(r);
            for (int i = 0; i < 8; i++) {
                s->weights[k / 2 + i][part] = r[i];
                s->exponents[k / 2 + i][part] = exponents_of(r[i]);
            }
        }
    }
}

static void load_x(struct scratch *s, int slot, const char *x, int count) {
    for (int k = 0; k < count; k += 16) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)(x + 2 * k));
        for (int i = 0; i < 2; i++) {
            __m128i eight = i ? _mm256_extracti128_si256(bits, 1) : _mm256_castsi256_si128(bits);
            _mm256_storeu_ps(
                &s->x[slot][k + 8 * i],
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16)));
        }
        _mm256_storeu_si256((__m256i *)(void *)&s->x_exponents[slot][k / 2], exponents_of(bits));
    }
}

// Of the rows done together: the extremes of emax, and sums past 31 bits (in the sign bits).
struct watch {
    __m256i lowest, highest, wrong;
};

// One k16 step for `rows` rows (1 or 2) and one part of the columns.
static inline __attribute__((always_inline)) void step(
    const struct scratch *s, int k, int part, const int rows, __m256 *acc, struct watch *watch) {
    __m256i lowest = watch->lowest, highest = watch->highest, wrong = watch->wrong;
    __m256i largest[2], low[2], sum[2];
    __m256 scale[2];
#pragma GCC unroll 8
    for (int p = 0; p < 8; p++) {
        __m256i e = s->exponents[k / 2 + p][part];
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            __m256i both = _mm256_adds_epi16(e, _mm256_set1_epi32(s->x_exponents[r][k / 2 + p]));
            largest[r] = p ? _mm256_max_epi16(largest[r], both) : both;
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
        __m256i products = _mm256_max_epi32(
            _mm256_srai_epi32(_mm256_slli_epi32(largest[r], 16), 16),
            _mm256_srai_epi32(largest[r], 16));
        __m256i field = _mm256_srli_epi32(_mm256_slli_epi32(_mm256_castps_si256(acc[r]), 1), 24);
        __m256i emax = _mm256_max_epi32(products, _mm256_add_epi32(field, _mm256_set1_epi32(127)));
        lowest = _mm256_min_epi32(lowest, emax);
        highest = _mm256_max_epi32(highest, emax);
        scale[r] = _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(254 + 152), emax), 23));
        sum[r] = _mm256_cvttps_epi32(_mm256_mul_ps(acc[r], scale[r]));
    }
#pragma GCC unroll 8
    for (int p = 0; p < 8; p++) {
        __m256i w = s->weights[k / 2 + p][part];
        __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
        __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xFFFF0000u)));
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            __m256 a = _mm256_mul_ps(even, _mm256_set1_ps(s->x[r][k + 2 * p]));
            __m256 b = _mm256_mul_ps(odd, _mm256_set1_ps(s->x[r][k + 2 * p + 1]));
            __m256i c = _mm256_cvttps_epi32(_mm256_mul_ps(a, scale[r]));
            __m256i d = _mm256_cvttps_epi32(_mm256_mul_ps(b, scale[r]));
            if (p == 4) {
                low[r] = sum[r];
                sum[r] = _mm256_add_epi32(c, d);
            } else {
                sum[r] = _mm256_add_epi32(sum[r], _mm256_add_epi32(c, d));
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
        __m256i total = _mm256_add_epi32(low[r], sum[r]);
        // Overflow: both terms have the sign that the total has not.
        wrong = _mm256_or_si256(
            wrong,
            _mm256_and_si256(_mm256_xor_si256(low[r], total), _mm256_xor_si256(sum[r], total)));
        __m256 inverse = _mm256_castsi256_ps(
            _mm256_sub_epi32(_mm256_set1_epi32(254 << 23), _mm256_castps_si256(scale[r])));
        acc[r] = _mm256_mul_ps(_mm256_cvtepi32_ps(total), inverse);
    }
    *watch = (struct watch){lowest, highest, wrong};
}

static int flagged(const struct watch *w) {
    __m256i out = _mm256_or_si256(
        _mm256_cmpgt_epi32(_mm256_set1_epi32(LOWEST), w->lowest),
        _mm256_cmpgt_epi32(w->highest, _mm256_set1_epi32(HIGHEST)));
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(out, w->wrong)));
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
    int flags[PARTS], any = 0;
    __m256 acc[PARTS][2];
    for (int part = 0; part < PARTS; part++) {
        struct watch watch = {
            _mm256_set1_epi32(LOWEST), _mm256_set1_epi32(HIGHEST), _mm256_setzero_si256()};
        for (int r = 0; r < rows; r++)
            acc[part][r] = _mm256_load_ps(&s->acc[t + r - row_block][8 * part]);
        for (int k = 0; k < at->count; k += 16) step(s, k, part, rows, acc[part], &watch);
        any |= flags[part] = flagged(&watch);
    }
    if (__builtin_expect(any && rows > 1, 0)) return false;
    for (int part = 0; part < PARTS; part++)
        for (int r = 0; r < rows; r++) {
            float *kept = &s->acc[t + r - row_block][8 * part], now[8];
            _mm256_storeu_ps(now, acc[part][r]);
            if (flags[part]) redo(at, t, part, flags[part], kept, now);
            memcpy(kept, now, sizeof now);
        }
    return true;
}

// MXCSR changes around the call, so nothing in here may move out of it.
static __attribute__((noinline)) void rows_of_tile(
    struct scratch *s, const struct place *at, int64_t row, int64_t end) {
    for (int64_t t = row; t < end;) {
        int64_t next = t + (end - t >= 2 ? 2 : 1);
        bool done = next - t == 2 ? run_rows(s, at, t, row, 2) : run_rows(s, at, t, row, 1);
        // Something was flagged: row by row, so that it costs only the row it is in.
        for (int64_t one = t; !done && one < next; one++) run_rows(s, at, one, row, 1);
        t = next;
    }
}

static void run_tile(struct scratch *s, const struct place *at, int64_t row, int64_t end) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_ROUND_TOWARD_ZERO);
    rows_of_tile(s, at, row, end);
    _mm_setcsr(mode);
}

void ctxkv__projection_avx2(
    const struct ctxkv__projection_args *args, int64_t begin, int64_t end, void *scratch) {
    for (int64_t unit = begin; unit < end; unit++) run_unit(args, unit, scratch);
}
