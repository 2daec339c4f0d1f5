// SPDX-License-Identifier: Apache-2.0
// Mirrors and tensors of the cases that go through plans.
#include "plans.h"

#include <string.h>

#include "../../src/device/memory.h"

bool plan_ok(struct check *c, ctxkv_status status, const char *what) {
    if (status) check_fail(c, "%s: %s (%s)", what, ctxkv_last_error(), ctxkv_status_name(status));
    return !status;
}

uint8_t *on_device(struct mirrors *m, struct area *area) {
    ctxkv_device *device = m->check->device;
    const ctxkv_memory_ops *memory = ctxkv_device_memory(device);
    if (!memory) return area->data;
    void *base = 0;
    if (m->count == MOST_MIRRORS) {
        check_fail(m->check, "more than %d operands", MOST_MIRRORS);
        return 0;
    }
    if (!plan_ok(m->check, memory->alloc(device, area->map_bytes, &base), "alloc")) return 0;
    m->list[m->count].area = area;
    m->list[m->count++].base = base;
    plan_ok(m->check, memory->to_device(device, base, area->map, area->map_bytes), "to_device");
    return (uint8_t *)base + (area->data - area->map);
}

void mirrors_return(struct mirrors *m) {
    ctxkv_device *device = m->check->device;
    const ctxkv_memory_ops *memory = ctxkv_device_memory(device);
    for (int i = 0; i < m->count; i++) {
        struct area *a = m->list[i].area;
        plan_ok(
            m->check, memory->to_host(device, a->map, m->list[i].base, a->map_bytes), "to_host");
        memory->free(device, m->list[i].base);
    }
    m->count = 0;
}

const DLTensor *boxed(
    const struct mirrors *m, struct box *b, const void *data, int type, int ndim,
    const int64_t *shape, const int64_t *strides) {
    static const DLDataType types[] = {
        {kDLBfloat, 16, 1}, {kDLFloat, 32, 1}, {kDLInt, 64, 1}, {kDLFloat, 16, 1}, {kDLUInt, 8, 1}};
    const struct check *c = m->check;
    memcpy(b->shape, shape, (size_t)ndim * sizeof *shape);
    if (strides) memcpy(b->strides, strides, (size_t)ndim * sizeof *strides);
    b->t = (DLTensor){
        .data = (void *)(uintptr_t)data,
        .device = {c->on_gpu ? kDLCUDA : kDLCPU, c->on_gpu ? c->ordinal : 0},
        .ndim = ndim,
        .dtype = types[type],
        .shape = b->shape,
        .strides = strides ? b->strides : 0,
    };
    return &b->t;
}
