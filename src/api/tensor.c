// SPDX-License-Identifier: Apache-2.0
// DLTensor checks: device, type, shape, strides, alignment, extent.
#include "tensor.h"

#include "../chain/device.h"

#include <inttypes.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

void ctxkv__shape_text(char *text, size_t size, const int64_t *shape, int ndim) {
    size_t used = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < ndim && used < size; i++) {
        const char *comma = i ? ", " : "";
        int n = shape[i] == CTXKV__ANY
                    ? snprintf(text + used, size - used, "%s*", comma)
                    : snprintf(text + used, size - used, "%s%" PRId64, comma, shape[i]);
        used += (size_t)n;
    }
    if (used < size) snprintf(text + used, size - used, "]");
}

static unsigned type_of(DLDataType t) {
    if (t.lanes != 1) return 0;
    if (t.code == kDLBfloat && t.bits == 16) return CTXKV__BF16;
    if (t.code == kDLFloat && t.bits == 32) return CTXKV__FP32;
    if (t.code == kDLInt && t.bits == 64) return CTXKV__I64;
    if (t.code == kDLFloat && t.bits == 16) return CTXKV__FP16;
    if (t.code == kDLFloat8_e4m3fn && t.bits == 8) return CTXKV__E4M3;
    if (t.code == kDLFloat8_e5m2 && t.bits == 8) return CTXKV__E5M2;
    if (t.code == kDLUInt && t.bits == 8) return CTXKV__U8;
    return 0;
}

static const struct {
    unsigned type;
    const char *name;
    int64_t size;
} types[] = {
    {CTXKV__BF16, "BF16", 2}, {CTXKV__FP16, "FP16", 2},     {CTXKV__FP32, "FP32", 4},
    {CTXKV__I64, "int64", 8}, {CTXKV__E4M3, "FP8 e4m3", 1}, {CTXKV__E5M2, "FP8 e5m2", 1},
    {CTXKV__U8, "uint8", 1},
};
#define TYPES (sizeof types / sizeof *types)

static void types_text(char *text, size_t size, unsigned wanted) {
    size_t used = 0;
    for (size_t i = 0; i < TYPES; i++) {
        if (!(wanted & types[i].type)) continue;
        used +=
            (size_t)snprintf(text + used, size - used, "%s%s", used ? " or " : "", types[i].name);
    }
}

int64_t ctxkv__item_size(unsigned type) {
    for (size_t i = 0; i < TYPES; i++)
        if (types[i].type == type) return types[i].size;
    return 1;
}

static ctxkv_status check_type(
    const DLTensor *t, const char *name, const struct ctxkv__want *want) {
    if (type_of(t->dtype) & want->types) return CTXKV_OK;
    static const char *const codes[] = {"int",    "uint",    "float", "opaque",
                                        "bfloat", "complex", "bool"};
    char number[24], wanted[96];
    snprintf(number, sizeof number, "(DLPack code %d) ", t->dtype.code);
    types_text(wanted, sizeof wanted, want->types);
    const char *code = t->dtype.code < 7 ? codes[t->dtype.code] : number;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s has dtype %s%d (lanes %d), must be %s", name, code,
        t->dtype.bits, t->dtype.lanes, wanted);
}

static ctxkv_status check_device(
    const DLTensor *t, const char *name, const struct ctxkv__want *want) {
    bool cuda = want->device && want->device->cuda;
    int type = (int)t->device.device_type;
    if (cuda && type == kDLCUDA && t->device.device_id == want->device->ordinal) return CTXKV_OK;
    if (!cuda && (type == kDLCPU || type == kDLCUDAHost)) return CTXKV_OK;
    char wanted[32] = "CPU memory (device type 1)";
    if (cuda) snprintf(wanted, sizeof wanted, "cuda:%d (device type 2)", want->device->ordinal);
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s lies on device type %d, id %d, must lie in %s", name, type,
        t->device.device_id, wanted);
}

static ctxkv_status check_shape(
    const DLTensor *t, const char *name, const struct ctxkv__want *want) {
    bool good = t->ndim == want->ndim && (t->shape || t->ndim == 0);
    for (int i = 0; good && i < want->ndim; i++)
        good = t->shape[i] >= 0 && (want->shape[i] == CTXKV__ANY || t->shape[i] == want->shape[i]);
    if (good) return CTXKV_OK;
    char was[160] = "[?]", must[160];
    if (t->ndim >= 0 && t->ndim <= 8 && (t->shape || t->ndim == 0))
        ctxkv__shape_text(was, sizeof was, t->shape, t->ndim);
    ctxkv__shape_text(must, sizeof must, want->shape, want->ndim);
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s has shape %s (%d dimensions), must be %s", name, was, t->ndim,
        must);
}

static ctxkv_status bad_strides(
    const DLTensor *t, const char *name, const struct ctxkv__view *view, const char *must) {
    char was[160];
    if (t->strides)
        ctxkv__shape_text(was, sizeof was, t->strides, view->ndim);
    else
        snprintf(was, sizeof was, "row-major");
    return ctxkv__fail(CTXKV_INVALID_ARGUMENT, "%s has strides %s, must %s", name, was, must);
}

// Sorted by stride, each dimension must step over all of the smaller ones.
static bool elements_distinct(const struct ctxkv__view *v) {
    bool used[CTXKV__MAX_DIMS] = {false};
    int64_t reach = 0;
    for (int round = 0; round < v->ndim; round++) {
        int best = 0;
        while (used[best]) best++;
        for (int i = best + 1; i < v->ndim; i++)
            if (!used[i] && llabs(v->stride[i]) < llabs(v->stride[best])) best = i;
        used[best] = true;
        if (v->shape[best] <= 1) continue;
        int64_t step = llabs(v->stride[best]);
        if (step <= reach) return false;
        reach += step * (v->shape[best] - 1);
    }
    return true;
}

static ctxkv_status fill_view(
    const DLTensor *t, const char *name, const struct ctxkv__want *want, struct ctxkv__view *v) {
    int64_t next = 1, low = 0, high = 0, span;
    bool empty = false, overflow = false;
    v->type = type_of(t->dtype);
    v->ndim = t->ndim;
    for (int i = t->ndim - 1; i >= 0; i--) {
        v->shape[i] = t->shape[i];
        int64_t stride = t->strides ? t->strides[i] : next;
        overflow |= __builtin_mul_overflow(next, t->shape[i] ? t->shape[i] : 1, &next);
        // The stride of a size-1 dimension carries no meaning.
        v->stride[i] = t->shape[i] > 1 ? stride : 0;
        if (i == t->ndim - 1 && t->shape[i] == 1) v->stride[i] = 1;
        if (t->shape[i] == 0) empty = true;
        overflow |= v->stride[i] == INT64_MIN;
        if (!empty) {
            overflow |= __builtin_mul_overflow(v->stride[i], t->shape[i] - 1, &span);
            overflow |= span < 0 ? __builtin_add_overflow(low, span, &low)
                                 : __builtin_add_overflow(high, span, &high);
        }
    }
    const int64_t limit = INT64_MAX / 16;
    if (overflow || low < -limit || high > limit)
        return bad_strides(t, name, v, "stay within the address space");
    if (want->unit && t->ndim && v->shape[t->ndim - 1] > 1 && v->stride[t->ndim - 1] != 1)
        return bad_strides(t, name, v, "have stride 1 in the last dimension");
    if (want->written && !empty && !elements_distinct(v))
        return bad_strides(t, name, v, "give each element an address of its own");
    int64_t item = ctxkv__item_size(v->type);
    if (!t->data && !empty)
        return ctxkv__fail(CTXKV_INVALID_ARGUMENT, "%s has a NULL data address", name);
    v->data = 0;
    v->low = v->high = 0;
    if (!t->data) return CTXKV_OK;
    // In integers, since an extent that wraps around is no pointer.
    uintptr_t at = (uintptr_t)t->data, first, end;
    if (__builtin_add_overflow(at, t->byte_offset, &at))
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "%s has byte_offset %" PRIu64 ", must stay within the address space", name,
            t->byte_offset);
    if (!empty && (__builtin_add_overflow(at, low * item, &first) ||
                   __builtin_add_overflow(at, (high + 1) * item, &end)))
        return bad_strides(t, name, v, "stay within the address space");
    v->data = (char *)at;
    v->low = empty ? v->data : (char *)first;
    v->high = empty ? v->data : (char *)end;
    return CTXKV_OK;
}

static ctxkv_status check_alignment(
    const char *name, const struct ctxkv__want *want, const struct ctxkv__view *v) {
    // The CPU reads BF16 and FP32 at any address; int64 arrays and devices need natural alignment.
    bool cuda = want->device && want->device->cuda;
    int64_t item = ctxkv__item_size(v->type);
    if ((!cuda && v->type != CTXKV__I64) || (uintptr_t)v->data % (uintptr_t)item == 0)
        return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s lies at address %p, must be aligned to %d bytes", name,
        (void *)v->data, (int)item);
}

ctxkv_status ctxkv__tensor(
    const DLTensor *tensor, const char *name, const struct ctxkv__want *want,
    struct ctxkv__view *view) {
    if (!tensor) return ctxkv__fail(CTXKV_INVALID_ARGUMENT, "%s is NULL, must be a tensor", name);
    ctxkv_status status = check_device(tensor, name, want);
    if (!status) status = check_type(tensor, name, want);
    if (!status) status = check_shape(tensor, name, want);
    if (!status) status = fill_view(tensor, name, want, view);
    if (!status) status = check_alignment(name, want, view);
    return status;
}

ctxkv_status ctxkv__no_overlap(
    const struct ctxkv__view *a, const char *a_name, const struct ctxkv__view *b,
    const char *b_name) {
    if (a->low == a->high || b->low == b->high || a->high <= b->low || b->high <= a->low)
        return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s overlaps %s in memory, must lie apart", a_name, b_name);
}
