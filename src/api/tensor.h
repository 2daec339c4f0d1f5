// SPDX-License-Identifier: Apache-2.0
// Checks of DLTensor arguments; every refusal names the argument, what it was, what it must be.
#ifndef CTXKV_API_TENSOR_H
#define CTXKV_API_TENSOR_H

#include <stdbool.h>

#include "error.h"

#define CTXKV__BF16 1u
#define CTXKV__FP32 2u
#define CTXKV__I64 4u
#define CTXKV__FP16 8u
#define CTXKV__E4M3 16u
#define CTXKV__E5M2 32u
#define CTXKV__U8 64u

#define CTXKV__MAX_DIMS 5
#define CTXKV__ANY (-1) // any size of a dimension

struct ctxkv__view {
    char *data;
    unsigned type;
    int ndim;
    int64_t shape[CTXKV__MAX_DIMS], stride[CTXKV__MAX_DIMS]; // elements; 0 where the size is 1
    const char *low, *high;                                  // bytes [low, high) it may touch
};

struct ctxkv__want {
    const ctxkv_device *device;
    unsigned types; // CTXKV__BF16 | ...
    int ndim;
    int64_t shape[CTXKV__MAX_DIMS];
    bool unit;    // the last stride must be 1
    bool written; // elements may not share addresses
};

int64_t ctxkv__item_size(unsigned type);

ctxkv_status ctxkv__tensor(
    const DLTensor *tensor, const char *name, const struct ctxkv__want *want,
    struct ctxkv__view *view);

// "[4, 8192]" into text.
void ctxkv__shape_text(char *text, size_t size, const int64_t *shape, int ndim);

ctxkv_status ctxkv__no_overlap(
    const struct ctxkv__view *a, const char *a_name, const struct ctxkv__view *b,
    const char *b_name);

#endif
