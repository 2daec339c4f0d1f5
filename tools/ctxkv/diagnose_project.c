// SPDX-License-Identifier: Apache-2.0
// The projection stage with its faults: other weight rows, other orders of the sum.
#include <string.h>

#include "../../src/ops/numerics.h"
#include "diagnose.h"

typedef struct weight {
    const uint16_t *data;
    int64_t stride;
} weight;

static const io_draft *draft_of(const dg_call *call, int32_t rank) {
    return rank == call->facts.tp_rank || !call->ranks ? &call->draft : &call->ranks[rank];
}

static const uint16_t *block_of(const dg_call *call, const dg_project *p, int64_t l, int part) {
    const io_draft *draft = draft_of(call, p->rank);
    return draft->weights[draft->parts * l + part].tensor.data;
}

// W[n][k] of a matrix whose bytes are read as its transpose: element k*rows + n of the block.
static weight gather_transposed(
    dg_worker *w, const dg_project *p, int64_t l, int part, int64_t first, int64_t count) {
    const dg_call *call = dg_worker_call(w);
    uint16_t *to = dg_worker_scratch(w)->weights;
    int64_t rows = call->H * call->dim, size = rows * call->D;
    bool stacked = p->transposed == 2;
    int second = call->draft.parts == 2; // K alone is never stacked
    const uint16_t *blocks[2] = {block_of(call, p, l, 0), block_of(call, p, l, second)};
    int64_t width = stacked ? 2 * rows : rows;
    for (int64_t k = 0; k < call->D; ++k) {
        for (int64_t n = 0; n < count; ++n) {
            int64_t at = k * width + first + n + (stacked ? part * rows : 0);
            int from = stacked ? at >= size : part;
            to[n * call->D + k] = blocks[from][stacked ? at % size : at];
        }
    }
    return (weight){to, call->D};
}

static weight weight_of(
    dg_worker *w, const dg_project *p, int64_t layer, int part, int64_t first, int64_t count) {
    const dg_call *call = dg_worker_call(w);
    int64_t l = dg_source_layer(call, p->layers, layer);
    int rows = p->rows[part];
    if (rows >= DG_Q_ROWS) {
        int64_t skip = rows == DG_Q_ROWS_AFTER ? call->H * call->dim : 0;
        const uint8_t *from = call->q_rows[l] + (skip + first) * call->D * 2;
        uint16_t *to = dg_worker_scratch(w)->weights;
        memcpy(to, from, (size_t)(count * call->D) * 2);
        return (weight){to, call->D};
    }
    if (p->transposed) return gather_transposed(w, p, l, rows, first, count);
    return (weight){block_of(call, p, l, rows) + first * call->D, call->D};
}

// The bias of some columns; NULL: none.
static const float *bias_of(
    const dg_call *call, const dg_project *p, int64_t layer, int part, int64_t column,
    int64_t count, float *to) {
    const io_draft *draft = draft_of(call, p->rank);
    int64_t l = dg_source_layer(call, p->bias_layers, layer), width = call->H * call->dim;
    bool none =
        p->bias == DG_BIAS_NONE || p->bias_parts == (part ? DG_BIAS_K_ONLY : DG_BIAS_V_ONLY);
    if (none) return NULL;
    if (p->bias_parts == DG_BIAS_SWAPPED) part = 1 - part;
    int64_t first = (draft->parts * l + part) * width + column;
    for (int64_t i = 0; i < count; ++i)
        to[i] = ctxkv__load_bf16(draft->bias.tensor.data, first + i);
    return to;
}

static float rounded(float x) {
    return ctxkv__from_bf16(ctxkv__to_bf16(x));
}

static float split_sum(const dg_project *p, const uint16_t *x, const uint16_t *w, int64_t D) {
    float sum = 0.0f;
    int64_t size = (int64_t)p->steps * 16;
    for (int64_t first = 0; first < D; first += size) {
        int64_t end = first + size < D ? first + size : D;
        float part = ctxkv__projection_chain(x, w, first, end, 0.0f);
        if (p->mode == DG_SPLIT_BF16) part = rounded(part);
        sum = first ? sum + part : part;
    }
    return sum;
}

static float bf16_sum(const dg_project *p, const uint16_t *x, const uint16_t *w, int64_t D) {
    float sum = 0.0f;
    if (p->mode == DG_BF16_STEPS) {
        for (int64_t k = 0; k < D; k += 16) sum = rounded(ctxkv__mma16(x + k, w + k, sum));
        return sum;
    }
    for (int64_t k = 0; k < D; ++k)
        sum = rounded(ctxkv__fma(ctxkv__from_bf16(x[k]), ctxkv__from_bf16(w[k]), sum));
    return sum;
}

static float one_output(const dg_project *p, const uint16_t *x, const uint16_t *w, int64_t D) {
    float sum = 0.0f;
    double wide = 0.0;
    switch (p->mode) {
    case DG_FP32: // products of BF16 values are exact: with and without fma is the same
        for (int64_t k = 0; k < D; ++k) sum = sum + ctxkv__from_bf16(x[k]) * ctxkv__from_bf16(w[k]);
        return sum;
    case DG_FP64:
        for (int64_t k = 0; k < D; ++k)
            wide += (double)ctxkv__from_bf16(x[k]) * ctxkv__from_bf16(w[k]);
        return (float)wide;
    case DG_BF16_STEPS:
    case DG_BF16_TERMS:
        return bf16_sum(p, x, w, D);
    default:
        return split_sum(p, x, w, D);
    }
}

void dg_project_rows(
    dg_worker *w, const dg_project *p, int64_t layer, int part, int64_t h, int64_t first,
    int64_t count, const uint16_t *x, int64_t rows, uint16_t *out, int64_t out_stride) {
    const dg_call *call = dg_worker_call(w);
    int64_t column = h * call->dim + first;
    weight from = weight_of(w, p, layer, part, column, count);
    float values[DG_COLUMNS];
    const float *bias = bias_of(call, p, layer, part, column, count, values);
    if (p->mode == DG_EXACT) {
        struct ctxkv__weight_block block = {from.data, from.stride};
        struct ctxkv__projection_args args = {
            .hidden_size = call->D,
            .num_layers = 1,
            .parts = 1,
            .block_columns = count,
            .blocks = &block,
            .bias = bias,
            .round_first = p->bias == DG_BIAS_AFTER,
            .rows = rows,
            .x = x,
            .x_row_stride = call->D,
            .kv = out,
            .kv_row_stride = out_stride};
        int64_t units = ctxkv__projection_units_per_block(&args);
        call->kernels.projection(&args, 0, units, dg_worker_scratch(w)->tier);
        return;
    }
    for (int64_t t = 0; t < rows; ++t) {
        for (int64_t n = 0; n < count; ++n) {
            float sum = one_output(p, x + t * call->D, from.data + n * from.stride, call->D);
            if (bias) sum = (p->bias == DG_BIAS_AFTER ? rounded(sum) : sum) + bias[n];
            out[t * out_stride + n] = ctxkv__to_bf16(sum);
        }
    }
}
