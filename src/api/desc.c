// SPDX-License-Identifier: Apache-2.0
// Versioned descriptors and small argument checks shared by the plans.
#include "desc.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

ctxkv_status ctxkv__not_null(const void *pointer, const char *name) {
    if (pointer) return CTXKV_OK;
    return ctxkv__fail(CTXKV_INVALID_ARGUMENT, "%s is NULL, must be an address", name);
}

ctxkv_status ctxkv__no_memory(const char *what) {
    return ctxkv__fail(CTXKV_OUT_OF_MEMORY, "no memory for %s", what);
}

void ctxkv__init(void *to, size_t size, const void *defaults, size_t known) {
    if (!to || size < sizeof size) return;
    memset(to, 0, size);
    memcpy(to, defaults, size < known ? size : known);
    memcpy(to, &size, sizeof size);
}

ctxkv_status ctxkv__desc(
    void *to, size_t size, size_t first_size, const void *from, const char *name) {
    ctxkv_status status = ctxkv__not_null(from, name);
    if (status) return status;
    size_t given;
    memcpy(&given, from, sizeof given);
    if (given < first_size)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "%s->size is %zu, must be at least %zu (call its _init first)",
            name, given, first_size);
    for (size_t i = size; i < given && i < size + 4096; i++)
        if (((const unsigned char *)from)[i])
            return ctxkv__fail(
                CTXKV_UNSUPPORTED, "%s has a field at byte %zu that ctxkv %s does not know", name,
                i, ctxkv_version());
    memset(to, 0, size);
    memcpy(to, from, given < size ? given : size);
    return CTXKV_OK;
}

ctxkv_status ctxkv__range(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s is %" PRId64 ", must be in %" PRId64 "..%" PRId64, name, value,
        least, most);
}

ctxkv_status ctxkv__eps(const char *name, float eps) {
    if (isfinite(eps) && eps >= 0) return CTXKV_OK;
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "%s is %g, must be finite and >= 0", name, (double)eps);
}

ctxkv_status ctxkv__fill_slots(
    struct ctxkv__slots *slots, int64_t layers, const int64_t *const *addresses,
    const int64_t *rows, int64_t count, int64_t most_rows) {
    if (count != 1 && count != layers)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "slot_count is %" PRId64 ", must be 1 or the number of layers (%" PRId64 ")", count,
            layers);
    for (int64_t l = 0; l < layers; l++) {
        int64_t from = count == 1 ? 0 : l;
        slots[l].slots = addresses[from];
        slots[l].rows = addresses[from] ? rows[from] : 0;
        if ((uintptr_t)addresses[from] % 8)
            return ctxkv__fail(
                CTXKV_INVALID_ARGUMENT,
                "slots[%" PRId64 "] lies at address %p, must be aligned to 8 bytes", from,
                (const void *)addresses[from]);
        if (slots[l].rows < 0 || slots[l].rows > most_rows)
            return ctxkv__fail(
                CTXKV_INVALID_ARGUMENT,
                "slots[%" PRId64 "] has %" PRId64 " rows, must have 0..%" PRId64 " (T)", from,
                slots[l].rows, most_rows);
    }
    return CTXKV_OK;
}

ctxkv_status ctxkv__slot_tensors(
    const ctxkv_device *device, const DLTensor *const *slots, int64_t slot_count, int64_t layers,
    const int64_t **addresses, int64_t *rows) {
    if (slot_count != 1 && slot_count != layers)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT,
            "slot_count is %" PRId64 ", must be 1 or the number of layers (%" PRId64 ")",
            slot_count, layers);
    ctxkv_status status = ctxkv__not_null(slots, "slots");
    for (int64_t i = 0; !status && i < slot_count; i++) {
        addresses[i] = 0;
        rows[i] = 0;
        if (!slots[i]) continue;
        char name[32];
        snprintf(name, sizeof name, "slots[%" PRId64 "]", i);
        struct ctxkv__want want = {device, CTXKV__I64, 1, {CTXKV__ANY}, true, false};
        struct ctxkv__view view;
        status = ctxkv__tensor(slots[i], name, &want, &view);
        if (status) break;
        rows[i] = view.shape[0];
        addresses[i] = rows[i] ? (const int64_t *)(const void *)view.data : 0;
    }
    return status;
}

ctxkv_status ctxkv__positions(
    const ctxkv_device *device, const DLTensor *positions, bool needed, int64_t rows,
    const int64_t **address) {
    *address = 0;
    if (!positions && !needed) return CTXKV_OK;
    struct ctxkv__want want = {device, CTXKV__I64, 1, {rows}, true, false};
    struct ctxkv__view view;
    ctxkv_status status = ctxkv__tensor(positions, "positions", &want, &view);
    if (!status) *address = (const int64_t *)(const void *)view.data;
    return status;
}
