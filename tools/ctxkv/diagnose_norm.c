// SPDX-License-Identifier: Apache-2.0
// The norm stages with their faults: hidden norm, rounded or not, then a layer's norm.
#include <math.h>
#include <string.h>

#include "../../src/ops/numerics.h"
#include "diagnose.h"

#define THREADS 256
#define VALUES 32

static float fold(float *s, int n) {
    for (int half = n / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; ++i) s[i] = s[i] + s[i + half];
    return s[0];
}

static float thread_sum(const float *v, int t, int order) {
    float q[VALUES], sum = 0.0f;
    for (int i = 0; i < VALUES; ++i) q[i] = v[t * 8 + i / 8 * 2048 + i % 8];
    for (int i = 0; i < VALUES; ++i)
        sum = order == DG_ORDER_THREAD_FMA ? ctxkv__fma(q[i], q[i], sum) : sum + q[i] * q[i];
    return sum;
}

static float row_sum(const float *v, int64_t n, int order, bool contract) {
    float lanes[THREADS], warps[THREADS / 32], sum = 0.0f;
    switch (order) {
    case DG_ORDER_PAIR:
        return ctxkv__row_sum_ref(v, CTXKV__ORDER_PAIR, false);
    case DG_ORDER_PACKED:
        return ctxkv__row_sum_ref(v, CTXKV__ORDER_PACKED, contract);
    case DG_ORDER_ROW_FMA:
        for (int64_t i = 0; i < n; ++i) sum = ctxkv__fma(v[i], v[i], sum);
        return sum;
    case DG_ORDER_ROW:
        for (int64_t i = 0; i < n; ++i) sum = sum + v[i] * v[i];
        return sum;
    default:
        break;
    }
    for (int t = 0; t < THREADS; ++t) lanes[t] = thread_sum(v, t, order);
    for (int w = 0; w < THREADS / 32; ++w) warps[w] = fold(lanes + w * 32, 32);
    return fold(warps, THREADS / 32);
}

static float scale_of(const float *v, int64_t n, int order, const dg_norm *norm, bool contract) {
    if (order >= DG_ORDER_RMS_1024) {
        int64_t most = order == DG_ORDER_RMS_1024 ? 1024 : 256;
        return ctxkv__rms_scale_ref(v, n, n / 8 < most ? n / 8 : most, norm->eps);
    }
    float mean = ctxkv__fma(row_sum(v, n, order, contract), 1.0f / (float)n, norm->eps);
    if (norm->rsqrt == DG_RSQRT_NEAREST) return (float)(1.0 / sqrt((double)mean));
    if (norm->rsqrt == DG_RSQRT_DIVIDE) return 1.0f / sqrtf(mean);
    return ctxkv__rsqrt_ftz(mean);
}

static float gain_of(const dg_norms *p, const dg_norm *norm, float weight) {
    float gain = weight + norm->centre;
    return p->gain_bf16 ? ctxkv__from_bf16(ctxkv__to_bf16(gain)) : gain;
}

// In place, unrounded. fp32: the weight's type, which decides the packed order's contraction.
static void apply_norm(
    const dg_norms *p, const dg_norm *norm, const float *weight, bool fp32, int64_t n, float *v) {
    if (!norm->present) return;
    if (norm->gain == DG_GAIN_NONE) weight = NULL;
    bool contract = weight && (fp32 || norm->input_scale);
    if (weight && norm->input_scale)
        for (int64_t i = 0; i < n; ++i) v[i] = v[i] * gain_of(p, norm, weight[i]);
    float scale = scale_of(v, n, p->order, norm, contract);
    for (int64_t i = 0; i < n; ++i) {
        v[i] = scale * v[i];
        if (weight && !norm->input_scale) v[i] = v[i] * gain_of(p, norm, weight[i]);
    }
}

static bool is_fp32(const io_view *view) {
    return view && view->tensor.dtype.bits == 32;
}

void dg_normed(dg_worker *w, const dg_norms *p, int64_t layer, int64_t row, uint16_t *out) {
    const dg_call *call = dg_worker_call(w);
    float *v = dg_worker_scratch(w)->values;
    int64_t n = call->D;
    for (int64_t i = 0; i < n; ++i) v[i] = ctxkv__load_bf16(call->context.hidden, row * n + i);
    apply_norm(p, &p->hidden, call->gains, is_fp32(&call->draft.hidden), n, v);
    if (!p->unrounded)
        for (int64_t i = 0; i < n; ++i) v[i] = ctxkv__from_bf16(ctxkv__to_bf16(v[i]));
    bool own = p->layer.gain == DG_GAIN_OWN;
    const float *weight =
        own ? call->gains + (1 + dg_source_layer(call, p->layers, layer)) * n : call->gains;
    bool fp32 = own ? is_fp32(call->draft.layer_norms) : is_fp32(&call->draft.hidden);
    apply_norm(p, &p->layer, weight, fp32, n, v);
    for (int64_t i = 0; i < n; ++i) out[i] = ctxkv__to_bf16(v[i]);
}
