// SPDX-License-Identifier: Apache-2.0
// Harness of the projection: tails, strides, addresses and hostile chains; timings of 16 KV heads.
#include "plans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/ops/numerics.h"

#define MAX_LAYERS 3

struct made {
    struct ctxkv__projection_args args;
    struct ctxkv__weight_block blocks[2 * MAX_LAYERS];
    struct area weights[2 * MAX_LAYERS], bias, x;
    struct area bias_bf16; // a plan's
    int64_t head_dim;
    bool long_sums; // past 31 bits, in many rows
    bool mirrored;  // the second half takes away the first: what is left shows every bit cut
};

// Heads of a size that plans know; the shapes of the GPU's kernels change with the rows.
static void plan_shape(struct check *c, struct made *m) {
    struct ctxkv__projection_args *a = &m->args;
    m->head_dim = PICK(c, 64, 64, 64, 128);
    a->parts = c->on_gpu || check_chance(c, 75) ? 2 : 1;
    a->round_first = !c->on_gpu && check_chance(c, 40);
    a->hidden_size = PICK(c, 16, 48, 64, 112, 128, 256, 512, 528, 784, 1040);
    a->num_layers = 1 + check_below(c, MAX_LAYERS);
    a->block_columns = m->head_dim * PICK(c, 1, 1, 2);
    a->rows = PICK(c, 1, 1, 2, 3, 5, 7, 8, 9, 16, 17, 33);
    if (check_chance(c, 10)) {
        a->rows = PICK(c, 49, 64, 65, 130);
        a->hidden_size = PICK(c, 16, 64, 128);
    } else if (check_chance(c, 4)) {
        a->hidden_size = 8192;
        a->rows = PICK(c, 1, 3);
        a->num_layers = 1 + check_below(c, 2);
        a->block_columns = m->head_dim = 64;
    }
}

static void random_shape(struct check *c, struct made *m) {
    struct ctxkv__projection_args *a = &m->args;
    if (c->device) {
        plan_shape(c, m);
        return;
    }
    a->hidden_size = PICK(c, 16, 32, 48, 112, 128, 144, 240, 256, 272, 512, 528, 784, 1040);
    a->num_layers = 1 + check_below(c, MAX_LAYERS);
    a->block_columns = PICK(c, 1, 7, 15, 16, 17, 31, 32, 33, 64, 96, 100);
    a->parts = check_chance(c, 75) ? 2 : 1;
    a->round_first = check_chance(c, 40);
    a->rows = PICK(c, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13);
    if (check_chance(c, 3)) { // more rows than a tile's accumulators
        a->rows = 250 + check_below(c, 20);
        a->hidden_size = PICK(c, 16, 32, 48);
        a->num_layers = 1;
        a->block_columns = PICK(c, 16, 33);
    } else if (check_chance(c, 3)) {
        a->hidden_size = 8192;
        a->num_layers = 1;
        a->block_columns = PICK(c, 16, 33);
    }
}

static void mirror(uint8_t *row, int64_t n, uint16_t sign) {
    for (int64_t i = 0; i < n / 2; i++)
        ctxkv__store16(row, n / 2 + i, ctxkv__load16(row, i) ^ sign);
}

static void make_weights(struct check *c, struct made *m) {
    struct ctxkv__projection_args *a = &m->args;
    for (int64_t b = 0; b < a->parts * a->num_layers; b++) {
        int64_t stride = a->hidden_size + (check_chance(c, 60) ? 0 : check_below(c, 50));
        size_t values = (size_t)((a->block_columns - 1) * stride + a->hidden_size);
        bool aligned = c->device && check_chance(c, 80);
        if (aligned) stride = (stride + 7) / 8 * 8, values += (size_t)(8 * a->block_columns);
        m->weights[b] = area_new(c, values * 2, aligned ? 16 : 1);
        for (int64_t n = 0; n < a->block_columns; n++) {
            uint8_t *row = m->weights[b].data + 2 * n * stride;
            (m->long_sums && n % 3 ? hostile_past_31_bits : hostile_bf16)(c, row, a->hidden_size);
            if (m->mirrored) mirror(row, a->hidden_size, 0x8000);
        }
        m->blocks[b] = (struct ctxkv__weight_block){m->weights[b].data, stride};
    }
    a->blocks = m->blocks;
    size_t biases = (size_t)(a->parts * a->block_columns * a->num_layers);
    m->bias = area_new(c, biases * 4, 4);
    hostile_f32(c, (float *)(void *)m->bias.data, (int64_t)biases);
    a->bias = check_chance(c, c->device ? 20 : 40) ? (const float *)(const void *)m->bias.data : 0;
    if (!c->device) return;
    m->bias_bf16 = area_new(c, biases * 2, 2);
    hostile_bf16(c, m->bias_bf16.data, (int64_t)biases);
    ctxkv__gains(m->bias_bf16.data, false, (int64_t)biases, 0.0f, (float *)(void *)m->bias.data);
}

static void make_x(struct check *c, struct made *m) {
    struct ctxkv__projection_args *a = &m->args;
    bool shared = check_chance(c, 30);
    bool aligned = c->device && check_chance(c, 70);
    a->x_row_stride = a->hidden_size + (check_chance(c, 50) ? 0 : check_below(c, 40));
    if (aligned) a->x_row_stride = (a->x_row_stride + 7) / 8 * 8;
    a->x_layer_stride = shared ? 0 : a->rows * a->x_row_stride + check_below(c, 30);
    if (aligned) a->x_layer_stride = (a->x_layer_stride + 7) / 8 * 8;
    // A plan knows one layer's x as shared by its shape.
    if (c->device && a->num_layers == 1) a->x_layer_stride = 0;
    int64_t copies = a->x_layer_stride ? a->num_layers : 1;
    int64_t last = (copies - 1) * a->x_layer_stride + (a->rows - 1) * a->x_row_stride;
    m->x = area_new(c, (size_t)(last + a->hidden_size) * 2, aligned ? 16 : 1);
    for (int64_t l = 0; l < copies; l++)
        for (int64_t t = 0; t < a->rows; t++) {
            uint8_t *row = m->x.data + 2 * (l * a->x_layer_stride + t * a->x_row_stride);
            (m->long_sums && t % 3 ? hostile_largest : hostile_bf16)(c, row, a->hidden_size);
            if (m->mirrored) mirror(row, a->hidden_size, 0);
        }
    a->x = m->x.data;
}

static struct area make_out(struct check *c, struct ctxkv__projection_args *a) {
    int64_t columns = a->parts * a->block_columns;
    a->kv_row_stride = columns + (check_chance(c, 50) ? 0 : check_below(c, 40));
    a->kv_layer_stride = a->rows * a->kv_row_stride + (check_chance(c, 50) ? 0 : check_below(c, 9));
    if (check_chance(c, 25)) {
        a->kv_layer_stride = columns;
        a->kv_row_stride = columns * a->num_layers;
    }
    int64_t last = (a->num_layers - 1) * a->kv_layer_stride + (a->rows - 1) * a->kv_row_stride;
    return area_new(c, (size_t)(last + columns) * 2, 1);
}

// On the units in parts, with rubbish in the scratch; its own guards are compared afterwards.
static void run_tier(struct check *c, const struct ctxkv__projection_args *a, int64_t units) {
    struct area scratch = area_new(c, CTXKV__PROJECTION_SCRATCH, 64);
    struct area before = area_copy(&scratch);
    struct parts parts = check_parts(c, units);
    unsigned mode = check_float_mode();
    for (int i = 0; i < parts.count; i++)
        c->kernels.projection(a, parts.begin[i], parts.end[i], scratch.data);
    if (check_float_mode() != mode) check_fail(c, "the floating-point mode was not restored");
    memcpy(scratch.data, before.data, scratch.bytes);
    area_same(c, &before, &scratch, "scratch");
    area_free(&scratch);
    area_free(&before);
}

static void run_plan(struct check *c, struct made *m, struct area *got) {
    const struct ctxkv__projection_args *a = &m->args;
    struct mirrors mirrors = {.check = c};
    struct box b[2 * MAX_LAYERS + 3];
    const DLTensor *weights[2 * MAX_LAYERS];
    int64_t D = a->hidden_size, L = a->num_layers, N = a->parts * a->block_columns, T = a->rows;
    ctxkv_projection_desc d;
    ctxkv_projection_desc_init(&d);
    d.hidden_size = D;
    d.num_layers = L;
    d.head_dim = m->head_dim;
    d.num_kv_heads = a->block_columns / m->head_dim;
    for (int64_t i = 0; i < a->parts * L; i++)
        weights[i] = boxed(
            &mirrors, &b[i], on_device(&mirrors, &m->weights[i]), TYPE_BF16, 2,
            (int64_t[]){a->block_columns, D}, (int64_t[]){m->blocks[i].row_stride, 1});
    d.weights = weights;
    d.weight_count = a->parts * L;
    d.k_only = a->parts == 1;
    d.bias_add = a->round_first ? CTXKV_BIAS_AFTER : CTXKV_BIAS_FUSED;
    struct box *rest = b + 2 * MAX_LAYERS;
    if (a->bias)
        d.bias = boxed(
            &mirrors, &rest[0], on_device(&mirrors, &m->bias_bf16), TYPE_BF16, 2, (int64_t[]){L, N},
            0);
    d.mode = check_chance(c, 50) ? CTXKV_PROJECTION_EXACT : CTXKV_PROJECTION_AUTO;
    const DLTensor *x = boxed(
        &mirrors, &rest[1], on_device(&mirrors, &m->x), TYPE_BF16, 3,
        (int64_t[]){a->x_layer_stride ? L : 1, T, D},
        (int64_t[]){a->x_layer_stride, a->x_row_stride, 1});
    const DLTensor *kv = boxed(
        &mirrors, &rest[2], on_device(&mirrors, got), TYPE_BF16, 3, (int64_t[]){L, T, N},
        (int64_t[]){a->kv_layer_stride, a->kv_row_stride, 1});
    ctxkv_projection *plan = 0;
    if (!c->failed &&
        plan_ok(c, ctxkv_projection_create(c->device, &d, &plan), "projection_create"))
        plan_ok(c, ctxkv_projection_run(plan, x, kv, 0), "projection_run");
    mirrors_return(&mirrors);
    ctxkv_projection_destroy(plan);
}

static void one_case(struct check *c) {
    struct made m = {0};
    struct ctxkv__projection_args *a = &m.args;
    random_shape(c, &m);
    m.long_sums = check_chance(c, 20);
    m.mirrored = !m.long_sums && check_chance(c, 40);
    make_weights(c, &m);
    make_x(c, &m);
    struct area truth = make_out(c, a);
    struct area got = area_copy(&truth), x_before = area_copy(&m.x);
    check_tell(
        c, "K=%lld L=%lld columns=%lld*%lld T=%lld%s%s x+%lld w+%lld kv+%lld",
        (long long)a->hidden_size, (long long)a->num_layers, (long long)a->parts,
        (long long)a->block_columns, (long long)a->rows,
        !a->bias         ? ""
        : a->round_first ? " bias after"
                         : " bias",
        a->x_layer_stride ? "" : " shared x", (long long)((uintptr_t)a->x % 64),
        (long long)((uintptr_t)m.weights[0].data % 64), (long long)((uintptr_t)got.data % 64));
    int64_t units = ctxkv__projection_units(a);
    a->kv = truth.data;
    ctxkv__projection_ref(a, 0, units, 0);
    a->kv = got.data;
    if (c->device)
        run_plan(c, &m, &got);
    else
        run_tier(c, a, units);
    area_same(c, &truth, &got, "kv");
    area_same(c, &x_before, &m.x, "x");
    for (int64_t b = 0; b < a->parts * a->num_layers; b++) area_free(&m.weights[b]);
    area_free(&m.bias);
    area_free(&m.bias_bf16);
    area_free(&m.x);
    area_free(&x_before);
    area_free(&truth);
    area_free(&got);
}

// ---- timings ---------------------------------------------------------------------------------
#define BENCH_K 8192
#define BENCH_L 5
#define BENCH_COLUMNS 1024 // 16 heads of 64

struct operands {
    struct ctxkv__projection_args args;
    int64_t units, share, at;
};

// A share of the units a run, the next one each time: short enough to be undisturbed now and then,
// and the weights come from memory.
static void run(void *p, const struct ctxkv__kernels *kernels) {
    static void *scratch;
    struct operands *o = p;
    if (!scratch) scratch = bench_memory(CTXKV__PROJECTION_SCRATCH);
    kernels->projection(&o->args, o->at, o->at + o->share, scratch);
    o->at = (o->at + o->share) % o->units;
}

static size_t timings(struct timing *list, size_t max) {
    static struct operands all[3];
    static struct ctxkv__weight_block blocks[2 * BENCH_L];
    static const int64_t rows[3] = {1, 8, 64}, shares[3] = {32, 8, 4};
    size_t block_values = (size_t)BENCH_K * BENCH_COLUMNS;
    if (!blocks[0].data) {
        uint16_t *w = bench_memory(block_values * 2 * 2 * BENCH_L);
        for (size_t i = 0; i < block_values * 2 * BENCH_L; i++)
            w[i] = (uint16_t)(0x3C00 + (check_mix(2, i) & 0x83FF));
        for (int b = 0; b < 2 * BENCH_L; b++)
            blocks[b] = (struct ctxkv__weight_block){w + b * block_values, BENCH_K};
    }
    for (size_t i = 0; i < 3 && i < max; i++) {
        struct operands *o = &all[i];
        if (!o->units) {
            uint16_t *x = bench_memory((size_t)(rows[i] * BENCH_K) * 2);
            for (int64_t k = 0; k < rows[i] * BENCH_K; k++)
                x[k] = (uint16_t)(0x3E00 + (check_mix(3, (uint64_t)k) & 0x81FF));
            int64_t row = 2 * BENCH_COLUMNS;
            o->args = (struct ctxkv__projection_args){
                .hidden_size = BENCH_K,
                .num_layers = BENCH_L,
                .parts = 2,
                .block_columns = BENCH_COLUMNS,
                .blocks = blocks,
                .rows = rows[i],
                .x = x,
                .x_row_stride = BENCH_K,
                .kv = bench_memory((size_t)(rows[i] * row * BENCH_L) * 2),
                .kv_layer_stride = rows[i] * row,
                .kv_row_stride = row};
            o->units = ctxkv__projection_units(&o->args);
            o->share = shares[i];
        }
        double weights = (double)(o->share * CTXKV__UNIT_COLUMNS) * BENCH_K;
        list[i].bytes = weights * 2;
        list[i].macs = weights * (double)rows[i];
        list[i].run = run;
        list[i].operands = o;
        snprintf(
            list[i].name, sizeof list[i].name, "projection %lld columns T=%lld",
            (long long)(o->share * CTXKV__UNIT_COLUMNS), (long long)rows[i]);
    }
    return max < 3 ? max : 3;
}

const struct op check_projection = {"projection", one_case, timings, 0};
