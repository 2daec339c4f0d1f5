// SPDX-License-Identifier: Apache-2.0
// Scalar truth of the norms: written to be read beside SPEC 3.1 and 5, never optimised.
#include "norms.h"
#include "float_mode.h"
#include "numerics.h"

#define ROW_THREADS 256
#define ROW_VALUES 32

// Sum of squares of one thread's 32 values.
static float thread_sum_pair(const float q[ROW_VALUES]) {
    float p[16];
    for (int i = 0; i < 16; i++) p[i] = ctxkv__fma(q[2 * i], q[2 * i], q[2 * i + 1] * q[2 * i + 1]);
    for (int n = 8; n >= 1; n /= 2)
        for (int i = 0; i < n; i++) p[i] = p[2 * i] + p[2 * i + 1];
    return p[0];
}

static float thread_sum_packed(const float q[ROW_VALUES], bool contract) {
    float p[8][2];
    for (int i = 0; i < 8; i++)
        for (int lane = 0; lane < 2; lane++) {
            float first = q[4 * i + lane], second = q[4 * i + 2 + lane];
            float square = second * second;
            p[i][lane] = contract ? ctxkv__fma(first, first, square) : first * first + square;
        }
    for (int n = 4; n >= 1; n /= 2)
        for (int i = 0; i < n; i++)
            for (int lane = 0; lane < 2; lane++) p[i][lane] = p[2 * i][lane] + p[2 * i + 1][lane];
    return p[0][0] + p[0][1];
}

// A butterfly leaves every lane with the sum that folding by halves leaves in lane 0.
static float fold(float *s, int n) {
    for (int half = n / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; i++) s[i] = s[i] + s[i + half];
    return s[0];
}

float ctxkv__row_sum_ref(const float *v, enum ctxkv__sum_order order, bool contract) {
    float warps[8];
    for (int w = 0; w < 8; w++) {
        float lanes[32];
        for (int lane = 0; lane < 32; lane++) {
            int t = w * 32 + lane;
            float q[ROW_VALUES];
            for (int k = 0; k < 4; k++)
                for (int e = 0; e < 8; e++) q[8 * k + e] = v[t * 8 + k * 2048 + e];
            lanes[lane] =
                order == CTXKV__ORDER_PAIR ? thread_sum_pair(q) : thread_sum_packed(q, contract);
        }
        warps[w] = fold(lanes, 32);
    }
    return fold(warps, 8);
}

static float row_scale(const float *v, const struct ctxkv__norm *norm) {
    float sum = ctxkv__row_sum_ref(v, norm->order, norm->contract);
    return ctxkv__rsqrt_ftz(ctxkv__fma(sum, 1.0f / 8192, norm->eps));
}

float ctxkv__rms_scale_ref(const float *values, int64_t n, int64_t threads, float eps) {
    float sum = 0.0f;
    for (int64_t warp = 0; warp * 32 < threads; warp++) {
        float lanes[32];
        int count = threads - warp * 32 < 32 ? (int)(threads - warp * 32) : 32;
        for (int lane = 0; lane < count; lane++) {
            float a = 0.0f;
            for (int64_t vector = warp * 32 + lane; vector < n / 8; vector += threads)
                for (int e = 0; e < 8; e++) {
                    float x = values[vector * 8 + e];
                    a = ctxkv__fma(x, x, a);
                }
            lanes[lane] = a;
        }
        for (int step = 1; step < 32; step *= 2)
            for (int i = 0; i + step < count; i += 2 * step) lanes[i] = lanes[i] + lanes[i + step];
        sum = warp == 0 ? lanes[0] : sum + lanes[0];
    }
    return ctxkv__rsqrt(sum / (float)n + eps);
}

// values becomes the norm of values, rounded to BF16 and widened again.
static void norm_row(float *values, int64_t n, const struct ctxkv__norm *norm, int64_t layer) {
    const float *g = norm->gain ? norm->gain + layer * n : 0;
    bool rms = norm->order == CTXKV__ORDER_RMS_1024 || norm->order == CTXKV__ORDER_RMS_256;
    float scale;
    if (g && norm->input_scale)
        for (int64_t i = 0; i < n; i++) values[i] = values[i] * g[i];
    if (rms) {
        int64_t most = norm->order == CTXKV__ORDER_RMS_1024 ? 1024 : 256;
        scale = ctxkv__rms_scale_ref(values, n, n / 8 < most ? n / 8 : most, norm->eps);
    } else {
        scale = row_scale(values, norm);
    }
    for (int64_t i = 0; i < n; i++) {
        float y = scale * values[i];
        if (g && !norm->input_scale) y = y * g[i];
        values[i] = ctxkv__from_bf16(ctxkv__to_bf16(y));
    }
}

void ctxkv__norms_ref(const struct ctxkv__norms_args *args, int64_t row_begin, int64_t row_end) {
    int64_t n = args->hidden_size;
    // Two absent norms pass every bit, a NaN's payload too.
    bool untouched = !args->hidden.present && !args->layer.present;
    for (int64_t t = row_begin; t < row_end; t++) {
        float hidden[CTXKV__MAX_HIDDEN], values[CTXKV__MAX_HIDDEN];
        for (int64_t i = 0; i < n; i++)
            hidden[i] = ctxkv__load_bf16(args->x, t * args->x_row_stride + i);
        if (args->hidden.present) norm_row(hidden, n, &args->hidden, 0);
        for (int64_t l = 0; l < args->num_layers; l++) {
            memcpy(values, hidden, (size_t)n * sizeof(float));
            if (args->layer.present) norm_row(values, n, &args->layer, l);
            int64_t first = l * args->out_layer_stride + t * args->out_row_stride;
            for (int64_t i = 0; i < n; i++) {
                uint16_t raw = ctxkv__load16(args->x, t * args->x_row_stride + i);
                ctxkv__store16(args->out, first + i, untouched ? raw : ctxkv__to_bf16(values[i]));
            }
        }
    }
}

void ctxkv__gains(const void *weights, bool fp32, int64_t n, float centre, float *gains) {
    fenv_t mode;
    ctxkv__float_mode_enter(&mode);
    for (int64_t i = 0; i < n; i++) {
        float w;
        if (fp32)
            memcpy(&w, (const char *)weights + 4 * i, 4);
        else
            w = ctxkv__load_bf16(weights, i);
        gains[i] = w + centre;
    }
    ctxkv__float_mode_leave(&mode);
}
