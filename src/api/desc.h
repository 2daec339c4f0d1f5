// SPDX-License-Identifier: Apache-2.0
// Versioned descriptors and small argument checks shared by the plans.
#ifndef CTXKV_API_DESC_H
#define CTXKV_API_DESC_H

#include "../chain/plan.h"

// Fills a caller's size bytes: the defaults, then zeros past the `known` bytes of this version.
void ctxkv__init(void *to, size_t size, const void *defaults, size_t known);
// Copies a caller's descriptor of any version into ours; first_size: its size in the first version.
ctxkv_status ctxkv__desc(
    void *to, size_t size, size_t first_size, const void *from, const char *name);
ctxkv_status ctxkv__range(const char *name, int64_t value, int64_t least, int64_t most);
ctxkv_status ctxkv__eps(const char *name, float eps);
ctxkv_status ctxkv__not_null(const void *pointer, const char *name);
ctxkv_status ctxkv__no_memory(const char *what);

// Shared by store and chain runs: fills L slots from 1 or L addresses and lengths.
ctxkv_status ctxkv__fill_slots(
    struct ctxkv__slots *slots, int64_t layers, const int64_t *const *addresses,
    const int64_t *rows, int64_t count, int64_t most_rows);
// The same from tensors; addresses and rows are scratch of slot_count entries.
ctxkv_status ctxkv__slot_tensors(
    const ctxkv_device *device, const DLTensor *const *slots, int64_t slot_count, int64_t layers,
    const int64_t **addresses, int64_t *rows);
ctxkv_status ctxkv__positions(
    const ctxkv_device *device, const DLTensor *positions, bool needed, int64_t rows,
    const int64_t **address);

// The store's descriptor (store_desc.c): its options, then its tensors as views in the plan.
ctxkv_status ctxkv__store_check(const ctxkv_device *device, const ctxkv_store_desc *desc);
ctxkv_status ctxkv__store_views(struct ctxkv_store *plan, const ctxkv_store_desc *desc);

// A projection of its own, or the one of a chain.
ctxkv_status ctxkv__projection_create(
    ctxkv_device *device, const ctxkv_projection_desc *desc, bool in_chain,
    ctxkv_projection **projection);

#define CTXKV__MAX_LAYERS 65535

#endif
