// SPDX-License-Identifier: Apache-2.0
// Harness of the store: K norms, RoPE kinds, scattered slots, faults; timings of 16 heads of 64.
#include "plans.h"

#include <stdio.h>
#include <string.h>

#include "../../src/ops/numerics.h"

#define MAX_LAYERS 3
#define MAX_ROWS 24
#define MAX_SLOTS 96

struct made {
    struct ctxkv__store_args args;
    struct ctxkv__cache truth[MAX_LAYERS], got[MAX_LAYERS];
    struct area truth_areas[MAX_LAYERS], got_areas[MAX_LAYERS];
    struct ctxkv__slots slots[MAX_LAYERS];
    struct area k, v, gain, cos_sin, positions, slot_areas[MAX_LAYERS];
    struct area weight; // a plan's, from which gain is
    bool fp32_weight;
    int64_t rows;
    bool aligned; // every operand on 16 bytes in every row
};

// An element count a stride or a place has, or the next that is aligned.
static int64_t fit(const struct made *m, int64_t elements) {
    return m->aligned ? (elements + 7) / 8 * 8 : elements;
}

static void random_shape(struct check *c, struct made *m) {
    struct ctxkv__store_args *a = &m->args;
    a->num_layers = 1 + check_below(c, MAX_LAYERS);
    a->num_heads = 1 + check_below(c, 5);
    a->head_dim = check_chance(c, 60) ? 64 : PICK(c, 32, 64, 96, 128, 256, 512);
    a->k_norm = (enum ctxkv__k_norm_kind)check_below(c, 3);
    if (a->head_dim != 64 && a->k_norm == CTXKV__K_PLAIN) a->k_norm = CTXKV__K_RMS;
    a->k_eps = check_chance(c, 40) ? 0.0f : 1e-5f;
    a->rope = (enum ctxkv__rope_kind)check_below(c, 3);
    if (a->head_dim == 64 && check_chance(c, 50)) a->rope = CTXKV__ROPE_GPTJ;
    a->rotary_dim = check_chance(c, 75) ? a->head_dim : 2 + 2 * check_below(c, a->head_dim / 2);
    a->max_position = 1 + check_below(c, 40);
    m->rows = 1 + check_below(c, MAX_ROWS);
    if (!c->device) return;
    // A GPU's plan: heads of these sizes, rotated whole; fast kernels where everything is aligned.
    if (a->head_dim == 32 || a->head_dim == 96) a->head_dim = 64;
    if (c->on_gpu) a->rotary_dim = a->head_dim;
    if (a->rotary_dim > a->head_dim) a->rotary_dim = a->head_dim;
    m->aligned = check_chance(c, 60);
}

// A plan makes its gain from a weight: the truth gets that gain.
static void as_weight(struct check *c, struct made *m, int64_t n) {
    float *gain = (float *)(void *)m->gain.data;
    m->fp32_weight = check_chance(c, 50);
    m->weight = area_new(c, (size_t)n * (m->fp32_weight ? 4 : 2), 4);
    for (int64_t i = 0; i < n; i++) {
        if (m->fp32_weight)
            memcpy(m->weight.data + 4 * i, gain + i, 4);
        else
            ctxkv__store16(m->weight.data, i, ctxkv__to_bf16(gain[i]));
    }
    ctxkv__gains(m->weight.data, m->fp32_weight, n, 0.0f, gain);
}

// K and V in one tensor as the projection leaves them, or each in its own.
static void make_inputs(struct check *c, struct made *m) {
    struct ctxkv__store_args *a = &m->args;
    int64_t n = a->head_dim, L = a->num_layers, H = a->num_heads, T = m->rows;
    a->k_head_stride = fit(m, n + (check_chance(c, 70) ? 0 : check_below(c, 20)));
    a->k_row_stride = fit(m, H * a->k_head_stride + (check_chance(c, 60) ? 0 : check_below(c, 90)));
    a->k_layer_stride =
        fit(m, T * a->k_row_stride + (check_chance(c, 60) ? 0 : check_below(c, 90)));
    a->v_head_stride = fit(m, n + (check_chance(c, 70) ? 0 : check_below(c, 20)));
    a->v_row_stride = fit(m, H * a->v_head_stride + (check_chance(c, 60) ? 0 : check_below(c, 90)));
    a->v_layer_stride =
        fit(m, T * a->v_row_stride + (check_chance(c, 60) ? 0 : check_below(c, 90)));
    m->k = area_new(c, (size_t)(L * a->k_layer_stride) * 2, m->aligned ? 16 : 1);
    m->v = area_new(c, (size_t)(L * a->v_layer_stride) * 2, m->aligned ? 16 : 1);
    for (int64_t i = 0; i < L * T * H; i++) {
        int64_t l = i / (T * H), t = i / H % T, h = i % H;
        hostile_bf16(
            c, m->k.data + 2 * (l * a->k_layer_stride + t * a->k_row_stride + h * a->k_head_stride),
            n);
        hostile_bf16(
            c, m->v.data + 2 * (l * a->v_layer_stride + t * a->v_row_stride + h * a->v_head_stride),
            n);
    }
    a->k = m->k.data;
    a->v = m->v.data;
    m->gain = area_new(c, (size_t)(L * n) * 4, 4);
    for (int64_t l = 0; l < L; l++) hostile_f32(c, (float *)(void *)m->gain.data + l * n, n);
    a->k_gain = (const float *)(const void *)m->gain.data;
    if (c->device) as_weight(c, m, L * n);
    m->cos_sin = area_new(c, (size_t)(a->max_position * a->rotary_dim) * 2, m->aligned ? 16 : 1);
    for (int64_t p = 0; p < a->max_position; p++)
        hostile_bf16(c, m->cos_sin.data + 2 * p * a->rotary_dim, a->rotary_dim);
    a->cos_sin = a->rope == CTXKV__ROPE_NONE ? 0 : m->cos_sin.data;
    m->positions = area_new(c, (size_t)T * 8, 8);
    int64_t *positions = (int64_t *)(void *)m->positions.data;
    for (int64_t t = 0; t < T; t++)
        positions[t] = check_chance(c, 92) ? check_below(c, a->max_position)
                                           : PICK(
                                                 c, -1, a->max_position, INT64_MAX, INT64_MIN,
                                                 INT64_C(1) << 32, (INT64_C(1) << 32) + 1);
    a->positions = a->rope == CTXKV__ROPE_NONE ? 0 : positions;
}

// Slots that no two rows of a layer share; some negative, some past the cache.
static void make_slots(struct check *c, struct made *m, int64_t l, int64_t total) {
    int64_t order[MAX_SLOTS], rows = check_chance(c, 80) ? m->rows : check_below(c, m->rows + 1);
    for (int64_t i = 0; i < total; i++) order[i] = i;
    for (int64_t i = total - 1; i > 0; i--) {
        int64_t j = check_below(c, i + 1), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    m->slot_areas[l] = area_new(c, (size_t)m->rows * 8, 8);
    int64_t *slots = (int64_t *)(void *)m->slot_areas[l].data;
    for (int64_t t = 0; t < m->rows; t++) {
        slots[t] = t < total ? order[t] : -1;
        if (check_chance(c, 15))
            slots[t] = PICK(
                c, -1, -1, -7, INT64_MIN, total, total + 5, INT64_MAX, INT64_C(1) << 32,
                (INT64_C(1) << 32) + 1);
    }
    m->slots[l] = (struct ctxkv__slots){check_chance(c, 90) ? slots : 0, rows};
    if (!m->slots[l].slots) m->slots[l].rows = 0;
}

// Storage [blocks, heads, page, 2*head_dim] (stock), or K and V as [blocks, page, heads, head_dim].
static void make_cache(struct check *c, struct made *m, int64_t l) {
    int64_t n = m->args.head_dim, H = m->args.num_heads, page = PICK(c, 1, 3, 4, 16);
    int64_t blocks = 1 + check_below(c, MAX_SLOTS / page), gap = fit(m, check_below(c, 30));
    struct ctxkv__cache cache = {.num_blocks = blocks, .block_size = page};
    int64_t v_first;
    if (check_chance(c, 60)) {
        cache.k_page_stride = 2 * n;
        cache.k_head_stride = 2 * n * page;
        cache.k_block_stride = 2 * n * page * H + gap;
        v_first = n;
    } else {
        cache.k_head_stride = n;
        cache.k_page_stride = n * H;
        cache.k_block_stride = n * H * page + gap;
        v_first = blocks * cache.k_block_stride;
    }
    cache.v_page_stride = cache.k_page_stride;
    cache.v_head_stride = cache.k_head_stride;
    cache.v_block_stride = cache.k_block_stride;
    m->truth_areas[l] =
        area_new(c, (size_t)(2 * blocks * (n * H * page + gap)) * 2, check_chance(c, 50) ? 1 : 64);
    m->got_areas[l] = area_copy(&m->truth_areas[l]);
    m->truth[l] = m->got[l] = cache;
    m->truth[l].k = m->truth_areas[l].data;
    m->truth[l].v = m->truth_areas[l].data + 2 * v_first;
    m->got[l].k = m->got_areas[l].data;
    m->got[l].v = m->got_areas[l].data + 2 * v_first;
    make_slots(c, m, l, blocks * page);
}

static const DLTensor *cache_view(
    const struct mirrors *mirrors, const struct made *m, struct box *b, const uint8_t *data,
    int64_t layer) {
    const struct ctxkv__cache *cache = &m->got[layer];
    return boxed(
        mirrors, b, data, TYPE_BF16, 4,
        (int64_t[]){cache->num_blocks, cache->block_size, m->args.num_heads, m->args.head_dim},
        (int64_t[]){cache->k_block_stride, cache->k_page_stride, cache->k_head_stride, 1});
}

static void run_bound(
    struct check *c, struct made *m, struct mirrors *mirrors, ctxkv_store *plan,
    struct ctxkv__fault_record *faults) {
    const struct ctxkv__store_args *a = &m->args;
    struct box b[3 * MAX_LAYERS + 3];
    const DLTensor *keys[MAX_LAYERS], *values[MAX_LAYERS], *slots[MAX_LAYERS] = {0};
    int64_t L = a->num_layers;
    for (int64_t l = 0; l < L; l++) {
        const uint8_t *data = on_device(mirrors, &m->got_areas[l]);
        int64_t v = (const uint8_t *)m->got[l].v - (const uint8_t *)m->got[l].k;
        keys[l] = cache_view(mirrors, m, &b[3 * l], data, l);
        values[l] = cache_view(mirrors, m, &b[3 * l + 1], data + v, l);
        if (m->slots[l].slots)
            slots[l] = boxed(
                mirrors, &b[3 * l + 2], on_device(mirrors, &m->slot_areas[l]), TYPE_I64, 1,
                (int64_t[]){m->slots[l].rows}, 0);
    }
    struct box *rest = b + 3 * MAX_LAYERS;
    const int64_t shape[] = {L, m->rows, a->num_heads, a->head_dim};
    const DLTensor *k = boxed(
        mirrors, &rest[0], on_device(mirrors, &m->k), TYPE_BF16, 4, shape,
        (int64_t[]){a->k_layer_stride, a->k_row_stride, a->k_head_stride, 1});
    const DLTensor *v = boxed(
        mirrors, &rest[1], on_device(mirrors, &m->v), TYPE_BF16, 4, shape,
        (int64_t[]){a->v_layer_stride, a->v_row_stride, a->v_head_stride, 1});
    const DLTensor *positions = 0;
    if (a->rope != CTXKV__ROPE_NONE)
        positions = boxed(
            mirrors, &rest[2], on_device(mirrors, &m->positions), TYPE_I64, 1, (int64_t[]){m->rows},
            0);
    ctxkv_faults found = {0};
    if (c->failed || !plan_ok(c, ctxkv_store_bind_caches(plan, keys, values, L), "bind_caches") ||
        !plan_ok(c, ctxkv_store_run(plan, k, v, positions, slots, L, 0), "store_run") ||
        !plan_ok(c, ctxkv_store_faults(plan, &found), "store_faults"))
        return;
    *faults = (struct ctxkv__fault_record){found.count, (enum ctxkv__fault)found.kind,
                                           found.layer, found.row,
                                           found.value, found.limit};
}

static void run_plan(struct check *c, struct made *m, struct ctxkv__fault_record *faults) {
    const struct ctxkv__store_args *a = &m->args;
    struct mirrors mirrors = {.check = c};
    struct box b[2];
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = a->num_layers;
    d.num_kv_heads = a->num_heads;
    d.head_dim = a->head_dim;
    d.k_norm = (ctxkv_k_norm)a->k_norm;
    d.k_eps = a->k_eps;
    d.rope = (ctxkv_rope)a->rope;
    d.rotary_dim = a->rotary_dim;
    if (a->k_norm == CTXKV__K_RMS)
        d.k_norm_weight = boxed(
            &mirrors, &b[0], on_device(&mirrors, &m->weight),
            m->fp32_weight ? TYPE_FP32 : TYPE_BF16, 2, (int64_t[]){a->num_layers, a->head_dim}, 0);
    if (a->rope != CTXKV__ROPE_NONE)
        d.cos_sin = boxed(
            &mirrors, &b[1], on_device(&mirrors, &m->cos_sin), TYPE_BF16, 2,
            (int64_t[]){a->max_position, a->rotary_dim}, 0);
    ctxkv_store *plan = 0;
    if (!c->failed && plan_ok(c, ctxkv_store_create(c->device, &d, &plan), "store_create"))
        run_bound(c, m, &mirrors, plan, faults);
    mirrors_return(&mirrors);
    ctxkv_store_destroy(plan);
}

static void run_tier(
    struct check *c, const struct made *m, int64_t layer, struct ctxkv__fault_record *faults) {
    struct parts parts = check_parts(c, m->slots[layer].rows);
    for (int i = 0; i < parts.count; i++) {
        struct ctxkv__fault_record some = {0};
        c->kernels.store(&m->args, layer, parts.begin[i], parts.end[i], &some);
        ctxkv__fault_merge(faults, &some);
    }
}

static void same_faults(
    struct check *c, const struct ctxkv__fault_record *truth,
    const struct ctxkv__fault_record *got) {
    if (truth->count != got->count || truth->kind != got->kind || truth->layer != got->layer ||
        truth->row != got->row || truth->value != got->value || truth->limit != got->limit)
        check_fail(
            c,
            "faults: %llu, the first at layer %lld row %lld value %lld; must be %llu, %lld %lld "
            "%lld",
            (unsigned long long)got->count, (long long)got->layer, (long long)got->row,
            (long long)got->value, (unsigned long long)truth->count, (long long)truth->layer,
            (long long)truth->row, (long long)truth->value);
}

static void one_case(struct check *c) {
    static const char *const norms[] = {"plain", "rms", "absent"};
    static const char *const ropes[] = {"none", "gptj", "neox"};
    struct made m = {0};
    struct ctxkv__store_args *a = &m.args;
    struct ctxkv__fault_record truth = {0}, got = {0};
    random_shape(c, &m);
    make_inputs(c, &m);
    for (int64_t l = 0; l < a->num_layers; l++) make_cache(c, &m, l);
    a->slots = m.slots;
    a->stream = check_chance(c, 50);
    check_tell(
        c,
        "head_dim=%lld H=%lld L=%lld T=%lld norm=%s rope=%s rotary=%lld eps=%g k+%lld v+%lld "
        "cache+%lld",
        (long long)a->head_dim, (long long)a->num_heads, (long long)a->num_layers,
        (long long)m.rows, norms[a->k_norm], ropes[a->rope], (long long)a->rotary_dim,
        (double)a->k_eps, (long long)((uintptr_t)a->k % 64), (long long)((uintptr_t)a->v % 64),
        (long long)((uintptr_t)m.got[0].k % 64));
    struct area k_before = area_copy(&m.k), v_before = area_copy(&m.v);
    a->caches = m.truth;
    for (int64_t l = 0; l < a->num_layers; l++) ctxkv__store_ref(a, l, 0, m.slots[l].rows, &truth);
    a->caches = m.got;
    unsigned mode = check_float_mode();
    if (c->device) run_plan(c, &m, &got);
    for (int64_t l = 0; l < a->num_layers && !c->device; l++) run_tier(c, &m, l, &got);
    if (check_float_mode() != mode) check_fail(c, "the floating-point mode was not restored");
    for (int64_t l = 0; l < a->num_layers; l++) {
        area_same(c, &m.truth_areas[l], &m.got_areas[l], "cache");
        area_free(&m.truth_areas[l]);
        area_free(&m.got_areas[l]);
        area_free(&m.slot_areas[l]);
    }
    same_faults(c, &truth, &got);
    area_same(c, &k_before, &m.k, "k");
    area_same(c, &v_before, &m.v, "v");
    struct area *rest[] = {&m.k,    &m.v,       &k_before,    &v_before,
                           &m.gain, &m.cos_sin, &m.positions, &m.weight};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) area_free(rest[i]);
}

// ---- timings ---------------------------------------------------------------------------------
#define BENCH_L 5
#define BENCH_H 16
#define BENCH_POSITIONS 32768

struct operands {
    struct ctxkv__store_args args;
    struct ctxkv__cache caches[BENCH_L];
    struct ctxkv__slots slots[BENCH_L];
    int64_t rows;
};

static void run(void *p, const struct ctxkv__kernels *kernels) {
    struct operands *o = p;
    struct ctxkv__fault_record faults = {0};
    for (int64_t l = 0; l < BENCH_L; l++) kernels->store(&o->args, l, 0, o->rows, &faults);
}

// As the chain calls it: kv [L, T, 2, H, 64], stock storage of pages of 16, scattered blocks.
static void make_operands(struct operands *o, int64_t rows) {
    int64_t row = 2 * BENCH_H * 64, page = 16, blocks = rows / page + 4;
    uint16_t *kv = bench_memory((size_t)(BENCH_L * rows * row) * 2);
    uint16_t *table = bench_memory((size_t)BENCH_POSITIONS * 64 * 2);
    int64_t *slots = bench_memory((size_t)rows * 8), *positions = bench_memory((size_t)rows * 8);
    for (int64_t i = 0; i < BENCH_L * rows * row; i++)
        kv[i] = (uint16_t)(0x3F00 + check_mix(4, (uint64_t)i) % 0xFF);
    for (int64_t i = 0; i < BENCH_POSITIONS * 64; i++)
        table[i] = (uint16_t)(0x3E80 + check_mix(5, (uint64_t)i) % 0x80);
    for (int64_t t = 0; t < rows; t++) {
        slots[t] = (t / page * 7 % blocks) * page + t % page;
        positions[t] = 100 + t;
    }
    o->rows = rows;
    o->args = (struct ctxkv__store_args){
        .num_layers = BENCH_L,
        .num_heads = BENCH_H,
        .head_dim = 64,
        .k_norm = CTXKV__K_PLAIN,
        .k_eps = 1e-5f,
        .rope = CTXKV__ROPE_GPTJ,
        .rotary_dim = 64,
        .cos_sin = table,
        .max_position = BENCH_POSITIONS,
        .positions = positions,
        .k = kv,
        .v = kv + BENCH_H * 64,
        .k_layer_stride = rows * row,
        .k_row_stride = row,
        .k_head_stride = 64,
        .v_layer_stride = rows * row,
        .v_row_stride = row,
        .v_head_stride = 64,
        .caches = o->caches,
        .slots = o->slots,
        .stream = rows >= 64};
    for (int l = 0; l < BENCH_L; l++) {
        int64_t block = 2 * 64 * page * BENCH_H;
        uint16_t *storage = bench_memory((size_t)(blocks * block) * 2);
        o->caches[l] = (struct ctxkv__cache){storage, storage + 64, block,      128,    128 * page,
                                             block,   128,          128 * page, blocks, page};
        o->slots[l] = (struct ctxkv__slots){slots, rows};
    }
}

static size_t timings(struct timing *list, size_t max) {
    static struct operands all[2];
    static const int64_t rows[2] = {8, 1024};
    for (size_t i = 0; i < 2 && i < max; i++) {
        if (!all[i].rows) make_operands(&all[i], rows[i]);
        list[i].bytes = (double)(BENCH_L * rows[i] * 2 * BENCH_H * 64) * 2 * 2;
        list[i].macs = 0;
        list[i].run = run;
        list[i].operands = &all[i];
        snprintf(list[i].name, sizeof list[i].name, "store L=5 H=16 T=%lld", (long long)rows[i]);
    }
    return max < 2 ? max : 2;
}

const struct op check_store = {"store", one_case, timings, 0};
