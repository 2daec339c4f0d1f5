// SPDX-License-Identifier: Apache-2.0
// Every allocation and every thread creation fails in its turn: a clear error or a working result,
// nothing leaked, nothing written in part. Linked with --wrap for each allocator.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "checks.h"

#define D 32
#define L 70 // more than what a run keeps on its stack
#define N 64
#define C (2 * N)
#define ROWS 3
#define STORAGE (16 * 2 * N)

static atomic_long calls, live;
static long fail_at = -1; // the number of the call that fails
static bool fail_on;      // and all after it
static bool counting;

static bool fails(void) {
    if (!counting) return false;
    long number = atomic_fetch_add(&calls, 1);
    return fail_at >= 0 && (number == fail_at || (fail_on && number > fail_at));
}

static void *note(void *address) {
    if (address && counting) atomic_fetch_add(&live, 1);
    return address;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
void __real_free(void *address);
int __real_pthread_create(
    pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument);

void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
char *__wrap_strdup(const char *text);
void __wrap_free(void *address);
int __wrap_pthread_create(
    pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument);

void *__wrap_malloc(size_t size) {
    return fails() ? 0 : note(__real_malloc(size));
}
void *__wrap_calloc(size_t count, size_t size) {
    return fails() ? 0 : note(__real_calloc(count, size));
}
void *__wrap_realloc(void *old, size_t size) {
    if (fails()) return 0;
    void *address = __real_realloc(old, size);
    return old ? address : note(address);
}
void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return fails() ? 0 : note(__real_aligned_alloc(alignment, size));
}
char *__wrap_strdup(const char *text) {
    return fails() ? 0 : note(__real_strdup(text));
}
void __wrap_free(void *address) {
    if (address && counting) atomic_fetch_sub(&live, 1);
    __real_free(address);
}
int __wrap_pthread_create(
    pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    return fails() ? 11 : __real_pthread_create(thread, attributes, start, argument);
}

static uint16_t x[ROWS * D], w[L * C * D], gains[(L + 1) * D], bias[L * C], k_gain[L * N];
static uint16_t cos_sin[8 * N], table[8 * N];
static int64_t positions[ROWS] = {0, 1, 2}, slot[ROWS] = {2, 0, 1};
static uint16_t storage[L][STORAGE], want[L][STORAGE];

struct parts {
    ctxkv_device *device;
    ctxkv_chain *chain;
    ctxkv_store *store;
};

static ctxkv_status plans(struct parts *p, const struct place *at) {
    struct tensor wt, ht, lt, bt, kt, ct;
    const DLTensor *weights, *layers;
    struct chain_descs d;
    chain_descs_init(&d, D, L, 1, ROWS);
    d.norms.hidden.kind = d.norms.layer.kind = CTXKV_NORM_RMS;
    d.norms.hidden_weight = tensor_on(&ht, at, gains, BF16, 1, DIMS(D), 0);
    layers = tensor_on(&lt, at, gains + D, BF16, 2, DIMS(L, D), 0);
    d.norms.layer_weights = &layers;
    d.norms.layer_weight_count = d.projection.weight_count = 1;
    weights = tensor_on(&wt, at, w, BF16, 3, DIMS(L, C, D), 0);
    d.projection.weights = &weights;
    d.projection.bias = tensor_on(&bt, at, bias, BF16, 2, DIMS(L, C), 0);
    d.store.k_norm = CTXKV_K_NORM_RMS;
    d.store.k_norm_weight = tensor_on(&kt, at, k_gain, BF16, 2, DIMS(L, N), 0);
    d.store.rope = CTXKV_ROPE_NEOX;
    d.store.cos_sin = tensor_on(&ct, at, cos_sin, BF16, 2, DIMS(8, N), 0);
    ctxkv_status status = ctxkv_chain_create(p->device, &d.chain, &p->chain);
    return status ? status : ctxkv_store_create(p->device, &d.store, &p->store);
}

static ctxkv_status work(struct parts *p) {
    static const struct place at;
    static struct tensor keys[L], values[L];
    static const DLTensor *key_list[L], *value_list[L], *slots[L];
    struct tensor xt, pt, st, tt, kt;
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.threads = 3;
    ctxkv_status status = ctxkv_device_open("cpu", &options, &p->device);
    if (!status) status = plans(p, &at);
    for (int l = 0; l < L; l++) {
        key_list[l] = cache_half(&keys[l], &at, storage[l], 0, 4, 4, 1, N, 4 * 2 * N);
        value_list[l] = cache_half(&values[l], &at, storage[l], 1, 4, 4, 1, N, 4 * 2 * N);
        slots[l] = tensor_on(&st, &at, slot, I64, 1, DIMS(ROWS), 0);
    }
    if (!status) status = ctxkv_chain_bind_caches(p->chain, key_list, value_list, L);
    if (!status) status = ctxkv_store_bind_caches(p->store, key_list, value_list, L);
    tensor_on(&xt, &at, x, BF16, 2, DIMS(ROWS, D), 0);
    tensor_on(&pt, &at, positions, I64, 1, DIMS(ROWS), 0);
    tensor_on(&kt, &at, w, BF16, 4, DIMS(L, ROWS, 1, N), 0);
    tensor_on(&tt, &at, table, BF16, 2, DIMS(8, N), 0);
    if (!status) status = ctxkv_store_run(p->store, &kt.t, &kt.t, &pt.t, slots, L, 0);
    if (!status) status = ctxkv_chain_run(p->chain, &xt.t, &pt.t, slots, L, 0);
    return status ? status : ctxkv_rope_table(10000.0f, N, 8, &tt.t);
}

static ctxkv_status scenario(void) {
    struct parts p = {0};
    atomic_store(&calls, 0);
    atomic_store(&live, 0);
    memset(storage, POISON, sizeof storage);
    counting = true;
    ctxkv_status status = work(&p);
    ctxkv_chain_destroy(p.chain);
    ctxkv_store_destroy(p.store);
    ctxkv_device_close(p.device);
    counting = false;
    return status;
}

static void each_in_turn(void **state) {
    (void)state;
    fail_at = -1;
    assert_int_equal(scenario(), CTXKV_OK);
    assert_int_equal(atomic_load(&live), 0);
    long total = atomic_load(&calls);
    memcpy(want, storage, sizeof want);
    assert_true(total > 15);
    for (int on = 0; on < 2; on++) {
        int refused = 0;
        for (fail_at = 0; fail_at < total; fail_at++) {
            fail_on = on;
            ctxkv_status status = scenario();
            if (atomic_load(&live)) fail_msg("call %ld failed: %ld leaked", fail_at, (long)live);
            if (status) {
                refused++;
                if (status != CTXKV_OUT_OF_MEMORY || !strstr(ctxkv_last_error(), "no memory for "))
                    fail_msg("call %ld failed: %d, %s", fail_at, status, ctxkv_last_error());
            } else { // a thread fewer
                assert_memory_equal(storage, want, sizeof want);
            }
        }
        // Only the two threads can be done without.
        if (on == 0) assert_int_equal(refused, total - 2);
        printf("%ld calls failed %s: %d refusals\n", total, on ? "from there on" : "once", refused);
    }
    fail_at = -1;
    assert_int_equal(scenario(), CTXKV_OK);
    assert_memory_equal(storage, want, sizeof want);
}

int main(void) {
    fill_bf16(x, ROWS * D, 1, 1.0f);
    fill_bf16(w, L * C * D, 2, 1.0f);
    fill_bf16(gains, (L + 1) * D, 3, 1.0f);
    fill_bf16(bias, L * C, 4, 1.0f);
    fill_bf16(k_gain, L * N, 5, 1.0f);
    fill_bf16(cos_sin, 8 * N, 6, 1.0f);
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_in_turn)};
    return cmocka_run_group_tests(tests, 0, 0);
}
