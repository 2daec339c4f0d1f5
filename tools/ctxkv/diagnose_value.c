// SPDX-License-Identifier: Apache-2.0
// V's stages with their faults, and the stored formats of both.
#include <math.h>
#include <string.h>

#include "../../src/ops/norms.h"
#include "../../src/ops/numerics.h"
#include "diagnose.h"

// ---- the cache's words -------------------------------------------------------------------------
static float scale_of(const dg_call *call, const dg_store *p, int64_t layer, int part) {
    if (p->scales == DG_SCALES_OF_K) part = 0;
    if (p->scales == DG_SCALES_SWAPPED) part = 1 - part;
    const float *scales = part ? call->context.v_scales : call->context.k_scales;
    if (!scales || p->scales == DG_SCALES_NONE) return 1.0f;
    return scales[dg_source_layer(call, p->scale_layers, layer)];
}

// What is past the largest value is no number, or infinite, where the conversion does not saturate.
static bool overflows(const dg_store *p, float x, uint16_t *out) {
    bool e4m3 = p->kind == CTXKV_CACHE_FP8_E4M3;
    if (!p->unsaturated || !(e4m3 ? fabsf(x) > 464.0f : fabsf(x) >= 61440.0f)) return false;
    *out = (uint16_t)((signbit(x) ? 0x80 : 0) | (e4m3 ? 0x7F : 0x7C));
    return true;
}

static uint16_t quantised(const dg_store *p, float x, float scale) {
    uint16_t out;
    if (p->scales == DG_SCALES_TIMES)
        x = x * scale;
    else if (p->scales == DG_SCALES_RECIPROCAL)
        x = x * (1.0f / scale);
    else
        x = x / scale;
    if (overflows(p, x, &out)) return out;
    return p->kind == CTXKV_CACHE_FP8_E4M3 ? ctxkv__to_e4m3(x) : ctxkv__to_e5m2(x);
}

void dg_put(
    const dg_call *call, const dg_store *p, int64_t layer, int part, const float *x,
    const uint16_t *raw, int64_t count, uint16_t *out) {
    float scale = scale_of(call, p, layer, part);
    for (int64_t i = 0; i < count; ++i) {
        uint16_t bits = raw ? raw[i] : ctxkv__to_bf16(x[i]);
        float value = p->wide && !raw ? x[i] : ctxkv__from_bf16(bits);
        if (p->kind == CTXKV_CACHE_BF16)
            out[i] = bits;
        else if (p->kind == CTXKV_CACHE_FP16)
            out[i] = ctxkv__to_fp16(value);
        else
            out[i] = quantised(p, value, scale);
    }
}

// ---- V -----------------------------------------------------------------------------------------
bool dg_value_alone(const dg_value *p) {
    return p->norm == DG_V_PLAIN && p->source <= DG_V_RAW_K;
}

static void norm_value(
    const dg_call *call, const dg_params *p, int64_t layer, const DLTensor *weight, float *v) {
    int64_t n = call->dim;
    float scale = ctxkv__rms_scale_ref(v, n, n / 8, p->value.eps);
    for (int64_t i = 0; i < n; ++i) {
        v[i] = v[i] * scale;
        if (p->value.norm == DG_V_WEIGHTED) {
            float gain;
            bool fp32 = weight->dtype.bits == 32;
            const char *at = (const char *)weight->data + (layer * n + i) * (fp32 ? 4 : 2);
            ctxkv__gains(at, fp32, 1, p->key.centre, &gain);
            v[i] = v[i] * gain;
        }
        v[i] = ctxkv__round_bf16(v[i]);
    }
}

void dg_finish_columns(
    const dg_call *call, const dg_params *p, int64_t layer, const uint16_t *in, int64_t count,
    uint16_t *out) {
    float x[CTXKV__MAX_HEAD_DIM];
    bool scaled = p->value.scale != 0 && p->value.times;
    for (int64_t i = 0; i < count; ++i) {
        x[i] = ctxkv__from_bf16(in[i]);
        for (int turn = 0; scaled && turn < p->value.times; ++turn)
            x[i] = (turn ? ctxkv__round_bf16(x[i]) : x[i]) * p->value.scale;
    }
    dg_put(call, &p->store, layer, 1, x, scaled ? NULL : in, count, out);
}

bool dg_finish_value(
    dg_worker *w, const dg_params *p, int64_t layer, int64_t position, const uint16_t *in,
    uint16_t *out) {
    const dg_call *call = dg_worker_call(w);
    float v[CTXKV__MAX_HEAD_DIM];
    uint16_t bits[CTXKV__MAX_HEAD_DIM];
    if (!dg_value_alone(&p->value)) {
        if (!dg_key_stages(w, &p->key, layer, position, p->value.source, in, v)) return false;
        for (int64_t i = 0; i < call->dim; ++i) v[i] = ctxkv__round_bf16(v[i]);
        if (p->value.norm != DG_V_PLAIN) norm_value(call, p, layer, &call->draft.k_norm.tensor, v);
        for (int64_t i = 0; i < call->dim; ++i) bits[i] = ctxkv__to_bf16(v[i]);
        in = bits;
    }
    dg_finish_columns(call, p, layer, in, call->dim, out);
    return true;
}
