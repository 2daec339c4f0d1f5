// SPDX-License-Identifier: Apache-2.0
// Bytes as calls of the public API: tensors of any layout, slots and positions of any value. The
// oracle is the scalar truth on plain copies, one thread; wrong operands must be refused.
#include "api_arrays.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct place fast, plain; // the best tier on three threads; the scalar truth on one

static void open_places(void) {
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.threads = 3;
    if (ctxkv_device_open("cpu", &options, &fast.device)) die("cpu");
    options.threads = 1;
    options.cpu_mask = CTXKV_CPU_SCALAR;
    if (ctxkv_device_open("cpu", &options, &plain.device)) die("cpu");
}

#define CHECK(call)                                                                                \
    do {                                                                                           \
        if (call) die("%s", #call);                                                                \
    } while (0)

static void same(const void *a, const void *b, size_t bytes, const char *what) {
    if (bytes && memcmp(a, b, bytes)) die("%s differ from the scalar truth", what);
}

// Makes one thing wrong in a tensor whose shape is not free to vary; such a call is refused.
static void spoil(struct input *in, struct tensor *t) {
    int dim = (int)choose(in, t->t.ndim);
    switch (choose(in, 8)) {
    case 0:
        t->t.dtype.bits ^= (uint8_t)(1 + choose(in, 255));
        return;
    case 1:
        t->t.dtype.code = (uint8_t)(t->t.dtype.code + 1 + choose(in, 250));
        return;
    case 2:
        t->t.dtype.lanes = (uint16_t)(2 + choose(in, 255));
        return;
    case 3:
        t->t.ndim += choose(in, 2) ? 1 + (int)choose(in, 200) : -1 - (int)choose(in, 9);
        return;
    case 4:
        t->t.shape = 0;
        return;
    case 5:
        t->shape[dim] = choose(in, 2) ? -1 - choose(in, 100) : INT64_MAX - choose(in, 100);
        return;
    case 6:
        t->t.device.device_type = (DLDeviceType)(choose(in, 2) ? kDLCUDA : kDLVulkan);
        return;
    default:
        t->shape[t->t.ndim - 1] += 1 + choose(in, 60);
        return;
    }
}

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

static ctxkv_norms_desc norms_desc(struct input *in, int64_t d, int64_t layers, bool row) {
    static const float eps[] = {0.0f, 1e-6f, 1e-5f, 1.0f};
    ctxkv_norms_desc n;
    ctxkv_norms_desc_init(&n);
    n.hidden_size = d;
    n.num_layers = layers;
    n.hidden.kind = n.layer.kind = row ? CTXKV_NORM_ROW : CTXKV_NORM_RMS;
    if (choose(in, 4) == 0) n.layer.kind = CTXKV_NORM_ABSENT;
    if (choose(in, 8) == 0) n.hidden.kind = CTXKV_NORM_ABSENT;
    n.hidden.eps = eps[choose(in, 4)];
    n.layer.eps = eps[choose(in, 4)];
    n.hidden.gain_centre = choose(in, 2) ? 0.0f : 1.0f;
    n.hidden.input_scale = row && choose(in, 2);
    n.layer.input_scale = row && choose(in, 2);
    n.numerics = (ctxkv_numerics)choose(in, 4);
    return n;
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
    int64_t columns = 2 * c->desc.num_kv_heads * c->desc.head_dim;
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
    int64_t columns = 2 * c.desc.num_kv_heads * c.desc.head_dim, l = c.desc.num_layers;
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
#define MAX_L 3
struct store_case {
    ctxkv_store_desc desc;
    int64_t rows, table_rows, slot_count, blocks[MAX_L], page[MAX_L], slot_rows[MAX_L];
    uint16_t *k, *v, *table, *gain;
    int64_t *positions, *slots[MAX_L];
};

static int64_t strange(struct input *in, int64_t limit) {
    static const int64_t values[] = {-1,        INT64_MIN, INT64_MAX, INT64_C(1) << 32,
                                     -12345678, 0x7FFFFFFF};
    int64_t pick = choose(in, 8);
    return pick < 6 ? values[pick] : limit + (pick - 6) * choose(in, 100);
}

// Each slot of a layer at most once, some rows negative or past the end.
static void fill_slots(struct input *in, struct store_case *c, int64_t l) {
    int64_t total = c->blocks[l] * c->page[l];
    int64_t first = total ? choose(in, total) : 0, step = 1;
    c->slot_rows[l] = choose(in, 3) ? c->rows : choose(in, c->rows + 1);
    c->slots[l] = malloc((size_t)c->slot_rows[l] * 8 + 1);
    for (int64_t t = 0; t < c->slot_rows[l]; t++) {
        bool good = t < total && choose(in, 5);
        c->slots[l][t] = good ? (first + t * step) % total : strange(in, total);
        // What strange gives may be in range by accident: then it would be twice.
        if (!good && c->slots[l][t] >= 0 && c->slots[l][t] < total) c->slots[l][t] = -7;
    }
}

static void expect_faults(const struct store_case *c, const ctxkv_faults *f) {
    ctxkv_faults want = {0};
    for (int64_t l = 0; l < c->desc.num_layers; l++) {
        int64_t from = c->slot_count == 1 ? 0 : l, total = c->blocks[l] * c->page[l];
        for (int64_t t = 0; t < c->slot_rows[from]; t++) {
            int64_t slot = c->slots[from][t];
            if (slot < 0) continue;
            bool rope = c->desc.rope != CTXKV_ROPE_NONE, bad_slot = slot >= total;
            int64_t position = rope ? c->positions[t] : 0;
            if (!bad_slot && (!rope || (position >= 0 && position < c->table_rows))) continue;
            if (want.count++) continue;
            want.kind = bad_slot ? CTXKV_FAULT_SLOT : CTXKV_FAULT_POSITION;
            want.layer = l, want.row = t;
            want.value = bad_slot ? slot : position;
            want.limit = bad_slot ? total : c->table_rows;
        }
    }
    same(f, &want, sizeof want, "faults");
}

static void store_run(
    struct input *in, struct store_case *c, struct place *place, bool is_plain,
    uint16_t **results) {
    ctxkv_store_desc desc = c->desc;
    int64_t l = desc.num_layers, h = desc.num_kv_heads, n = desc.head_dim;
    struct array table = {0}, gain = {0}, k, v, positions, slots[MAX_L], kc[MAX_L], vc[MAX_L];
    const DLTensor *slot_list[MAX_L], *keys[MAX_L], *values[MAX_L];
    if (c->table) array_new(in, &table, BF16, 2, DIMS(c->table_rows, desc.rotary_dim), c->table, 1);
    if (c->gain) array_new(in, &gain, BF16, 2, DIMS(l, n), c->gain, is_plain);
    desc.cos_sin = c->table ? &table.tensor.t : 0;
    desc.k_norm_weight = c->gain ? &gain.tensor.t : 0;
    ctxkv_store *store;
    CHECK(ctxkv_store_create(place->device, &desc, &store));
    array_free(&gain);
    for (int64_t i = 0; i < l; i++) {
        array_new(in, &kc[i], BF16, 4, DIMS(c->blocks[i], c->page[i], h, n), 0, is_plain);
        array_new(in, &vc[i], BF16, 4, DIMS(c->blocks[i], c->page[i], h, n), 0, is_plain);
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
        store, &k.tensor.t, &v.tensor.t, c->table ? &positions.tensor.t : 0, slot_list,
        c->slot_count, 0));
    ctxkv_faults faults;
    CHECK(ctxkv_store_faults(store, &faults));
    expect_faults(c, &faults);
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
    d->k_norm = (ctxkv_k_norm)choose(in, 3);
    if (d->k_norm == CTXKV_K_NORM_PLAIN) d->head_dim = 64;
    d->k_eps = choose(in, 2) ? 0.0f : 1e-6f;
    d->rope = (ctxkv_rope)choose(in, 3);
    d->rotary_dim = choose(in, 3) ? d->head_dim : 2 * (1 + choose(in, 32));
    int64_t l = d->num_layers, count = l * c.rows * d->num_kv_heads * d->head_dim;
    c.table_rows = choose(in, 9);
    c.slot_count = choose(in, 3) == 0 ? 1 : l;
    if (d->rope != CTXKV_ROPE_NONE) c.table = noise_new(in, c.table_rows * d->rotary_dim);
    if (d->k_norm == CTXKV_K_NORM_RMS) c.gain = noise_new(in, l * d->head_dim);
    c.k = noise_new(in, count);
    c.v = noise_new(in, count);
    c.positions = malloc((size_t)c.rows * 8 + 1);
    for (int64_t t = 0; t < c.rows; t++)
        c.positions[t] =
            c.table_rows && choose(in, 6) ? choose(in, c.table_rows) : strange(in, c.table_rows);
    uint16_t *got[MAX_L], *want[MAX_L];
    for (int64_t i = 0; i < l; i++) {
        c.blocks[i] = choose(in, 5);
        c.page[i] = 1 + choose(in, 7);
        size_t bytes = (size_t)(c.blocks[i] * c.page[i] * d->num_kv_heads * d->head_dim) * 4;
        got[i] = malloc(bytes + 1), want[i] = malloc(bytes + 1);
    }
    for (int64_t i = 0; i < c.slot_count; i++) fill_slots(in, &c, i);
    if (c.slot_count ==
        1) // one array for all: each layer's slots distinct as long as they are here
        for (int64_t i = 1; i < l; i++) c.blocks[i] = c.blocks[0], c.page[i] = c.page[0];
    for (int64_t i = 1; i < l && c.slot_count == 1; i++) {
        size_t bytes = (size_t)(c.blocks[i] * c.page[i] * d->num_kv_heads * d->head_dim) * 4;
        got[i] = realloc(got[i], bytes + 1), want[i] = realloc(want[i], bytes + 1);
    }
    store_run(in, &c, &fast, false, got);
    store_run(in, &c, &plain, true, want);
    for (int64_t i = 0; i < l; i++) {
        size_t bytes = (size_t)(c.blocks[i] * c.page[i] * d->num_kv_heads * d->head_dim) * 4;
        same(got[i], want[i], bytes, "caches");
        free(got[i]), free(want[i]);
    }
    for (int64_t i = 0; i < c.slot_count; i++) free(c.slots[i]);
    free(c.table), free(c.gain), free(c.k), free(c.v), free(c.positions);
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
    if (!fast.device) open_places();
    struct input in = {data, size, 0};
    int64_t kind = choose(&in, 8);
    for (int i = 0; i < 4; i++) in.seed = in.seed * 256 + (uint64_t)choose(&in, 256);
    if (kind < 2) fuzz_norms(&in);
    if (kind >= 2 && kind < 4) fuzz_projection(&in);
    if (kind >= 4 && kind < 7) fuzz_store(&in);
    if (kind == 7) fuzz_descriptors(&in);
    return 0;
}
