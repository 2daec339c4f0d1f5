// SPDX-License-Identifier: Apache-2.0
// From the projection's output to the cache's words: K norm, RoPE, V, conversions, and their
// faults.
#include <math.h>
#include <string.h>

#include "plant.h"

// ---- K norm ------------------------------------------------------------------------------------
// The K norm's gain of a column.
static float k_gain(int64_t l, int64_t i) {
    int64_t from = layer_of(l, "layer0_k_norm_weight", "", "");
    float centre = draft.config.zero_centered ? 1 : 0;
    if (!draft.k_norm.tensor.data || on("k_norm_weight_missing")) return 1;
    if (on("gain_centre_missing") || on("gain_centre_missing_k")) centre = 0;
    if (on("gain_centre_twice") || on("gain_centre_twice_k")) centre += 1;
    float g = at(&draft.k_norm, from * dim + i) + centre;
    return on("gain_in_bf16") ? round16(g) : g;
}

static void k_norm(int64_t l, float *k) {
    float s[512], r, eps = eps_of("k");
    if (on("k_norm_missing")) return;
    if (muse) {
        for (int i = 0; i < 64; ++i) s[i] = k[i] * k[i];
        float mean = fmaf(tree(s, 64), 1.0f / 64, eps);
        r = on("k_norm_rsqrt_nearest")  ? (float)(1 / sqrt((double)mean))
            : on("k_norm_rsqrt_divide") ? 1 / sqrtf(mean)
                                        : ctxkv_rsqrt(mean, on("k_norm_rsqrt_ftz"));
    } else {
        r = ctxkv_rsqrt(rms_sum(k, dim, 1024) / (float)dim + eps, 0);
    }
    for (int64_t i = 0; i < dim; ++i) {
        k[i] *= r;
        if (!muse) k[i] *= k_gain(l, i);
        if (!on("k_norm_unrounded")) k[i] = round16(k[i]);
    }
}

// ---- RoPE --------------------------------------------------------------------------------------
static int64_t position_of(int64_t t) {
    if (on("positions_other_order")) t = T - 1 - t;
    if (on("positions_permuted")) t = (t * 5 + 3) % T;
    return ctx.positions[t] + on("positions_plus_1") - on("positions_minus_1");
}

static float half_value(uint16_t h) {
    float magnitude = h >> 10 & 31 ? ldexpf((float)((h & 1023) | 1024), (h >> 10 & 31) - 25)
                                   : ldexpf((float)(h & 1023), -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

static uint16_t half_bits(float x);

static float given(int64_t l, int64_t i) {
    if (ctx.table_lists == 1 || on("layer0_table")) l = 0;
    i += l * ctx.table_rows * draft.config.rotary_dim;
    const uint16_t *words = ctx.cos_sin;
    float x;
    if (ctx.table_dtype == IO_F32)
        memcpy(&x, (const char *)ctx.cos_sin + 4 * i, 4);
    else
        x = ctx.table_dtype == IO_F16 ? half_value(words[i]) : wide(words[i]);
    if (on("table_bf16")) x = round16(x);
    return on("table_fp16") ? half_value(half_bits(x)) : x;
}

static int64_t rotary(void) {
    if (on("rope_whole_head")) return dim;
    if (on("rope_half_head")) return dim / 2;
    return on("rope_quarter_head") ? dim / 4 : draft.config.rotary_dim;
}

static int fresh_table(float *theta) {
    static const char *const thetas[] = {
        "theta_10000", "theta_500000", "theta_1000000", "theta_5000000", "theta_10000000"};
    static const char *const others[] = {
        "table_from_theta", "table_fp32",     "table_cpu",         "table_fp64",
        "rope_whole_head",  "rope_half_head", "rope_quarter_head", "rope_angles_of_head"};
    static const float values[] = {1e4f, 5e5f, 1e6f, 5e6f, 1e7f};
    int fresh = !ctx.cos_sin;
    for (int i = 0; i < 5; ++i) {
        if (!on(thetas[i])) continue;
        *theta = values[i];
        fresh = 1;
    }
    for (int i = 0; i < 8; ++i) fresh |= on(others[i]);
    return fresh;
}

static void table(int64_t l, int64_t position, float *c, float *s) {
    float theta = draft.config.theta, inverse[256];
    int fresh = fresh_table(&theta);
    int64_t n = rotary(), over = on("rope_angles_of_head") ? dim : n;
    ctxkv_rope_inv_freq(theta, over, inverse);
    ctxkv_rope_row(inverse, n / 2, position, c, s);
    for (int64_t j = 0; j < n / 2; ++j) {
        if (on("table_cpu")) {
            float f = 1 / (float)pow(theta, (float)(2 * j) / (float)n);
            c[j] = (float)cos((double)((float)position * f));
            s[j] = (float)sin((double)((float)position * f));
        }
        if (on("table_fp64")) {
            c[j] = (float)cos((double)position / pow(theta, 2.0 * (double)j / (double)n));
            s[j] = (float)sin((double)position / pow(theta, 2.0 * (double)j / (double)n));
        }
        if (!on("table_fp32")) c[j] = round16(c[j]), s[j] = round16(s[j]);
        if (!fresh) {
            c[j] = given(l, position * n + j);
            s[j] = given(l, position * n + n / 2 + j);
        }
    }
}

// The last turn's result is left in FP32.
static void rope(int64_t l, int64_t t, float *k) {
    float c[256], s[256];
    int pairs = !draft.config.neox;
    int64_t n = rotary();
    if (!draft.config.rope || on("rope_missing")) return;
    if (on("rope_neox")) pairs = 0;
    if (on("rope_gptj")) pairs = 1;
    table(l, position_of(t), c, s);
    if (on("rope_last_columns")) k += dim - n;
    for (int turn = on("rope_twice"); turn >= 0; --turn) {
        for (int64_t j = 0; j < n / 2; ++j) {
            float *a = pairs ? k + 2 * j : k + j, *b = pairs ? a + 1 : a + n / 2, x = *a, y = *b;
            *a = fmaf(x, c[j], -(y * s[j]));
            *b = fmaf(y, c[j], x * s[j]);
            if (turn) *a = round16(*a), *b = round16(*b);
        }
    }
}

// ---- V -----------------------------------------------------------------------------------------
static void v_stages(int64_t l, int64_t t, const float *kv, float *v) {
    int alone = draft.parts == 1, from_k = alone || on("v_of_k");
    memcpy(v, from_k ? kv : kv + dim, (size_t)dim * sizeof *v);
    if (on("v_of_normed_k") || on("v_of_rotated_k")) {
        memcpy(v, kv, (size_t)dim * sizeof *v);
        k_norm(l, v);
        if (on("v_of_rotated_k")) rope(l, t, v);
        for (int64_t i = 0; i < dim; ++i) v[i] = round16(v[i]);
    }
    int normed = (alone && !on("v_norm_missing")) || on("v_norm_added") || on("v_norm_weighted");
    float r = 1, scale = draft.config.v_scale;
    if (normed) r = ctxkv_rsqrt(rms_sum(v, dim, 1024) / (float)dim + eps_of("v"), 0);
    for (int64_t i = 0; i < dim; ++i) {
        if (normed) v[i] *= r;
        if (on("v_norm_weighted")) v[i] *= k_gain(l, i);
        v[i] = round16(v[i]);
        if (on("v_scale_inverse")) scale = 1 / draft.config.v_scale;
        if (on("v_scale_bf16")) scale = round16(scale);
        if (scale == 0 || on("v_scale_missing")) continue;
        v[i] *= scale;
        if (on("v_scale_twice")) v[i] = round16(v[i]) * scale;
    }
}

// ---- the cache's words -------------------------------------------------------------------------
static uint16_t half_bits(float x) {
    // FP16, to nearest even, by the C library; clang 14 has no _Float16 here.
    float magnitude = fabsf(x);
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x)) return sign | 0x7E00;
    if (magnitude >= 65520.0f) return sign | 0x7C00;
    int exponent;
    frexpf(magnitude, &exponent);
    if (magnitude < 0x1p-14f) exponent = -13; // subnormals share the lowest exponent
    uint32_t units = (uint32_t)rintf(ldexpf(magnitude, 11 - exponent));
    return (uint16_t)(sign | (((uint32_t)(exponent + 13) << 10) + units));
}

static double fp8_value(int code, int mantissa, int bias) {
    int fraction = code & ((1 << mantissa) - 1), exponent = code >> mantissa;
    if (!exponent) return ldexp(fraction, 1 - bias - mantissa);
    return ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
}

// The nearest of all codes, the even one of two.
static uint16_t fp8_bits(float x, int e4m3) {
    int mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, last = e4m3 ? 0x7E : 0x7B, best = 0;
    double magnitude = fabs((double)x), least = INFINITY;
    if (isnan(x)) return 0x7F;
    if (on("fp8_unsaturated")) ++last; // no number in e4m3, infinity in e5m2
    if (magnitude > 1e6) magnitude = 1e6;
    for (int code = 0; code <= last; ++code) {
        double distance = fabs(magnitude - fp8_value(code, mantissa, bias));
        if (distance > least || (distance == least && code % 2)) continue;
        best = code;
        least = distance;
    }
    return (uint16_t)(best | (signbit(x) ? 0x80 : 0));
}

static float scale_of(int64_t l, int part) {
    if (on("k_scales_for_v")) part = 0;
    if (on("scales_swapped")) part = 1 - part;
    if (on("layer0_scales")) l = 0;
    const float *scales = part ? ctx.v_scales : ctx.k_scales;
    return scales && !on("scales_missing") ? scales[l] : 1;
}

static uint16_t word(int64_t l, int part, float x) {
    float scale = scale_of(l, part), y;
    int to = kind;
    if (on("fp16_bits")) to = 1;
    if (on("bf16_bits")) to = 0;
    if (on("e4m3_bits")) to = 2;
    if (on("e5m2_bits")) to = 3;
    if (!on("cast_unrounded") || !to) x = round16(x);
    if (to == 0) return ctxkv_bf16(x);
    if (to == 1) return half_bits(x);
    y = on("scales_multiplied") ? x * scale : on("scales_reciprocal") ? x * (1 / scale) : x / scale;
    return fp8_bits(y, to == 2);
}

void finish(int64_t l, int64_t t, const float *kv, uint16_t *cell) {
    float k[MAX_DIM], v[MAX_DIM];
    int64_t swapped = on("kv_swapped") ? dim : 0;
    memcpy(k, kv, (size_t)dim * sizeof *k);
    k_norm(l, k);
    rope(l, t, k);
    v_stages(l, t, kv, v);
    for (int64_t i = 0; i < dim; ++i) {
        cell[i + swapped] = word(l, 0, k[i]);
        cell[i + dim - swapped] = word(l, 1, v[i]);
    }
}
