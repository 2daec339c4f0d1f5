// SPDX-License-Identifier: Apache-2.0
// Device memory for the command line and the tests: internal, never part of the public API.
#ifndef CTXKV_DEVICE_MEMORY_H
#define CTXKV_DEVICE_MEMORY_H

#include <stddef.h>

#include "ctxkv/ctxkv.h"

// Every call waits for its own work, except copy, which only enqueues on the
// default stream. Failures leave a sentence in ctxkv_last_error().
typedef struct ctxkv_memory_ops {
    ctxkv_status (*alloc)(ctxkv_device *device, size_t bytes, void **address);
    void (*free)(ctxkv_device *device, void *address);
    ctxkv_status (*to_device)(ctxkv_device *device, void *to, const void *from, size_t bytes);
    ctxkv_status (*to_host)(ctxkv_device *device, void *to, const void *from, size_t bytes);
    ctxkv_status (*copy)(ctxkv_device *device, void *to, const void *from, size_t bytes);
    ctxkv_status (*sync)(ctxkv_device *device);
} ctxkv_memory_ops;

// NULL on a CPU device. Implemented by src/device/memory.c.
const ctxkv_memory_ops *ctxkv_device_memory(const ctxkv_device *device);

#endif
