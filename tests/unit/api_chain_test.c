// SPDX-License-Identifier: Apache-2.0
// ctxkv_chain: the same bits as the three plans, in any chunking and any batch, with any number of
// threads, in any floating-point mode of the caller, from eight threads, after a fork.
#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chain_scene.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

// The caches and faults of `rows` rows by the three plans, one thread.
struct truth {
    int64_t rows;
    uint16_t *storage;
    ctxkv_faults faults;
};

static struct truth truth_of(int64_t rows) {
    struct scene s;
    struct truth t = {.rows = rows};
    scene_new(&s, 1, rows);
    operands(&s, 0, rows);
    ctxkv_norms *norms;
    ctxkv_projection *projection;
    ctxkv_store *store;
    assert_ok(ctxkv_norms_create(s.place.device, &s.d.norms, &norms));
    assert_ok(ctxkv_projection_create(s.place.device, &s.d.projection, &projection));
    assert_ok(ctxkv_store_create(s.place.device, &s.d.store, &store));
    assert_ok(ctxkv_store_bind_caches(store, s.key_list, s.value_list, L));
    uint16_t *n = malloc((size_t)(L * rows * D) * 2), *kv = malloc((size_t)(L * rows * C) * 2);
    struct tensor nt, kvt, k, v;
    const int64_t shape[] = {L, rows, H, N}, strides[] = {rows * C, C, N, 1};
    assert_ok(ctxkv_norms_run(
        norms, &s.x.t, tensor_on(&nt, &s.place, n, BF16, 3, DIMS(L, rows, D), 0), 0));
    assert_ok(ctxkv_projection_run(
        projection, &nt.t, tensor_on(&kvt, &s.place, kv, BF16, 3, DIMS(L, rows, C), 0), 0));
    assert_ok(ctxkv_store_run(
        store, tensor_on(&k, &s.place, kv, BF16, 4, shape, strides),
        tensor_on(&v, &s.place, kv + C / 2, BF16, 4, shape, strides), &s.positions.t, s.slot_list,
        L, 0));
    assert_ok(ctxkv_store_faults(store, &t.faults));
    ctxkv_norms_destroy(norms);
    ctxkv_projection_destroy(projection);
    ctxkv_store_destroy(store);
    free(n);
    free(kv);
    t.storage = s.storage;
    place_close(&s.place);
    return t;
}

static void same(struct scene *s, ctxkv_chain *chain, const struct truth *t) {
    ctxkv_faults f;
    assert_memory_equal(s->storage, t->storage, sizeof(uint16_t) * L * STORAGE);
    assert_ok(ctxkv_chain_faults(chain, &f));
    assert_memory_equal(&f, &t->faults, sizeof f);
}

// Batch invariance: the rows one by one, and in batches of several sizes, leave the bits that all
// of them leave at once.
static void any_batch(void **state) {
    (void)state;
    static const int64_t batches[] = {1, 7, 64, 299};
    struct truth t = truth_of(MOST);
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        struct scene s;
        scene_new(&s, 2, MOST);
        ctxkv_chain *chain = chain_new(&s);
        for (int64_t first = 0; first < MOST; first += batches[i]) {
            int64_t rows = MOST - first < batches[i] ? MOST - first : batches[i];
            int64_t slots = MOST - 5 - first < rows ? MOST - 5 - first : rows;
            operands(&s, first, rows);
            // Layer 1 has slots for all rows but the last five of the whole.
            s.slot_list[1] = tensor_on(
                &s.slots[1], &s.place, slot_values[1] + first, I64, 1, DIMS(slots < 0 ? 0 : slots),
                0);
            assert_ok(ctxkv_chain_run(chain, &s.x.t, &s.positions.t, s.slot_list, L, 0));
        }
        assert_memory_equal(s.storage, t.storage, sizeof(uint16_t) * L * STORAGE);
        ctxkv_chain_destroy(chain);
        scene_free(&s);
    }
    free(t.storage);
}

static void separate_plans_and_threads(void **state) {
    (void)state;
    static const int64_t rows[] = {1, 2, 127, 128, 129, 255, 256, 257, MOST};
    static const int threads[] = {1, 2, 7};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct truth t = truth_of(rows[i]);
        for (int j = 0; j < 3; j++) {
            struct scene s;
            scene_new(&s, threads[j], j == 1 ? rows[i] : MOST);
            ctxkv_chain *chain = chain_new(&s);
            assert_ok(run(&s, chain, 0, rows[i]));
            same(&s, chain, &t);
            ctxkv_chain_destroy(chain);
            scene_free(&s);
        }
        free(t.storage);
    }
}

#if defined(__x86_64__)
// The norms alone, whose subnormal outputs the projection would hide; made and run as the caller
// is.
static ctxkv_status norms_of(struct scene *s, uint16_t *out) {
    ctxkv_norms *norms = 0;
    struct tensor x, n;
    ctxkv_status status = ctxkv_norms_create(s->place.device, &s->d.norms, &norms);
    if (!status)
        status = ctxkv_norms_run(
            norms, tensor_on(&x, &s->place, x_values, BF16, 2, DIMS(MOST, D), 0),
            tensor_on(&n, &s->place, out, BF16, 3, DIMS(L, MOST, D), 0), 0);
    ctxkv_norms_destroy(norms);
    return status;
}

// Creates and runs in a mode of the caller, which must still be in force after every call.
static void caller_modes(void **state) {
    (void)state;
    struct truth t = truth_of(MOST);
    static const unsigned modes[] = {0x8000, 0x0040, 0x8040, 0x6000,
                                     0x4000, 0x2000, 0xE040, 0xE000}; // FTZ, DAZ, rounding
    static uint16_t usual_norms[L * MOST * D], norms[L * MOST * D];
    float table_freq[N / 2], freq[N / 2];
    struct scene first;
    scene_new(&first, 1, MOST);
    assert_ok(norms_of(&first, usual_norms));
    scene_free(&first);
    assert_ok(ctxkv_rope_inv_freq(500000.0f, N, table_freq));
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        struct scene s;
        scene_new(&s, 2, MOST);
        unsigned usual = _mm_getcsr();
        _mm_setcsr(usual | modes[i]);
        ctxkv_chain *chain = 0;
        ctxkv_status status = ctxkv_chain_create(s.place.device, &s.d.chain, &chain);
        if (!status) status = ctxkv_chain_bind_caches(chain, s.key_list, s.value_list, L);
        if (!status) status = run(&s, chain, 0, MOST);
        if (!status) status = ctxkv_rope_inv_freq(500000.0f, N, freq);
        if (!status) status = norms_of(&s, norms);
        unsigned after = _mm_getcsr();
        _mm_setcsr(usual);
        assert_int_equal(status, CTXKV_OK);
        assert_int_equal(after & 0xFFC0, (usual | modes[i]) & 0xFFC0);
        assert_memory_equal(freq, table_freq, sizeof freq);
        assert_memory_equal(norms, usual_norms, sizeof norms);
        same(&s, chain, &t);
        ctxkv_chain_destroy(chain);
        scene_free(&s);
    }
    free(t.storage);
}

// Exceptions that the caller has unmasked are not raised by our arithmetic.
static void caller_traps(void **state) {
    (void)state;
    struct scene s;
    struct truth t = truth_of(MOST);
    scene_new(&s, 2, MOST);
    feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INEXACT);
    ctxkv_chain *chain = 0;
    ctxkv_status status = ctxkv_chain_create(s.place.device, &s.d.chain, &chain);
    if (!status) status = ctxkv_chain_bind_caches(chain, s.key_list, s.value_list, L);
    if (!status) status = run(&s, chain, 0, MOST);
    int enabled = fegetexcept();
    fedisableexcept(FE_ALL_EXCEPT);
    assert_int_equal(status, CTXKV_OK);
    assert_int_equal(enabled, FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INEXACT);
    same(&s, chain, &t);
    ctxkv_chain_destroy(chain);
    scene_free(&s);
    free(t.storage);
}
#endif

struct worker {
    struct scene *scene;
    ctxkv_chain *chain;
    int index, failures;
};

// Rows [index*16, +16) of the call again and again, with the plan's workspace or one's own.
static void *worker_main(void *argument) {
    struct worker *w = argument;
    int64_t first = w->index * 16;
    const int64_t *slots[L], counts[L] = {16, 16, 16};
    for (int l = 0; l < L; l++) slots[l] = slot_values[l] + first;
    ctxkv_chain_call call;
    ctxkv_chain_call_init(&call);
    call.x = x_values + first * D;
    call.x_row_stride = D;
    call.rows = 16;
    call.positions = position_values + first;
    call.slots = slots;
    call.slot_rows = counts;
    call.slot_count = L;
    size_t size = (ctxkv_chain_workspace_size(w->chain) + 255) / 256 * 256;
    void *own = aligned_alloc(256, size);
    for (int i = 0; i < 40; i++) {
        call.workspace = (i + w->index) % 2 ? own : 0;
        w->failures += ctxkv_chain_run_call(w->chain, &call) != CTXKV_OK;
    }
    free(own);
    return 0;
}

static void eight_threads(void **state) {
    (void)state;
    struct scene s, alone;
    scene_new(&s, 3, 16);
    scene_new(&alone, 1, 16);
    ctxkv_chain *chain = chain_new(&s), *one = chain_new(&alone);
    pthread_t threads[8];
    struct worker workers[8], single[8];
    for (int i = 0; i < 8; i++) {
        workers[i] = (struct worker){&s, chain, i, 0};
        assert_int_equal(pthread_create(&threads[i], 0, worker_main, &workers[i]), 0);
    }
    for (int i = 0; i < 8; i++) {
        pthread_join(threads[i], 0);
        assert_int_equal(workers[i].failures, 0);
        single[i] = (struct worker){&alone, one, i, 0};
        worker_main(&single[i]);
    }
    assert_memory_equal(s.storage, alone.storage, sizeof(uint16_t) * L * STORAGE);
    ctxkv_faults f, g;
    assert_ok(ctxkv_chain_faults(chain, &f));
    assert_ok(ctxkv_chain_faults(one, &g));
    assert_int_equal(f.count, g.count); // none lost
    assert_memory_equal(&f, &g, sizeof f);
    ctxkv_chain_destroy(chain);
    ctxkv_chain_destroy(one);
    scene_free(&s);
    scene_free(&alone);
}

// A forked child uses and destroys the parent's plan; the parent's goes on.
static void forked(void **state) {
    (void)state;
    struct truth t = truth_of(MOST);
    struct scene s;
    scene_new(&s, 4, MOST);
    ctxkv_chain *chain = chain_new(&s);
    assert_ok(run(&s, chain, 0, 20));
    ctxkv_faults f;
    assert_ok(ctxkv_chain_faults(chain, &f));
    fflush(0);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        memset(s.storage, POISON, sizeof(uint16_t) * L * STORAGE);
        int wrong = run(&s, chain, 0, MOST) != CTXKV_OK;
        wrong |= memcmp(s.storage, t.storage, sizeof(uint16_t) * L * STORAGE) != 0;
        ctxkv_chain_destroy(chain);
        place_close(&s.place);
        _exit(wrong);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    memset(s.storage, POISON, sizeof(uint16_t) * L * STORAGE);
    assert_ok(run(&s, chain, 0, MOST));
    same(&s, chain, &t);
    ctxkv_chain_destroy(chain);
    scene_free(&s);
    free(t.storage);
}

int main(void) {
    fill_inputs();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(separate_plans_and_threads),
        cmocka_unit_test(any_batch),
#if defined(__x86_64__)
        cmocka_unit_test(caller_modes),
        cmocka_unit_test(caller_traps),
#endif
        cmocka_unit_test(eight_threads),
        cmocka_unit_test(forked),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
