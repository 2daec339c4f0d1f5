// SPDX-License-Identifier: Apache-2.0
// What the tests share: memory on the device under test, guarded, and tensors over it.
#ifndef CTXKV_TESTS_SUPPORT_H
#define CTXKV_TESTS_SUPPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../src/device/memory.h"
#include "ctxkv/ctxkv.h"

// The device under test: CTXKV_TEST_DEVICE ("cpu" unless set).
struct place {
    ctxkv_device *device;
    const ctxkv_memory_ops *memory; // NULL on a CPU
    int ordinal;
};

// threads: CPU workers, 0 for the library's choice. Ends the process when the device is not there.
struct place place_open(int threads);
void place_close(struct place *place);
void place_sync(const struct place *place);
bool place_is_cuda(const struct place *place);

#define POISON 0x5A
#define GUARD_BYTES ((size_t)1 << 20)

struct buffer {
    char *data; // in the place's memory
    size_t bytes;
    void *map; // what was allocated around it
    size_t map_bytes, guard;
};

// All poison, with GUARD_BYTES of poison on both sides.
struct buffer buffer_new(const struct place *place, size_t bytes);
// All poison; the last byte is the last that may be touched (on a CPU: PROT_NONE follows).
struct buffer buffer_tail(const struct place *place, size_t bytes);
void buffer_free(const struct place *place, struct buffer *buffer);
void buffer_put(
    const struct place *place, const struct buffer *buffer, size_t offset, const void *from,
    size_t bytes);
void buffer_get(
    const struct place *place, const struct buffer *buffer, size_t offset, void *to, size_t bytes);
// Whether the buffer is image (bytes long) and its guards are poison; the first wrong byte is told.
bool buffer_is(const struct place *place, const struct buffer *buffer, const void *image);
// A fresh image of poison of that size, to be freed.
void *poison_image(size_t bytes);

enum type { BF16, FP32, I64, I32, FP16, U8, E4M3, E5M2 };
#define DIMS(...) ((const int64_t[]){__VA_ARGS__})
#define MAX_TEST_DIMS 6

struct tensor {
    DLTensor t;
    int64_t shape[MAX_TEST_DIMS], strides[MAX_TEST_DIMS];
};

// Fills tensor in place and returns its DLTensor. strides NULL: row-major (NULL in the DLTensor).
const DLTensor *tensor_on(
    struct tensor *tensor, const struct place *place, const void *data, enum type type, int ndim,
    const int64_t *shape, const int64_t *strides);
// K (part 0) or V (part 1) of storage [blocks, heads, page, 2*head_dim] with that block stride.
const DLTensor *cache_half(
    struct tensor *tensor, const struct place *place, const void *storage, int part, int64_t blocks,
    int64_t page, int64_t heads, int64_t head_dim, int64_t block_stride);

// The descriptors of a chain: each filled by its _init, all of one shape, the last pointing at the
// others.
struct chain_descs {
    ctxkv_norms_desc norms;
    ctxkv_projection_desc projection;
    ctxkv_store_desc store;
    ctxkv_chain_desc chain;
};
void chain_descs_init(
    struct chain_descs *descs, int64_t hidden_size, int64_t layers, int64_t heads,
    int64_t max_rows);

// A plain generator: the numbered value of a seed.
uint64_t test_mix(uint64_t seed, uint64_t index);
// BF16 noise in about -scale..scale.
void fill_bf16(uint16_t *values, size_t count, uint64_t seed, float scale);
void fill_same(uint16_t *values, size_t count, uint16_t value);
uint16_t bf16_of(float value);

// Prints and ends the process: for set-up that cannot fail in a working test.
__attribute__((noreturn, format(printf, 1, 2))) void die(const char *format, ...);

#endif
