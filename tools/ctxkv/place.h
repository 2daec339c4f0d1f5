// SPDX-License-Identifier: Apache-2.0
// A device with its memory, and chains of a draft on it.
#ifndef CTXKV_CLI_PLACE_H
#define CTXKV_CLI_PLACE_H

#include "cli.h"
#include "draft.h"

typedef struct ctxkv_memory_ops ctxkv_memory_ops;

typedef struct cli_place {
    ctxkv_device *device;
    const ctxkv_memory_ops *memory; // NULL: host memory
    DLDevice where;
    ctxkv_device_info info;
    void **blocks;
    size_t block_count;
} cli_place;

// Every function below that returns false or NULL has called cli_fail.
bool cli_place_open(cli_place *place, const cli_options *options);
void cli_place_close(cli_place *place);
// Memory of the device, given back by cli_place_reset or _close. Never NULL for 0 bytes.
void *cli_alloc(cli_place *place, size_t bytes);
void cli_place_reset(cli_place *place);
void cli_place_release(cli_place *place, size_t mark); // all since block_count was mark
// The host bytes where the device can read them: the same address on a CPU.
void *cli_share(cli_place *place, const void *host, size_t bytes);
bool cli_to_device(cli_place *place, void *to, const void *from, size_t bytes);
bool cli_to_host(cli_place *place, void *to, const void *from, size_t bytes);
bool cli_copy(cli_place *place, void *to, const void *from, size_t bytes);
bool cli_sync(cli_place *place);

// A contiguous tensor in the place's memory.
typedef struct cli_tensor {
    DLTensor tensor;
    int64_t shape[4], strides[4];
} cli_tensor;

#define CLI_BF16 ((DLDataType){kDLBfloat, 16, 1})
#define CLI_F32 ((DLDataType){kDLFloat, 32, 1})
#define CLI_I64 ((DLDataType){kDLInt, 64, 1})

void cli_tensor_set(
    cli_tensor *tensor, const cli_place *place, const void *data, DLDataType dtype, int rank,
    const int64_t *shape);
extern const char *const cli_cache_names[]; // "bf16", ...: by ctxkv_cache_type; NULL-terminated
DLDataType cli_cache_dtype(ctxkv_cache_type type);

// The caches of all layers: storage, and the views that a plan is bound to.
typedef struct cli_caches {
    int64_t layers, blocks, heads, block_size, dim;
    ctxkv_cache_type type;
    size_t bytes; // of one layer
    void **storage;
    cli_tensor *views; // [2*L]
    const DLTensor **keys, **values;
} cli_caches;

// Of caches' numbers and type; fills every layer with the byte.
bool cli_caches_make_as(cli_caches *caches, cli_place *place, uint8_t fill);
// The same of BF16.
bool cli_caches_make(
    cli_caches *caches, cli_place *place, int64_t layers, int64_t blocks, int64_t heads,
    int64_t block_size, int64_t dim, uint8_t fill);
void cli_caches_free(cli_caches *caches);

// What a chain's store takes beside the draft.
typedef struct cli_store {
    const DLTensor *const *tables; // NULL: no RoPE
    int64_t table_count;           // 1 or L
    ctxkv_cache_type cache_type;
    const DLTensor *const *k_scales, *const *v_scales; // L, or NULL: all 1
    bool checked;
} cli_store;

bool cli_chain_make(
    ctxkv_chain **chain, cli_place *place, const io_draft *draft, const cli_store *store,
    const cli_options *options, int64_t max_rows);

#endif
