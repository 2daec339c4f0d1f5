// SPDX-License-Identifier: Apache-2.0
// Harness of the norms: all orders, weight kinds and strides; timings of the 8192-wide row.
#include "plans.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../../src/ops/numerics.h"

#define MAX_LAYERS 3

static const char *const order_names[] = {"pair", "packed", "rms1024", "rms256"};

static void random_norm(
    struct check *c, struct ctxkv__norm *norm, const float *gain, bool row_order) {
    norm->present = check_chance(c, 85);
    norm->order = (enum ctxkv__sum_order)(check_below(c, 2) + (row_order ? 0 : 2));
    norm->contract = check_chance(c, 50);
    norm->input_scale = check_chance(c, 40);
    norm->gain = check_chance(c, 75) ? gain : 0;
    norm->eps = check_chance(c, 30) ? 0.0f : check_chance(c, 50) ? 1e-5f : 1e-6f;
}

static void tell_norm(struct check *c, const char *name, const struct ctxkv__norm *n) {
    if (!n->present)
        check_tell(c, " %s=absent", name);
    else
        check_tell(
            c, " %s=%s%s%s%s eps=%g", name, order_names[n->order], n->contract ? "+fma" : "",
            n->gain ? " gain" : "", n->gain && n->input_scale ? " on input" : "", (double)n->eps);
}

// The last bit of a row's scale shows in few BF16 outputs. So a few vectors of 8 carry the sum of
// row 0, which then depends on the order of each addition, and the gains of the rest, too small to
// count, put each output within a few FP32 ulps of a BF16 halfway case.
static void sharpen(struct check *c, struct ctxkv__norms_args *a, uint8_t *x, float *gain) {
    int64_t n = a->hidden_size, carriers[5];
    bool input = a->layer.input_scale;
    double sum = 0;
    for (int i = 0; i < 5; i++) carriers[i] = check_below(c, n / 8);
    for (int64_t i = 0; i < n; i++) {
        bool carries = false;
        for (int k = 0; k < 5; k++) carries |= carriers[k] == i / 8;
        uint64_t r = check_random(c);
        uint32_t field = (uint32_t)(carries ? 122 + (r >> 32) % 8 : 100 + (r >> 32) % 4);
        ctxkv__store16(x, i, (uint16_t)((r & 0x807F) | field << 7));
        gain[i] = carries ? 1.0f + (float)(r >> 40) * 0x1p-24f : 0.0f;
        double v = ctxkv__load_bf16(x, i) * (input ? gain[i] : 1.0f);
        sum += v * v;
    }
    double scale = 1 / sqrt(sum / (double)n + a->layer.eps);
    for (int64_t i = 0; i < n; i++) {
        if (gain[i] != 0) continue;
        double y = scale * ctxkv__load_bf16(x, i);
        double half = ctxkv__float((ctxkv__bits((float)y) & 0xFFFF0000u) | 0x8000u);
        gain[i] = (float)(half / y * (1 + (double)(check_below(c, 13) - 6) * 0x1p-24));
    }
}

// ---- through a plan --------------------------------------------------------------------------
struct weights {
    struct area area;
    bool fp32;
    float centre;
};

// A plan makes its gains from weights and a centre: the truth gets those gains.
static void as_weights(
    struct check *c, struct ctxkv__norm *norm, struct weights *w, struct area *gain, int64_t n) {
    w->fp32 = check_chance(c, 50);
    w->centre = check_chance(c, 70) ? 0.0f : check_chance(c, 50) ? 1.0f : 0.5f;
    w->area = area_new(c, (size_t)n * (w->fp32 ? 4 : 2), w->fp32 ? 4 : 2);
    float *gains = (float *)(void *)gain->data;
    for (int64_t i = 0; i < n; i++) {
        if (w->fp32)
            memcpy(w->area.data + 4 * i, gains + i, 4);
        else
            ctxkv__store16(w->area.data, i, ctxkv__to_bf16(gains[i]));
    }
    ctxkv__gains(w->area.data, w->fp32, n, w->centre, gains);
    norm->contract = norm->gain && (w->fp32 || norm->input_scale);
}

// What a plan cannot be asked for: an order for each norm, a scaled input of rms_norm, any stride.
static ctxkv_numerics as_a_plan(struct check *c, struct ctxkv__norms_args *a, int64_t rows) {
    static const ctxkv_numerics numerics[] = {
        CTXKV_NUMERICS_PAIR, CTXKV_NUMERICS_PACKED, CTXKV_NUMERICS_INVARIANT, CTXKV_NUMERICS_STOCK};
    ctxkv_numerics chosen = numerics[a->hidden.order];
    a->layer.order = a->hidden.order;
    if (a->hidden.order >= CTXKV__ORDER_RMS_1024)
        a->hidden.input_scale = a->layer.input_scale = false;
    if (chosen == CTXKV_NUMERICS_STOCK) {
        if (rows < 256) a->hidden.order = CTXKV__ORDER_RMS_1024;
        if (rows * a->num_layers < 256) a->layer.order = CTXKV__ORDER_RMS_1024;
    }
    if (check_chance(c, 60)) a->hidden.present = a->layer.present = true;
    if (c->on_gpu) {
        a->out_layer_stride = (a->out_layer_stride + 7) / 8 * 8;
        a->out_row_stride = (a->out_row_stride + 7) / 8 * 8;
    }
    return chosen;
}

static ctxkv_norm norm_of(const struct ctxkv__norm *norm, float centre) {
    return (ctxkv_norm){
        .kind = !norm->present                         ? CTXKV_NORM_ABSENT
                : norm->order >= CTXKV__ORDER_RMS_1024 ? CTXKV_NORM_RMS
                                                       : CTXKV_NORM_ROW,
        .eps = norm->eps,
        .gain_centre = centre,
        .input_scale = norm->present && norm->gain && norm->input_scale,
    };
}

static void run_plan(
    struct check *c, const struct ctxkv__norms_args *a, ctxkv_numerics numerics, int64_t rows,
    struct weights w[2], struct area *x, struct area *got) {
    struct mirrors m = {.check = c};
    struct box b[4];
    int64_t D = a->hidden_size, L = a->num_layers;
    ctxkv_norms_desc d;
    ctxkv_norms_desc_init(&d);
    d.hidden_size = D;
    d.num_layers = L;
    d.hidden = norm_of(&a->hidden, w[0].centre);
    d.layer = norm_of(&a->layer, w[1].centre);
    d.numerics = numerics;
    if (a->hidden.present && a->hidden.gain)
        d.hidden_weight = boxed(
            &m, &b[0], on_device(&m, &w[0].area), w[0].fp32 ? TYPE_FP32 : TYPE_BF16, 1,
            (int64_t[]){D}, 0);
    const DLTensor *layers = 0;
    if (a->layer.present && a->layer.gain) {
        layers = boxed(
            &m, &b[1], on_device(&m, &w[1].area), w[1].fp32 ? TYPE_FP32 : TYPE_BF16, 2,
            (int64_t[]){L, D}, 0);
        d.layer_weights = &layers;
        d.layer_weight_count = 1;
    }
    const DLTensor *from = boxed(
        &m, &b[2], on_device(&m, x), TYPE_BF16, 2, (int64_t[]){rows, D},
        (int64_t[]){a->x_row_stride, 1});
    const DLTensor *to = boxed(
        &m, &b[3], on_device(&m, got), TYPE_BF16, 3, (int64_t[]){L, rows, D},
        (int64_t[]){a->out_layer_stride, a->out_row_stride, 1});
    ctxkv_norms *plan = 0;
    if (!c->failed && plan_ok(c, ctxkv_norms_create(c->device, &d, &plan), "norms_create"))
        plan_ok(c, ctxkv_norms_run(plan, from, to, 0), "norms_run");
    mirrors_return(&m);
    ctxkv_norms_destroy(plan);
}

static void run_kernels(struct check *c, const struct ctxkv__norms_args *a, int64_t rows) {
    struct parts parts = check_parts(c, rows);
    unsigned mode = check_float_mode();
    for (int i = 0; i < parts.count; i++) c->kernels.norms(a, parts.begin[i], parts.end[i]);
    if (check_float_mode() != mode) check_fail(c, "the floating-point mode was not restored");
}

// ---- cases -----------------------------------------------------------------------------------
static int64_t random_rows(struct check *c, int64_t hidden_size) {
    if (!c->device) return 1 + check_below(c, 5);
    // The shapes of the GPU's kernels change with the rows.
    if (check_chance(c, 3)) return PICK(c, 2048, 2051);
    int64_t rows = PICK(c, 1, 1, 2, 3, 5, 7, 8, 13, 16, 17, 33, 64, 65, 130, 257);
    return hidden_size > 4096 && rows > 64 && check_chance(c, 60) ? 5 : rows;
}

static void random_strides(struct check *c, struct ctxkv__norms_args *a, int64_t rows) {
    a->x_row_stride = a->hidden_size + (check_chance(c, 50) ? 0 : check_below(c, 40));
    a->out_row_stride = a->hidden_size + (check_chance(c, 50) ? 0 : check_below(c, 40));
    if (c->device && check_chance(c, 60)) a->x_row_stride = (a->x_row_stride + 7) / 8 * 8;
    if (c->on_gpu) a->out_row_stride = (a->out_row_stride + 7) / 8 * 8;
    a->out_layer_stride = rows * a->out_row_stride + (check_chance(c, 50) ? 0 : check_below(c, 99));
    if (check_chance(c, 25)) { // rows outside, layers inside
        a->out_layer_stride = a->out_row_stride;
        a->out_row_stride = a->out_layer_stride * a->num_layers;
    }
}

static void one_case(struct check *c) {
    struct ctxkv__norms_args a = {0};
    struct weights weights[2] = {{{0}, false, 0.0f}};
    bool row_order = check_chance(c, 55);
    a.hidden_size = row_order ? 8192
                              : PICK(
                                    c, 8, 16, 24, 64, 128, 136, 192, 264, 1000, 1024, 2048, 2056,
                                    2560, 2880, 4096, 5120, 7168, 8192, 12288);
    a.num_layers = 1 + check_below(c, MAX_LAYERS);
    int64_t rows = random_rows(c, a.hidden_size);
    random_strides(c, &a, rows);
    size_t gain_count = (size_t)(a.hidden_size * a.num_layers);
    struct area hidden_gain = area_new(c, (size_t)a.hidden_size * 4, 4);
    struct area layer_gain = area_new(c, gain_count * 4, 4);
    hostile_f32(c, (float *)(void *)hidden_gain.data, a.hidden_size);
    for (int64_t l = 0; l < a.num_layers; l++)
        hostile_f32(c, (float *)(void *)layer_gain.data + l * a.hidden_size, a.hidden_size);
    random_norm(c, &a.hidden, (const float *)(const void *)hidden_gain.data, row_order);
    random_norm(c, &a.layer, (const float *)(const void *)layer_gain.data, row_order);
    ctxkv_numerics numerics = c->device ? as_a_plan(c, &a, rows) : CTXKV_NUMERICS_STOCK;

    struct area x = area_new(
        c, (size_t)((rows - 1) * a.x_row_stride + a.hidden_size) * 2,
        c->device && check_chance(c, 60) ? 16 : 1);
    for (int64_t t = 0; t < rows; t++)
        hostile_bf16(c, x.data + 2 * t * a.x_row_stride, a.hidden_size);
    if (a.layer.present && a.layer.gain && check_chance(c, 60)) {
        a.hidden.present = c->device && check_chance(c, 30);
        sharpen(c, &a, x.data, (float *)(void *)layer_gain.data);
    }
    if (c->device) {
        as_weights(c, &a.hidden, &weights[0], &hidden_gain, a.hidden_size);
        as_weights(c, &a.layer, &weights[1], &layer_gain, (int64_t)gain_count);
    }
    if (!a.layer.present) a.num_layers = 1;
    int64_t last = (a.num_layers - 1) * a.out_layer_stride + (rows - 1) * a.out_row_stride;
    struct area truth = area_new(c, (size_t)(last + a.hidden_size) * 2, c->on_gpu ? 16 : 1);
    struct area got = area_copy(&truth), x_before = area_copy(&x);
    check_tell(
        c, "D=%lld L=%lld T=%lld x+%lld out+%lld", (long long)a.hidden_size,
        (long long)a.num_layers, (long long)rows, (long long)((uintptr_t)x.data % 64),
        (long long)((uintptr_t)got.data % 64));
    tell_norm(c, "hidden", &a.hidden);
    tell_norm(c, "layer", &a.layer);

    a.x = x.data;
    a.stream = check_chance(c, 50);
    a.out = truth.data;
    ctxkv__norms_ref(&a, 0, rows);
    a.out = got.data;
    if (c->device)
        run_plan(c, &a, numerics, rows, weights, &x, &got);
    else
        run_kernels(c, &a, rows);
    area_same(c, &truth, &got, "out");
    area_same(c, &x_before, &x, "x");
    struct area *all[] = {&hidden_gain, &layer_gain, &weights[0].area, &weights[1].area,
                          &x,           &x_before,   &truth,           &got};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) area_free(all[i]);
}

// ---- timings ---------------------------------------------------------------------------------
#define BENCH_D 8192
#define BENCH_L 5

struct operands {
    struct ctxkv__norms_args args;
    int64_t rows;
};

static void run(void *p, const struct ctxkv__kernels *kernels) {
    const struct operands *o = p;
    kernels->norms(&o->args, 0, o->rows);
}

static size_t timings(struct timing *list, size_t max) {
    static struct operands all[2];
    static const int64_t rows[2] = {8, 256};
    for (size_t i = 0; i < 2 && i < max; i++) {
        struct operands *o = &all[i];
        if (!o->rows) {
            o->rows = rows[i];
            uint16_t *x = bench_memory((size_t)(o->rows * BENCH_D) * 2);
            float *gain = bench_memory((size_t)(BENCH_D * BENCH_L) * 4);
            for (int64_t k = 0; k < o->rows * BENCH_D; k++)
                x[k] = (uint16_t)(0x3F00 + check_mix(1, (uint64_t)k) % 0xFF);
            for (int64_t k = 0; k < BENCH_D * BENCH_L; k++) gain[k] = 1.0f;
            struct ctxkv__norm norm = {true, CTXKV__ORDER_PAIR, false, false, gain, 1e-5f};
            o->args = (struct ctxkv__norms_args){
                BENCH_D,
                BENCH_L,
                norm,
                norm,
                x,
                BENCH_D,
                bench_memory((size_t)(o->rows * BENCH_D) * 2 * BENCH_L),
                o->rows * BENCH_D,
                BENCH_D};
        }
        o->args.stream = o->rows * BENCH_L >= 32; // as the chain asks for it
        list[i].bytes = (double)(o->rows * BENCH_D) * 2 * (1 + BENCH_L) + BENCH_D * BENCH_L * 4;
        list[i].macs = 0;
        list[i].run = run;
        list[i].operands = o;
        snprintf(list[i].name, sizeof list[i].name, "norms L=5 T=%lld", (long long)o->rows);
    }
    return max < 2 ? max : 2;
}

const struct op check_norms = {"norms", one_case, timings, 0};
