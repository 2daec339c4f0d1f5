// SPDX-License-Identifier: Apache-2.0
// The fault record that store kernels write and ctxkv_faults reads: shared by C and CUDA code.
#ifndef CTXKV_CUDA_FAULT_RECORD_H
#define CTXKV_CUDA_FAULT_RECORD_H

// Why a row was skipped. The numbers are those of the public fault kinds.
#define CTXKV_FAULT_KIND_NONE 0
#define CTXKV_FAULT_KIND_SLOT 1
#define CTXKV_FAULT_KIND_POSITION 2

// All zero means "nothing was skipped", so clearing is one memset. `first` is the complement of
// layer << 40 | row of the smallest offender (the largest complement wins), which makes zero the
// starting value; layer, row, kind and value belong together because they change under the lock.
typedef struct {
    unsigned long long count;
    unsigned long long first;
    long long layer;
    long long row;
    long long value;
    unsigned int kind;
    unsigned int lock;
} ctxkv_fault_record;

#endif
