// SPDX-License-Identifier: Apache-2.0
// B10: no rows at all, more rows than 65,535, and outputs past 2^31 elements.
#define _GNU_SOURCE
#include "cases.h"

#include <sys/mman.h>
#include <unistd.h>

// A large output on a CPU: one window of memory mapped over and over, so that the addresses are
// real and the pages few. One thread runs in row order, hence the last rows are what is left.
#define WINDOW ((size_t)64 << 20)
#define SLIDE 8 // row t of x begins at element 8*t of one array of noise

static struct buffer large_new(const struct place *place, size_t bytes) {
    if (place_is_cuda(place)) {
        struct buffer b = {.bytes = bytes};
        if (place->memory->alloc(place->device, bytes, &b.map)) die("alloc of %zu bytes", bytes);
        b.data = b.map;
        return b;
    }
    struct buffer b = {.bytes = bytes, .map_bytes = (bytes + WINDOW - 1) / WINDOW * WINDOW};
    int file = memfd_create("ctxkv", 0);
    if (file < 0 || ftruncate(file, (off_t)WINDOW)) die("memfd");
    b.map = mmap(0, b.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b.map == MAP_FAILED) die("mmap");
    for (size_t at = 0; at < b.map_bytes; at += WINDOW)
        if (mmap(
                (char *)b.map + at, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                0) == MAP_FAILED)
            die("mmap of the window");
    close(file);
    b.data = b.map;
    return b;
}

static ctxkv_norms *norms_new(const struct place *place, int64_t layers) {
    ctxkv_norms_desc d;
    ctxkv_norms_desc_init(&d);
    d.num_layers = layers;
    d.hidden.eps = d.layer.eps = 1e-6f;
    if (layers == 1) d.layer.kind = CTXKV_NORM_ABSENT;
    ctxkv_norms *norms;
    assert_ok(ctxkv_norms_create(place->device, &d, &norms));
    return norms;
}

// Norms of `rows` sliding rows; the last rows of the last layer equal the same rows run alone.
static void many_norms(const struct place *place, int64_t layers, int64_t rows) {
    size_t count = (size_t)(rows * SLIDE + HIDDEN);
    uint16_t *noise = malloc(count * 2), last[HIDDEN], alone[HIDDEN];
    fill_bf16(noise, count, 10, 1.0f);
    struct buffer x = buffer_tail(place, count * 2);
    buffer_put(place, &x, 0, noise, count * 2);
    struct buffer out = large_new(place, (size_t)(layers * rows) * HIDDEN * 2);
    struct buffer one = buffer_new(place, (size_t)layers * HIDDEN * 2);
    ctxkv_norms *norms = norms_new(place, layers);
    struct tensor from, to;
    assert_ok(ctxkv_norms_run(
        norms, tensor_on(&from, place, x.data, BF16, 2, DIMS(rows, HIDDEN), DIMS(SLIDE, 1)),
        tensor_on(&to, place, out.data, BF16, 3, DIMS(layers, rows, HIDDEN), 0), 0));
    const int64_t picked[] = {rows - 1, rows - 2, rows - 3, rows - 300};
    for (size_t i = 0; i < 4; i++) {
        size_t at = (size_t)((layers - 1) * rows + picked[i]) * HIDDEN * 2;
        buffer_get(place, &out, at, last, HIDDEN * 2);
        assert_ok(ctxkv_norms_run(
            norms,
            tensor_on(&from, place, x.data + picked[i] * SLIDE * 2, BF16, 2, DIMS(1, HIDDEN), 0),
            tensor_on(&to, place, one.data, BF16, 3, DIMS(layers, 1, HIDDEN), 0), 0));
        buffer_get(place, &one, (size_t)(layers - 1) * HIDDEN * 2, alone, HIDDEN * 2);
        assert_memory_equal(last, alone, HIDDEN * 2);
    }
    ctxkv_norms_destroy(norms);
    buffer_free(place, &x);
    buffer_free(place, &out);
    buffer_free(place, &one);
    free(noise);
}

#define SMALL 16 // hidden size of the many-row chain
#define COLUMNS (2 * HEAD)

struct small_chain {
    struct operand w;
    ctxkv_chain *chain;
    ctxkv_projection *projection;
};

static void small_chain_new(struct small_chain *c, const struct place *place, int64_t max_rows) {
    uint16_t values[COLUMNS * SMALL];
    fill_bf16(values, COLUMNS * SMALL, 11, 1.0f);
    const DLTensor *w = operand_new(&c->w, place, BF16, 2, DIMS(COLUMNS, SMALL), values);
    uint16_t gains[SMALL];
    fill_same(gains, SMALL, 0x3F80);
    struct operand gain;
    struct chain_descs d;
    chain_descs_init(&d, SMALL, 1, 1, max_rows);
    d.norms.hidden.kind = CTXKV_NORM_RMS;
    d.norms.hidden_weight = operand_new(&gain, place, BF16, 1, DIMS(SMALL), gains);
    d.norms.layer.kind = CTXKV_NORM_ABSENT;
    d.projection.weights = &w;
    d.projection.weight_count = 1;
    d.projection.max_rows = max_rows;
    assert_ok(ctxkv_chain_create(place->device, &d.chain, &c->chain));
    assert_ok(ctxkv_projection_create(place->device, &d.projection, &c->projection));
    operand_free(&gain, place); // copied by create
}

static void small_chain_free(struct small_chain *c, const struct place *place) {
    ctxkv_chain_destroy(c->chain);
    ctxkv_projection_destroy(c->projection);
    operand_free(&c->w, place);
}

// Chain and projection of `rows` rows; picked rows against the same rows run alone.
static void many_rows(const struct place *place, int64_t rows) {
    struct small_chain c;
    small_chain_new(&c, place, rows);
    uint16_t *noise = malloc((size_t)rows * SMALL * 2);
    int64_t *slot = malloc((size_t)rows * sizeof *slot), blocks = (rows + 15) / 16;
    for (int64_t t = 0; t < rows; t++) slot[t] = rows - 1 - t;
    fill_bf16(noise, (size_t)rows * SMALL, 12, 1.0f);
    struct operand x, slots;
    operand_new(&x, place, BF16, 2, DIMS(rows, SMALL), noise);
    const DLTensor *all = operand_new(&slots, place, I64, 1, DIMS(rows), slot), *first;
    struct caches many, one;
    caches_new(&many, place, 1, blocks, 16, 1);
    caches_new(&one, place, 1, blocks, 16, 1);
    struct buffer kv = buffer_new(place, (size_t)rows * COLUMNS * 2);
    struct tensor from, to, t;
    uint16_t got[COLUMNS], want[COLUMNS];
    assert_ok(ctxkv_chain_bind_caches(c.chain, many.keys, many.values, 1));
    assert_ok(ctxkv_chain_run(c.chain, &x.tensor.t, 0, &all, 1, 0));
    assert_ok(ctxkv_projection_run(
        c.projection, tensor_on(&from, place, x.buffer.data, BF16, 3, DIMS(1, rows, SMALL), 0),
        tensor_on(&to, place, kv.data, BF16, 3, DIMS(1, rows, COLUMNS), 0), 0));
    assert_ok(ctxkv_chain_bind_caches(c.chain, one.keys, one.values, 1));
    struct buffer single = buffer_new(place, COLUMNS * 2);
    const int64_t picked[] = {rows - 1, rows - 2, 65535, 65534, 32768, 0};
    for (size_t i = 0; i < sizeof picked / sizeof *picked; i++) {
        int64_t row = picked[i];
        size_t at = (size_t)(slot[row] * 2 * HEAD) * 2;
        const char *data = x.buffer.data + row * SMALL * 2;
        first = tensor_on(&t, place, slots.buffer.data + 8 * row, I64, 1, DIMS(1), 0);
        assert_ok(ctxkv_chain_run(
            c.chain, tensor_on(&from, place, data, BF16, 2, DIMS(1, SMALL), 0), 0, &first, 1, 0));
        buffer_get(place, &many.storage[0], at, got, sizeof got);
        buffer_get(place, &one.storage[0], at, want, sizeof want);
        assert_memory_equal(got, want, sizeof got);
        assert_ok(ctxkv_projection_run(
            c.projection, tensor_on(&from, place, data, BF16, 3, DIMS(1, 1, SMALL), 0),
            tensor_on(&to, place, single.data, BF16, 3, DIMS(1, 1, COLUMNS), 0), 0));
        buffer_get(place, &kv, (size_t)row * COLUMNS * 2, got, sizeof got);
        buffer_get(place, &single, 0, want, sizeof want);
        assert_memory_equal(got, want, sizeof got);
    }
    buffer_free(place, &single);
    buffer_free(place, &kv);
    caches_free(&many, place);
    caches_free(&one, place);
    operand_free(&x, place);
    operand_free(&slots, place);
    small_chain_free(&c, place);
    free(noise);
    free(slot);
}

static void no_rows(const struct place *place) {
    struct small_chain c;
    struct caches caches;
    struct tensor from, to, k, v, s, x;
    small_chain_new(&c, place, 4);
    caches_new(&caches, place, 1, 1, 16, 1);
    ctxkv_norms *norms = norms_new(place, 5);
    ctxkv_store *store = muse_store(place, 1, 1, 0);
    assert_ok(ctxkv_store_bind_caches(store, caches.keys, caches.values, 1));
    assert_ok(ctxkv_chain_bind_caches(c.chain, caches.keys, caches.values, 1));
    const DLTensor *none = tensor_on(&s, place, 0, I64, 1, DIMS(0), 0), *missing = 0;
    for (int again = 0; again < 2; again++) {
        assert_ok(ctxkv_norms_run(
            norms, tensor_on(&from, place, 0, BF16, 2, DIMS(0, HIDDEN), 0),
            tensor_on(&to, place, 0, BF16, 3, DIMS(5, 0, HIDDEN), 0), 0));
        assert_ok(ctxkv_projection_run(
            c.projection, tensor_on(&from, place, 0, BF16, 3, DIMS(1, 0, SMALL), 0),
            tensor_on(&to, place, 0, BF16, 3, DIMS(1, 0, COLUMNS), 0), 0));
        assert_ok(ctxkv_store_run(
            store, tensor_on(&k, place, 0, BF16, 4, DIMS(1, 0, 1, HEAD), 0),
            tensor_on(&v, place, 0, BF16, 4, DIMS(1, 0, 1, HEAD), 0), 0, &none, 1, 0));
        assert_ok(ctxkv_chain_run(
            c.chain, tensor_on(&x, place, 0, BF16, 2, DIMS(0, SMALL), 0), 0, &none, 1, 0));
        assert_ok(ctxkv_chain_run(c.chain, &x.t, 0, &missing, 1, 0));
    }
    caches_check(&caches, place);
    ctxkv_norms_destroy(norms);
    ctxkv_store_destroy(store);
    small_chain_free(&c, place);
    caches_free(&caches, place);
}

void b10(void **state) {
    (void)state;
    struct place place = place_open(1);
    no_rows(&place);
    many_rows(&place, 65537);
    many_norms(&place, 1, 65537);
    many_norms(&place, 5, 52429);
    if (getenv("CTXKV_TEST_LONG")) { // the controls, one row below each edge
        many_rows(&place, 65536);
        many_norms(&place, 1, 65536);
        many_norms(&place, 5, 52428);
    }
    place_close(&place);
}
