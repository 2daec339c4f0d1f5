// SPDX-License-Identifier: Apache-2.0
// Devices, wrong tensors and plans' operands for the API fuzzers.
#include "api_cases.h"

#include <stdlib.h>
#include <string.h>

struct place fast, plain;

void open_places(void) {
    if (fast.device) return;
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.threads = 3;
    if (ctxkv_device_open("cpu", &options, &fast.device)) die("cpu");
    options.threads = 1;
    options.cpu_mask = CTXKV_CPU_SCALAR;
    if (ctxkv_device_open("cpu", &options, &plain.device)) die("cpu");
}

void same(const void *a, const void *b, size_t bytes, const char *what) {
    if (bytes && memcmp(a, b, bytes)) die("%s differ from the scalar truth", what);
}

void spoil(struct input *in, struct tensor *t) {
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

ctxkv_norms_desc norms_desc(struct input *in, int64_t d, int64_t layers, bool row) {
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

void store_options(struct input *in, struct store_case *c) {
    ctxkv_store_desc *d = &c->desc;
    d->k_norm = (ctxkv_k_norm)choose(in, 3);
    if (d->k_norm == CTXKV_K_NORM_PLAIN) d->head_dim = 64;
    d->k_eps = choose(in, 2) ? 0.0f : 1e-6f;
    d->rope = (ctxkv_rope)choose(in, 3);
    d->rotary_dim = choose(in, 3) ? d->head_dim : 2 * (1 + choose(in, 32));
    c->table_rows = choose(in, 9);
    c->slot_count = choose(in, 3) == 0 ? 1 : d->num_layers;
    static const enum type tables[] = {BF16, BF16, FP16, FP32}, caches[] = {BF16, FP16, E4M3, E5M2};
    static const float factors[] = {0.0f, 0.0f, 0.612f, -1e30f};
    c->table_type = tables[choose(in, 4)];
    if (d->rope != CTXKV_ROPE_NONE) // FP32: two noises a value
        c->table = noise_new(in, c->table_rows * d->rotary_dim * (c->table_type == FP32 ? 2 : 1));
    if (d->k_norm == CTXKV_K_NORM_RMS && choose(in, 4))
        c->gain = noise_new(in, d->num_layers * d->head_dim);
    d->k_gain_centre = choose(in, 2) ? 0.0f : 1.0f;
    d->v_norm = (ctxkv_v_norm)(choose(in, 3) == 0);
    d->v_eps = d->k_eps;
    d->v_scale = factors[choose(in, 4)];
    d->cache_type = (ctxkv_cache_type)(choose(in, 2) ? 0 : choose(in, 4));
    c->cache = d->cache_type >= CTXKV_CACHE_FP8_E4M3 && choose(in, 2) ? U8 : caches[d->cache_type];
}

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

void store_places(struct input *in, struct store_case *c) {
    int64_t l = c->desc.num_layers;
    c->positions = malloc((size_t)c->rows * 8 + 1);
    for (int64_t t = 0; t < c->rows; t++)
        c->positions[t] =
            c->table_rows && choose(in, 6) ? choose(in, c->table_rows) : strange(in, c->table_rows);
    for (int64_t i = 0; i < l; i++) {
        c->blocks[i] = choose(in, 5);
        c->page[i] = 1 + choose(in, 7);
    }
    for (int64_t i = 0; i < c->slot_count; i++) fill_slots(in, c, i);
    // One array for all: each layer's slots are distinct as long as they are here.
    for (int64_t i = 1; i < l && c->slot_count == 1; i++)
        c->blocks[i] = c->blocks[0], c->page[i] = c->page[0];
}

size_t store_bytes(const struct store_case *c, int64_t layer) {
    int64_t rows = c->blocks[layer] * c->page[layer];
    return (size_t)(rows * c->desc.num_kv_heads * c->desc.head_dim) * 4;
}

void store_free(struct store_case *c) {
    for (int64_t i = 0; i < c->slot_count; i++) free(c->slots[i]);
    free(c->table), free(c->gain), free(c->k), free(c->v), free(c->positions);
}

void expect_faults(const struct store_case *c, const ctxkv_faults *f, uint64_t runs) {
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
    want.count *= runs;
    same(f, &want, sizeof want, "faults");
}
