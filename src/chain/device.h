// SPDX-License-Identifier: Apache-2.0
// The device object: a CPU with its kernels and threads, or a CUDA device.
#ifndef CTXKV_CHAIN_DEVICE_H
#define CTXKV_CHAIN_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "../../include/ctxkv/ctxkv.h"
#include "../cpu/cpu.h"
#include "pool.h"

struct ctxkv__cuda_device;

struct ctxkv_device {
    atomic_int references; // the opener and every plan
    bool cuda;
    int ordinal; // CUDA device number
    ctxkv_log_fn log;
    void *log_user;
    struct ctxkv__kernels kernels; // CPU
    struct ctxkv__pool *pool;      // CPU
    struct ctxkv__cuda_device *gpu;
};

void ctxkv__device_retain(ctxkv_device *device);
void ctxkv__device_release(ctxkv_device *device);

#endif
