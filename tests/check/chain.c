// SPDX-License-Identifier: Apache-2.0
// Whole chains of a device against the CPU's, whose parts the other ops compare with the truth.
#include "plans.h"

#include <stdlib.h>
#include <string.h>

#include "../../src/device/memory.h"
#include "../../src/ops/numerics.h"

enum { D = 8192, L = 5, PAGE = 16, HEAD = 64, POSITIONS = 4096, MOST_ROWS = 4096 };
static const int64_t head_counts[] = {1, 2, 4, 8, 16};
static const int64_t row_counts[] = {1, 2, 7, 8, 16, 17, 33, 64, 130, 257, 1024, 4096};
enum { ROW_COUNTS = sizeof row_counts / sizeof *row_counts, HEAD_COUNTS = 5 };

// One side: a device, its copies of the constant operands, its chain.
struct side {
    ctxkv_device *device;
    uint8_t *hidden, *layers, *weights, *table;
    ctxkv_chain *chain;
};

// What the cases of one number of heads share: making it takes longer than a case.
static struct {
    int64_t heads;
    struct side cpu, under_test;
    uint16_t *x; // MOST_ROWS rows, of which row i is the same in every case
} shared;

static bool fp32_of(int64_t heads) {
    return heads == 4;
}
static size_t norm_bytes(int64_t heads, int64_t rows) {
    return (size_t)(rows * D) * (fp32_of(heads) ? 4 : 2);
}
static size_t weight_bytes(int64_t heads) {
    return (size_t)(L * 2 * heads * HEAD * D) * 2;
}

// count BF16 values with exponents from `lowest`, four from each random number.
static uint16_t *values(uint64_t seed, size_t count, unsigned lowest) {
    uint16_t *to = bench_memory(count * 2);
    for (size_t i = 0; i < count; i += 4) {
        uint64_t r = check_mix(seed, i);
        for (size_t k = 0; k < 4 && i + k < count; k++) {
            uint16_t h = (uint16_t)(r >> (16 * k));
            to[i + k] = (uint16_t)((h & 0x807F) | (lowest + (h >> 7 & 3)) << 7);
        }
    }
    return to;
}

static float *gains(uint64_t seed, size_t count) {
    float *to = bench_memory(count * 4);
    for (size_t i = 0; i < count; i++)
        to[i] = 1.0f + (float)(check_mix(seed, i) >> 44) * 0x1p-22f; // 1 .. 1.25, all 23 bits
    return to;
}

static uint8_t *placed(struct check *c, ctxkv_device *device, void *from, size_t bytes) {
    const ctxkv_memory_ops *memory = ctxkv_device_memory(device);
    void *to = 0;
    if (!memory) return from;
    if (plan_ok(c, memory->alloc(device, bytes, &to), "alloc"))
        plan_ok(c, memory->to_device(device, to, from, bytes), "to_device");
    return to;
}

static void make_chain(struct check *c, struct side *s, int64_t heads, int64_t most_rows) {
    struct check as = {.on_gpu = s == &shared.under_test && c->on_gpu, .ordinal = c->ordinal};
    struct mirrors m = {.check = &as};
    struct box b[4];
    int type = fp32_of(heads) ? TYPE_FP32 : TYPE_BF16;
    ctxkv_norms_desc n;
    ctxkv_projection_desc p;
    ctxkv_store_desc t;
    ctxkv_chain_desc d;
    ctxkv_norms_desc_init(&n);
    ctxkv_projection_desc_init(&p);
    ctxkv_store_desc_init(&t);
    ctxkv_chain_desc_init(&d);
    n.num_layers = p.num_layers = t.num_layers = L;
    n.hidden.input_scale = heads == 1;
    n.layer.input_scale = heads == 8;
    n.hidden_weight = boxed(&m, &b[0], s->hidden, type, 1, (int64_t[]){D}, 0);
    const DLTensor *layers = boxed(&m, &b[1], s->layers, type, 2, (int64_t[]){L, D}, 0);
    n.layer_weights = &layers;
    n.layer_weight_count = 1;
    p.num_kv_heads = t.num_kv_heads = heads;
    const DLTensor *w =
        boxed(&m, &b[2], s->weights, TYPE_BF16, 3, (int64_t[]){L, 2 * heads * HEAD, D}, 0);
    p.weights = &w;
    p.weight_count = 1;
    t.rope = CTXKV_ROPE_GPTJ;
    t.cos_sin = boxed(&m, &b[3], s->table, TYPE_BF16, 2, (int64_t[]){POSITIONS, HEAD}, 0);
    d.norms = &n;
    d.projection = &p;
    d.store = &t;
    d.max_rows = most_rows;
    plan_ok(c, ctxkv_chain_create(s->device, &d, &s->chain), "chain_create");
}

static void side_end(struct side *s) {
    uint8_t *all[] = {s->hidden, s->layers, s->weights, s->table};
    ctxkv_chain_destroy(s->chain);
    const ctxkv_memory_ops *memory = s->device ? ctxkv_device_memory(s->device) : 0;
    for (int i = 0; memory && i < 4; i++)
        if (all[i]) memory->free(s->device, all[i]);
    s->chain = 0;
}

void check_chain_end(void) {
    side_end(&shared.under_test);
    side_end(&shared.cpu);
    ctxkv_device_close(shared.cpu.device);
    shared.cpu.device = 0;
    shared.heads = 0;
}

static void share(struct check *c, int64_t heads) {
    if (shared.heads == heads && shared.under_test.chain && shared.cpu.chain) return;
    check_chain_end();
    shared.heads = heads;
    shared.under_test.device = c->device;
    if (!plan_ok(c, ctxkv_device_open("cpu", 0, &shared.cpu.device), "device_open")) return;
    if (!shared.x) {
        struct check rows = {.state = 7};
        shared.x = bench_memory((size_t)MOST_ROWS * D * 2);
        for (int64_t t = 0; t < MOST_ROWS; t++) hostile_bf16(&rows, shared.x + t * D, D);
    }
    uint64_t seed = (uint64_t)heads;
    void *from[] = {
        fp32_of(heads) ? (void *)gains(seed, D) : values(seed, D, 125),
        fp32_of(heads) ? (void *)gains(seed + 20, L * D) : values(seed + 20, L * D, 125),
        values(seed + 40, weight_bytes(heads) / 2, 118),
        values(seed + 60, (size_t)POSITIONS * HEAD, 123)};
    size_t bytes[] = {
        norm_bytes(heads, 1), norm_bytes(heads, L), weight_bytes(heads),
        (size_t)POSITIONS * HEAD * 2};
    struct side *sides[] = {&shared.cpu, &shared.under_test};
    for (int i = 0; i < 2; i++) {
        uint8_t **to[] = {
            &sides[i]->hidden, &sides[i]->layers, &sides[i]->weights, &sides[i]->table};
        for (int k = 0; k < 4; k++) *to[k] = placed(c, sides[i]->device, from[k], bytes[k]);
        if (!c->failed) make_chain(c, sides[i], heads, MOST_ROWS);
    }
}

struct run {
    int64_t heads, rows, blocks;
    struct area x, positions, slots[L], caches[L];
};

static void bind_and_run(struct check *c, struct side *s, struct run *r, ctxkv_faults *faults) {
    bool on_gpu = s == &shared.under_test && c->on_gpu;
    struct check as = {.device = s->device, .on_gpu = on_gpu, .ordinal = c->ordinal};
    struct mirrors m = {.check = &as};
    struct box b[3 * L + 2];
    const DLTensor *keys[L], *values_of[L], *slots[L];
    const int64_t shape[] = {r->blocks, PAGE, r->heads, HEAD};
    const int64_t strides[] = {r->heads * PAGE * 2 * HEAD, 2 * HEAD, PAGE * 2 * HEAD, 1};
    for (int l = 0; l < L; l++) {
        uint8_t *cache = on_device(&m, &r->caches[l]);
        keys[l] = boxed(&m, &b[3 * l], cache, TYPE_BF16, 4, shape, strides);
        values_of[l] = boxed(&m, &b[3 * l + 1], cache + 2 * HEAD, TYPE_BF16, 4, shape, strides);
        slots[l] = boxed(
            &m, &b[3 * l + 2], on_device(&m, &r->slots[l]), TYPE_I64, 1, (int64_t[]){r->rows}, 0);
    }
    const DLTensor *x =
        boxed(&m, &b[3 * L], on_device(&m, &r->x), TYPE_BF16, 2, (int64_t[]){r->rows, D}, 0);
    const DLTensor *positions = boxed(
        &m, &b[3 * L + 1], on_device(&m, &r->positions), TYPE_I64, 1, (int64_t[]){r->rows}, 0);
    if (!as.failed && plan_ok(c, ctxkv_chain_bind_caches(s->chain, keys, values_of, L), "bind") &&
        plan_ok(c, ctxkv_chain_run(s->chain, x, positions, slots, L, 0), "chain_run"))
        plan_ok(c, ctxkv_chain_faults(s->chain, faults), "chain_faults");
    mirrors_return(&m);
    if (as.failed) check_fail(c, "%s", as.told);
}

static int64_t *numbers(struct area *a) {
    return (int64_t *)(void *)a->data;
}

static void make_run(struct check *c, struct run *r, int64_t heads, int64_t rows, bool faulty) {
    *r = (struct run){.heads = heads, .rows = rows, .blocks = (rows + PAGE - 1) / PAGE + 3};
    int64_t total = r->blocks * PAGE, *order = bench_memory((size_t)total * 8);
    r->x = area_new(c, (size_t)(rows * D) * 2, 16);
    memcpy(r->x.data, shared.x, r->x.bytes);
    r->positions = area_new(c, (size_t)rows * 8, 8);
    for (int64_t t = 0; t < rows; t++)
        numbers(&r->positions)[t] = faulty && check_chance(c, 5)
                                        ? PICK(c, -1, POSITIONS, INT64_C(1) << 32, INT64_MAX)
                                        : check_below(c, POSITIONS);
    for (int l = 0; l < L; l++) {
        for (int64_t i = 0; i < total; i++) order[i] = i;
        for (int64_t i = total - 1; i > 0; i--) {
            int64_t j = check_below(c, i + 1), kept = order[i];
            order[i] = order[j];
            order[j] = kept;
        }
        r->slots[l] = area_new(c, (size_t)rows * 8, 8);
        memcpy(r->slots[l].data, order, (size_t)rows * 8);
        for (int64_t t = 0; t < rows; t++) {
            if (check_chance(c, l % 2 ? 20 : 3)) numbers(&r->slots[l])[t] = -1 - t;
            if (faulty && check_chance(c, 4))
                numbers(&r->slots[l])[t] = PICK(c, total, INT64_MAX, (INT64_C(1) << 32) + 1);
        }
        r->caches[l] = area_new(c, (size_t)(total * heads * 2 * HEAD) * 2, 16);
    }
}

// The rows of `all` that the CPU does, too: rows do not depend on one another.
static void pick_rows(struct check *c, const struct run *all, struct run *some, uint8_t *picked) {
    *some = *all;
    some->x = area_new(c, (size_t)(some->rows * D) * 2, 16);
    some->positions = area_new(c, (size_t)some->rows * 8, 8);
    for (int l = 0; l < L; l++) {
        some->slots[l] = area_new(c, (size_t)some->rows * 8, 8);
        some->caches[l] = area_copy(&all->caches[l]);
    }
    int64_t most = all->heads <= 2 ? 130 : 24, left = all->rows, want = left < most ? left : most;
    some->rows = 0;
    for (int64_t t = 0; t < all->rows; t++, left--) {
        picked[t] = check_below(c, left) < want - some->rows;
        if (!picked[t]) continue;
        memcpy(some->x.data + 2 * some->rows * D, all->x.data + 2 * t * D, 2 * D);
        memcpy(some->positions.data + 8 * some->rows, all->positions.data + 8 * t, 8);
        for (int l = 0; l < L; l++)
            memcpy(some->slots[l].data + 8 * some->rows, all->slots[l].data + 8 * t, 8);
        some->rows++;
    }
}

// What only one side was asked to store goes back to what was there before.
static void unstore(struct run *all, const struct run *some, const uint8_t *picked) {
    for (int l = 0; l < L; l++)
        for (int64_t t = 0; t < all->rows; t++) {
            int64_t slot = numbers(&all->slots[l])[t];
            if (picked[t] || slot < 0) continue;
            for (int64_t h = 0; h < all->heads; h++) {
                size_t at =
                    (size_t)((slot / PAGE * all->heads + h) * PAGE + slot % PAGE) * 4 * HEAD;
                memcpy(all->caches[l].data + at, some->caches[l].data + at, 4 * HEAD);
            }
        }
}

static void run_free(struct run *r) {
    area_free(&r->x);
    area_free(&r->positions);
    for (int l = 0; l < L; l++) {
        area_free(&r->slots[l]);
        area_free(&r->caches[l]);
    }
}

static void one_case(struct check *c) {
    int64_t heads = head_counts[c->number / ROW_COUNTS % HEAD_COUNTS];
    int64_t rows = row_counts[c->number % ROW_COUNTS];
    if (!c->on_gpu && rows > 33) rows = 33; // a CPU's rows are the same kernels over and over
    bool all_rows = rows <= (heads <= 2 ? 130 : 24);
    check_tell(c, "H=%lld T=%lld", (long long)heads, (long long)rows);
    share(c, heads);
    if (c->failed) return;
    struct run got, truth;
    ctxkv_faults faults[2];
    memset(faults, 0, sizeof faults);
    uint8_t *picked = bench_memory((size_t)rows);
    make_run(c, &got, heads, rows, all_rows);
    pick_rows(c, &got, &truth, picked);
    bind_and_run(c, &shared.under_test, &got, &faults[0]);
    bind_and_run(c, &shared.cpu, &truth, &faults[1]);
    unstore(&got, &truth, picked);
    for (int l = 0; l < L; l++) area_same(c, &truth.caches[l], &got.caches[l], "cache");
    if (memcmp(&faults[0], &faults[1], sizeof faults[0]) != 0)
        check_fail(
            c, "faults: %llu, the first at layer %lld row %lld; must be %llu, %lld %lld",
            (unsigned long long)faults[0].count, (long long)faults[0].layer,
            (long long)faults[0].row, (unsigned long long)faults[1].count,
            (long long)faults[1].layer, (long long)faults[1].row);
    run_free(&got);
    run_free(&truth);
}

const struct op check_chain = {"chain", one_case, 0, HEAD_COUNTS *ROW_COUNTS};
