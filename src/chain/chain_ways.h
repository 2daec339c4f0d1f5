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

struct ctxkv__decode;
// NULL without an error where the kernels do not know the chain or there is no room for the packed
// copy of the weights that they read. fuse: one kernel may do the whole chain.
ctxkv_status ctxkv__decode_create(
    struct ctxkv_chain *plan, bool fuse, struct ctxkv__decode **decode);
void ctxkv__decode_destroy(const struct ctxkv_chain *plan, struct ctxkv__decode *decode);
size_t ctxkv__decode_memory(const struct ctxkv__decode *decode);
// Bytes of the chain's workspace that this way wants; 0 where it does not exist.
size_t ctxkv__decode_workspace(const struct ctxkv_chain *plan);
bool ctxkv__decode_takes_run(
    const struct ctxkv__decode *decode, const struct ctxkv__chain_call *call);
ctxkv_status ctxkv__decode_launch(
    const struct ctxkv_chain *plan, const struct ctxkv__decode *decode,
    const struct ctxkv__chain_call *call, char *workspace);

#endif
