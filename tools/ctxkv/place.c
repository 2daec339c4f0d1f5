// SPDX-License-Identifier: Apache-2.0
// Devices and memory for the commands: the same code for a CPU and a GPU.
#include "place.h"

#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "replay.h"

static ctxkv_status open_named(cli_place *place, const cli_options *options, const char *name) {
    ctxkv_device_options wanted;
    ctxkv_device_options_init(&wanted);
    wanted.threads = (int32_t)options->threads;
    wanted.cpu_mask = options->cpu_mask;
    return ctxkv_device_open(name, &wanted, &place->device);
}

bool cli_place_open(cli_place *place, const cli_options *options) {
    *place = (cli_place){.where = {kDLCPU, 0}};
    const char *name = options->device;
    ctxkv_status status = CTXKV_OK;
    if (!strcmp(name, "auto")) {
        name = "cpu";
        if (ctxkv_cuda_device_count() > 0 && !open_named(place, options, "cuda:0")) name = "cuda:0";
    }
    if (!place->device) status = open_named(place, options, name);
    if (status) {
        cli_fail_status("--device");
        return false;
    }
    place->info.size = sizeof place->info;
    if (ctxkv_device_get_info(place->device, &place->info)) {
        cli_fail_status("--device");
        cli_place_close(place);
        return false;
    }
    if (!strncmp(name, "cuda", 4)) {
        place->where = (DLDevice){kDLCUDA, name[4] ? (int)strtol(name + 5, NULL, 10) : 0};
        place->memory = ctxkv_device_memory(place->device);
        if (!place->memory) {
            cli_fail("--device: %s has no memory interface in this build", name);
            cli_place_close(place);
            return false;
        }
    }
    return true;
}

void cli_place_close(cli_place *place) {
    cli_place_reset(place);
    ctxkv_device_close(place->device);
    place->device = NULL;
}

void cli_place_release(cli_place *place, size_t mark) {
    while (place->block_count > mark) {
        void *block = place->blocks[--place->block_count];
        if (place->memory) {
            place->memory->free(place->device, block);
        } else {
            free(block);
        }
    }
}

void cli_place_reset(cli_place *place) {
    cli_place_release(place, 0);
    free(place->blocks);
    place->blocks = NULL;
}

void *cli_alloc(cli_place *place, size_t bytes) {
    void *block = NULL;
    size_t size = (bytes + 255) / 256 * 256 + 256;
    void **blocks = realloc(place->blocks, (place->block_count + 1) * sizeof *blocks);
    if (blocks) place->blocks = blocks;
    if (blocks && size > bytes) {
        if (place->memory) {
            if (place->memory->alloc(place->device, size, &block)) block = NULL;
        } else {
            block = aligned_alloc(256, size);
        }
    }
    if (!block) {
        cli_fail("out of memory for %zu bytes on the device", bytes);
        return NULL;
    }
    place->blocks[place->block_count++] = block;
    return block;
}

static bool check(ctxkv_status status) {
    if (status) cli_fail_status("device memory");
    return !status;
}

bool cli_to_device(cli_place *place, void *to, const void *from, size_t bytes) {
    if (place->memory)
        return !bytes || check(place->memory->to_device(place->device, to, from, bytes));
    if (bytes) memcpy(to, from, bytes);
    return true;
}

bool cli_to_host(cli_place *place, void *to, const void *from, size_t bytes) {
    if (place->memory)
        return !bytes || check(place->memory->to_host(place->device, to, from, bytes));
    if (bytes) memcpy(to, from, bytes);
    return true;
}

bool cli_copy(cli_place *place, void *to, const void *from, size_t bytes) {
    if (place->memory) return check(place->memory->copy(place->device, to, from, bytes));
    memcpy(to, from, bytes);
    return true;
}

bool cli_sync(cli_place *place) {
    return !place->memory || check(place->memory->sync(place->device));
}

void *cli_share(cli_place *place, const void *host, size_t bytes) {
    if (!place->memory) return (void *)host;
    void *copy = cli_alloc(place, bytes);
    return copy && cli_to_device(place, copy, host, bytes) ? copy : NULL;
}

void cli_tensor_set(
    cli_tensor *tensor, const cli_place *place, const void *data, DLDataType dtype, int rank,
    const int64_t *shape) {
    memcpy(tensor->shape, shape, (size_t)rank * sizeof *shape);
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
        tensor->strides[i] = stride;
        stride *= shape[i];
    }
    tensor->tensor = (DLTensor){
        .data = (void *)data,
        .device = place->where,
        .ndim = rank,
        .dtype = dtype,
        .shape = tensor->shape,
        .strides = tensor->strides};
}

const char *const cli_cache_names[] = {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2", NULL};

DLDataType cli_cache_dtype(ctxkv_cache_type type) {
    static const DLDataType types[] = {
        {kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {kDLFloat8_e4m3fn, 8, 1}, {kDLFloat8_e5m2, 8, 1}};
    return types[type];
}

// A layer's storage [blocks, heads, block_size, 2*dim] as K (part 0) or V (part 1).
static void cache_view(
    cli_tensor *tensor, const cli_place *place, const cli_caches *c, void *storage, int part) {
    const int64_t shape[4] = {c->blocks, c->block_size, c->heads, c->dim};
    const int64_t strides[4] = {
        c->heads * c->block_size * 2 * c->dim, 2 * c->dim, c->block_size * 2 * c->dim, 1};
    DLDataType dtype = cli_cache_dtype(c->type);
    char *first = (char *)storage + part * c->dim * (dtype.bits / 8);
    cli_tensor_set(tensor, place, first, dtype, 4, shape);
    memcpy(tensor->strides, strides, sizeof strides);
}

bool cli_caches_make(
    cli_caches *caches, cli_place *place, int64_t layers, int64_t blocks, int64_t heads,
    int64_t block_size, int64_t dim, uint8_t fill) {
    *caches = (cli_caches){layers, blocks, heads, block_size, dim, CTXKV_CACHE_BF16, 0, 0, 0, 0, 0};
    return cli_caches_make_as(caches, place, fill);
}

bool cli_caches_make_as(cli_caches *caches, cli_place *place, uint8_t fill) {
    size_t count = (size_t)caches->layers, item = cli_cache_dtype(caches->type).bits / 8;
    caches->bytes =
        (size_t)(caches->blocks * caches->heads * caches->block_size * caches->dim) * 2 * item;
    caches->storage = calloc(count, sizeof *caches->storage);
    caches->views = calloc(count * 2, sizeof *caches->views);
    caches->keys = calloc(count, sizeof *caches->keys);
    caches->values = calloc(count, sizeof *caches->values);
    void *image = place->memory ? malloc(caches->bytes + 1) : NULL;
    bool ok = caches->storage && caches->views && caches->keys && caches->values &&
              (image || !place->memory);
    if (!ok) cli_fail("out of memory for the caches of %zu bytes a layer", caches->bytes);
    if (image) memset(image, fill, caches->bytes);
    for (size_t i = 0; ok && i < count; ++i) {
        void *storage = caches->storage[i] = cli_alloc(place, caches->bytes);
        ok = storage != NULL;
        if (ok && image) ok = cli_to_device(place, storage, image, caches->bytes);
        if (ok && !image) memset(storage, fill, caches->bytes);
        for (int part = 0; part < 2 && ok; ++part) {
            cli_tensor *view = &caches->views[2 * i + (size_t)part];
            cache_view(view, place, caches, storage, part);
            (part ? caches->values : caches->keys)[i] = &view->tensor;
        }
    }
    free(image);
    if (!ok) cli_caches_free(caches);
    return ok;
}

void cli_caches_free(cli_caches *caches) {
    free(caches->storage);
    free(caches->views);
    free(caches->keys);
    free(caches->values);
    *caches = (cli_caches){0};
}
