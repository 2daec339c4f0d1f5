// SPDX-License-Identifier: Apache-2.0
// The cos/sin table and the single values of the public API, and its constants by name.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/float_mode.h"
#include "../ops/numerics.h"
#include "../ops/rope.h"
#include "desc.h"

static ctxkv_status check_theta(float theta, int64_t rotary_dim) {
    if (!isfinite(theta) || theta <= 1.0f)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "theta is %g, must be finite and > 1", (double)theta);
    if (rotary_dim < 2 || rotary_dim > 65536 || rotary_dim % 2)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "rotary_dim is %" PRId64 ", must be even and in 2..65536",
            rotary_dim);
    return CTXKV_OK;
}

ctxkv_status ctxkv_rope_inv_freq(float theta, int64_t rotary_dim, float *inv_freq) {
    ctxkv_status status = check_theta(theta, rotary_dim);
    if (!status) status = ctxkv__not_null(inv_freq, "inv_freq");
    if (status) return status;
    fenv_t mode;
    ctxkv__float_mode_enter(&mode);
    ctxkv__rope_inv_freq(theta, rotary_dim, inv_freq);
    ctxkv__float_mode_leave(&mode);
    return CTXKV_OK;
}

ctxkv_status ctxkv_rope_row(
    const float *inv_freq, int64_t count, int64_t position, float *cosine, float *sine) {
    ctxkv_status status = ctxkv__not_null(inv_freq, "inv_freq");
    if (!status) status = ctxkv__not_null(cosine, "cosine");
    if (!status) status = ctxkv__not_null(sine, "sine");
    if (!status) status = ctxkv__range("count", count, 0, 32768);
    if (!status) status = ctxkv__range("position", position, 0, INT64_C(1) << 40);
    if (status) return status;
    fenv_t mode;
    ctxkv__float_mode_enter(&mode);
    ctxkv__rope_row(inv_freq, count, position, cosine, sine);
    ctxkv__float_mode_leave(&mode);
    return CTXKV_OK;
}

static void put(const struct ctxkv__view *table, int64_t i, float x) {
    if (table->type == CTXKV__FP32)
        memcpy(table->data + 4 * i, &x, 4);
    else
        ctxkv__store16(
            table->data, i, table->type == CTXKV__FP16 ? ctxkv__to_fp16(x) : ctxkv__to_bf16(x));
}

ctxkv_status ctxkv_rope_table(
    float theta, int64_t rotary_dim, int64_t positions, const DLTensor *table) {
    ctxkv_status status = check_theta(theta, rotary_dim);
    if (!status) status = ctxkv__range("positions", positions, 0, INT64_C(1) << 32);
    if (status) return status;
    struct ctxkv__view view;
    struct ctxkv__want want = {
        0, CTXKV__BF16 | CTXKV__FP16 | CTXKV__FP32, 2, {positions, rotary_dim}, true, true};
    status = ctxkv__tensor(table, "table", &want, &view);
    if (status || positions == 0) return status;
    int64_t half = rotary_dim / 2;
    float *scratch = malloc((size_t)(3 * half) * sizeof *scratch);
    if (!scratch) return ctxkv__no_memory("the inverse frequencies");
    float *cosine = scratch + half, *sine = cosine + half;
    fenv_t mode;
    ctxkv__float_mode_enter(&mode);
    ctxkv__rope_inv_freq(theta, rotary_dim, scratch);
    for (int64_t p = 0; p < positions; p++) {
        ctxkv__rope_row(scratch, half, p, cosine, sine);
        for (int64_t j = 0; j < half; j++) {
            put(&view, p * view.stride[0] + j, cosine[j]);
            put(&view, p * view.stride[0] + half + j, sine[j]);
        }
    }
    ctxkv__float_mode_leave(&mode);
    free(scratch);
    return CTXKV_OK;
}

float ctxkv_rsqrt(float x, int32_t ftz) {
    return ftz ? ctxkv__rsqrt_ftz(x) : ctxkv__rsqrt(x);
}

float ctxkv_mma16(const uint16_t a[16], const uint16_t b[16], float acc) {
    return a && b ? ctxkv__mma16(a, b, acc) : ctxkv__float(CTXKV__NAN_BITS);
}

uint16_t ctxkv_bf16(float x) {
    return ctxkv__to_bf16(x);
}

uint16_t ctxkv_fp16(float x) {
    return ctxkv__to_fp16(x);
}

uint8_t ctxkv_fp8(float x, ctxkv_cache_type type) {
    return type == CTXKV_CACHE_FP8_E4M3   ? ctxkv__to_e4m3(x)
           : type == CTXKV_CACHE_FP8_E5M2 ? ctxkv__to_e5m2(x)
                                          : 0x7F;
}

#define NAMED(constant)                                                                            \
    { #constant, (int32_t)constant }
static const struct {
    const char *name;
    int32_t value;
} constants[] = {
    NAMED(CTXKV_CPU_SCALAR),         NAMED(CTXKV_CPU_AVX2),        NAMED(CTXKV_CPU_AVX512),
    NAMED(CTXKV_NORM_ROW),           NAMED(CTXKV_NORM_RMS),        NAMED(CTXKV_NORM_ABSENT),
    NAMED(CTXKV_NUMERICS_STOCK),     NAMED(CTXKV_NUMERICS_PAIR),   NAMED(CTXKV_NUMERICS_PACKED),
    NAMED(CTXKV_NUMERICS_INVARIANT), NAMED(CTXKV_PROJECTION_AUTO), NAMED(CTXKV_PROJECTION_EXACT),
    NAMED(CTXKV_PROJECTION_CUBLAS),  NAMED(CTXKV_K_NORM_PLAIN),    NAMED(CTXKV_K_NORM_RMS),
    NAMED(CTXKV_BIAS_FUSED),         NAMED(CTXKV_BIAS_AFTER),      NAMED(CTXKV_V_NORM_ABSENT),
    NAMED(CTXKV_V_NORM_RMS),         NAMED(CTXKV_CACHE_BF16),      NAMED(CTXKV_CACHE_FP16),
    NAMED(CTXKV_CACHE_FP8_E4M3),     NAMED(CTXKV_CACHE_FP8_E5M2),  NAMED(CTXKV_K_NORM_ABSENT),
    NAMED(CTXKV_ROPE_NONE),          NAMED(CTXKV_ROPE_GPTJ),       NAMED(CTXKV_ROPE_NEOX),
    NAMED(CTXKV_FAULT_NONE),         NAMED(CTXKV_FAULT_SLOT),      NAMED(CTXKV_FAULT_POSITION),
    NAMED(CTXKV_VERSION_MAJOR),      NAMED(CTXKV_VERSION_MINOR),   NAMED(CTXKV_VERSION_PATCH),
#define CTXKV_ERROR(name, value, text) {"CTXKV_" #name, value},
#include "../../include/ctxkv/errors.inc"
#undef CTXKV_ERROR
};

int32_t ctxkv_constant(const char *name) {
    for (size_t i = 0; name && i < sizeof constants / sizeof *constants; i++)
        if (!strcmp(name, constants[i].name)) return constants[i].value;
    return -1;
}
