// SPDX-License-Identifier: Apache-2.0
// The K stages with their faults: K norm, rotary table, RoPE, the stored format.
#include <math.h>
#include <string.h>

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

static void norm_key(const dg_call *call, const dg_key *p, int64_t layer, float *k) {
    int64_t n = call->dim, l = layer;
    if (p->norm == CTXKV__K_ABSENT) return;
    if (p->layers == DG_FIRST) l = 0;
    if (p->layers == DG_NEXT) l = (layer + 1) % call->L;
    if (p->layers == DG_PREVIOUS) l = (layer + call->L - 1) % call->L;
    float scale = scale_of(p, k, n);
    const DLTensor *weight = &call->draft.k_norm.tensor;
    for (int64_t i = 0; i < n; ++i) {
        k[i] = k[i] * scale;
        if (p->gain && weight->data) {
            float gain;
            bool fp32 = weight->dtype.bits == 32;
            const char *at = (const char *)weight->data + (l * n + i) * (fp32 ? 4 : 2);
            ctxkv__gains(at, fp32, 1, 0.0f, &gain);
            k[i] = k[i] * gain;
        }
        if (!p->unrounded) k[i] = ctxkv__from_bf16(ctxkv__to_bf16(k[i]));
    }
}

static void table_wide(const dg_key *p, int64_t dim, int64_t position, float *c, float *s) {
    for (int64_t j = 0; j < dim / 2; ++j) {
        double power = (double)(2 * j) / (double)dim;
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

static void table_row(const dg_call *call, const dg_key *p, int64_t position, float *c, float *s) {
    int64_t half = call->dim / 2;
    if (p->table == DG_TABLE_GIVEN) {
        for (int64_t j = 0; j < half; ++j) {
            c[j] = ctxkv__load_bf16(call->context.cos_sin, position * call->dim + j);
            s[j] = ctxkv__load_bf16(call->context.cos_sin, position * call->dim + half + j);
        }
        return;
    }
    if (p->table == DG_TABLE_CPU || p->table == DG_TABLE_FP64) {
        table_wide(p, call->dim, position, c, s);
    } else {
        float inverse[CTXKV__MAX_HEAD_DIM];
        ctxkv__rope_inv_freq(p->theta, call->dim, inverse);
        ctxkv__rope_row(inverse, half, position, c, s);
    }
    for (int64_t j = 0; j < half && p->table != DG_TABLE_GPU_FP32; ++j) {
        c[j] = ctxkv__from_bf16(ctxkv__to_bf16(c[j]));
        s[j] = ctxkv__from_bf16(ctxkv__to_bf16(s[j]));
    }
}

static void rotate(const dg_key *p, int64_t dim, const float *c, const float *s, float *k) {
    int64_t half = dim / 2;
    bool gptj = p->rope == CTXKV__ROPE_GPTJ;
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

bool dg_finish_key(
    dg_worker *w, const dg_key *p, int64_t layer, int64_t position, const uint16_t *in,
    uint16_t *out) {
    const dg_call *call = dg_worker_call(w);
    float k[CTXKV__MAX_HEAD_DIM];
    int64_t n = call->dim;
    if (p->norm == CTXKV__K_ABSENT && p->rope == CTXKV__ROPE_NONE) {
        memcpy(out, in, (size_t)n * sizeof *out);
        return true;
    }
    for (int64_t i = 0; i < n; ++i) k[i] = ctxkv__from_bf16(in[i]);
    norm_key(call, p, layer, k);
    if (p->rope != CTXKV__ROPE_NONE) {
        if (position < 0 || position >= call->table_rows) return false;
        bool filled;
        float *c = dg_worker_table(w, p, position, &filled), *s = c + n / 2;
        if (!filled) table_row(call, p, position, c, s);
        for (int turn = 0; turn < p->times; ++turn) {
            rotate(p, n, c, s, k);
            for (int64_t i = 0; i < n; ++i) k[i] = ctxkv__from_bf16(ctxkv__to_bf16(k[i]));
        }
    }
    for (int64_t i = 0; i < n; ++i) out[i] = ctxkv__to_bf16(k[i]);
    return true;
}

uint16_t dg_half(uint16_t bf16) {
    uint32_t b = (uint32_t)bf16 << 16, sign = b >> 16 & 0x8000u, magnitude = b & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7C00u);
    if (magnitude < 0x38800000u) { // subnormal in FP16: units of 2^-24
        float units = ctxkv__float(magnitude) * 0x1p24f;
        return (uint16_t)(sign | (uint32_t)nearbyintf(units));
    }
    // 8 significant bits fit in FP16's 11: nothing is rounded.
    return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}
