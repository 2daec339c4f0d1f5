// SPDX-License-Identifier: Apache-2.0
// What the plans ask of a CUDA device. cuda_none.c answers where the build has no CUDA code.
#ifndef CTXKV_CHAIN_CUDA_BACKEND_H
#define CTXKV_CHAIN_CUDA_BACKEND_H

#include "plan.h"

// Devices: open fills device->gpu for device->ordinal.
int ctxkv__cuda_count(void);
ctxkv_status ctxkv__cuda_open(ctxkv_device *device, const ctxkv_device_options *options);
void ctxkv__cuda_close(ctxkv_device *device);
void ctxkv__cuda_info(const ctxkv_device *device, ctxkv_device_info *info);

// Plans: create may read the views kept in the plan during create; it does everything slow.
ctxkv_status ctxkv__cuda_norms_create(struct ctxkv_norms *plan);
void ctxkv__cuda_norms_destroy(struct ctxkv_norms *plan);
ctxkv_status ctxkv__cuda_norms_run(struct ctxkv_norms *plan, const struct ctxkv__norms_call *call);

ctxkv_status ctxkv__cuda_projection_create(struct ctxkv_projection *plan);
void ctxkv__cuda_projection_destroy(struct ctxkv_projection *plan);
ctxkv_status ctxkv__cuda_projection_run(
    struct ctxkv_projection *plan, const struct ctxkv__projection_call *call);

ctxkv_status ctxkv__cuda_store_create(struct ctxkv_store *plan);
void ctxkv__cuda_store_destroy(struct ctxkv_store *plan);
ctxkv_status ctxkv__cuda_store_bind(struct ctxkv_store *plan); // plan->caches has changed
ctxkv_status ctxkv__cuda_store_run(struct ctxkv_store *plan, const struct ctxkv__store_call *call);
ctxkv_status ctxkv__cuda_store_faults(
    struct ctxkv_store *plan, struct ctxkv__fault_record *record); // reads and clears

// The chain owns its three plans; create sets workspace_size.
ctxkv_status ctxkv__cuda_chain_create(struct ctxkv_chain *plan);
void ctxkv__cuda_chain_destroy(struct ctxkv_chain *plan);
ctxkv_status ctxkv__cuda_chain_run(struct ctxkv_chain *plan, const struct ctxkv__chain_call *call);
size_t ctxkv__cuda_chain_memory(const struct ctxkv_chain *plan);

#endif
