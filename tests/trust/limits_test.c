// SPDX-License-Identifier: Apache-2.0
// Sizes at the far end: offsets past 2^31 and 2^32 elements, a million rows, a thousand layers,
// a hundred thousand plans.
#define _GNU_SOURCE
#include <malloc.h>
#include <stdio.h>
#include <sys/mman.h>

#include "checks.h"

#define N 64
#define D 64

static struct place place;

// Address space without memory behind it until it is written.
static char *sparse(size_t bytes) {
    void *map =
        mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) die("mmap of %zu bytes", bytes);
    return map;
}

static ctxkv_store *store_new(int64_t layers, int64_t heads) {
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = layers;
    d.num_kv_heads = heads;
    ctxkv_store *store;
    assert_ok(ctxkv_store_create(place.device, &d, &store));
    return store;
}

// K and V rows and the cache with every stride past 2^31 or 2^32; a compact twin gives the truth.
static void store_offsets(int64_t step) {
    enum { BLOCKS = 2, PAGE = 2, H = 2, T = 2 };
    size_t bytes = (size_t)step * 8 * 2 + 4096;
    char *far = sparse(bytes), *input = sparse(bytes);
    uint16_t near[BLOCKS * PAGE * H * N * 2], k[T * H * N], v[T * H * N];
    struct tensor kt, vt, keys, values, slots, positions;
    fill_bf16(k, T * H * N, 1, 1.0f);
    fill_bf16(v, T * H * N, 2, 1.0f);
    memset(near, POISON, sizeof near);
    ctxkv_store *store = store_new(1, H);
    const int64_t slot_values[T] = {3, 0};
    const DLTensor *slot = tensor_on(&slots, &place, slot_values, I64, 1, DIMS(T), 0);
    const int64_t shape[] = {BLOCKS, PAGE, H, N}, rows[] = {1, T, H, N};
    const DLTensor *key = tensor_on(&keys, &place, near, BF16, 4, shape, 0);
    const DLTensor *value = tensor_on(&values, &place, near + 8 * N, BF16, 4, shape, 0);
    assert_ok(ctxkv_store_bind_caches(store, &key, &value, 1));
    assert_ok(ctxkv_store_run(
        store, tensor_on(&kt, &place, k, BF16, 4, rows, 0),
        tensor_on(&vt, &place, v, BF16, 4, rows, 0),
        tensor_on(&positions, &place, slot_values, I64, 1, DIMS(T), 0), &slot, 1, 0));

    const int64_t cache_strides[] = {4 * step, 2 * step, step, 1};
    const int64_t row_strides[] = {0, 2 * step, step, 1};
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            memcpy(input + (t * 2 + h) * step * 2, k + (t * H + h) * N, N * 2);
            memcpy(input + (t * 2 + h) * step * 2 + N * 2, v + (t * H + h) * N, N * 2);
        }
    tensor_on(&keys, &place, far, BF16, 4, shape, cache_strides);
    tensor_on(&values, &place, far + N * 2, BF16, 4, shape, cache_strides);
    assert_ok(ctxkv_store_bind_caches(store, &key, &value, 1));
    assert_ok(ctxkv_store_run(
        store, tensor_on(&kt, &place, input, BF16, 4, rows, row_strides),
        tensor_on(&vt, &place, input + N * 2, BF16, 4, rows, row_strides), 0, &slot, 1, 0));
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            int64_t page = slot_values[t], at = page * 2 * step + h * step;
            assert_memory_equal(far + at * 2, near + (page * H + h) * N, N * 2);
            assert_memory_equal(far + at * 2 + N * 2, near + 8 * N + (page * H + h) * N, N * 2);
        }
    ctxkv_store_destroy(store);
    munmap(far, bytes);
    munmap(input, bytes);
}

// x, the norms' output, the projection's input, weights and output with far strides.
static void dense_offsets(int64_t step) {
    enum { L = 2, T = 2, C = 2 * N };
    size_t bytes = (size_t)step * 4 * 2 + 4096, w_bytes = (size_t)step * 2 * 2 + C * D * 2;
    char *in = sparse(bytes), *mid = sparse(bytes), *out = sparse(bytes), *w = sparse(w_bytes);
    uint16_t x[T * D], weights[L * C * D], n_near[L * T * D], kv_near[L * T * C];
    struct tensor a, b, wt;
    fill_bf16(x, T * D, 3, 1.0f);
    fill_bf16(weights, L * C * D, 4, 1.0f);
    ctxkv_norms_desc n;
    ctxkv_norms_desc_init(&n);
    n.hidden_size = D;
    n.num_layers = L;
    n.hidden.kind = n.layer.kind = CTXKV_NORM_RMS;
    ctxkv_norms *norms;
    assert_ok(ctxkv_norms_create(place.device, &n, &norms));
    ctxkv_projection_desc p;
    ctxkv_projection_desc_init(&p);
    p.hidden_size = D;
    p.num_layers = L;
    p.num_kv_heads = 1;
    p.weight_count = 1;
    for (int round = 0; round < 2; round++) { // near, then far
        int64_t s = round ? step : 0;
        const DLTensor *list = tensor_on(
            &wt, &place, round ? w : (char *)weights, BF16, 3, DIMS(L, C, D),
            DIMS(round ? 2 * s : C * D, D, 1));
        p.weights = &list;
        ctxkv_projection *projection;
        assert_ok(ctxkv_projection_create(place.device, &p, &projection));
        if (round)
            for (int i = 0; i < 2; i++) {
                memcpy(in + i * s * 2, x + i * D, D * 2);
                memcpy(w + i * 2 * s * 2, weights + i * C * D, C * D * 2);
            }
        tensor_on(&a, &place, round ? in : (char *)x, BF16, 2, DIMS(T, D), DIMS(round ? s : D, 1));
        tensor_on(
            &b, &place, round ? mid : (char *)n_near, BF16, 3, DIMS(L, T, D),
            DIMS(round ? 2 * s : T * D, round ? s : D, 1));
        assert_ok(ctxkv_norms_run(norms, &a.t, &b.t, 0));
        tensor_on(
            &a, &place, round ? out : (char *)kv_near, BF16, 3, DIMS(L, T, C),
            DIMS(round ? 2 * s : T * C, round ? s : C, 1));
        assert_ok(ctxkv_projection_run(projection, &b.t, &a.t, 0));
        ctxkv_projection_destroy(projection);
    }
    for (int i = 0; i < L * T; i++) {
        assert_memory_equal(mid + i * step * 2, n_near + i * D, D * 2);
        assert_memory_equal(out + i * step * 2, kv_near + i * C, C * 2);
    }
    ctxkv_norms_destroy(norms);
    munmap(in, bytes), munmap(mid, bytes), munmap(out, bytes), munmap(w, w_bytes);
}

static void far_offsets(void **state) {
    (void)state;
    static const int64_t steps[] = {
        INT64_C(1) << 30, (INT64_C(1) << 31) - 64, INT64_C(1) << 31, INT64_C(1) << 32,
        (INT64_C(1) << 32) + 64};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        store_offsets(steps[i]);
        dense_offsets(steps[i]);
    }
}

// A million rows from one sliding array; picked slots hold what a run of that row alone gives.
static void million_rows(void **state) {
    (void)state;
    const int64_t rows = 1000000, blocks = rows / 16;
    uint16_t *noise = malloc((size_t)(rows * 8 + N) * 2), want[2 * N];
    int64_t *slot = malloc((size_t)rows * 8);
    size_t bytes = (size_t)rows * 2 * N * 2;
    char *storage = sparse(bytes);
    fill_bf16(noise, (size_t)(rows * 8 + N), 5, 1.0f);
    for (int64_t t = 0; t < rows; t++) slot[t] = (t * 7919) % rows;
    ctxkv_store *store = store_new(1, 1);
    struct tensor k, v, s, kc, vc;
    const DLTensor *keys = cache_half(&kc, &place, storage, 0, blocks, 16, 1, N, 16 * 2 * N);
    const DLTensor *values = cache_half(&vc, &place, storage, 1, blocks, 16, 1, N, 16 * 2 * N);
    const DLTensor *slots = tensor_on(&s, &place, slot, I64, 1, DIMS(rows), 0);
    const int64_t strides[] = {0, 8, N, 1};
    assert_ok(ctxkv_store_bind_caches(store, &keys, &values, 1));
    tensor_on(&k, &place, noise, BF16, 4, DIMS(1, rows, 1, N), strides);
    tensor_on(&v, &place, noise, BF16, 4, DIMS(1, rows, 1, N), strides);
    assert_ok(ctxkv_store_run(store, &k.t, &v.t, 0, &slots, 1, 0));
    keys = cache_half(&kc, &place, want, 0, 1, 1, 1, N, 2 * N);
    values = cache_half(&vc, &place, want, 1, 1, 1, 1, N, 2 * N);
    assert_ok(ctxkv_store_bind_caches(store, &keys, &values, 1));
    const int64_t zero = 0;
    for (int64_t t = 0; t < rows; t += t < rows - 400 ? 997 : 1) {
        slots = tensor_on(&s, &place, &zero, I64, 1, DIMS(1), 0);
        tensor_on(&k, &place, noise + t * 8, BF16, 4, DIMS(1, 1, 1, N), 0);
        assert_ok(ctxkv_store_run(store, &k.t, &k.t, 0, &slots, 1, 0));
        assert_memory_equal(storage + slot[t] * 2 * N * 2, want, sizeof want);
    }
    ctxkv_store_destroy(store);
    munmap(storage, bytes);
    free(noise);
    free(slot);
}

static void thousand_layers(void **state) {
    (void)state;
    enum { L = 1000 };
    uint16_t *storage = malloc(L * 2 * N * 2), *kv = malloc(L * 2 * N * 2);
    struct tensor *keys = malloc(L * sizeof *keys), *values = malloc(L * sizeof *values);
    const DLTensor **key_list = malloc(L * sizeof *key_list);
    const DLTensor **value_list = malloc(L * sizeof *value_list);
    fill_bf16(kv, L * 2 * N, 6, 1.0f);
    for (int l = 0; l < L; l++) {
        key_list[l] = cache_half(&keys[l], &place, storage + l * 2 * N, 0, 1, 1, 1, N, 2 * N);
        value_list[l] = cache_half(&values[l], &place, storage + l * 2 * N, 1, 1, 1, 1, N, 2 * N);
    }
    ctxkv_store *store = store_new(L, 1), *one = store_new(1, 1);
    struct tensor k, v, s;
    const int64_t zero = 0, strides[] = {2 * N, 0, N, 1};
    const DLTensor *slots = tensor_on(&s, &place, &zero, I64, 1, DIMS(1), 0);
    assert_ok(ctxkv_store_bind_caches(store, key_list, value_list, L));
    assert_ok(ctxkv_store_run(
        store, tensor_on(&k, &place, kv, BF16, 4, DIMS(L, 1, 1, N), strides),
        tensor_on(&v, &place, kv + N, BF16, 4, DIMS(L, 1, 1, N), strides), 0, &slots, 1, 0));
    uint16_t want[2 * N];
    struct tensor kc, vc;
    const DLTensor *key = cache_half(&kc, &place, want, 0, 1, 1, 1, N, 2 * N);
    const DLTensor *value = cache_half(&vc, &place, want, 1, 1, 1, 1, N, 2 * N);
    assert_ok(ctxkv_store_bind_caches(one, &key, &value, 1));
    for (int l = 0; l < L; l++) {
        tensor_on(&k, &place, kv + l * 2 * N, BF16, 4, DIMS(1, 1, 1, N), 0);
        tensor_on(&v, &place, kv + l * 2 * N + N, BF16, 4, DIMS(1, 1, 1, N), 0);
        assert_ok(ctxkv_store_run(one, &k.t, &v.t, 0, &slots, 1, 0));
        assert_memory_equal(storage + l * 2 * N, want, sizeof want);
    }
    ctxkv_store_destroy(store);
    ctxkv_store_destroy(one);
    free(storage), free(kv), free(keys), free(values), free(key_list), free(value_list);
}

static void many_plans(void **state) {
    (void)state;
    struct mallinfo2 before = {0}, after;
    uint16_t weight[D] = {0};
    struct tensor w;
    const DLTensor *weights[1] = {tensor_on(&w, &place, weight, BF16, 2, DIMS(1, D), 0)};
    for (int i = 0; i < 100000; i++) {
        if (i == 100) before = mallinfo2();
        ctxkv_norms_desc n;
        ctxkv_norms_desc_init(&n);
        n.hidden_size = D;
        n.num_layers = 1;
        n.hidden.kind = n.layer.kind = CTXKV_NORM_RMS;
        n.layer_weights = weights;
        n.layer_weight_count = 1;
        ctxkv_norms *norms;
        assert_ok(ctxkv_norms_create(place.device, &n, &norms));
        ctxkv_store *store = store_new(1, 1);
        ctxkv_norms_destroy(norms);
        ctxkv_store_destroy(store);
    }
    after = mallinfo2();
    assert_int_equal(after.uordblks, before.uordblks);
    assert_int_equal(after.arena, before.arena);
    assert_int_equal(after.hblkhd, before.hblkhd);
}

int main(void) {
    place = place_open(2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(far_offsets), cmocka_unit_test(million_rows),
        cmocka_unit_test(thousand_layers), cmocka_unit_test(many_plans)};
    int failed = cmocka_run_group_tests(tests, 0, 0);
    place_close(&place);
    return failed;
}
