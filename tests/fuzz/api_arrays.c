// SPDX-License-Identifier: Apache-2.0
// Arrays of any layout for the API fuzzer.
#include "api_arrays.h"

#include <stdlib.h>
#include <string.h>

int64_t choose(struct input *in, int64_t limit) {
    if (!in->size) return 0;
    in->size--;
    return *in->data++ % limit;
}

static void layout(struct input *in, struct array *a, int ndim, bool plain, int64_t *first) {
    int order[MAX_FUZZ_DIMS];
    int64_t next = 1;
    int64_t *strides = a->tensor.strides, *shape = a->tensor.shape;
    for (int i = 0; i < ndim; i++) order[i] = ndim - 1 - i; // innermost first
    if (!plain && ndim > 2 && choose(in, 3) == 0) {         // as [T, L, ...] storage has it
        int swap = order[ndim - 1];
        order[ndim - 1] = order[ndim - 2];
        order[ndim - 2] = swap;
    }
    *first = 0;
    for (int i = 0; i < ndim; i++) {
        int d = order[i];
        int64_t pad = plain || i == 0 ? 0 : choose(in, 6) == 0 ? choose(in, 9) : 0;
        strides[d] = next + pad;
        next = strides[d] * (shape[d] ? shape[d] : 1);
        if (!plain && i > 0 && choose(in, 8) == 0) {
            *first += strides[d] * (shape[d] ? shape[d] - 1 : 0);
            strides[d] = -strides[d];
        }
    }
}

// Element number index (row-major) as an offset from the first, in elements.
static int64_t offset_of(const struct array *a, int64_t index) {
    int64_t offset = 0;
    for (int i = a->tensor.t.ndim - 1; i >= 0; i--) {
        offset += index % a->tensor.shape[i] * a->tensor.strides[i];
        index /= a->tensor.shape[i];
    }
    return offset;
}

static char *element(const struct array *a, int64_t index) {
    return (char *)a->tensor.t.data + a->tensor.t.byte_offset +
           offset_of(a, index) * (int64_t)a->item;
}

void array_new(
    struct input *in, struct array *a, enum type type, int ndim, const int64_t *shape,
    const void *values, bool plain) {
    static const size_t items[] = {
        [BF16] = 2, [FP32] = 4, [I64] = 8, [FP16] = 2, [U8] = 1, [E4M3] = 1, [E5M2] = 1};
    static const struct place cpu;
    int64_t first, extent = 1;
    tensor_on(&a->tensor, &cpu, 0, type, ndim, shape, shape);
    a->item = items[type];
    a->count = 1;
    for (int i = 0; i < ndim; i++) a->count *= shape[i];
    layout(in, a, ndim, plain, &first);
    for (int i = 0; i < ndim; i++)
        if (shape[i] > 1) extent += llabs(a->tensor.strides[i]) * (shape[i] - 1);
    if (a->count == 0) extent = first = 0;
    size_t shift = plain || type == I64 ? 0 : (size_t)choose(in, 4) % 3;
    a->block_bytes = (size_t)extent * a->item + shift;
    a->block = malloc(a->block_bytes ? a->block_bytes : 1);
    if (!a->block) die("malloc of %zu", a->block_bytes);
    memset(a->block, POISON, a->block_bytes);
    uint64_t offset = (uint64_t)first * a->item + shift;
    bool apart = !plain && choose(in, 2);
    a->tensor.t.data = a->block + (apart ? 0 : offset);
    a->tensor.t.byte_offset = apart ? offset : 0;
    if (plain && choose(in, 2)) a->tensor.t.strides = 0;
    if (a->count == 0 && choose(in, 2)) a->tensor.t.data = 0, a->tensor.t.byte_offset = 0;
    for (int64_t i = 0; values && i < a->count; i++)
        memcpy(element(a, i), (const char *)values + i * (int64_t)a->item, a->item);
    // The stride of a dimension of size 1 carries no meaning.
    for (int i = 0; i < ndim && !plain; i++)
        if (shape[i] == 1 && choose(in, 3) == 0) a->tensor.strides[i] = INT64_MAX - choose(in, 9);
}

void array_free(struct array *a) {
    free(a->block);
    memset(a, 0, sizeof *a);
}

void array_values(const struct array *a, void *values) {
    for (int64_t i = 0; i < a->count; i++)
        memcpy((char *)values + i * (int64_t)a->item, element(a, i), a->item);
}

void array_check_gaps(const struct array *a) {
    char *image = malloc(a->block_bytes + 1);
    if (!image) die("malloc");
    memcpy(image, a->block, a->block_bytes);
    for (int64_t i = 0; i < a->count; i++)
        memset(image + (element(a, i) - a->block), POISON, a->item);
    for (size_t i = 0; i < a->block_bytes; i++)
        if (image[i] != POISON) die("byte %zu between elements was written", i);
    free(image);
}

uint16_t *noise_new(struct input *in, int64_t count) {
    uint16_t *values = malloc((size_t)count * 2 + 1);
    if (!values) die("malloc");
    int64_t kind = choose(in, 4);
    uint64_t seed = in->seed++;
    fill_bf16(values, (size_t)count, seed, kind == 2 ? 1e-38f : 1.0f);
    for (int64_t i = 0; i < count; i++) {
        uint64_t z = test_mix(seed + 77, (uint64_t)i);
        if (kind == 1) values[i] = (uint16_t)z; // NaN, infinities, subnormals, all of them
        if (kind == 3 && z % 16 == 0) values[i] = (uint16_t)(z >> 16);
    }
    return values;
}
