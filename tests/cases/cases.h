// SPDX-License-Identifier: Apache-2.0
// The cases: faults that users of such kernels reported, as inputs. Each runs on CTXKV_TEST_DEVICE.
#ifndef CTXKV_TESTS_CASES_H
#define CTXKV_TESTS_CASES_H

#include "checks.h"

#define HIDDEN 8192
#define HEAD 64

// Layers of guarded cache storage [blocks, heads, page, 128], each its own buffer, with an image.
#define MAX_CASE_LAYERS 16
struct caches {
    int64_t layers, blocks, page, heads;
    struct buffer storage[MAX_CASE_LAYERS];
    uint16_t *image[MAX_CASE_LAYERS]; // what the storage must hold
    struct tensor k[MAX_CASE_LAYERS], v[MAX_CASE_LAYERS];
    const DLTensor *keys[MAX_CASE_LAYERS], *values[MAX_CASE_LAYERS];
};
void caches_new(
    struct caches *c, const struct place *place, int64_t layers, int64_t blocks, int64_t page,
    int64_t heads);
// Expects row `slot` of that layer and head to be all k and all v.
void caches_expect(
    struct caches *c, int64_t layer, int64_t slot, int64_t head, uint16_t k, uint16_t v);
void caches_check(const struct caches *c, const struct place *place);
void caches_poison(struct caches *c, const struct place *place);
void caches_free(struct caches *c, const struct place *place);

// A tensor with memory of its own, filled from host values.
struct operand {
    struct buffer buffer;
    struct tensor tensor;
};
const DLTensor *operand_new(
    struct operand *o, const struct place *place, enum type type, int ndim, const int64_t *shape,
    const void *values);
void operand_free(struct operand *o, const struct place *place);

// A store plan of the Muse kind: eps 1e-6, no RoPE unless table is given.
ctxkv_store *muse_store(
    const struct place *place, int64_t layers, int64_t heads, const DLTensor *table);

void b02(void **state);
void b04(void **state);
void b06(void **state);
void b09(void **state);
void b10(void **state);
void b12(void **state);
void b14(void **state);
void b16(void **state);
void b18(void **state);
void b24(void **state);

#endif
