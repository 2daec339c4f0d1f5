// SPDX-License-Identifier: Apache-2.0
// Bytes as a chain of the public API, any layout and any slots, by tensors or raw addresses. The
// oracle is its parts one after the other: the scalar truth on plain copies, one thread.
#include "api_cases.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct chain_case {
    ctxkv_norms_desc norms;
    ctxkv_projection_desc projection;
    struct store_case store;
    uint16_t *x, *hidden, *layer, *w, *bias, *tables[MAX_L], *scales[2];
    int64_t way;   // of handing the weights over: one tensor, L, or 2*L
    int64_t parts; // 1: K alone, of which V is made
};

static int64_t columns_of(const struct chain_case *c) {
    return c->parts * c->projection.num_kv_heads * c->projection.head_dim;
}

// A table for each layer, and what FP8 caches are divided by: any values. FP32: two noises each.
static void more_options(struct input *in, struct chain_case *c) {
    struct store_case *s = &c->store;
    int64_t l = s->desc.num_layers;
    int64_t each = s->table_rows * s->desc.rotary_dim * (s->table_type == FP32 ? 2 : 1);
    bool tables = s->table && choose(in, 3) == 0;
    for (int64_t i = 0; tables && i < l; i++) c->tables[i] = noise_new(in, each);
    bool scales = s->desc.cache_type >= CTXKV_CACHE_FP8_E4M3 && choose(in, 4);
    for (int part = 0; scales && part < 2; part++) c->scales[part] = noise_new(in, 2 * l);
}

static void case_new(struct input *in, struct chain_case *c) {
    bool row = choose(in, 16) == 0;
    struct store_case *s = &c->store;
    s->rows = choose(in, row ? 3 : 10);
    ctxkv_store_desc_init(&s->desc);
    s->desc.num_layers = row ? 1 : 1 + choose(in, MAX_L);
    s->desc.num_kv_heads = row || choose(in, 3) ? 1 : 2;
    s->desc.head_dim = choose(in, 5) ? 64 : 128;
    store_options(in, s);
    store_places(in, s);
    int64_t l = s->desc.num_layers, d = row ? 8192 : 16 * (1 + choose(in, 4));
    c->norms = norms_desc(in, d, l, row);
    ctxkv_projection_desc_init(&c->projection);
    c->projection.hidden_size = d;
    c->projection.num_layers = l;
    c->projection.num_kv_heads = s->desc.num_kv_heads;
    c->projection.head_dim = s->desc.head_dim;
    c->parts = choose(in, 3) ? 2 : 1;
    c->projection.k_only = s->desc.v_from_k = c->parts == 1;
    c->projection.bias_add = choose(in, 2) ? CTXKV_BIAS_AFTER : CTXKV_BIAS_FUSED;
    int64_t columns = columns_of(c);
    c->way = choose(in, c->parts + 1);
    c->x = noise_new(in, s->rows * d);
    if (c->norms.hidden.kind != CTXKV_NORM_ABSENT && choose(in, 2)) c->hidden = noise_new(in, d);
    if (c->norms.layer.kind != CTXKV_NORM_ABSENT && choose(in, 2)) c->layer = noise_new(in, l * d);
    c->w = noise_new(in, l * columns * d);
    if (choose(in, 2)) c->bias = noise_new(in, l * columns);
    more_options(in, c);
}

static void case_free(struct chain_case *c) {
    free(c->x), free(c->hidden), free(c->layer), free(c->w), free(c->bias);
    for (int i = 0; i < MAX_L; i++) free(c->tables[i]);
    free(c->scales[0]), free(c->scales[1]);
    store_free(&c->store);
}

// ---- the tensors that the descriptors name -----------------------------------------------------
struct operands {
    struct array hidden, layer, w[2 * MAX_L], bias, table[MAX_L], gain, scales[2][MAX_L];
    const DLTensor *layers, *weights[2 * MAX_L], *tables[MAX_L], *scale_list[2][MAX_L];
    ctxkv_norms_desc norms;
    ctxkv_projection_desc projection;
    ctxkv_store_desc store;
};

static void weights_new(
    struct input *in, const struct chain_case *c, bool is_plain, struct operands *o) {
    int64_t d = c->norms.hidden_size, l = c->norms.num_layers;
    int64_t columns = columns_of(c);
    int64_t count = is_plain || c->way == 0 ? 1 : c->way == 1 ? l : 2 * l;
    int64_t rows = l * columns / count;
    for (int64_t i = 0; i < count; i++) {
        array_new(in, &o->w[i], BF16, 2, DIMS(rows, d), c->w + i * rows * d, is_plain);
        o->weights[i] = &o->w[i].tensor.t;
    }
    o->projection.weights = o->weights;
    o->projection.weight_count = count;
}

static void store_operands(struct input *in, const struct chain_case *c, struct operands *o) {
    const struct store_case *s = &c->store;
    int64_t l = c->norms.num_layers, count = !s->table ? 0 : c->tables[0] ? l : 1, one = 1;
    for (int64_t i = 0; i < count; i++) {
        const uint16_t *data = c->tables[0] ? c->tables[i] : s->table;
        array_new(
            in, &o->table[i], s->table_type, 2, DIMS(s->table_rows, s->desc.rotary_dim), data,
            true);
        o->tables[i] = &o->table[i].tensor.t;
    }
    if (c->tables[0]) {
        o->store.layer_cos_sin = o->tables;
        o->store.layer_cos_sin_count = l;
    } else {
        o->store.cos_sin = o->tables[0];
    }
    for (int part = 0; c->scales[0] && part < 2; part++) {
        for (int64_t i = 0; i < l; i++) {
            array_new(in, &o->scales[part][i], FP32, 1, &one, c->scales[part] + 2 * i, true);
            o->scale_list[part][i] = &o->scales[part][i].tensor.t;
        }
    }
    if (!c->scales[0]) return;
    o->store.k_scales = o->scale_list[0];
    o->store.v_scales = o->scale_list[1];
    o->store.scale_count = l;
}

static void operands_new(
    struct input *in, const struct chain_case *c, bool is_plain, struct operands *o) {
    int64_t d = c->norms.hidden_size, l = c->norms.num_layers;
    int64_t columns = columns_of(c);
    const struct store_case *s = &c->store;
    *o = (struct operands){.norms = c->norms, .projection = c->projection, .store = s->desc};
    if (c->hidden) array_new(in, &o->hidden, BF16, 1, &d, c->hidden, is_plain);
    if (c->layer) array_new(in, &o->layer, BF16, 2, DIMS(l, d), c->layer, is_plain);
    if (c->bias) array_new(in, &o->bias, BF16, 2, DIMS(l, columns), c->bias, is_plain);
    if (s->gain) array_new(in, &o->gain, BF16, 2, DIMS(l, s->desc.head_dim), s->gain, is_plain);
    weights_new(in, c, is_plain, o);
    o->layers = &o->layer.tensor.t;
    o->norms.hidden_weight = c->hidden ? &o->hidden.tensor.t : 0;
    o->norms.layer_weights = &o->layers;
    o->norms.layer_weight_count = c->layer ? 1 : 0;
    o->projection.bias = c->bias ? &o->bias.tensor.t : 0;
    store_operands(in, c, o);
    o->store.k_norm_weight = s->gain ? &o->gain.tensor.t : 0;
}

// What create has copied is freed as soon as the plans are there.
static void operands_copied(struct operands *o) {
    array_free(&o->hidden), array_free(&o->layer), array_free(&o->bias), array_free(&o->gain);
}

static void operands_free(struct operands *o) {
    for (int i = 0; i < 2 * MAX_L; i++) array_free(&o->w[i]);
    for (int i = 0; i < MAX_L; i++) {
        array_free(&o->table[i]);
        array_free(&o->scales[0][i]), array_free(&o->scales[1][i]);
    }
}

struct caches {
    struct array k[MAX_L], v[MAX_L];
    const DLTensor *keys[MAX_L], *values[MAX_L];
};

static void caches_new(
    struct input *in, const struct store_case *s, bool is_plain, struct caches *to) {
    for (int64_t i = 0; i < s->desc.num_layers; i++) {
        const int64_t shape[] = {s->blocks[i], s->page[i], s->desc.num_kv_heads, s->desc.head_dim};
        array_new(in, &to->k[i], s->cache, 4, shape, 0, is_plain);
        array_new(in, &to->v[i], s->cache, 4, shape, 0, is_plain);
        to->keys[i] = &to->k[i].tensor.t, to->values[i] = &to->v[i].tensor.t;
    }
}

static void caches_read(const struct store_case *s, struct caches *from, uint16_t **results) {
    for (int64_t i = 0; i < s->desc.num_layers; i++) {
        array_values(&from->k[i], results[i]);
        array_values(&from->v[i], results[i] + from->k[i].count);
        array_check_gaps(&from->k[i]), array_check_gaps(&from->v[i]);
    }
}

static void caches_free(struct caches *c) {
    for (int i = 0; i < MAX_L; i++) array_free(&c->k[i]), array_free(&c->v[i]);
}

// ---- the parts ---------------------------------------------------------------------------------
static void parts_run(struct input *in, struct chain_case *c, uint16_t **results) {
    struct store_case *s = &c->store;
    int64_t l = c->norms.num_layers, d = c->norms.hidden_size, t = s->rows;
    int64_t h = s->desc.num_kv_heads, n = s->desc.head_dim, columns = columns_of(c);
    int64_t own = c->norms.layer.kind == CTXKV_NORM_ABSENT ? 1 : l;
    struct operands o;
    struct array x, normed, kv, positions, slots[MAX_L] = {{0}};
    struct caches caches = {{{0}}, {{0}}, {0}, {0}};
    struct tensor k, v;
    const DLTensor *list[MAX_L];
    ctxkv_norms *norms;
    ctxkv_projection *projection;
    ctxkv_store *store;
    operands_new(in, c, true, &o);
    CHECK(ctxkv_norms_create(plain.device, &o.norms, &norms));
    CHECK(ctxkv_projection_create(plain.device, &o.projection, &projection));
    CHECK(ctxkv_store_create(plain.device, &o.store, &store));
    operands_copied(&o);
    array_new(in, &x, BF16, 2, DIMS(t, d), c->x, true);
    array_new(in, &normed, BF16, 3, DIMS(own, t, d), 0, true);
    array_new(in, &kv, BF16, 3, DIMS(l, t, columns), 0, true);
    array_new(in, &positions, I64, 1, &t, s->positions, true);
    caches_new(in, s, true, &caches);
    for (int64_t i = 0; i < s->slot_count; i++) {
        array_new(in, &slots[i], I64, 1, &s->slot_rows[i], s->slots[i], true);
        list[i] = &slots[i].tensor.t;
    }
    CHECK(ctxkv_norms_run(norms, &x.tensor.t, &normed.tensor.t, 0));
    CHECK(ctxkv_projection_run(projection, &normed.tensor.t, &kv.tensor.t, 0));
    CHECK(ctxkv_store_bind_caches(store, caches.keys, caches.values, l));
    const int64_t strides[] = {t * columns, columns, n, 1}, shape[] = {l, t, h, n};
    const uint16_t *first = (const uint16_t *)(void *)kv.tensor.t.data;
    static const struct place cpu;
    CHECK(ctxkv_store_run(
        store, tensor_on(&k, &cpu, first, BF16, 4, shape, strides),
        c->parts == 1 ? 0 : tensor_on(&v, &cpu, first ? first + h * n : 0, BF16, 4, shape, strides),
        s->table ? &positions.tensor.t : 0, list, s->slot_count, 0));
    caches_read(s, &caches, results);
    ctxkv_norms_destroy(norms), ctxkv_projection_destroy(projection), ctxkv_store_destroy(store);
    for (int i = 0; i < MAX_L; i++) array_free(&slots[i]);
    array_free(&x), array_free(&normed), array_free(&kv), array_free(&positions);
    caches_free(&caches), operands_free(&o);
}

// ---- the chain ---------------------------------------------------------------------------------
// One field of a right call made wrong: refused.
static void refuse(struct input *in, ctxkv_chain *chain, ctxkv_chain_call call, int64_t most) {
    int64_t wrong[MAX_L];
    for (int64_t i = 0; i < call.slot_count; i++) wrong[i] = call.slot_rows[i];
    int64_t kind = choose(in, 8);
    // Without rows there is nothing to read: their addresses are not looked at.
    if (kind >= 6 && call.rows == 0) kind = 0;
    if (kind == 0) call.rows = choose(in, 2) ? most + 1 + choose(in, 9) : -1 - choose(in, 9);
    if (kind == 1) call.slot_count = choose(in, 2) ? call.slot_count + 77 : -choose(in, 9);
    if (kind == 2) wrong[choose(in, call.slot_count)] = choose(in, 2) ? call.rows + 1 : INT64_MIN;
    if (kind == 3) call.slots = 0;
    if (kind == 4) call.slot_rows = 0;
    if (kind == 5) call.size = (size_t)choose(in, 8); // less than the size itself
    if (kind == 6) call.x = 0;
    if (kind == 7) call.workspace = (void *)((uintptr_t)call.workspace + 8);
    if (kind == 2) call.slot_rows = wrong;
    ctxkv_status status = ctxkv_chain_run_call(chain, &call);
    if (status != CTXKV_INVALID_ARGUMENT) die("wrong call %d gave %d", (int)kind, (int)status);
}

static void call_new(struct store_case *s, ctxkv_chain_call *call, const int64_t **slots) {
    ctxkv_chain_call_init(call);
    for (int64_t i = 0; i < s->slot_count; i++) slots[i] = s->slots[i];
    call->rows = s->rows;
    call->positions = s->positions;
    call->slots = slots;
    call->slot_rows = s->slot_rows;
    call->slot_count = s->slot_count;
}

static void chain_runs(
    struct input *in, struct chain_case *c, ctxkv_chain *chain, int64_t most, uint64_t runs) {
    struct store_case *s = &c->store;
    int64_t d = c->norms.hidden_size;
    struct array x, positions, slots[MAX_L] = {{0}};
    const DLTensor *list[MAX_L];
    ctxkv_chain_call call;
    const int64_t *addresses[MAX_L];
    call_new(s, &call, addresses);
    array_new(in, &x, BF16, 2, DIMS(s->rows, d), c->x, false);
    array_new(in, &positions, I64, 1, &s->rows, s->positions, true);
    for (int64_t i = 0; i < s->slot_count; i++) {
        array_new(in, &slots[i], I64, 1, &s->slot_rows[i], s->slots[i], true);
        list[i] = &slots[i].tensor.t;
    }
    size_t bytes = ctxkv_chain_workspace_size(chain);
    void *own = aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (x.tensor.t.data) call.x = (char *)x.tensor.t.data + x.tensor.t.byte_offset;
    call.x_row_stride = x.tensor.t.strides && s->rows > 1 ? x.tensor.t.strides[0] : d;
    for (uint64_t i = 0; i < runs; i++) {
        call.workspace = choose(in, 2) ? own : 0;
        if (choose(in, 3) == 0) refuse(in, chain, call, most);
        if (choose(in, 2)) {
            CHECK(ctxkv_chain_run_call(chain, &call));
        } else {
            CHECK(ctxkv_chain_run(
                chain, &x.tensor.t, s->table ? &positions.tensor.t : 0, list, s->slot_count, 0));
        }
    }
    free(own);
    for (int i = 0; i < MAX_L; i++) array_free(&slots[i]);
    array_free(&x), array_free(&positions);
}

static void chain_run(struct input *in, struct chain_case *c, uint16_t **results) {
    struct store_case *s = &c->store;
    struct operands o;
    struct caches caches = {{{0}}, {{0}}, {0}, {0}};
    ctxkv_chain_desc desc;
    ctxkv_chain *chain;
    operands_new(in, c, false, &o);
    ctxkv_chain_desc_init(&desc);
    desc.norms = &o.norms;
    desc.projection = &o.projection;
    desc.store = &o.store;
    desc.max_rows = s->rows + choose(in, 4);
    if (!desc.max_rows) desc.max_rows = 1;
    if (choose(in, 6) == 0) { // parts that do not fit
        ctxkv_store_desc wrong = o.store;
        wrong.num_kv_heads += 1 + choose(in, 5);
        desc.store = &wrong;
        if (ctxkv_chain_create(fast.device, &desc, &chain) != CTXKV_INVALID_ARGUMENT || chain)
            die("parts of different heads were taken");
        desc.store = &o.store;
    }
    CHECK(ctxkv_chain_create(fast.device, &desc, &chain));
    operands_copied(&o);
    caches_new(in, s, false, &caches);
    CHECK(ctxkv_chain_bind_caches(chain, caches.keys, caches.values, s->desc.num_layers));
    uint64_t runs = 1 + (uint64_t)choose(in, 2);
    chain_runs(in, c, chain, desc.max_rows, runs);
    ctxkv_faults faults;
    CHECK(ctxkv_chain_faults(chain, &faults));
    expect_faults(s, &faults, runs);
    caches_read(s, &caches, results);
    ctxkv_chain_destroy(chain);
    caches_free(&caches), operands_free(&o);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    open_places();
    struct input in = {data, size, 0};
    struct chain_case c = {.x = 0};
    uint16_t *got[MAX_L], *want[MAX_L];
    for (int i = 0; i < 4; i++) in.seed = in.seed * 256 + (uint64_t)choose(&in, 256);
    case_new(&in, &c);
    for (int64_t i = 0; i < c.norms.num_layers; i++) {
        got[i] = calloc(store_bytes(&c.store, i) + 1, 1);
        want[i] = calloc(store_bytes(&c.store, i) + 1, 1);
    }
    chain_run(&in, &c, got);
    parts_run(&in, &c, want);
    for (int64_t i = 0; i < c.norms.num_layers; i++) {
        same(got[i], want[i], store_bytes(&c.store, i), "caches");
        free(got[i]), free(want[i]);
    }
    case_free(&c);
    return 0;
}
