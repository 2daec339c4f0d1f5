// SPDX-License-Identifier: Apache-2.0
// CUDA graphs with timing, and the GPU's own limits, for ctxkv bench: internal.
#ifndef CTXKV_DEVICE_REPLAY_H
#define CTXKV_DEVICE_REPLAY_H

#include <stddef.h>

#include "ctxkv/ctxkv.h"

typedef struct ctxkv_replay ctxkv_replay;

typedef enum ctxkv_floor {
    CTXKV_FLOOR_READ = 0, // size: bytes
    CTXKV_FLOOR_COPY,
    CTXKV_FLOOR_PRODUCTS // size: k16 steps
} ctxkv_floor;

// Failures leave a sentence in ctxkv_last_error().
typedef struct ctxkv_replay_ops {
    // What runs on *stream until end is recorded, not executed.
    ctxkv_status (*begin)(ctxkv_device *device, ctxkv_replay **replay, void **stream);
    ctxkv_status (*end)(ctxkv_replay *replay);
    // One replay; seconds between an event before it and one after.
    ctxkv_status (*run)(ctxkv_replay *replay, double *seconds);
    void (*free)(ctxkv_replay *replay); // also in the middle of a recording; NULL is allowed
    // Not during a recording: loads what floor launches.
    ctxkv_status (*load_floors)(ctxkv_device *device);
    ctxkv_status (*floor)(
        ctxkv_device *device, ctxkv_floor kind, void *to, const void *from, size_t size,
        void *stream);
    // Multiply-adds of CTXKV_FLOOR_PRODUCTS on the whole GPU.
    double (*products)(const ctxkv_device *device, size_t steps);
    size_t (*cache_bytes)(const ctxkv_device *device); // of the second level
} ctxkv_replay_ops;

// NULL on a CPU device.
const ctxkv_replay_ops *ctxkv_device_replay(const ctxkv_device *device);

#endif
