// SPDX-License-Identifier: Apache-2.0
// B16: projections with dimensions of size 1 and 0, from many threads at once.
#include "cases.h"

#include <pthread.h>

#define LAYERS 5
#define COLUMNS (2 * HEAD)
#define THREADS 8

struct scene {
    struct place place;
    ctxkv_projection *projection; // shared by all threads
    ctxkv_norms *norms;           // FP32 weights, the same shape, mixed in
    struct operand x, wide, weight;
    int calls;
    int failures[THREADS];
};

static bool all_ones(const struct scene *s, const struct buffer *b, size_t count) {
    uint16_t *values = malloc(count * 2);
    bool good = true;
    buffer_get(&s->place, b, 0, values, count * 2);
    for (size_t i = 0; i < count; i++) good &= values[i] == 0x3F80;
    free(values);
    return good;
}

// One round: T = 1 with row stride 8192 and 77, T = 2, T = 0, and a norms run.
static int round_of_calls(const struct scene *s, const struct buffer *kv, const struct buffer *n) {
    static const struct {
        int64_t rows, stride;
    } kinds[] = {{1, HIDDEN}, {1, 77}, {2, HIDDEN}, {0, HIDDEN}};
    struct tensor from, to;
    int bad = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        int64_t rows = kinds[i].rows;
        bad += ctxkv_projection_run(
                   s->projection,
                   tensor_on(
                       &from, &s->place, s->x.buffer.data, BF16, 3, DIMS(LAYERS, rows, HIDDEN),
                       DIMS(2 * HIDDEN, kinds[i].stride, 1)),
                   tensor_on(&to, &s->place, kv->data, BF16, 3, DIMS(LAYERS, rows, COLUMNS), 0),
                   0) != CTXKV_OK;
        bad += !all_ones(s, kv, (size_t)(LAYERS * rows * COLUMNS));
    }
    bad +=
        ctxkv_norms_run(
            s->norms, tensor_on(&from, &s->place, s->x.buffer.data, BF16, 2, DIMS(1, HIDDEN), 0),
            tensor_on(&to, &s->place, n->data, BF16, 3, DIMS(LAYERS, 1, HIDDEN), 0), 0) != CTXKV_OK;
    return bad + !all_ones(s, n, LAYERS * HIDDEN);
}

struct worker {
    struct scene *scene;
    int index;
};

static void *worker_main(void *argument) {
    struct worker *w = argument;
    struct scene *s = w->scene;
    struct buffer kv = buffer_tail(&s->place, LAYERS * 2 * COLUMNS * 2);
    struct buffer n = buffer_tail(&s->place, LAYERS * HIDDEN * 2);
    for (int i = 0; i < s->calls; i++) s->failures[w->index] += round_of_calls(s, &kv, &n);
    buffer_free(&s->place, &kv);
    buffer_free(&s->place, &n);
    return 0;
}

static void plans_new(struct scene *s) {
    ctxkv_projection_desc p;
    ctxkv_projection_desc_init(&p);
    p.num_layers = LAYERS;
    p.num_kv_heads = 1;
    p.max_rows = 2;
    const DLTensor *w = &s->wide.tensor.t, *g = &s->weight.tensor.t;
    p.weights = &w;
    p.weight_count = 1;
    assert_ok(ctxkv_projection_create(s->place.device, &p, &s->projection));
    ctxkv_norms_desc n;
    ctxkv_norms_desc_init(&n);
    n.num_layers = LAYERS;
    n.layer_weights = &g;
    n.layer_weight_count = 1;
    assert_ok(ctxkv_norms_create(s->place.device, &n, &s->norms));
}

void b16(void **state) {
    (void)state;
    struct scene s = {.place = place_open(0)};
    if (place_is_cuda(&s.place)) { // a fault of CPU libraries
        place_close(&s.place);
        skip();
    }
    ctxkv_device_info info = {.size = sizeof info};
    assert_ok(ctxkv_device_get_info(s.place.device, &info));
    // The scalar truth takes 0.1 s a round.
    s.calls = info.cpu_used == CTXKV_CPU_SCALAR ? 4 : getenv("CTXKV_TEST_LONG") ? 1000 : 100;
    size_t count = (size_t)LAYERS * COLUMNS * HIDDEN;
    uint16_t *values = malloc(count * 2);
    float *gains = malloc(LAYERS * HIDDEN * sizeof *gains);
    for (int i = 0; i < LAYERS * HIDDEN; i++) gains[i] = 1.0f;
    fill_same(values, count, 0x3F80);
    operand_new(&s.x, &s.place, BF16, 3, DIMS(LAYERS, 2, HIDDEN), values);
    fill_same(values, count, 0x3900); // 2^-13
    operand_new(&s.wide, &s.place, BF16, 3, DIMS(LAYERS, COLUMNS, HIDDEN), values);
    operand_new(&s.weight, &s.place, FP32, 2, DIMS(LAYERS, HIDDEN), gains);
    plans_new(&s);
    pthread_t threads[THREADS];
    struct worker workers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){&s, i};
        assert_int_equal(pthread_create(&threads[i], 0, worker_main, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], 0);
        assert_int_equal(s.failures[i], 0);
    }
    ctxkv_projection_destroy(s.projection);
    ctxkv_norms_destroy(s.norms);
    operand_free(&s.x, &s.place);
    operand_free(&s.wide, &s.place);
    operand_free(&s.weight, &s.place);
    free(values);
    free(gains);
    place_close(&s.place);
}
