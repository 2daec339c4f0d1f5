// SPDX-License-Identifier: Apache-2.0
// Forks while other threads hold every lock of a plan and its device: the child computes, from two
// threads and on a device of its own, and gives the same bits; so does the parent.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checks.h"

#define D 64
#define L 2
#define N 64
#define ROWS 40
#define FORKS 120
#define STORAGE (48 * 2 * N)

static const struct place cpu;
static uint16_t x[ROWS * D], w[L * 2 * N * D], truth[L * STORAGE];
static int64_t slot[ROWS];
static atomic_bool stop;

static ctxkv_device *device_new(void) {
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.threads = 3;
    ctxkv_device *device;
    if (ctxkv_device_open("cpu", &options, &device)) die("%s", ctxkv_last_error());
    return device;
}

static ctxkv_chain *chain_new(ctxkv_device *device, uint16_t *storage) {
    struct chain_descs d;
    struct tensor wt, key[L], value[L];
    const DLTensor *weights = tensor_on(&wt, &cpu, w, BF16, 3, DIMS(L, 2 * N, D), 0);
    chain_descs_init(&d, D, L, 1, ROWS);
    d.norms.hidden.kind = d.norms.layer.kind = CTXKV_NORM_RMS;
    d.projection.weights = &weights;
    d.projection.weight_count = 1;
    ctxkv_chain *chain;
    const DLTensor *keys[L], *values[L];
    for (int l = 0; l < L; l++) {
        keys[l] = cache_half(&key[l], &cpu, storage + l * STORAGE, 0, 3, 16, 1, N, 16 * 2 * N);
        values[l] = cache_half(&value[l], &cpu, storage + l * STORAGE, 1, 3, 16, 1, N, 16 * 2 * N);
    }
    if (ctxkv_chain_create(device, &d.chain, &chain)) die("%s", ctxkv_last_error());
    if (ctxkv_chain_bind_caches(chain, keys, values, L)) die("%s", ctxkv_last_error());
    return chain;
}

static int run(ctxkv_chain *chain) {
    struct tensor xt, st;
    const DLTensor *slots = tensor_on(&st, &cpu, slot, I64, 1, DIMS(ROWS), 0);
    tensor_on(&xt, &cpu, x, BF16, 2, DIMS(ROWS, D), 0);
    return ctxkv_chain_run(chain, &xt.t, 0, &slots, 1, 0) != CTXKV_OK;
}

static void *run_on(void *chain) {
    ctxkv_faults faults;
    while (!atomic_load(&stop))
        if (run(chain) || ctxkv_chain_faults(chain, &faults)) die("%s", ctxkv_last_error());
    return 0;
}

static void *run_once(void *chain) {
    return run(chain) ? chain : 0;
}

static int child(ctxkv_device *device, ctxkv_chain *chain, uint16_t *storage) {
    alarm(60); // a lock that nobody gives back
    memset(storage, POISON, L * STORAGE * sizeof *storage);
    pthread_t other;
    void *wrong = chain;
    if (pthread_create(&other, 0, run_once, chain)) return 2;
    int bad = run(chain);
    pthread_join(other, &wrong);
    bad |= wrong != 0 || memcmp(storage, truth, sizeof truth) != 0;
    ctxkv_device *own = device_new();
    ctxkv_chain *fresh = chain_new(own, storage);
    memset(storage, POISON, L * STORAGE * sizeof *storage);
    bad |= run(fresh) || memcmp(storage, truth, sizeof truth) != 0;
    bad |= ctxkv_cuda_device_count() < 0;
    ctxkv_chain_destroy(fresh);
    ctxkv_device_close(own);
    ctxkv_chain_destroy(chain);
    ctxkv_device_close(device);
    return bad;
}

// Every other fork forks again: a lock made anew in the child is a parent's in the grandchild.
static int descendant(ctxkv_device *device, ctxkv_chain *chain, uint16_t *storage, bool twice) {
    if (!twice) return child(device, chain, storage);
    alarm(90);
    pthread_t other;
    if (run(chain) || pthread_create(&other, 0, run_on, chain)) return 3;
    pid_t pid = fork();
    if (pid == 0) _exit(child(device, chain, storage));
    int status = -1;
    waitpid(pid, &status, 0);
    return status != 0;
}

static void forks_amid_runs(void **state) {
    (void)state;
    uint16_t *storage = malloc(sizeof truth);
    memset(truth, POISON, sizeof truth);
    ctxkv_device *device = device_new();
    ctxkv_chain *chain = chain_new(device, truth);
    assert_int_equal(run(chain), 0);
    ctxkv_chain_destroy(chain);
    memset(storage, POISON, sizeof truth);
    chain = chain_new(device, storage);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], 0, run_on, chain), 0);
    fflush(0);
    for (int i = 0; i < FORKS; i++) {
        if (i % 3) usleep((useconds_t)(i * 7 % 100)); // at another moment of a run
        pid_t pid = fork();
        if (pid == 0) _exit(descendant(device, chain, storage, i % 2));
        int status = -1;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (status) fail_msg("fork %d: the child ended with %#x", i, (unsigned)status);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
    assert_memory_equal(storage, truth, sizeof truth);
    ctxkv_chain_destroy(chain);
    ctxkv_device_close(device);
    free(storage);
    printf("%d forks amid runs\n", FORKS);
}

int main(void) {
    fill_bf16(x, ROWS * D, 1, 1.0f);
    fill_bf16(w, L * 2 * N * D, 2, 1.0f);
    for (int i = 0; i < ROWS; i++) slot[i] = i % 7 ? i : 1000; // some faults
    const struct CMUnitTest tests[] = {cmocka_unit_test(forks_amid_runs)};
    return cmocka_run_group_tests(tests, 0, 0);
}
