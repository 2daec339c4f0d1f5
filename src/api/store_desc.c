// SPDX-License-Identifier: Apache-2.0
// The store's descriptor: checks of its options, views of its tensors.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "desc.h"

static ctxkv_status check_count(const char *name, int64_t count, int64_t layers) {
    if (count == 0 || count == layers) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s is %" PRId64 ", must be 0 or num_layers (%" PRId64 ")", name,
        count, layers);
}

static ctxkv_status check_rope(const ctxkv_store_desc *d) {
    ctxkv_status status = ctxkv__range("rope", (int64_t)d->rope, CTXKV_ROPE_NONE, CTXKV_ROPE_NEOX);
    if (!status) status = check_count("layer_cos_sin_count", d->layer_cos_sin_count, d->num_layers);
    if (!status && d->layer_cos_sin_count)
        status = ctxkv__not_null(d->layer_cos_sin, "layer_cos_sin");
    if (status) return status;
    if (d->rope == CTXKV_ROPE_NONE) {
        if (!d->cos_sin && !d->layer_cos_sin_count) return CTXKV_OK;
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "%scos_sin is given, must be NULL when rope is NONE",
            d->cos_sin ? "" : "layer_");
    }
    if (d->cos_sin && d->layer_cos_sin_count)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "layer_cos_sin is given, must be left out when cos_sin is given");
    if (d->rotary_dim == 0 && d->layer_cos_sin_count) return CTXKV_OK;
    if (d->rotary_dim < 2 || d->rotary_dim > d->head_dim || d->rotary_dim % 2)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "rotary_dim is %" PRId64 ", must be even and in 2..head_dim (%" PRId64 ")",
            d->rotary_dim, d->head_dim);
    return CTXKV_OK;
}

static ctxkv_status check_finite(const char *name, float value) {
    if (isfinite(value)) return CTXKV_OK;
    return ctxkv__fail(CTXKV_INVALID_ARGUMENT, "%s is %g, must be finite", name, (double)value);
}

static bool fp8(ctxkv_cache_type type) {
    return type == CTXKV_CACHE_FP8_E4M3 || type == CTXKV_CACHE_FP8_E5M2;
}

static ctxkv_status check_cache(const ctxkv_store_desc *d) {
    ctxkv_status status =
        ctxkv__range("cache_type", (int64_t)d->cache_type, CTXKV_CACHE_BF16, CTXKV_CACHE_FP8_E5M2);
    if (!status) status = check_count("scale_count", d->scale_count, d->num_layers);
    if (!status && d->scale_count) status = ctxkv__not_null(d->k_scales, "k_scales");
    if (!status && d->scale_count) status = ctxkv__not_null(d->v_scales, "v_scales");
    if (!status && d->scale_count && !fp8(d->cache_type))
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "scale_count is %" PRId64 ", must be 0 unless cache_type is FP8", d->scale_count);
    return status;
}

static ctxkv_status check_values(const ctxkv_store_desc *d) {
    ctxkv_status status =
        ctxkv__range("v_norm", (int64_t)d->v_norm, CTXKV_V_NORM_ABSENT, CTXKV_V_NORM_RMS);
    if (!status) status = ctxkv__eps("v_eps", d->v_eps);
    if (!status) status = check_finite("v_scale", d->v_scale);
    if (!status) status = ctxkv__range("v_from_k", d->v_from_k, 0, 1);
    return status;
}

static ctxkv_status check_k_norm(const ctxkv_store_desc *d) {
    ctxkv_status status =
        ctxkv__range("k_norm", (int64_t)d->k_norm, CTXKV_K_NORM_PLAIN, CTXKV_K_NORM_ABSENT);
    if (!status && d->k_norm == CTXKV_K_NORM_PLAIN && d->head_dim != 64)
        status = ctxkv__fail(
            CTXKV_UNSUPPORTED, "head_dim is %" PRId64 ", must be 64 for k_norm PLAIN", d->head_dim);
    if (!status && d->k_norm != CTXKV_K_NORM_RMS && d->k_norm_weight)
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "k_norm_weight is given, must be NULL unless k_norm is RMS");
    if (!status) status = ctxkv__eps("k_eps", d->k_eps);
    return status ? status : check_finite("k_gain_centre", d->k_gain_centre);
}

ctxkv_status ctxkv__store_check(const ctxkv_device *device, const ctxkv_store_desc *d) {
    ctxkv_status status = ctxkv__range("num_layers", d->num_layers, 1, CTXKV__MAX_LAYERS);
    if (!status) status = ctxkv__range("num_kv_heads", d->num_kv_heads, 1, 65535);
    int64_t n = d->head_dim;
    if (!status && n != 64 && n != 128 && n != 256 && n != 512)
        status = ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "head_dim is %" PRId64 ", must be 64, 128, 256 or 512", n);
    if (!status) status = check_k_norm(d);
    if (!status) status = check_rope(d);
    if (!status) status = check_values(d);
    if (!status) status = check_cache(d);
    if (!status && d->checked && device->cuda)
        status = ctxkv__fail(
            CTXKV_UNSUPPORTED, "checked is 1, must be 0 on a CUDA device (it would have to wait)");
    return status;
}

static ctxkv_status table_view(
    const struct ctxkv_store *plan, const DLTensor *tensor, const char *name, int64_t columns,
    struct ctxkv__view *view) {
    struct ctxkv__want want = {
        plan->device, CTXKV__BF16 | CTXKV__FP16 | CTXKV__FP32, 2, {CTXKV__ANY, columns}, true,
        false};
    ctxkv_status status = ctxkv__tensor(tensor, name, &want, view);
    if (status) return status;
    int64_t width = view->shape[1];
    if (width < 2 || width > plan->desc.head_dim || width % 2)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "%s has %" PRId64 " columns (rotary_dim), must be even and in 2..head_dim (%" PRId64
            ")",
            name, width, plan->desc.head_dim);
    if (view->shape[0] <= 1 || view->stride[0] == width) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s has row stride %" PRId64 ", must be contiguous (%" PRId64 ")",
        name, view->stride[0], width);
}

static enum ctxkv__float_type table_type(unsigned type) {
    return type == CTXKV__FP32   ? CTXKV__TABLE_FP32
           : type == CTXKV__FP16 ? CTXKV__TABLE_FP16
                                 : CTXKV__TABLE_BF16;
}

static ctxkv_status table_views(struct ctxkv_store *plan, const ctxkv_store_desc *d) {
    if (d->rope == CTXKV_ROPE_NONE) return CTXKV_OK;
    int64_t columns = d->rotary_dim ? d->rotary_dim : CTXKV__ANY;
    unsigned first = 0;
    struct ctxkv__view view;
    for (int64_t l = 0; l < d->num_layers; l++) {
        bool own = d->layer_cos_sin_count != 0;
        char name[48] = "cos_sin";
        if (own) snprintf(name, sizeof name, "layer_cos_sin[%" PRId64 "]", l);
        if (own || l == 0) {
            ctxkv_status status =
                table_view(plan, own ? d->layer_cos_sin[l] : d->cos_sin, name, columns, &view);
            if (status) return status;
        }
        if (l == 0) first = view.type;
        if (view.type != first)
            return ctxkv__fail(
                CTXKV_INVALID_ARGUMENT, "%s has another dtype than layer_cos_sin[0]", name);
        plan->tables[l] = (struct ctxkv__table){view.data, view.shape[0], view.shape[1]};
    }
    plan->args.table_type = table_type(first);
    return CTXKV_OK;
}

static ctxkv_status scale_view(
    const struct ctxkv_store *plan, const DLTensor *tensor, const char *which, int64_t layer,
    const void **scale) {
    char name[48];
    snprintf(name, sizeof name, "%s[%" PRId64 "]", which, layer);
    struct ctxkv__want want = {plan->device, CTXKV__FP32, 1, {1}, true, false};
    if (tensor && tensor->ndim == 0) want.ndim = 0;
    struct ctxkv__view view;
    ctxkv_status status = ctxkv__tensor(tensor, name, &want, &view);
    if (!status) *scale = view.data;
    return status;
}

ctxkv_status ctxkv__store_views(struct ctxkv_store *plan, const ctxkv_store_desc *d) {
    ctxkv_status status = table_views(plan, d);
    if (!status && d->k_norm_weight) {
        struct ctxkv__want want = {
            plan->device, CTXKV__BF16 | CTXKV__FP32, 2, {d->num_layers, d->head_dim}, true, false};
        status = ctxkv__tensor(d->k_norm_weight, "k_norm_weight", &want, &plan->k_weight);
    }
    for (int64_t l = 0; !status && l < d->scale_count; l++) {
        status = scale_view(plan, d->k_scales[l], "k_scales", l, &plan->scales[l].k);
        if (!status) status = scale_view(plan, d->v_scales[l], "v_scales", l, &plan->scales[l].v);
    }
    return status;
}
