// SPDX-License-Identifier: Apache-2.0
// Bytes of a fuzz input as choices, and arrays of any layout in blocks of exactly their size.
#ifndef CTXKV_TESTS_FUZZ_API_ARRAYS_H
#define CTXKV_TESTS_FUZZ_API_ARRAYS_H

#include "support.h"

struct input {
    const uint8_t *data;
    size_t size;
    uint64_t seed; // of the values; changes with every array
};

// The next byte modulo limit; 0 when the input has ended.
int64_t choose(struct input *in, int64_t limit);

#define MAX_FUZZ_DIMS 4

struct array {
    char *block;
    size_t block_bytes, item;
    struct tensor tensor;
    int64_t count; // elements
};

// A tensor of that shape in a layout of the input's choice (plain: row-major, aligned), the last
// stride 1, filled from values (row-major; NULL: poison). The gaps are poison.
void array_new(
    struct input *in, struct array *a, enum type type, int ndim, const int64_t *shape,
    const void *values, bool plain);
void array_free(struct array *a);
// The elements in row-major order.
void array_values(const struct array *a, void *values);
// Dies unless every byte outside the elements is poison still.
void array_check_gaps(const struct array *a);
// BF16 noise of a kind of the input's choice: tame, wild exponents, any bits.
uint16_t *noise_new(struct input *in, int64_t count);

#endif
