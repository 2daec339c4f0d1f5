// SPDX-License-Identifier: Apache-2.0
// A checkpoint folder: model.safetensors, or the shards that model.safetensors.index.json names.
#ifndef CTXKV_IO_CHECKPOINT_H
#define CTXKV_IO_CHECKPOINT_H

#include "safetensors.h"

typedef struct io_checkpoint {
    io_safetensors *shards;
    char **shard_names;
    size_t count;
    void *weight_map; // NULL for a single file
    char *index_path;
} io_checkpoint;

bool io_checkpoint_open(io_checkpoint *checkpoint, const char *folder, io_error *error);
void io_checkpoint_close(io_checkpoint *checkpoint);
// True with *tensor NULL when there is none of that name; false when the index promises one that
// its shard does not hold. *path: the file it lies in.
bool io_checkpoint_find(
    const io_checkpoint *checkpoint, const char *name, const io_tensor **tensor, const char **path,
    io_error *error);

// The names of the shards of an index, for the parser's tests: checked, unique, in file order.
bool io_index_parse(
    io_checkpoint *checkpoint, const char *data, size_t size, const char *path, io_error *error);

#endif
