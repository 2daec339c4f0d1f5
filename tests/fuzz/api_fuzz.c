// SPDX-License-Identifier: Apache-2.0
// Bytes as calls of the public API: tensors of any layout, slots and positions of any value. The
// oracle is the scalar truth on plain copies, one thread; wrong operands must be refused.
#include "api_cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// ---- norms -------------------------------------------------------------------------------------
struct norms_case {
    ctxkv_norms_desc desc;
    int64_t rows, out_layers;
    uint16_t *x, *hidden, *layer;
};

static void norms_run(
    struct input *in, struct norms_case *c, struct place *place, bool is_plain, uint16_t *result) {
    int64_t d = c->desc.hidden_size, l = c->desc.num_layers;
    struct array hidden = {0}, layer = {0}, x, out;
    ctxkv_norms_desc desc = c->desc;
    if (c->hidden) array_new(in, &hidden, BF16, 1, &d, c->hidden, is_plain);
    if (c->layer) array_new(in, &layer, BF16, 2, DIMS(l, d), c->layer, is_plain);
    const DLTensor *stacked = &layer.tensor.t;
    desc.hidden_weight = c->hidden ? &hidden.tensor.t : 0;
    desc.layer_weights = &stacked;
    desc.layer_weight_count = c->layer ? 1 : 0;
    ctxkv_norms *norms;
    CHECK(ctxkv_norms_create(place->device, &desc, &norms));
    array_free(&hidden);
    array_free(&layer); // copied by create
    array_new(in, &x, BF16, 2, DIMS(c->rows, d), c->x, is_plain);
    array_new(in, &out, BF16, 3, DIMS(c->out_layers, c->rows, d), 0, is_plain);
    if (!is_plain && choose(in, 4) == 0) {
        struct tensor wrong = out.tensor;
        wrong.t.shape = wrong.shape;
        wrong.t.strides = out.tensor.t.strides ? wrong.strides : 0;
        spoil(in, &wrong);
        if (ctxkv_norms_run(norms, &x.tensor.t, &wrong.t, 0) != CTXKV_INVALID_ARGUMENT)
            die("a wrong out was taken");
        array_check_gaps(&out);
    }
    CHECK(ctxkv_norms_run(norms, &x.tensor.t, &out.tensor.t, 0));
    array_values(&out, result);
    array_check_gaps(&out);
    ctxkv_norms_destroy(norms);
    array_free(&x);
    array_free(&out);
}

static void fuzz_norms(struct input *in) {
    bool row = choose(in, 4) == 0;
    int64_t d = row ? 8192 : 8 * (1 + choose(in, 40)), layers = 1 + choose(in, 3);
    struct norms_case c = {.desc = norms_desc(in, d, layers, row)};
    c.rows = choose(in, row ? 3 : 12);
    c.out_layers = c.desc.layer.kind == CTXKV_NORM_ABSENT ? 1 : layers;
    c.x = noise_new(in, c.rows * d);
    if (c.desc.hidden.kind != CTXKV_NORM_ABSENT && choose(in, 2)) c.hidden = noise_new(in, d);
    if (c.out_layers == layers && c.desc.layer.kind != CTXKV_NORM_ABSENT && choose(in, 2))
        c.layer = noise_new(in, layers * d);
    size_t bytes = (size_t)(c.out_layers * c.rows * d) * 2;
    uint16_t *got = malloc(bytes + 1), *want = malloc(bytes + 1);
    norms_run(in, &c, &fast, false, got);
    norms_run(in, &c, &plain, true, want);
    same(got, want, bytes, "norms");
    free(got), free(want), free(c.x), free(c.hidden), free(c.layer);
}

// ---- projection --------------------------------------------------------------------------------
struct projection_case {
    ctxkv_projection_desc desc;
    int64_t rows;
    bool shared;
    uint16_t *x, *w, *bias;
};

static void projection_run(
    struct input *in, struct projection_case *c, struct place *place, bool is_plain,
    uint16_t *result) {
    int64_t d = c->desc.hidden_size, l = c->desc.num_layers;
    int64_t columns = (c->desc.k_only ? 1 : 2) * c->desc.num_kv_heads * c->desc.head_dim;
    struct array w, bias = {0}, x, kv;
    ctxkv_projection_desc desc = c->desc;
    array_new(in, &w, BF16, 3, DIMS(l, columns, d), c->w, is_plain);
    if (c->bias) array_new(in, &bias, BF16, 2, DIMS(l, columns), c->bias, is_plain);
    const DLTensor *weights = &w.tensor.t;
    desc.weights = &weights;
    desc.weight_count = 1;
    desc.bias = c->bias ? &bias.tensor.t : 0;
    ctxkv_projection *projection;
    CHECK(ctxkv_projection_create(place->device, &desc, &projection));
    array_free(&bias);
    array_new(in, &x, BF16, 3, DIMS(c->shared ? 1 : l, c->rows, d), c->x, is_plain);
    array_new(in, &kv, BF16, 3, DIMS(l, c->rows, columns), 0, is_plain);
    CHECK(ctxkv_projection_run(projection, &x.tensor.t, &kv.tensor.t, 0));
    array_values(&kv, result);
    array_check_gaps(&kv);
    ctxkv_projection_destroy(projection);
    array_free(&w);
    array_free(&x);
    array_free(&kv);
}

static void fuzz_projection(struct input *in) {
    struct projection_case c = {.rows = choose(in, 12), .shared = choose(in, 4) == 0};
    ctxkv_projection_desc_init(&c.desc);
    c.desc.hidden_size = 16 * (1 + choose(in, 6));
    c.desc.num_layers = 1 + choose(in, 3);
    c.desc.num_kv_heads = 1 + choose(in, 2);
    c.desc.head_dim = choose(in, 4) ? 64 : 128;
    c.desc.k_only = choose(in, 4) == 0;
    c.desc.bias_add = choose(in, 2) ? CTXKV_BIAS_FUSED : CTXKV_BIAS_AFTER;
    int64_t columns = (c.desc.k_only ? 1 : 2) * c.desc.num_kv_heads * c.desc.head_dim;
    int64_t l = c.desc.num_layers;
    c.x = noise_new(in, (c.shared ? 1 : l) * c.rows * c.desc.hidden_size);
    c.w = noise_new(in, l * columns * c.desc.hidden_size);
    if (choose(in, 2)) c.bias = noise_new(in, l * columns);
    size_t bytes = (size_t)(l * c.rows * columns) * 2;
    uint16_t *got = malloc(bytes + 1), *want = malloc(bytes + 1);
    projection_run(in, &c, &fast, false, got);
    projection_run(in, &c, &plain, true, want);
    same(got, want, bytes, "projections");
    free(got), free(want), free(c.x), free(c.w), free(c.bias);
}

// ---- store -------------------------------------------------------------------------------------
static void store_run(
    struct input *in, struct store_case *c, struct place *place, bool is_plain,
    uint16_t **results) {
    ctxkv_store_desc desc = c->desc;
    int64_t l = desc.num_layers, h = desc.num_kv_heads, n = desc.head_dim;
    struct array table = {0}, gain = {0}, k, v, positions, slots[MAX_L], kc[MAX_L], vc[MAX_L];
    const DLTensor *slot_list[MAX_L], *keys[MAX_L], *values[MAX_L];
    if (c->table)
        array_new(in, &table, c->table_type, 2, DIMS(c->table_rows, desc.rotary_dim), c->table, 1);
    if (c->gain) array_new(in, &gain, BF16, 2, DIMS(l, n), c->gain, is_plain);
    desc.cos_sin = c->table ? &table.tensor.t : 0;
    desc.k_norm_weight = c->gain ? &gain.tensor.t : 0;
    ctxkv_store *store;
    CHECK(ctxkv_store_create(place->device, &desc, &store));
    array_free(&gain);
    for (int64_t i = 0; i < l; i++) {
        array_new(in, &kc[i], c->cache, 4, DIMS(c->blocks[i], c->page[i], h, n), 0, is_plain);
        array_new(in, &vc[i], c->cache, 4, DIMS(c->blocks[i], c->page[i], h, n), 0, is_plain);
        keys[i] = &kc[i].tensor.t, values[i] = &vc[i].tensor.t;
    }
    for (int64_t i = 0; i < c->slot_count; i++) {
        array_new(in, &slots[i], I64, 1, &c->slot_rows[i], c->slots[i], true);
        slot_list[i] = &slots[i].tensor.t;
    }
    CHECK(ctxkv_store_bind_caches(store, keys, values, l));
    array_new(in, &k, BF16, 4, DIMS(l, c->rows, h, n), c->k, is_plain);
    array_new(in, &v, BF16, 4, DIMS(l, c->rows, h, n), c->v, is_plain);
    array_new(in, &positions, I64, 1, &c->rows, c->positions, true);
    CHECK(ctxkv_store_run(
        store, &k.tensor.t, desc.v_from_k ? 0 : &v.tensor.t, c->table ? &positions.tensor.t : 0,
        slot_list, c->slot_count, 0));
    ctxkv_faults faults;
    CHECK(ctxkv_store_faults(store, &faults));
    expect_faults(c, &faults, 1);
    for (int64_t i = 0; i < l; i++) {
        array_values(&kc[i], results[i]);
        array_values(&vc[i], results[i] + kc[i].count);
        array_check_gaps(&kc[i]), array_check_gaps(&vc[i]);
        array_free(&kc[i]), array_free(&vc[i]);
    }
    for (int64_t i = 0; i < c->slot_count; i++) array_free(&slots[i]);
    ctxkv_store_destroy(store);
    array_free(&table), array_free(&k), array_free(&v), array_free(&positions);
}

static void fuzz_store(struct input *in) {
    struct store_case c = {.rows = choose(in, 20)};
    ctxkv_store_desc_init(&c.desc);
    ctxkv_store_desc *d = &c.desc;
    d->num_layers = 1 + choose(in, MAX_L);
    d->num_kv_heads = 1 + choose(in, 3);
    d->head_dim = choose(in, 3) ? 64 : 128;
    store_options(in, &c);
    d->v_from_k = choose(in, 4) == 0;
    int64_t count = d->num_layers * c.rows * d->num_kv_heads * d->head_dim;
    c.k = noise_new(in, count);
    c.v = noise_new(in, count);
    store_places(in, &c);
    uint16_t *got[MAX_L], *want[MAX_L];
    for (int64_t i = 0; i < d->num_layers; i++) {
        got[i] = calloc(store_bytes(&c, i) + 1, 1);
        want[i] = calloc(store_bytes(&c, i) + 1, 1);
    }
    store_run(in, &c, &fast, false, got);
    store_run(in, &c, &plain, true, want);
    for (int64_t i = 0; i < d->num_layers; i++) {
        same(got[i], want[i], store_bytes(&c, i), "caches");
        free(got[i]), free(want[i]);
    }
    store_free(&c);
}

// ---- descriptors of any bytes ------------------------------------------------------------------
// Numbers of any value in descriptors without tensors: a status, never a crash or a huge loop.
static void fuzz_descriptors(struct input *in) {
    ctxkv_norms_desc n = norms_desc(in, 64, 1, false);
    ctxkv_store_desc s;
    ctxkv_store_desc_init(&s);
    s.num_layers = s.num_kv_heads = 1;
    struct {
        void *at;
        size_t size;
    } fields[] = {
        {&n.hidden, sizeof n.hidden},
        {&n.layer, sizeof n.layer},
        {&n.numerics, sizeof n.numerics},
        {&n.hidden_size, 2},
        {&n.num_layers, 1},
        {&s.num_layers, 1},
        {&s.head_dim, 2},
        {&s.k_norm, sizeof s.k_norm},
        {&s.k_eps, sizeof s.k_eps},
        {&s.rope, sizeof s.rope},
        {&s.rotary_dim, 8},
        {&s.v_norm, sizeof s.v_norm},
        {&s.v_eps, sizeof s.v_eps},
        {&s.v_scale, sizeof s.v_scale},
        {&s.v_from_k, sizeof s.v_from_k},
        {&s.k_gain_centre, sizeof s.k_gain_centre},
        {&s.cache_type, sizeof s.cache_type},
        {&s.scale_count, 8},
        {&s.layer_cos_sin_count, 8},
        {&s.num_kv_heads, 8},
        {&n.size, 8},
        {&s.size, 1}};
    for (int i = 0; i < 2; i++) {
        size_t f = (size_t)choose(in, sizeof fields / sizeof *fields);
        for (size_t j = 0; j < fields[f].size; j++)
            ((uint8_t *)fields[f].at)[j] = (uint8_t)choose(in, 256);
    }
    if (n.size > sizeof n) n.size = sizeof n; // more would be read, as promised
    if (s.size > sizeof s) s.size = sizeof s;
    ctxkv_norms *norms = 0;
    ctxkv_store *store = 0;
    ctxkv_status a = ctxkv_norms_create(fast.device, &n, &norms);
    ctxkv_status b = ctxkv_store_create(fast.device, &s, &store);
    if (!norms != !!a || !store != !!b) die("a handle without success, or none with it");
    if ((a || b) && !*ctxkv_last_error()) die("no message");
    ctxkv_norms_destroy(norms);
    ctxkv_store_destroy(store);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    open_places();
    struct input in = {data, size, 0};
    int64_t kind = choose(&in, 8);
    for (int i = 0; i < 4; i++) in.seed = in.seed * 256 + (uint64_t)choose(&in, 256);
    if (kind < 2) fuzz_norms(&in);
    if (kind >= 2 && kind < 4) fuzz_projection(&in);
    if (kind >= 4 && kind < 7) fuzz_store(&in);
    if (kind == 7) fuzz_descriptors(&in);
    return 0;
}
