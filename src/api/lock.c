// SPDX-License-Identifier: Apache-2.0
// Locks and forks: a count of the forks that led here says whether a mutex is this process's own.
#include "lock.h"

#include <sched.h>
#include <stdatomic.h>

// The lowest bit of a lock's process is set while its mutex is being made.
static _Atomic unsigned forks;

unsigned ctxkv__process(void) {
    return 2 * atomic_load_explicit(&forks, memory_order_relaxed) + 2;
}

static void in_child(void) {
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(0, 0, in_child);
}

static void own(struct ctxkv__lock *lock) {
    unsigned mine = ctxkv__process();
    for (;;) {
        unsigned owner = atomic_load_explicit(&lock->process, memory_order_acquire);
        if (owner == mine) return;
        if (owner == (mine | 1)) {
            sched_yield();
        } else if (atomic_compare_exchange_strong(&lock->process, &owner, mine | 1)) {
            pthread_mutex_init(&lock->mutex, 0);
            atomic_store_explicit(&lock->process, mine, memory_order_release);
            return;
        }
    }
}

void ctxkv__lock_take(struct ctxkv__lock *lock) {
    own(lock);
    pthread_mutex_lock(&lock->mutex);
}

void ctxkv__lock_give(struct ctxkv__lock *lock) {
    pthread_mutex_unlock(&lock->mutex);
}

void ctxkv__lock_destroy(struct ctxkv__lock *lock) {
    own(lock);
    pthread_mutex_destroy(&lock->mutex);
}
