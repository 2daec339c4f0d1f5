// SPDX-License-Identifier: Apache-2.0
// Reports a skipped row: counts it and keeps the smallest (layer, row), without a sync or an abort.
#ifndef CTXKV_CUDA_FAULTS_CUH
#define CTXKV_CUDA_FAULTS_CUH

#include "fault_record.h"

// Call once per skipped (layer, row), from one thread. Whatever the order of the calls, the record
// ends the same. The lock is only taken by a row that may be the new smallest; the loop holds the
// critical section inside the branch that took it, so lanes of one warp cannot block each other.
static __device__ __noinline__ void fault_report(
    ctxkv_fault_record *f, long long layer, long long row, unsigned kind, long long value) {
    const unsigned long long key =
        ~((unsigned long long)layer << 40 | ((unsigned long long)row & 0xffffffffffull));
    atomicAdd(&f->count, 1ull);
    bool open = key > *(volatile unsigned long long *)&f->first;
    while (open) {
        if (atomicCAS(&f->lock, 0u, 1u) == 0u) {
            __threadfence();
            volatile ctxkv_fault_record *r = f;
            if (key > r->first) {
                r->first = key;
                r->layer = layer;
                r->row = row;
                r->value = value;
                r->kind = kind;
            }
            __threadfence();
            atomicExch(&f->lock, 0u);
            open = false;
        }
    }
}

// The bound check of SPEC 4.2. Returns the kind of fault of a row that has a slot >= 0, or none.
// `position` only counts when the slot is good; pass max_position < 0 when there is no table.
static __device__ __forceinline__ unsigned fault_kind(
    long long slot, long long slot_count, long long position, long long max_position) {
    if (slot >= slot_count) return CTXKV_FAULT_KIND_SLOT;
    if (max_position >= 0 && (position < 0 || position >= max_position))
        return CTXKV_FAULT_KIND_POSITION;
    return CTXKV_FAULT_KIND_NONE;
}

#endif
