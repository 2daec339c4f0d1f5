// SPDX-License-Identifier: Apache-2.0
// Scalar truth of the projection: the sequential chain of SPEC 3.3, one output at a time.
#include "projection.h"
#include "numerics.h"

float ctxkv__projection_chain(
    const void *x, const void *w, int64_t first, int64_t hidden_size, float acc) {
    for (int64_t k = first; k < hidden_size; k += 16)
        acc = ctxkv__mma16((const char *)x + 2 * k, (const char *)w + 2 * k, acc);
    return acc;
}

void ctxkv__projection_ref(
    const struct ctxkv__projection_args *a, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    int64_t per_block = ctxkv__projection_units_per_block(a);
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t block = unit / per_block, layer = block / a->parts;
        int64_t first = unit % per_block * CTXKV__UNIT_COLUMNS;
        int64_t last = first + CTXKV__UNIT_COLUMNS;
        if (last > a->block_columns) last = a->block_columns;
        const struct ctxkv__weight_block *weight = &a->blocks[block];
        for (int64_t n = first; n < last; n++) {
            const void *w = (const char *)weight->data + 2 * n * weight->row_stride;
            int64_t column = block % a->parts * a->block_columns + n;
            for (int64_t t = 0; t < a->rows; t++) {
                int64_t offset = layer * a->x_layer_stride + t * a->x_row_stride;
                const void *x = (const char *)a->x + 2 * offset;
                float acc = ctxkv__projection_chain(x, w, 0, a->hidden_size, 0.0f);
                if (a->bias && a->round_first) acc = ctxkv__round_bf16(acc);
                if (a->bias) acc = acc + a->bias[layer * a->parts * a->block_columns + column];
                int64_t out = layer * a->kv_layer_stride + t * a->kv_row_stride + column;
                ctxkv__store16(a->kv, out, ctxkv__to_bf16(acc));
            }
        }
    }
}
