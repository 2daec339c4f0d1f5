// SPDX-License-Identifier: Apache-2.0
// The ways a chain can go on a CUDA device beside norms, projection, store: same bits, chosen by
// the rows. Each is made with the chain (or not: then it is NULL) and only launches in a run.
#ifndef CTXKV_CHAIN_CHAIN_WAYS_H
#define CTXKV_CHAIN_CHAIN_WAYS_H

#include "cuda_plan.h"

struct ctxkv__prefill;
// NULL without an error where the chain is not one that the kernels know.
ctxkv_status ctxkv__prefill_create(struct ctxkv_chain *plan, struct ctxkv__prefill **prefill);
void ctxkv__prefill_destroy(const struct ctxkv_chain *plan, struct ctxkv__prefill *prefill);
size_t ctxkv__prefill_memory(const struct ctxkv__prefill *prefill);
// Whether this run goes that way.
bool ctxkv__prefill_takes(
    const struct ctxkv_chain *plan, const struct ctxkv__prefill *prefill,
    const struct ctxkv__chain_call *call);
ctxkv_status ctxkv__prefill_launch(
    const struct ctxkv_chain *plan, const struct ctxkv__prefill *prefill,
    const struct ctxkv__chain_call *call, char *workspace);

#endif
