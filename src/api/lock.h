// SPDX-License-Identifier: Apache-2.0
// A mutex that is free in a forked child, whoever held it in the parent: that thread is not there.
#ifndef CTXKV_API_LOCK_H
#define CTXKV_API_LOCK_H

#include <pthread.h>

// All zero is a lock that nobody holds.
struct ctxkv__lock {
    pthread_mutex_t mutex;
    _Atomic unsigned process; // that the mutex was made for; 0: none yet
};

// Names this process among its ancestors; never 0.
unsigned ctxkv__process(void);

void ctxkv__lock_take(struct ctxkv__lock *lock);
void ctxkv__lock_give(struct ctxkv__lock *lock);
void ctxkv__lock_destroy(struct ctxkv__lock *lock); // nobody holds it in this process

#endif
