// SPDX-License-Identifier: Apache-2.0
// ctxkv_chain: refusals; and the same bits as the three plans, in any chunking and any batch, with
// any number of threads, in any floating-point mode of the caller, from eight threads, after a
// fork.
#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checks.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define D 64
#define L 3
#define H 2
#define N 64
#define C (2 * H * N)
#define MOST 300
#define PAGE 16
#define BLOCKS 20
#define STORAGE (BLOCKS * H * PAGE * 2 * N)

static uint16_t x_values[MOST * D], w_values[L * C * D], gain_values[(L + 1) * D], b_values[L * C];
static uint16_t table_values[64 * N], k_gains[L * 128];
static int64_t position_values[MOST], slot_values[L][MOST];
static const ctxkv_status bad = CTXKV_INVALID_ARGUMENT;

// Everything that a chain is made of and runs on.
struct scene {
    struct place place;
    struct tensor w, hidden, layer, bias, table, k_gain, x, positions, slots[L], keys[L], values[L];
    const DLTensor *w_list[1], *layer_list[1], *slot_list[L], *key_list[L], *value_list[L];
    ctxkv_norms_desc n;
    ctxkv_projection_desc p;
    ctxkv_store_desc s;
    ctxkv_chain_desc d;
    uint16_t *storage; // [L, STORAGE]
};

static void fill_inputs(void) {
    fill_bf16(x_values, MOST * D, 21, 1.0f);
    fill_bf16(w_values, L * C * D, 22, 1.0f);
    fill_bf16(gain_values, (L + 1) * D, 23, 0.5f);
    fill_bf16(b_values, L * C, 24, 0.5f);
    fill_bf16(table_values, 64 * N, 25, 1.0f);
    fill_bf16(k_gains, L * 128, 26, 1.0f);
    // Subnormal and tiny operands, which a flushing mode would lose.
    for (int i = 0; i < D; i++) x_values[2 * D + i] = (uint16_t)(0x0001 + i);
    for (int i = 0; i < D; i += 3) gain_values[i] = 0x0040, b_values[i] = 0x0013;
    for (int t = 0; t < MOST; t++) {
        position_values[t] = t % 67; // now and then past the table
        for (int l = 0; l < L; l++)
            slot_values[l][t] = t % 11 == l ? -1 : (t * 7 + l) % (BLOCKS * PAGE + 1);
    }
}

static void scene_new(struct scene *s, int threads, int64_t max_rows) {
    memset(s, 0, sizeof *s);
    s->place = place_open(threads);
    const struct place *at = &s->place;
    s->storage = poison_image(sizeof(uint16_t) * L * STORAGE);
    s->w_list[0] = tensor_on(&s->w, at, w_values, BF16, 3, DIMS(L, C, D), 0);
    s->layer_list[0] = tensor_on(&s->layer, at, gain_values + D, BF16, 2, DIMS(L, D), 0);
    ctxkv_norms_desc_init(&s->n);
    s->n.hidden_size = D;
    s->n.num_layers = L;
    s->n.hidden.kind = s->n.layer.kind = CTXKV_NORM_RMS;
    s->n.layer.gain_centre = 0.1f; // not exact in BF16: the sum depends on the rounding mode
    s->n.hidden_weight = tensor_on(&s->hidden, at, gain_values, BF16, 1, DIMS(D), 0);
    s->n.layer_weights = s->layer_list;
    s->n.layer_weight_count = 1;
    ctxkv_projection_desc_init(&s->p);
    s->p.hidden_size = D;
    s->p.num_layers = L;
    s->p.num_kv_heads = H;
    s->p.weights = s->w_list;
    s->p.weight_count = 1;
    s->p.bias = tensor_on(&s->bias, at, b_values, BF16, 2, DIMS(L, C), 0);
    ctxkv_store_desc_init(&s->s);
    s->s.num_layers = L;
    s->s.num_kv_heads = H;
    s->s.k_norm = CTXKV_K_NORM_RMS;
    s->s.k_norm_weight = tensor_on(&s->k_gain, at, k_gains, BF16, 2, DIMS(L, N), 0);
    s->s.rope = CTXKV_ROPE_NEOX;
    s->s.cos_sin = tensor_on(&s->table, at, table_values, BF16, 2, DIMS(64, N), 0);
    ctxkv_chain_desc_init(&s->d);
    s->d.norms = &s->n;
    s->d.projection = &s->p;
    s->d.store = &s->s;
    s->d.max_rows = max_rows;
    for (int l = 0; l < L; l++) {
        uint16_t *data = s->storage + l * STORAGE;
        s->key_list[l] = cache_half(&s->keys[l], at, data, 0, BLOCKS, PAGE, H, N, H * PAGE * 2 * N);
        s->value_list[l] =
            cache_half(&s->values[l], at, data, 1, BLOCKS, PAGE, H, N, H * PAGE * 2 * N);
    }
}

// Operands of rows first .. first + rows; layer 1 has five slots fewer.
static void operands(struct scene *s, int64_t first, int64_t rows) {
    tensor_on(&s->x, &s->place, x_values + first * D, BF16, 2, DIMS(rows, D), 0);
    tensor_on(&s->positions, &s->place, position_values + first, I64, 1, DIMS(rows), 0);
    for (int l = 0; l < L; l++) {
        int64_t count = l == 1 && rows > 5 ? rows - 5 : rows;
        s->slot_list[l] =
            tensor_on(&s->slots[l], &s->place, slot_values[l] + first, I64, 1, DIMS(count), 0);
    }
}

static void scene_free(struct scene *s) {
    free(s->storage);
    place_close(&s->place);
}

static ctxkv_chain *chain_new(struct scene *s) {
    ctxkv_chain *chain;
    assert_ok(ctxkv_chain_create(s->place.device, &s->d, &chain));
    assert_ok(ctxkv_chain_bind_caches(chain, s->key_list, s->value_list, L));
    return chain;
}

static ctxkv_status run(struct scene *s, ctxkv_chain *chain, int64_t first, int64_t rows) {
    operands(s, first, rows);
    return ctxkv_chain_run(chain, &s->x.t, &s->positions.t, s->slot_list, L, 0);
}

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
    assert_ok(ctxkv_norms_create(s.place.device, &s.n, &norms));
    assert_ok(ctxkv_projection_create(s.place.device, &s.p, &projection));
    assert_ok(ctxkv_store_create(s.place.device, &s.s, &store));
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
    ctxkv_status status = ctxkv_norms_create(s->place.device, &s->n, &norms);
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
        ctxkv_status status = ctxkv_chain_create(s.place.device, &s.d, &chain);
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
    ctxkv_status status = ctxkv_chain_create(s.place.device, &s.d, &chain);
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

static bool untouched(const struct scene *s) {
    for (int i = 0; i < L * STORAGE; i++)
        if (s->storage[i] != 0x5A5A) return false;
    return true;
}

static void refused_parts(void **state) {
    (void)state;
    struct scene s;
    scene_new(&s, 1, MOST);
    ctxkv_chain *chain;
#define REFUSE(change, status, text)                                                               \
    do {                                                                                           \
        struct scene good = s;                                                                     \
        change;                                                                                    \
        chain = (ctxkv_chain *)&chain;                                                             \
        assert_refused(ctxkv_chain_create(s.place.device, &s.d, &chain), status, text);            \
        assert_null(chain);                                                                        \
        s = good;                                                                                  \
    } while (0)
    REFUSE(s.d.size = 1, bad, "desc->size is 1, must be at least");
    REFUSE(s.d.norms = 0, bad, "desc->norms is NULL");
    REFUSE(s.d.projection = 0, bad, "desc->projection is NULL");
    REFUSE(s.d.store = 0, bad, "desc->store is NULL");
    REFUSE(s.d.max_rows = 0, bad, "max_rows is 0, must be in 1..");
    REFUSE(s.d.max_rows = INT64_MAX, bad, "max_rows is 9223372036854775807, must be in 1..");
    REFUSE(s.d.max_rows = INT64_MAX / 4096, bad, "max_rows is 2251799813685247, too large");
    REFUSE(s.n.hidden_size = 68, bad, "hidden_size is 68, must be a multiple of 8");
    REFUSE(s.p.head_dim = 63, bad, "head_dim is 63");
    REFUSE(s.s.rotary_dim = 3, bad, "rotary_dim is 3");
    REFUSE(
        (s.n.num_layers = 2, s.layer.shape[0] = 2), bad,
        "projection.num_layers is 3, must equal norms.num_layers (2)");
    REFUSE(
        (s.s.num_layers = 2, s.k_gain.shape[0] = 2), bad,
        "store.num_layers is 2, must equal norms.num_layers (3)");
    REFUSE(
        s.s.num_kv_heads = 1, bad,
        "store.num_kv_heads is 1, must equal projection.num_kv_heads (2)");
    REFUSE(
        (s.s.head_dim = 128, s.s.rotary_dim = 64, s.k_gain.shape[1] = 128, s.k_gain.shape[0] = L),
        bad, "store.head_dim is 128, must equal projection.head_dim (64)");
    assert_refused(ctxkv_chain_create(0, &s.d, &chain), bad, "device is NULL");
    assert_refused(ctxkv_chain_create(s.place.device, 0, &chain), bad, "desc is NULL");
    assert_refused(ctxkv_chain_create(s.place.device, &s.d, 0), bad, "chain is NULL");
    scene_free(&s);
}

static void refused_runs(void **state) {
    (void)state;
    struct scene s;
    scene_new(&s, 1, 8);
    ctxkv_chain *chain;
    assert_ok(ctxkv_chain_create(s.place.device, &s.d, &chain));
    assert_refused(run(&s, chain, 0, 4), CTXKV_NOT_BOUND, "ctxkv_chain_bind_caches first");
    assert_ok(ctxkv_chain_bind_caches(chain, s.key_list, s.value_list, L));
    assert_refused(run(&s, chain, 0, 9), bad, "rows is 9, must be in 0..8");
    operands(&s, 0, 4);
#define RUN(x, p, slots, count) ctxkv_chain_run(chain, x, p, slots, count, 0)
    assert_refused(RUN(0, &s.positions.t, s.slot_list, L), bad, "x is NULL");
    assert_refused(RUN(&s.x.t, 0, s.slot_list, L), bad, "positions is NULL");
    assert_refused(RUN(&s.x.t, &s.positions.t, 0, L), bad, "slots is NULL");
    assert_refused(RUN(&s.x.t, &s.positions.t, s.slot_list, 2), bad, "slot_count is 2, must be 1");
    s.x.shape[1] = D - 1;
    assert_refused(RUN(&s.x.t, &s.positions.t, s.slot_list, L), bad, "x has shape [4, 63]");
    s.x.shape[1] = D;
    s.slots[2].shape[0] = 5;
    assert_refused(RUN(&s.x.t, &s.positions.t, s.slot_list, L), bad, "slots[2] has 5 rows");
    assert_refused(ctxkv_chain_faults(chain, 0), bad, "faults is NULL");
    assert_refused(
        ctxkv_chain_bind_caches(chain, s.key_list, s.value_list, 1), bad, "count is 1, must be");
    assert_true(untouched(&s));
    assert_ok(run(&s, chain, 0, 4));
    assert_false(untouched(&s));
    ctxkv_chain_destroy(chain);
    scene_free(&s);
}

static void refused_raw_calls(void **state) {
    (void)state;
    struct scene s;
    scene_new(&s, 1, 8);
    ctxkv_chain *chain = chain_new(&s);
    int64_t lengths[L] = {4, 4, 4};
    const int64_t *slots[L] = {slot_values[0], slot_values[1], slot_values[2]};
    ctxkv_chain_call good, c;
    ctxkv_chain_call_init(&good);
    assert_int_equal(good.size, sizeof good);
    good.x = x_values;
    good.x_row_stride = D;
    good.rows = 4;
    good.positions = position_values;
    good.slots = slots;
    good.slot_rows = lengths;
    good.slot_count = L;
#define CALL_REFUSED(change, text)                                                                 \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        assert_refused(ctxkv_chain_run_call(chain, &c), bad, text);                                \
        assert_true(untouched(&s));                                                                \
    } while (0)
    CALL_REFUSED(c.size = 4, "call->size is 4, must be at least");
    CALL_REFUSED(c.x = 0, "x is NULL");
    CALL_REFUSED(c.rows = -1, "rows is -1, must be in 0..8");
    CALL_REFUSED(c.rows = 9, "rows is 9, must be in 0..8");
    CALL_REFUSED(c.positions = 0, "positions is NULL");
    CALL_REFUSED(
        c.positions = (const int64_t *)(const void *)((const char *)position_values + 4),
        "positions lies at address");
    CALL_REFUSED(c.slots = 0, "slots is NULL");
    CALL_REFUSED(c.slot_rows = 0, "slot_rows is NULL");
    CALL_REFUSED(c.slot_count = 0, "slot_count is 0, must be 1 or the number of layers (3)");
    CALL_REFUSED(c.slot_count = -7, "slot_count is -7, must be 1");
    CALL_REFUSED(
        c.workspace = (char *)s.storage + 8 - (uintptr_t)s.storage % 8,
        "workspace lies at address");
    CALL_REFUSED(c.rows = 3, "slots[0] has 4 rows, must have 0..3 (T)");
    lengths[1] = -1;
    CALL_REFUSED(c = good, "slots[1] has -1 rows, must have 0..4 (T)");
    lengths[1] = 4;
    assert_refused(ctxkv_chain_run_call(chain, 0), bad, "call is NULL");
    c = good;
    c.rows = 0;
    c.x = 0;
    memset(lengths, 0, sizeof lengths);
    assert_ok(ctxkv_chain_run_call(chain, &c));
    assert_true(untouched(&s));
    assert_true(ctxkv_chain_workspace_size(chain) >= 8 * (L * D + L * C) * 2);
    assert_true(ctxkv_chain_memory(chain) >= ctxkv_chain_workspace_size(chain));
    ctxkv_chain_destroy(chain);
    scene_free(&s);
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
        cmocka_unit_test(refused_parts),
        cmocka_unit_test(refused_runs),
        cmocka_unit_test(refused_raw_calls),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
