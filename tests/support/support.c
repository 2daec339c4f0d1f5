// SPDX-License-Identifier: Apache-2.0
// Guarded memory and tensors for the tests.
#define _GNU_SOURCE
#include "support.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, " (ctxkv: %s)\n", ctxkv_last_error());
    abort();
}

struct place place_open(int threads) {
    struct place place = {0};
    const char *name = getenv("CTXKV_TEST_DEVICE");
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.threads = threads;
    if (!name) name = "cpu";
    if (ctxkv_device_open(name, &options, &place.device)) die("device %s", name);
    if (!strncmp(name, "cuda", 4)) {
        place.memory = ctxkv_device_memory(place.device);
        if (!place.memory) die("no memory functions for %s", name);
        place.ordinal = name[4] ? atoi(name + 5) : 0;
    }
    return place;
}

void place_close(struct place *place) {
    ctxkv_device_close(place->device);
    *place = (struct place){0};
}

bool place_is_cuda(const struct place *place) {
    return place->memory != 0;
}

void place_sync(const struct place *place) {
    if (place->memory && place->memory->sync(place->device)) die("sync");
}

static size_t pages(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

static void fill_poison(const struct place *place, char *to, size_t bytes) {
    if (!place->memory) {
        memset(to, POISON, bytes);
        return;
    }
    size_t piece = (size_t)64 << 20;
    char *image = poison_image(bytes < piece ? bytes : piece);
    for (size_t at = 0; at < bytes; at += piece)
        if (place->memory->to_device(
                place->device, to + at, image, bytes - at < piece ? bytes - at : piece))
            die("to_device");
    free(image);
}

static struct buffer allocate(const struct place *place, size_t bytes, size_t guard, bool tail) {
    struct buffer b = {.bytes = bytes, .guard = guard};
    if (place->memory) {
        b.map_bytes = bytes + 2 * guard;
        if (place->memory->alloc(place->device, b.map_bytes ? b.map_bytes : 1, &b.map))
            die("alloc of %zu bytes", b.map_bytes);
        b.data = (char *)b.map + guard;
    } else {
        size_t page = pages(1), inner = pages(bytes + 2 * guard);
        b.map_bytes = inner + page;
        b.map = mmap(0, b.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (b.map == MAP_FAILED) die("mmap of %zu bytes", b.map_bytes);
        if (mprotect((char *)b.map + inner, page, PROT_NONE)) die("mprotect");
        b.data = tail ? (char *)b.map + inner - bytes : (char *)b.map + guard;
    }
    fill_poison(place, b.data - guard, bytes + 2 * guard);
    return b;
}

struct buffer buffer_new(const struct place *place, size_t bytes) {
    return allocate(place, bytes, GUARD_BYTES, false);
}

struct buffer buffer_tail(const struct place *place, size_t bytes) {
    return allocate(place, bytes, 0, true);
}

void buffer_free(const struct place *place, struct buffer *b) {
    if (place->memory)
        place->memory->free(place->device, b->map);
    else if (b->map)
        munmap(b->map, b->map_bytes);
    *b = (struct buffer){0};
}

void buffer_put(
    const struct place *place, const struct buffer *b, size_t offset, const void *from,
    size_t bytes) {
    if (!place->memory)
        memcpy(b->data + offset, from, bytes);
    else if (place->memory->to_device(place->device, b->data + offset, from, bytes))
        die("to_device");
}

void buffer_get(
    const struct place *place, const struct buffer *b, size_t offset, void *to, size_t bytes) {
    place_sync(place);
    if (!place->memory)
        memcpy(to, b->data + offset, bytes);
    else if (place->memory->to_host(place->device, to, b->data + offset, bytes))
        die("to_host");
}

bool buffer_is(const struct place *place, const struct buffer *b, const void *image) {
    size_t all = b->bytes + 2 * b->guard;
    unsigned char *found = malloc(all ? all : 1);
    if (!found) die("malloc");
    struct buffer whole = {.data = b->data - b->guard};
    buffer_get(place, &whole, 0, found, all);
    bool same = true;
    for (size_t i = 0; i < all && same; i++) {
        bool inside = i >= b->guard && i < b->guard + b->bytes;
        unsigned char want = inside ? ((const unsigned char *)image)[i - b->guard] : POISON;
        same = found[i] == want;
        if (!same)
            fprintf(
                stderr, "byte %zd of %zu is 0x%02x, must be 0x%02x\n",
                (ssize_t)i - (ssize_t)b->guard, b->bytes, found[i], want);
    }
    free(found);
    return same;
}

void *poison_image(size_t bytes) {
    void *image = malloc(bytes ? bytes : 1);
    if (!image) die("malloc of %zu bytes", bytes);
    return memset(image, POISON, bytes);
}

const DLTensor *tensor_on(
    struct tensor *tensor, const struct place *place, const void *data, enum type type, int ndim,
    const int64_t *shape, const int64_t *strides) {
    static const DLDataType types[] = {
        [BF16] = {kDLBfloat, 16, 1},       [FP32] = {kDLFloat, 32, 1},      [I64] = {kDLInt, 64, 1},
        [I32] = {kDLInt, 32, 1},           [FP16] = {kDLFloat, 16, 1},      [U8] = {kDLUInt, 8, 1},
        [E4M3] = {kDLFloat8_e4m3fn, 8, 1}, [E5M2] = {kDLFloat8_e5m2, 8, 1},
    };
    memset(tensor, 0, sizeof *tensor);
    for (int i = 0; i < ndim; i++) {
        tensor->shape[i] = shape[i];
        if (strides) tensor->strides[i] = strides[i];
    }
    tensor->t.data = (void *)(uintptr_t)data;
    tensor->t.device.device_type = place_is_cuda(place) ? kDLCUDA : kDLCPU;
    tensor->t.device.device_id = place->ordinal;
    tensor->t.ndim = ndim;
    tensor->t.dtype = types[type];
    tensor->t.shape = tensor->shape;
    tensor->t.strides = strides ? tensor->strides : 0;
    return &tensor->t;
}

const DLTensor *cache_half(
    struct tensor *tensor, const struct place *place, const void *storage, int part, int64_t blocks,
    int64_t page, int64_t heads, int64_t head_dim, int64_t block_stride) {
    return tensor_on(
        tensor, place, (const char *)storage + 2 * part * head_dim, BF16, 4,
        DIMS(blocks, page, heads, head_dim),
        DIMS(block_stride, 2 * head_dim, page * 2 * head_dim, 1));
}

void chain_descs_init(
    struct chain_descs *d, int64_t hidden_size, int64_t layers, int64_t heads, int64_t max_rows) {
    ctxkv_norms_desc_init(&d->norms);
    ctxkv_projection_desc_init(&d->projection);
    ctxkv_store_desc_init(&d->store);
    ctxkv_chain_desc_init(&d->chain);
    d->norms.hidden_size = d->projection.hidden_size = hidden_size;
    d->norms.num_layers = d->projection.num_layers = d->store.num_layers = layers;
    d->projection.num_kv_heads = d->store.num_kv_heads = heads;
    d->chain.norms = &d->norms;
    d->chain.projection = &d->projection;
    d->chain.store = &d->store;
    d->chain.max_rows = max_rows;
}

uint64_t test_mix(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

void fill_bf16(uint16_t *values, size_t count, uint64_t seed, float scale) {
    for (size_t i = 0; i < count; i++) {
        uint64_t z = test_mix(seed, i);
        float v = (float)(z >> 40) / 8388608.0f - 1.0f;
        values[i] = bf16_of(v / (float)(1 << (z & 7)) * scale);
    }
}

void fill_same(uint16_t *values, size_t count, uint16_t value) {
    for (size_t i = 0; i < count; i++) values[i] = value;
}

uint16_t bf16_of(float value) {
    return ctxkv_bf16(value);
}
