// SPDX-License-Identifier: Apache-2.0
// The store's cases through a plan.
#include "plans.h"
#include "store_case.h"

#include <string.h>

#include "../../src/ops/norms.h"
#include "../../src/ops/numerics.h"

void store_as_a_plan(struct check *c, struct made *m) {
    struct ctxkv__store_args *a = &m->args;
    if (a->head_dim == 32 || a->head_dim == 96) a->head_dim = 64;
    m->aligned = check_chance(c, 60); // the GPU's fast kernels want it
    m->shared_table = check_chance(c, 60);
    if (!c->on_gpu) return;
    a->table_type = CTXKV__TABLE_BF16;
    a->cache_kind = CTXKV__CACHE_BF16;
    a->v_norm = a->v_from_k = false;
    a->v_scale = 0.0f;
    m->shared_table = true;
}

void store_as_weight(struct check *c, struct made *m) {
    float *gain = (float *)(void *)m->gain.data;
    int64_t n = m->args.num_layers * m->args.head_dim;
    m->fp32_weight = check_chance(c, 50);
    m->centre = check_chance(c, 70) ? 0.0f : 1.0f;
    m->weight = area_new(c, (size_t)n * (m->fp32_weight ? 4 : 2), 4);
    for (int64_t i = 0; i < n; i++) {
        if (m->fp32_weight)
            memcpy(m->weight.data + 4 * i, gain + i, 4);
        else
            ctxkv__store16(m->weight.data, i, ctxkv__to_bf16(gain[i]));
    }
    ctxkv__gains(m->weight.data, m->fp32_weight, n, m->centre, gain);
}

static const int cache_types[] = {TYPE_BF16, TYPE_FP16, TYPE_U8, TYPE_U8};
static const int table_types[] = {TYPE_BF16, TYPE_FP16, TYPE_FP32};

static const DLTensor *cache_view(
    const struct mirrors *mirrors, const struct made *m, struct box *b, const uint8_t *data,
    int64_t layer) {
    const struct ctxkv__cache *cache = &m->got[layer];
    return boxed(
        mirrors, b, data, cache_types[m->args.cache_kind], 4,
        (int64_t[]){cache->num_blocks, cache->block_size, m->args.num_heads, m->args.head_dim},
        (int64_t[]){cache->k_block_stride, cache->k_page_stride, cache->k_head_stride, 1});
}

static void run_bound(
    struct check *c, struct made *m, struct mirrors *mirrors, ctxkv_store *plan,
    struct ctxkv__fault_record *faults) {
    const struct ctxkv__store_args *a = &m->args;
    struct box b[3 * MAX_LAYERS + 3], *rest = b + 3 * MAX_LAYERS;
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
    const int64_t shape[] = {L, m->rows, a->num_heads, a->head_dim};
    const DLTensor *positions = 0, *v = 0;
    const DLTensor *k = boxed(
        mirrors, &rest[0], on_device(mirrors, &m->k), TYPE_BF16, 4, shape,
        (int64_t[]){a->k_layer_stride, a->k_row_stride, a->k_head_stride, 1});
    if (!a->v_from_k)
        v = boxed(
            mirrors, &rest[1], on_device(mirrors, &m->v), TYPE_BF16, 4, shape,
            (int64_t[]){a->v_layer_stride, a->v_row_stride, a->v_head_stride, 1});
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

struct constants {
    struct box weight, tables[MAX_LAYERS], scales[2 * MAX_LAYERS];
    const DLTensor *table_list[MAX_LAYERS], *k_scales[MAX_LAYERS], *v_scales[MAX_LAYERS];
};

static void put_tables(
    struct made *m, struct mirrors *mirrors, struct constants *k, ctxkv_store_desc *d) {
    const struct ctxkv__store_args *a = &m->args;
    for (int64_t l = 0; l < a->num_layers && (l == 0 || !m->shared_table); l++) {
        const struct ctxkv__table *t = &m->tables[l];
        k->table_list[l] = boxed(
            mirrors, &k->tables[l], on_device(mirrors, &m->table_areas[l]),
            table_types[a->table_type], 2, (int64_t[]){t->max_position, t->rotary_dim}, 0);
    }
    if (m->shared_table) {
        d->cos_sin = k->table_list[0];
        d->rotary_dim = m->tables[0].rotary_dim;
    } else {
        d->layer_cos_sin = k->table_list;
        d->layer_cos_sin_count = a->num_layers;
    }
}

static void put_scales(
    struct made *m, struct mirrors *mirrors, struct constants *k, ctxkv_store_desc *d) {
    const uint8_t *scale = on_device(mirrors, &m->scale);
    for (int64_t l = 0; l < m->args.num_layers; l++) {
        k->k_scales[l] =
            boxed(mirrors, &k->scales[2 * l], scale + 8 * l, TYPE_FP32, 1, (int64_t[]){1}, 0);
        k->v_scales[l] = boxed(
            mirrors, &k->scales[2 * l + 1], scale + 8 * l + 4, TYPE_FP32, 1, (int64_t[]){1}, 0);
    }
    d->k_scales = k->k_scales;
    d->v_scales = k->v_scales;
    d->scale_count = m->args.num_layers;
}

void store_run_plan(struct check *c, struct made *m, struct ctxkv__fault_record *faults) {
    const struct ctxkv__store_args *a = &m->args;
    struct mirrors mirrors = {.check = c};
    struct constants k;
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = a->num_layers;
    d.num_kv_heads = a->num_heads;
    d.head_dim = a->head_dim;
    d.k_norm = (ctxkv_k_norm)a->k_norm;
    d.k_eps = a->k_eps;
    d.k_gain_centre = m->centre;
    d.v_norm = a->v_norm ? CTXKV_V_NORM_RMS : CTXKV_V_NORM_ABSENT;
    d.v_eps = a->v_eps;
    d.v_scale = a->v_scale;
    d.v_from_k = a->v_from_k;
    d.rope = (ctxkv_rope)a->rope;
    d.cache_type = (ctxkv_cache_type)a->cache_kind;
    if (a->k_norm == CTXKV__K_RMS && a->k_gain)
        d.k_norm_weight = boxed(
            &mirrors, &k.weight, on_device(&mirrors, &m->weight),
            m->fp32_weight ? TYPE_FP32 : TYPE_BF16, 2, (int64_t[]){a->num_layers, a->head_dim}, 0);
    if (a->rope != CTXKV__ROPE_NONE) put_tables(m, &mirrors, &k, &d);
    if (a->cache_kind >= CTXKV__CACHE_E4M3) put_scales(m, &mirrors, &k, &d);
    ctxkv_store *plan = 0;
    if (!c->failed && plan_ok(c, ctxkv_store_create(c->device, &d, &plan), "store_create"))
        run_bound(c, m, &mirrors, plan, faults);
    mirrors_return(&mirrors);
    ctxkv_store_destroy(plan);
}
