// SPDX-License-Identifier: Apache-2.0
// Threads that open and close devices, make and destroy plans on a shared one, and run one plan,
// all at once. Run under ThreadSanitizer too (scripts/matrix tsan).
#include <pthread.h>

#include "checks.h"

#define THREADS 6
#define ROUNDS 60
#define N 64

static struct place place;
static ctxkv_store *shared;
static uint16_t kv[4 * N], storage[THREADS][8 * 2 * N], shared_storage[64 * 2 * N];

static int own_device(int index, int round) {
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.threads = 1 + (index + round) % 4;
    ctxkv_device *device = 0;
    int bad = ctxkv_device_open("cpu", &options, &device) != CTXKV_OK;
    ctxkv_device_info info = {.size = sizeof info};
    bad |= ctxkv_device_get_info(device, &info) != CTXKV_OK || info.threads != options.threads;
    ctxkv_device_close(device);
    return bad | (ctxkv_device_open("none", 0, &device) != CTXKV_INVALID_ARGUMENT);
}

static int run(ctxkv_store *store, const int64_t *slot_values, int64_t rows) {
    struct tensor k, s;
    const DLTensor *slots = tensor_on(&s, &place, slot_values, I64, 1, DIMS(rows), 0);
    tensor_on(&k, &place, kv, BF16, 4, DIMS(1, rows, 1, N), 0);
    return ctxkv_store_run(store, &k.t, &k.t, 0, &slots, 1, 0) != CTXKV_OK;
}

static int own_plan(int index) {
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = d.num_kv_heads = 1;
    ctxkv_store *store;
    struct tensor kc, vc;
    const int64_t slots[] = {1, 99, 3, -1};
    const DLTensor *keys = cache_half(&kc, &place, storage[index], 0, 2, 4, 1, N, 8 * N);
    const DLTensor *values = cache_half(&vc, &place, storage[index], 1, 2, 4, 1, N, 8 * N);
    if (ctxkv_store_create(place.device, &d, &store)) return 1;
    int bad = ctxkv_store_bind_caches(store, &keys, &values, 1) != CTXKV_OK;
    bad |= run(store, slots, 4);
    ctxkv_faults faults;
    bad |= ctxkv_store_faults(store, &faults) != CTXKV_OK || faults.count != 1;
    bad |= faults.row != 1 || faults.value != 99;
    ctxkv_store_destroy(store);
    return bad;
}

static void *worker_main(void *argument) {
    int index = *(int *)argument;
    long bad = 0;
    for (int i = 0; i < ROUNDS; i++) {
        const int64_t slots[] = {index * 4, index * 4 + 1, 1000 + index};
        bad += own_device(index, i);
        bad += own_plan(index);
        bad += run(shared, slots, 3);
    }
    return (void *)bad;
}

static void all_at_once(void **state) {
    (void)state;
    struct tensor kc, vc;
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = d.num_kv_heads = 1;
    const DLTensor *keys = cache_half(&kc, &place, shared_storage, 0, 4, 16, 1, N, 32 * N);
    const DLTensor *values = cache_half(&vc, &place, shared_storage, 1, 4, 16, 1, N, 32 * N);
    assert_ok(ctxkv_store_create(place.device, &d, &shared));
    assert_ok(ctxkv_store_bind_caches(shared, &keys, &values, 1));
    pthread_t threads[THREADS];
    int index[THREADS];
    for (int i = 0; i < THREADS; i++) {
        index[i] = i;
        assert_int_equal(pthread_create(&threads[i], 0, worker_main, &index[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        assert_null(bad);
    }
    ctxkv_faults faults;
    assert_ok(ctxkv_store_faults(shared, &faults));
    assert_int_equal(faults.count, THREADS * ROUNDS); // none lost
    assert_int_equal(faults.row, 2);
    ctxkv_store_destroy(shared);
}

int main(void) {
    fill_bf16(kv, 4 * N, 1, 1.0f);
    place = place_open(3);
    const struct CMUnitTest tests[] = {cmocka_unit_test(all_at_once)};
    int failed = cmocka_run_group_tests(tests, 0, 0);
    place_close(&place);
    return failed;
}
