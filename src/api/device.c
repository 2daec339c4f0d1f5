// SPDX-License-Identifier: Apache-2.0
// Devices: names, options, references.
#define _GNU_SOURCE
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../chain/cuda_backend.h"
#include "desc.h"

void ctxkv_device_options_init_sized(ctxkv_device_options *options, size_t size) {
    static const ctxkv_device_options defaults = {.programmatic_launch = 1};
    ctxkv__init(options, size, &defaults, sizeof defaults);
}

static int usable_cpus(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

#define MAX_THREADS 1024

static ctxkv_status tier_mask(const ctxkv_device_options *options, unsigned *mask) {
    unsigned all = CTXKV_CPU_SCALAR | CTXKV_CPU_AVX2 | CTXKV_CPU_AVX512;
    *mask = options->cpu_mask;
    if (*mask & ~all)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "cpu_mask is 0x%x, must be made of CTXKV_CPU_* (0x%x)", *mask,
            all);
    if (*mask) return CTXKV_OK;
    const char *text = getenv("CTXKV_CPU_MASK");
    if (!text || !*text) return CTXKV_OK;
    if (!strcmp(text, "scalar"))
        *mask = CTXKV_CPU_SCALAR;
    else if (!strcmp(text, "avx2"))
        *mask = CTXKV_CPU_SCALAR | CTXKV_CPU_AVX2;
    else if (!strcmp(text, "avx512"))
        *mask = all;
    else
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "CTXKV_CPU_MASK is \"%.40s\", must be scalar, avx2 or avx512",
            text);
    return CTXKV_OK;
}

static ctxkv_status open_cpu(ctxkv_device *device, const ctxkv_device_options *options) {
    ctxkv_status status = ctxkv__range("threads", options->threads, 0, MAX_THREADS);
    unsigned mask = 0;
    if (!status) status = tier_mask(options, &mask);
    if (status) return status;
    ctxkv__kernels_init(&device->kernels, mask);
    int threads = options->threads ? options->threads : usable_cpus();
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    device->pool = ctxkv__pool_create(threads, CTXKV__PROJECTION_SCRATCH);
    return device->pool ? CTXKV_OK : ctxkv__no_memory("the thread pool");
}

static ctxkv_status parse_name(const char *name, bool *cuda, int *ordinal) {
    *cuda = !strncmp(name, "cuda", 4);
    *ordinal = 0;
    if (!strcmp(name, "cpu") || !strcmp(name, "cuda")) return CTXKV_OK;
    if (*cuda && name[4] == ':' && name[5] >= '0' && name[5] <= '9') {
        char *end;
        long n = strtol(name + 5, &end, 10);
        if (!*end && n < 1024) {
            *ordinal = (int)n;
            return CTXKV_OK;
        }
    }
    return ctxkv__fail(
        CTXKV_INVALID_ARGUMENT, "device name is \"%.40s\", must be \"cpu\", \"cuda\" or \"cuda:N\"",
        name);
}

ctxkv_status ctxkv_device_open(
    const char *name, const ctxkv_device_options *options, ctxkv_device **device) {
    ctxkv_status status = ctxkv__not_null(device, "device");
    if (!status) *device = 0;
    if (!status) status = ctxkv__not_null(name, "name");
    ctxkv_device_options all;
    ctxkv_device_options_init(&all);
    if (!status && options) status = ctxkv__desc(&all, sizeof all, sizeof all, options, "options");
    bool cuda = false;
    int ordinal = 0;
    if (!status) status = parse_name(name, &cuda, &ordinal);
    if (status) return status;
    ctxkv_device *opened = calloc(1, sizeof *opened);
    if (!opened) return ctxkv__no_memory("the device");
    atomic_store(&opened->references, 1);
    opened->cuda = cuda;
    opened->ordinal = ordinal;
    opened->log = all.log;
    opened->log_user = all.log_user;
    status = cuda ? ctxkv__cuda_open(opened, &all) : open_cpu(opened, &all);
    if (status)
        free(opened);
    else
        *device = opened;
    return status;
}

void ctxkv__device_retain(ctxkv_device *device) {
    atomic_fetch_add(&device->references, 1);
}

void ctxkv__device_release(ctxkv_device *device) {
    if (atomic_fetch_sub(&device->references, 1) != 1) return;
    if (device->cuda) ctxkv__cuda_close(device);
    ctxkv__pool_destroy(device->pool);
    free(device);
}

void ctxkv_device_close(ctxkv_device *device) {
    if (device) ctxkv__device_release(device);
}

ctxkv_status ctxkv_device_get_info(const ctxkv_device *device, ctxkv_device_info *info) {
    ctxkv_status status = ctxkv__not_null(device, "device");
    if (!status) status = ctxkv__not_null(info, "info");
    if (status) return status;
    size_t given = info->size;
    if (given < sizeof *info)
        return ctxkv__fail(
            CTXKV_INVALID_ARGUMENT, "info->size is %zu, must be at least %zu", given, sizeof *info);
    memset(info, 0, sizeof *info);
    info->size = given;
    info->cpu_found = ctxkv__cpu_found();
    if (device->cuda) {
        ctxkv__cuda_info(device, info);
        return CTXKV_OK;
    }
    info->cpu_used = device->kernels.tier;
    info->threads = ctxkv__pool_threads(device->pool);
    info->bits_verified = 1;
    snprintf(info->name, sizeof info->name, "cpu %s", ctxkv__cpu_tier_name(info->cpu_used));
    return CTXKV_OK;
}

int32_t ctxkv_cuda_device_count(void) {
    return ctxkv__cuda_count();
}
