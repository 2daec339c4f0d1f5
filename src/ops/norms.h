// SPDX-License-Identifier: Apache-2.0
// Contract of the norms op: hidden norm, rounded to BF16, then one norm per layer (SPEC 3.1, 5).
#ifndef CTXKV_OPS_NORMS_H
#define CTXKV_OPS_NORMS_H

#include <stdbool.h>
#include <stdint.h>

enum ctxkv__sum_order {
    CTXKV__ORDER_PAIR,     // SPEC 3.1, D = 8192
    CTXKV__ORDER_PACKED,   // SPEC 3.1, D = 8192
    CTXKV__ORDER_RMS_1024, // SPEC 5 with B = min(n/8, 1024)
    CTXKV__ORDER_RMS_256   // SPEC 5 with B = min(n/8, 256)
};

struct ctxkv__norm {
    bool present;
    enum ctxkv__sum_order order;
    bool contract;     // packed order only: the first combination is an fma
    bool input_scale;  // the gain multiplies the input
    const float *gain; // weight + gain centre, FP32, layer l at gain + l*D; NULL: weightless
    float eps;
};

struct ctxkv__norms_args {
    int64_t hidden_size, num_layers; // num_layers = 1 when the layer norm is absent
    struct ctxkv__norm hidden, layer;
    const void *x; // BF16, row t at x + t*x_row_stride
    int64_t x_row_stride;
    void *out; // BF16, layer l, row t at out + l*out_layer_stride + t*out_row_stride
    int64_t out_layer_stride, out_row_stride;
    bool stream; // a hint: the output is large, so it need not pass through the caches
};

// Rows [row_begin, row_end) of every layer. No allocation, no globals, any byte alignment.
typedef void ctxkv__norms_fn(
    const struct ctxkv__norms_args *args, int64_t row_begin, int64_t row_end);

ctxkv__norms_fn ctxkv__norms_ref;

// Largest D; a row's FP32 copy lies on the stack.
#define CTXKV__MAX_HIDDEN 32768

// One vLLM rms_norm's scale for n values: rsqrt(sum/n + eps) with B threads (SPEC 5).
float ctxkv__rms_scale_ref(const float *values, int64_t n, int64_t threads, float eps);

// The row norm's sum of squares of 8192 values, order PAIR or PACKED (SPEC 3.1).
float ctxkv__row_sum_ref(const float *v, enum ctxkv__sum_order order, bool contract);

// FP32 gains of n weights (BF16 or FP32, any alignment): weight + centre.
void ctxkv__gains(const void *weights, bool fp32, int64_t n, float centre, float *gains);

#endif
