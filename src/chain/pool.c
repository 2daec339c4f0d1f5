// SPDX-License-Identifier: Apache-2.0
// The thread pool: workers sleep between loops and take pieces by an atomic counter.
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "../api/lock.h"
#include "../ops/float_mode.h"

struct worker {
    struct ctxkv__pool *pool;
    pthread_t thread;
    int index;
};

struct ctxkv__pool {
    int threads;
    unsigned process; // a forked child has no workers: it runs loops alone
    size_t scratch_bytes;
    char *scratch;
    struct worker *workers;
    struct ctxkv__lock callers; // one loop at a time
    pthread_mutex_t lock;       // guards what follows, where workers take part
    pthread_cond_t start, done;
    uint64_t generation;
    int running;
    bool stop;
    ctxkv__loop_fn *fn;
    void *context;
    int64_t count, grain;
    _Atomic int64_t next;
};

static void take_pieces(struct ctxkv__pool *pool, int index) {
    void *scratch = pool->scratch + (size_t)index * pool->scratch_bytes;
    for (;;) {
        int64_t begin = atomic_fetch_add(&pool->next, pool->grain);
        if (begin >= pool->count) return;
        int64_t end = pool->count - begin < pool->grain ? pool->count : begin + pool->grain;
        pool->fn(pool->context, begin, end, index, scratch);
    }
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct ctxkv__pool *pool = worker->pool;
    uint64_t seen = 0;
    fesetenv(FE_DFL_ENV);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && pool->generation == seen)
            pthread_cond_wait(&pool->start, &pool->lock);
        if (pool->stop) break;
        seen = pool->generation;
        pthread_mutex_unlock(&pool->lock);
        take_pieces(pool, worker->index);
        pthread_mutex_lock(&pool->lock);
        if (--pool->running == 0) pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

struct ctxkv__pool *ctxkv__pool_create(int threads, size_t scratch_bytes) {
    struct ctxkv__pool *pool = calloc(1, sizeof *pool);
    if (!pool) return 0;
    pool->scratch_bytes = (scratch_bytes + 4095) / 4096 * 4096;
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    pool->scratch = aligned_alloc(4096, pool->scratch_bytes * (size_t)threads);
    if (!pool->workers || !pool->scratch) {
        free(pool->workers);
        free(pool->scratch);
        free(pool);
        return 0;
    }
    pool->process = ctxkv__process();
    pthread_mutex_init(&pool->lock, 0);
    pthread_cond_init(&pool->start, 0);
    pthread_cond_init(&pool->done, 0);
    for (pool->threads = 1; pool->threads < threads; pool->threads++) {
        struct worker *w = &pool->workers[pool->threads];
        w->pool = pool;
        w->index = pool->threads;
        if (pthread_create(&w->thread, 0, worker_main, w)) break;
    }
    return pool;
}

void ctxkv__pool_destroy(struct ctxkv__pool *pool) {
    if (!pool) return;
    if (pool->process == ctxkv__process()) {
        pthread_mutex_lock(&pool->lock);
        pool->stop = true;
        pthread_cond_broadcast(&pool->start);
        pthread_mutex_unlock(&pool->lock);
        for (int i = 1; i < pool->threads; i++) pthread_join(pool->workers[i].thread, 0);
        pthread_cond_destroy(&pool->start);
        pthread_cond_destroy(&pool->done);
        pthread_mutex_destroy(&pool->lock);
    }
    ctxkv__lock_destroy(&pool->callers);
    free(pool->workers);
    free(pool->scratch);
    free(pool);
}

int ctxkv__pool_threads(const struct ctxkv__pool *pool) {
    return pool->threads;
}

void ctxkv__pool_loop(
    struct ctxkv__pool *pool, int64_t count, int64_t grain, ctxkv__loop_fn *fn, void *context) {
    if (count <= 0) return;
    fenv_t mode;
    ctxkv__float_mode_enter(&mode);
    ctxkv__lock_take(&pool->callers);
    bool alone = pool->threads == 1 || count <= grain || pool->process != ctxkv__process();
    // Alone: no worker looks, and in a child one may have held the lock when it was cut off.
    if (!alone) pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->context = context;
    pool->count = count;
    pool->grain = grain;
    atomic_store(&pool->next, 0);
    if (!alone) {
        pool->running = pool->threads - 1;
        pool->generation++;
        pthread_cond_broadcast(&pool->start);
        pthread_mutex_unlock(&pool->lock);
    }
    take_pieces(pool, 0);
    if (!alone) {
        pthread_mutex_lock(&pool->lock);
        while (pool->running) pthread_cond_wait(&pool->done, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
    }
    ctxkv__lock_give(&pool->callers);
    ctxkv__float_mode_leave(&mode);
}
