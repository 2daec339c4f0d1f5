// SPDX-License-Identifier: Apache-2.0
// The K stages with their faults: K norm, rotary table, RoPE.
#include <math.h>
#include <string.h>

#include "../../src/ops/norms.h"
#include "../../src/ops/numerics.h"
#include "../../src/ops/rope.h"
#include "diagnose.h"

static float scale_of(const dg_key *p, const float *k, int64_t n) {
    float s[32];
    if (p->norm == CTXKV__K_RMS) return ctxkv__rms_scale_ref(k, n, n / 8, p->eps);
    for (int i = 0; i < 32; ++i) s[i] = k[i] * k[i] + k[i + 32] * k[i + 32];
    for (int half = 16; half >= 1; half /= 2)
        for (int i = 0; i < half; ++i) s[i] = s[i] + s[i + half];
    float mean = ctxkv__fma(s[0], 1.0f / 64, p->eps);
    switch (p->rsqrt) {
    case DG_RSQRT_FTZ:
        return ctxkv__rsqrt_ftz(mean);
    case DG_RSQRT_NEAREST:
        return (float)(1.0 / sqrt((double)mean));
    case DG_RSQRT_DIVIDE:
        return 1.0f / sqrtf(mean);
    default:
        return ctxkv__rsqrt(mean);
    }
}

static float gain_of(const dg_call *call, const dg_key *p, int64_t index) {
    const DLTensor *weight = &call->draft.k_norm.tensor;
    bool fp32 = weight->dtype.bits == 32;
    float gain;
    const char *at = (const char *)weight->data + index * (fp32 ? 4 : 2);
    ctxkv__gains(at, fp32, 1, p->centre, &gain);
    return p->gain_bf16 ? ctxkv__round_bf16(gain) : gain;
}

static void norm_key(const dg_call *call, const dg_key *p, int64_t layer, float *k) {
    int64_t n = call->dim, l = dg_source_layer(call, p->layers, layer);
    if (p->norm == CTXKV__K_ABSENT) return;
    float scale = scale_of(p, k, n);
    for (int64_t i = 0; i < n; ++i) {
        k[i] = k[i] * scale;
        if (p->gain) k[i] = k[i] * gain_of(call, p, l * n + i);
        if (!p->unrounded) k[i] = ctxkv__round_bf16(k[i]);
    }
}

// ---- the table ---------------------------------------------------------------------------------
static void table_wide(const dg_key *p, int64_t position, float *c, float *s) {
    int64_t spread = p->spread ? p->spread : p->rotary;
    for (int64_t j = 0; j < p->rotary / 2; ++j) {
        double power = (double)(2 * j) / (double)spread;
        if (p->table == DG_TABLE_FP64) {
            double angle = (double)position / pow((double)p->theta, power);
            c[j] = (float)cos(angle);
            s[j] = (float)sin(angle);
        } else {
            float inverse = 1.0f / (float)pow((double)p->theta, (double)(float)power);
            float angle = (float)position * inverse;
            c[j] = (float)cos((double)angle);
            s[j] = (float)sin((double)angle);
        }
    }
}

static float given(const dg_call *call, const dg_key *p, int64_t i) {
    static const enum ctxkv__float_type types[] = {
        CTXKV__TABLE_BF16, CTXKV__TABLE_FP16, CTXKV__TABLE_FP32};
    io_dtype dtype = call->context.table_dtype;
    int type = dtype == IO_F32 ? 2 : dtype == IO_F16;
    float x = ctxkv__table_value(call->context.cos_sin, types[type], i);
    if (p->table_round == DG_TO_BF16) return ctxkv__round_bf16(x);
    return p->table_round == DG_TO_FP16 ? ctxkv__from_fp16(ctxkv__to_fp16(x)) : x;
}

static void table_row(
    const dg_call *call, const dg_key *p, int64_t layer, int64_t position, float *c, float *s) {
    int64_t half = p->rotary / 2;
    if (p->table == DG_TABLE_GIVEN) {
        int64_t list = call->context.table_lists > 1 ? layer : 0;
        int64_t row = (list * call->context.table_rows + position) * p->rotary;
        for (int64_t j = 0; j < half; ++j) {
            c[j] = given(call, p, row + j);
            s[j] = given(call, p, row + half + j);
        }
        return;
    }
    if (p->table == DG_TABLE_CPU || p->table == DG_TABLE_FP64) {
        table_wide(p, position, c, s);
    } else {
        float inverse[CTXKV__MAX_HEAD_DIM];
        ctxkv__rope_inv_freq(p->theta, p->spread ? p->spread : p->rotary, inverse);
        ctxkv__rope_row(inverse, half, position, c, s);
    }
    for (int64_t j = 0; j < half && p->table != DG_TABLE_GPU_FP32; ++j) {
        c[j] = ctxkv__round_bf16(c[j]);
        s[j] = ctxkv__round_bf16(s[j]);
    }
}

static void rotate(const dg_key *p, int64_t dim, const float *c, const float *s, float *k) {
    int64_t half = p->rotary / 2;
    bool gptj = p->rope == CTXKV__ROPE_GPTJ;
    if (p->last) k += dim - p->rotary;
    for (int64_t j = 0; j < half; ++j) {
        float *first = gptj ? &k[2 * j] : &k[j], *second = gptj ? &k[2 * j + 1] : &k[j + half];
        float x = *first, y = *second;
        *first = ctxkv__fma(x, c[j], -(y * s[j]));
        *second = ctxkv__fma(y, c[j], x * s[j]);
    }
}

int64_t dg_position(const dg_call *call, const dg_key *p, int64_t row) {
    return call->context.positions ? call->context.positions[row] + p->shift : 0;
}

bool dg_key_stages(
    dg_worker *w, const dg_key *p, int64_t layer, int64_t position, int source, const uint16_t *in,
    float *k) {
    const dg_call *call = dg_worker_call(w);
    int64_t n = call->dim;
    for (int64_t i = 0; i < n; ++i) k[i] = ctxkv__from_bf16(in[i]);
    if (source >= DG_V_NORMED_K) norm_key(call, p, layer, k);
    if (source < DG_V_ROTATED_K || p->rope == CTXKV__ROPE_NONE) return true;
    if (position < 0 || position >= call->table_rows) return false;
    int64_t own = dg_source_layer(call, p->table_layers, layer);
    bool filled;
    float *c = dg_worker_table(w, p, own, position, &filled), *s = c + n / 2;
    if (!filled) table_row(call, p, own, position, c, s);
    for (int turn = 0; turn < p->times; ++turn) {
        for (int64_t i = 0; turn && i < n; ++i) k[i] = ctxkv__round_bf16(k[i]);
        rotate(p, n, c, s, k);
    }
    return true;
}

bool dg_finish_key(
    dg_worker *w, const dg_params *p, int64_t layer, int64_t position, const uint16_t *in,
    uint16_t *out) {
    const dg_call *call = dg_worker_call(w);
    float k[CTXKV__MAX_HEAD_DIM];
    if (!dg_key_stages(w, &p->key, layer, position, DG_V_ROTATED_K, in, k)) return false;
    bool copied = p->key.norm == CTXKV__K_ABSENT && p->key.rope == CTXKV__ROPE_NONE;
    dg_put(call, &p->store, layer, 0, k, copied ? in : NULL, call->dim, out);
    return true;
}
