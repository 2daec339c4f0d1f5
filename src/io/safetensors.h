// SPDX-License-Identifier: Apache-2.0
// The safetensors format: an 8-byte head length, a JSON head, the tensors' bytes without holes.
#ifndef CTXKV_IO_SAFETENSORS_H
#define CTXKV_IO_SAFETENSORS_H

#include "file.h"

#define IO_HEAD_LIMIT 100000000u // of the reference reader

typedef enum io_dtype {
#define IO_DTYPE(name, bits) IO_##name,
#include "dtypes.inc"
#undef IO_DTYPE
    IO_DTYPE_COUNT
} io_dtype;

const char *io_dtype_name(io_dtype dtype);
int io_dtype_bits(io_dtype dtype);

typedef struct io_tensor {
    const char *name;
    io_dtype dtype;
    int rank;
    const int64_t *shape;
    const uint8_t *data; // anywhere in the map: not aligned
    uint64_t begin, bytes;
} io_tensor;

typedef struct io_safetensors {
    char *path;
    io_map map;
    void *json; // owns the names
    int64_t *shapes;
    io_tensor *tensors; // by name
    size_t count;
} io_safetensors;

// Every size is checked against the file's before it is used; a duplicate name is refused.
bool io_safetensors_open(io_safetensors *file, const char *path, io_error *error);
// The same from memory, which must outlive the result.
bool io_safetensors_parse(
    io_safetensors *file, const uint8_t *data, size_t size, const char *path, io_error *error);
void io_safetensors_close(io_safetensors *file);
const io_tensor *io_safetensors_find(const io_safetensors *file, const char *name);

// Shape as text, "[4, 8192]".
typedef struct io_shape_text {
    char text[96];
} io_shape_text;
io_shape_text io_shape(const int64_t *shape, int rank);

// ---- writing -------------------------------------------------------------------------------
typedef struct io_entry {
    char name[96];
    io_dtype dtype;
    int rank;
    int64_t shape[4];
    const void *data;
} io_entry;

typedef void (*io_progress)(void *user, uint64_t done, uint64_t total);

// Atomic. Data is written in the order given; 8-byte entries first keeps everything aligned.
bool io_safetensors_write(
    const char *path, const io_entry *entries, size_t count, io_progress progress, void *user,
    io_error *error);
uint64_t io_entry_bytes(const io_entry *entry);

#endif
