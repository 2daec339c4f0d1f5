// SPDX-License-Identifier: Apache-2.0
// Harness of the store: K norms, RoPE kinds, scattered slots, faults; timings of 16 heads of 64.
#include "store_case.h"

#include <stdio.h>
#include <string.h>

#define MAX_ROWS 24
#define MAX_SLOTS 96

// An element count a stride has, or the next that keeps rows on 16 bytes.
static int64_t fit(const struct made *m, int64_t elements) {
    return m->aligned ? (elements + 15) / 16 * 16 : elements;
}

static int64_t item_size(const struct made *m) {
    return m->args.cache_kind == CTXKV__CACHE_BF16 || m->args.cache_kind == CTXKV__CACHE_FP16 ? 2
                                                                                              : 1;
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
    a->table_type = (enum ctxkv__float_type)(check_chance(c, 60) ? 0 : check_below(c, 3));
    a->cache_kind = (enum ctxkv__cache_kind)(check_chance(c, 50) ? 0 : check_below(c, 4));
    a->v_norm = check_chance(c, 25);
    a->v_eps = check_chance(c, 30) ? 0.0f : 1e-6f;
    a->v_from_k = check_chance(c, 20);
    a->v_scale = check_chance(c, 70)   ? 0.0f
                 : check_chance(c, 80) ? 0.612f
                                       : ctxkv__float((uint32_t)check_random(c) & 0xFF7FFFFFu);
    m->rows = 1 + check_below(c, MAX_ROWS);
    m->shared_table = check_chance(c, 60);
    if (c->device) store_as_a_plan(c, m);
}

// One table for all layers or one for each, all of one type.
static void make_tables(struct check *c, struct made *m) {
    struct ctxkv__store_args *a = &m->args;
    int64_t n = a->head_dim, size = a->table_type == CTXKV__TABLE_FP32 ? 4 : 2;
    bool shared = m->shared_table;
    a->tables = m->tables;
    m->positions_below = 1 + check_below(c, 40);
    for (int64_t l = 0; a->rope != CTXKV__ROPE_NONE && l < a->num_layers; l++) {
        struct ctxkv__table *table = &m->tables[l];
        if (shared && l > 0) {
            *table = m->tables[0];
            continue;
        }
        table->rotary_dim = check_chance(c, 75) || c->on_gpu ? n : 2 + 2 * check_below(c, n / 2);
        table->max_position = shared || check_chance(c, 50)
                                  ? m->positions_below
                                  : 1 + check_below(c, m->positions_below);
        int64_t count = table->max_position * table->rotary_dim;
        m->table_areas[l] = area_new(
            c, (size_t)(count * size),
            m->aligned                           ? 16
            : a->table_type == CTXKV__TABLE_FP32 ? 4
                                                 : 1);
        for (int64_t p = 0; p < table->max_position; p++) {
            uint8_t *row = m->table_areas[l].data + size * p * table->rotary_dim;
            if (size == 4)
                hostile_f32(c, (float *)(void *)row, table->rotary_dim);
            else if (a->table_type == CTXKV__TABLE_BF16)
                hostile_bf16(c, row, table->rotary_dim);
            else
                for (int64_t i = 0; i < table->rotary_dim; i++)
                    ctxkv__store16(row, i, (uint16_t)check_random(c));
        }
        table->data = m->table_areas[l].data;
    }
}

static void make_scales(struct check *c, struct made *m) {
    m->scale = area_new(c, (size_t)(2 * m->args.num_layers) * 4, c->on_gpu ? 4 : 1);
    for (int64_t i = 0; i < 2 * m->args.num_layers; i++) {
        float usual = (float)(1 + check_below(c, 4000)) / 1024.0f, odd;
        hostile_f32(c, &odd, 1);
        memcpy(m->scale.data + 4 * i, check_chance(c, 80) ? &usual : &odd, 4);
    }
    for (int64_t l = 0; l < m->args.num_layers; l++) {
        // A plan has all scales or none.
        m->scales[l].k = c->device || check_chance(c, 80) ? m->scale.data + 8 * l : 0;
        m->scales[l].v = c->device || check_chance(c, 80) ? m->scale.data + 8 * l + 4 : 0;
    }
    m->args.scales = m->scales;
}

// K and V in one tensor as the projection leaves them, or each in its own.
static void make_inputs(struct check *c, struct made *m) {
    struct ctxkv__store_args *a = &m->args;
    int64_t n = a->head_dim, L = a->num_layers, H = a->num_heads, T = m->rows;
    a->k_head_stride = n + fit(m, check_chance(c, 70) ? 0 : check_below(c, 20));
    a->k_row_stride = H * a->k_head_stride + fit(m, check_chance(c, 60) ? 0 : check_below(c, 90));
    a->k_layer_stride = T * a->k_row_stride + fit(m, check_chance(c, 60) ? 0 : check_below(c, 90));
    a->v_head_stride = n + fit(m, check_chance(c, 70) ? 0 : check_below(c, 20));
    a->v_row_stride = H * a->v_head_stride + fit(m, check_chance(c, 60) ? 0 : check_below(c, 90));
    a->v_layer_stride = T * a->v_row_stride + fit(m, check_chance(c, 60) ? 0 : check_below(c, 90));
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
    a->k_gain = check_chance(c, 85) ? (const float *)(const void *)m->gain.data : 0;
    if (c->device) store_as_weight(c, m);
    make_tables(c, m);
    make_scales(c, m);
    m->positions = area_new(c, (size_t)T * 8, 8);
    int64_t *positions = (int64_t *)(void *)m->positions.data;
    for (int64_t t = 0; t < T; t++)
        positions[t] = check_chance(c, 92) ? check_below(c, m->positions_below)
                                           : PICK(
                                                 c, -1, m->positions_below, INT64_MAX, INT64_MIN,
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
    int64_t item = item_size(m);
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
    m->truth_areas[l] = area_new(
        c, (size_t)(2 * blocks * (n * H * page + gap) * item),
        m->aligned || check_chance(c, 50) ? 64 : 1);
    m->got_areas[l] = area_copy(&m->truth_areas[l]);
    m->truth[l] = m->got[l] = cache;
    m->truth[l].k = m->truth_areas[l].data;
    m->truth[l].v = m->truth_areas[l].data + item * v_first;
    m->got[l].k = m->got_areas[l].data;
    m->got[l].v = m->got_areas[l].data + item * v_first;
    make_slots(c, m, l, blocks * page);
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
    static const char *const tables[] = {"bf16", "fp16", "fp32"};
    static const char *const caches[] = {"bf16", "fp16", "e4m3", "e5m2"};
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
        "head_dim=%lld H=%lld L=%lld T=%lld norm=%s%s rope=%s %s rotary=%lld eps=%g v=%s%s*%g "
        "cache=%s k+%lld v+%lld cache+%lld",
        (long long)a->head_dim, (long long)a->num_heads, (long long)a->num_layers,
        (long long)m.rows, norms[a->k_norm], a->k_gain ? "" : " weightless", ropes[a->rope],
        tables[a->table_type], (long long)m.tables[0].rotary_dim, (double)a->k_eps,
        a->v_from_k ? "k" : "v", a->v_norm ? " normed" : "", (double)a->v_scale,
        caches[a->cache_kind], (long long)((uintptr_t)a->k % 64), (long long)((uintptr_t)a->v % 64),
        (long long)((uintptr_t)m.got[0].k % 64));
    struct area k_before = area_copy(&m.k), v_before = area_copy(&m.v);
    a->caches = m.truth;
    for (int64_t l = 0; l < a->num_layers; l++) ctxkv__store_ref(a, l, 0, m.slots[l].rows, &truth);
    a->caches = m.got;
    unsigned mode = check_float_mode();
    if (c->device) store_run_plan(c, &m, &got);
    for (int64_t l = 0; l < a->num_layers && !c->device; l++) run_tier(c, &m, l, &got);
    if (check_float_mode() != mode) check_fail(c, "the floating-point mode was not restored");
    for (int64_t l = 0; l < a->num_layers; l++) {
        area_same(c, &m.truth_areas[l], &m.got_areas[l], "cache");
        area_free(&m.truth_areas[l]);
        area_free(&m.got_areas[l]);
        area_free(&m.slot_areas[l]);
        if (m.table_areas[l].map) area_free(&m.table_areas[l]);
    }
    same_faults(c, &truth, &got);
    area_same(c, &k_before, &m.k, "k");
    area_same(c, &v_before, &m.v, "v");
    struct area *rest[] = {&m.k,    &m.v,     &k_before,    &v_before,
                           &m.gain, &m.scale, &m.positions, &m.weight};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) area_free(rest[i]);
}

// ---- timings ---------------------------------------------------------------------------------
#define BENCH_L 5
#define BENCH_POSITIONS 32768

static const struct kind {
    const char *name;
    int64_t heads, head_dim;
    enum ctxkv__k_norm_kind norm;
    enum ctxkv__rope_kind rope;
    enum ctxkv__cache_kind cache;
} kinds[] = {
    {"muse", 16, 64, CTXKV__K_PLAIN, CTXKV__ROPE_GPTJ, CTXKV__CACHE_BF16},
    {"qwen3", 8, 128, CTXKV__K_RMS, CTXKV__ROPE_NEOX, CTXKV__CACHE_BF16},
    {"qwen3 fp8", 8, 128, CTXKV__K_RMS, CTXKV__ROPE_NEOX, CTXKV__CACHE_E4M3},
    {"gemma", 8, 256, CTXKV__K_RMS, CTXKV__ROPE_NEOX, CTXKV__CACHE_BF16},
};
#define KINDS (sizeof kinds / sizeof *kinds)

struct operands {
    struct ctxkv__store_args args;
    struct ctxkv__cache caches[BENCH_L];
    struct ctxkv__slots slots[BENCH_L];
    struct ctxkv__table tables[BENCH_L];
    struct ctxkv__scales scales[BENCH_L];
    float gain[BENCH_L * CTXKV__MAX_HEAD_DIM];
    int64_t rows;
};

static void run(void *p, const struct ctxkv__kernels *kernels) {
    struct operands *o = p;
    struct ctxkv__fault_record faults = {0};
    for (int64_t l = 0; l < BENCH_L; l++) kernels->store(&o->args, l, 0, o->rows, &faults);
}

static uint16_t *noise(size_t count, uint16_t from, uint16_t below, uint64_t seed) {
    uint16_t *to = bench_memory(count * 2);
    for (size_t i = 0; i < count; i++) to[i] = (uint16_t)(from + check_mix(seed, i) % below);
    return to;
}

// As the chain calls it: kv [L, T, 2, H, head_dim], stock storage of pages of 16, scattered blocks.
static void make_operands(struct operands *o, const struct kind *kind, int64_t rows) {
    int64_t n = kind->head_dim, half = kind->heads * n, page = 16, blocks = rows / page + 4;
    uint16_t *kv = noise((size_t)(BENCH_L * rows * 2 * half), 0x3F00, 0xFF, 4);
    uint16_t *table = noise((size_t)(BENCH_POSITIONS * n), 0x3E80, 0x80, 5);
    int64_t *slots = bench_memory((size_t)rows * 8), *positions = bench_memory((size_t)rows * 8);
    for (int64_t t = 0; t < rows; t++) {
        slots[t] = (t / page * 7 % blocks) * page + t % page;
        positions[t] = 100 + t;
    }
    for (int64_t i = 0; i < BENCH_L * n; i++) o->gain[i] = 1.0f + (float)(i % 7) / 8;
    o->rows = rows;
    o->args = (struct ctxkv__store_args){
        .num_layers = BENCH_L,
        .num_heads = kind->heads,
        .head_dim = n,
        .k_norm = kind->norm,
        .k_eps = 1e-5f,
        .k_gain = o->gain,
        .rope = kind->rope,
        .tables = o->tables,
        .scales = o->scales,
        .positions = positions,
        .k = kv,
        .v = kv + half,
        .k_layer_stride = rows * 2 * half,
        .k_row_stride = 2 * half,
        .k_head_stride = n,
        .v_layer_stride = rows * 2 * half,
        .v_row_stride = 2 * half,
        .v_head_stride = n,
        .cache_kind = kind->cache,
        .caches = o->caches,
        .slots = o->slots,
        .stream = rows >= 64};
    int64_t item = kind->cache == CTXKV__CACHE_BF16 ? 2 : 1, block = 2 * half * page;
    for (int l = 0; l < BENCH_L; l++) {
        char *storage = bench_memory((size_t)(blocks * block * item));
        o->caches[l] =
            (struct ctxkv__cache){storage, storage + item * n, block,  2 * n, 2 * n * page, block,
                                  2 * n,   2 * n * page,       blocks, page};
        o->slots[l] = (struct ctxkv__slots){slots, rows};
        o->tables[l] = (struct ctxkv__table){table, BENCH_POSITIONS, n};
    }
}

static size_t timings(struct timing *list, size_t max) {
    static struct operands all[2 * KINDS];
    static const int64_t rows[2] = {8, 1024};
    size_t count = max < 2 * KINDS ? max : 2 * KINDS;
    for (size_t i = 0; i < count; i++) {
        const struct kind *kind = &kinds[i / 2];
        int64_t values = BENCH_L * rows[i % 2] * 2 * kind->heads * kind->head_dim;
        if (!all[i].rows) make_operands(&all[i], kind, rows[i % 2]);
        list[i].bytes = (double)(values * (kind->cache == CTXKV__CACHE_BF16 ? 4 : 3));
        list[i].macs = 0;
        list[i].run = run;
        list[i].operands = &all[i];
        snprintf(
            list[i].name, sizeof list[i].name, "store %s L=5 H=%lld hd=%lld T=%lld", kind->name,
            (long long)kind->heads, (long long)kind->head_dim, (long long)rows[i % 2]);
    }
    return count;
}

const struct op check_store = {"store", one_case, timings, 0};
