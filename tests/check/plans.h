// SPDX-License-Identifier: Apache-2.0
// The harness's cases through plans: operands are mirrored in the memory of the device under test.
#ifndef CTXKV_CHECK_PLANS_H
#define CTXKV_CHECK_PLANS_H

#include "check.h"
#include "ctxkv/ctxkv.h"

#define MOST_MIRRORS 24

// The areas of one case on the device; on a CPU the areas themselves.
struct mirrors {
    struct check *check;
    struct {
        struct area *area;
        uint8_t *base;
    } list[MOST_MIRRORS];
    int count;
};

// Copies all of the area, guards and placement too; the address of its data there.
uint8_t *on_device(struct mirrors *m, struct area *area);
// Copies every area back and frees the mirrors.
void mirrors_return(struct mirrors *m);

struct box {
    DLTensor t;
    int64_t shape[4], strides[4];
};
enum { TYPE_BF16, TYPE_FP32, TYPE_I64, TYPE_FP16, TYPE_U8 };
// strides NULL: row-major.
const DLTensor *boxed(
    const struct mirrors *m, struct box *b, const void *data, int type, int ndim,
    const int64_t *shape, const int64_t *strides);

// Whether the call succeeded; if not the case fails with the library's sentence.
bool plan_ok(struct check *c, ctxkv_status status, const char *what);

#endif
