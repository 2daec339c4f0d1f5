// SPDX-License-Identifier: Apache-2.0
// The search for the smallest set of hypotheses that gives the recorded bytes: probes, then proof.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "diagnose.h"

#define PER_KIND 12 // probes of each kind: V and K, differing and equal
#define PROBES (4 * PER_KIND)
#define CONFIRM_SECONDS 10.0 // for further sets, after the first that is proved

typedef struct found_pair {
    int a, b;
} found_pair;

typedef struct search {
    const dg_call *call;
    dg_result *result;
    dg_worker **workers;
    dg_probe probes[PROBES];
    int probe_count;
    dg_strays strays;
    uint8_t *passed; // [instances]
    uint8_t *idle;   // [instances] they change no row of this call
    double *scores;  // [instances]
    pthread_mutex_t lock;
    found_pair *pairs;
    size_t pair_count, pair_room;
    bool no_memory;
    double proved_at;
    uint64_t done, total;
    const char *label;
} search;

// ---- instances ---------------------------------------------------------------------------------
static dg_params applied(const dg_call *call, dg_params p, int hypothesis, int32_t value) {
    dg_hypotheses[hypothesis].apply(&p, &call->facts, value);
    return p;
}

static bool known_params(const dg_result *result, const dg_call *call, const dg_params *p) {
    if (!memcmp(p, &call->base, sizeof *p)) return true;
    for (int i = 0; i < result->instance_count; ++i) {
        if (!memcmp(p, &result->instances[i].params, sizeof *p)) return true;
    }
    return false;
}

static bool make_instances(search *s) {
    const dg_call *call = s->call;
    dg_result *result = s->result;
    int ranks = call->ranks ? call->facts.tp_size : 0;
    result->instances = calloc((size_t)dg_hypothesis_count * 8 + 64, sizeof *result->instances);
    if (!result->instances) return false;
    for (int h = 0; h < dg_hypothesis_count; ++h) {
        int count = dg_hypotheses[h].count ? dg_hypotheses[h].count : ranks;
        for (int i = 0; i < count; ++i) {
            int32_t value = dg_hypotheses[h].first + i;
            dg_params p = applied(call, call->base, h, value);
            dg_normalise(call, &p);
            if (!dg_testable(call, &p) || known_params(result, call, &p)) continue;
            result->instances[result->instance_count++] = (dg_instance){h, value, p};
        }
    }
    return true;
}

// The parameters of two hypotheses together; false when they are about the same thing.
static bool combine(const search *s, int a, int b, dg_params *p) {
    const dg_call *call = s->call;
    const dg_instance *x = &s->result->instances[a], *y = &s->result->instances[b];
    if (x->hypothesis == y->hypothesis) return false;
    dg_params one = applied(call, call->base, x->hypothesis, x->value);
    dg_params two = applied(call, call->base, y->hypothesis, y->value);
    one = applied(call, one, y->hypothesis, y->value);
    two = applied(call, two, x->hypothesis, x->value);
    dg_normalise(call, &one);
    dg_normalise(call, &two);
    *p = one;
    return !memcmp(&one, &two, sizeof one) && dg_testable(call, p) &&
           !known_params(s->result, call, p);
}

// ---- probes ------------------------------------------------------------------------------------
static uint64_t scatter(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    return (x ^ x >> 27) * 0x94D049BB133111EBu;
}

typedef struct pick {
    dg_probe probe;
    uint64_t key;
} pick;

static void offer(pick *kind, const dg_probe *probe, uint64_t key) {
    int worst = 0;
    for (int i = 1; i < PER_KIND; ++i) {
        if (kind[i].key > kind[worst].key) worst = i;
    }
    if (key < kind[worst].key) kind[worst] = (pick){*probe, key};
}

// Some cells that differ from the chain without a fault and some that do not, of K and of V. V
// comes first: it takes the projection only.
static void make_probes(search *s) {
    const dg_call *call = s->call;
    const dg_content *base = &s->result->base;
    pick kinds[4][PER_KIND];
    memset(kinds, -1, sizeof kinds);
    int64_t rows = call->L * call->T;
    for (int64_t i = 0; i < rows * call->H * 2; ++i) {
        dg_probe probe = {
            i / 2 / call->H / call->T, i / 2 / call->H % call->T, i / 2 % call->H, (int)(i % 2)};
        if (!base->computed[i / 2 / call->H]) continue;
        int64_t cell = dg_cell(call, &call->base.place, probe.layer, probe.row, probe.head);
        if (cell < 0) continue;
        const uint16_t *want = dg_content_cell(call, base, probe.layer, probe.row, probe.head);
        const uint8_t *got = dg_recorded(call, probe.layer, cell);
        size_t bytes = (size_t)call->dim * 2;
        bool same = !memcmp(want + probe.part * call->dim, got + (size_t)probe.part * bytes, bytes);
        offer(kinds[(1 - probe.part) * 2 + same], &probe, scatter((uint64_t)i) >> 1);
    }
    for (int i = 0; i < PER_KIND; ++i) {
        for (int kind = 0; kind < 4; ++kind) {
            if (kinds[kind][i].key == UINT64_MAX) continue;
            s->probes[s->probe_count++] = kinds[kind][i].probe;
        }
    }
}

static bool find_strays(search *s) {
    const dg_call *call = s->call;
    if (!call->before && !call->fill_known) return true;
    uint8_t *named = malloc((size_t)call->cells + 1);
    bool ok = named != NULL;
    for (int64_t l = 0; ok && l < call->L; ++l) {
        memset(named, 0, (size_t)call->cells);
        for (int64_t i = 0; i < call->T * call->H; ++i) {
            int64_t cell = dg_cell(call, &call->base.place, l, i / call->H, i % call->H);
            if (cell >= 0) named[cell] = 1;
        }
        for (int64_t cell = 0; cell < call->cells && s->strays.count < DG_STRAYS; ++cell) {
            if (named[cell] || dg_untouched(call, l, cell)) continue;
            s->strays.layer[s->strays.count] = l;
            s->strays.cell[s->strays.count++] = cell;
        }
    }
    free(named);
    return ok;
}

static bool all_hold(const search *s, dg_worker *w, const dg_params *p) {
    if (!dg_strays_explained(s->call, p, &s->strays)) return false;
    for (int i = 0; i < s->probe_count; ++i) {
        if (!dg_probe_holds(w, p, &s->probes[i])) return false;
    }
    return true;
}

static void tick(search *s) {
    pthread_mutex_lock(&s->lock);
    cli_progress((void *)s->label, ++s->done, s->total);
    pthread_mutex_unlock(&s->lock);
}

static void single_work(dg_worker *w, void *user, int64_t index) {
    search *s = user;
    s->passed[index] = all_hold(s, w, &s->result->instances[index].params);
    tick(s);
}

static void score_work(dg_worker *w, void *user, int64_t index) {
    search *s = user;
    int holds = 0;
    for (int i = 0; i < s->probe_count; ++i)
        holds += dg_probe_holds(w, &s->result->instances[index].params, &s->probes[i]);
    s->scores[index] = s->probe_count ? (double)holds / s->probe_count : 0.0;
    tick(s);
}

static void add_pair(search *s, int a, int b) {
    pthread_mutex_lock(&s->lock);
    if (s->pair_count == s->pair_room) {
        size_t room = s->pair_room ? 2 * s->pair_room : 64;
        found_pair *larger = realloc(s->pairs, room * sizeof *larger);
        if (larger) s->pairs = larger, s->pair_room = room;
        s->no_memory |= !larger;
    }
    if (s->pair_count < s->pair_room) s->pairs[s->pair_count++] = (found_pair){a, b};
    pthread_mutex_unlock(&s->lock);
}

// All pairs whose first member is the instance.
static void pair_work(dg_worker *w, void *user, int64_t index) {
    search *s = user;
    for (int b = (int)index + 1; b < s->result->instance_count && !s->idle[index]; ++b) {
        dg_params p;
        if (!s->idle[b] && combine(s, (int)index, b, &p) && all_hold(s, w, &p))
            add_pair(s, (int)index, b);
    }
    tick(s);
}

static void begin(search *s, const char *label) {
    s->label = label;
    s->done = 0;
    s->total = (uint64_t)s->result->instance_count;
}

// ---- proof -------------------------------------------------------------------------------------
static double share(const dg_set *set) {
    return set->match.places ? (double)set->match.matched / (double)set->match.places : 0.0;
}

static void keep_closest(dg_result *result, dg_set *set) {
    int at = result->closest_count;
    while (at > 0 && share(set) > share(&result->closest[at - 1])) --at;
    if (at >= 3) {
        free(set->positions);
        return;
    }
    if (result->closest_count == 3)
        free(result->closest[2].positions);
    else
        ++result->closest_count;
    for (int i = result->closest_count - 1; i > at; --i)
        result->closest[i] = result->closest[i - 1];
    result->closest[at] = *set;
}

static bool seen(const dg_result *result, const dg_params *p) {
    for (int i = 0; i < result->exact_count; ++i) {
        if (!memcmp(p, &result->exact[i].params, sizeof *p)) return true;
    }
    return false;
}

static bool changes_nothing(const search *s, const dg_set *set, const dg_content *content) {
    const dg_call *call = s->call;
    const dg_content *base = &s->result->base;
    size_t rows = (size_t)(call->L * call->T);
    return set->match.differs && set->match.elements == s->result->clean.elements &&
           !memcmp(&set->params.place, &call->base.place, sizeof set->params.place) &&
           !memcmp(content->computed, base->computed, rows) &&
           !memcmp(content->cells, base->cells, rows * (size_t)(call->H * call->dim) * 4);
}

// Compares all rows; false only when memory is out.
static bool prove(search *s, dg_set *set) {
    dg_result *result = s->result;
    dg_content content;
    if (result->exact_count == DG_LISTED || seen(result, &set->params)) return true;
    if (result->exact_count && cli_now() - s->proved_at > CONFIRM_SECONDS) return true;
    if (!dg_content_make(s->call, s->workers, &set->params, &result->base, &content)) return false;
    bool ok = dg_compare(s->call, &set->params, &content, &set->match);
    if (set->count == 1) s->idle[set->member[0]] = changes_nothing(s, set, &content);
    set->positions = content.positions;
    content.positions = NULL;
    dg_content_free(&content);
    if (!ok) return false;
    // Where nothing is known of untouched places, a chain that writes nothing proves nothing.
    bool enough = set->match.matched * 2 >= result->clean.places;
    if (set->match.differs || !enough) {
        keep_closest(result, set);
        return true;
    }
    if (!result->exact_count) s->proved_at = cli_now();
    result->exact[result->exact_count++] = *set;
    return true;
}

static bool prove_single(search *s, int a) {
    dg_set set = {.count = 1, .member = {a}, .params = s->result->instances[a].params};
    return prove(s, &set);
}

static bool try_singles(search *s) {
    begin(s, "trying hypotheses");
    dg_each(s->call, s->workers, s->result->instance_count, single_work, s);
    for (int i = 0; i < s->result->instance_count; ++i) {
        if (s->passed[i] && !prove_single(s, i)) return false;
    }
    return true;
}

static int by_members(const void *a, const void *b) {
    const found_pair *x = a, *y = b;
    return x->a != y->a ? x->a - y->a : x->b - y->b;
}

static bool try_pairs(search *s) {
    begin(s, "trying pairs");
    int count = s->result->instance_count;
    s->result->tried_pairs = count * (count - 1) / 2;
    dg_each(s->call, s->workers, count, pair_work, s);
    if (s->no_memory) cli_fail("out of memory for the pairs");
    if (s->no_memory) return false;
    if (s->pair_count) qsort(s->pairs, s->pair_count, sizeof *s->pairs, by_members);
    double start = cli_now();
    for (size_t i = 0; i < s->pair_count; ++i) {
        dg_set set = {.count = 2, .member = {s->pairs[i].a, s->pairs[i].b}};
        combine(s, s->pairs[i].a, s->pairs[i].b, &set.params);
        if (!prove(s, &set)) return false;
        if (i > 64 && cli_now() - start > 6 * CONFIRM_SECONDS) break;
    }
    return true;
}

// Nothing is exact: the singles that most probes speak for are compared on all rows.
static bool find_closest(search *s) {
    dg_result *result = s->result;
    begin(s, "looking for the closest");
    dg_each(s->call, s->workers, result->instance_count, score_work, s);
    for (int turn = 0; turn < 3; ++turn) {
        int best = -1;
        for (int i = 0; i < result->instance_count; ++i) {
            if (s->passed[i] || s->scores[i] < 0) continue;
            if (best < 0 || s->scores[i] > s->scores[best]) best = i;
        }
        if (best < 0) break;
        s->scores[best] = -1.0;
        if (!prove_single(s, best)) return false;
    }
    double clean =
        result->clean.places ? (double)result->clean.matched / (double)result->clean.places : 0.0;
    while (result->closest_count && share(&result->closest[result->closest_count - 1]) <= clean)
        free(result->closest[--result->closest_count].positions);
    return true;
}

static bool run(search *s) {
    dg_result *result = s->result;
    if (!dg_content_make(s->call, s->workers, &s->call->base, NULL, &result->base) ||
        !dg_compare(s->call, &s->call->base, &result->base, &result->clean)) {
        return false;
    }
    if (!result->clean.differs) return true;
    bool ok = make_instances(s);
    s->passed = calloc((size_t)result->instance_count + 1, sizeof *s->passed);
    s->idle = calloc((size_t)result->instance_count + 1, sizeof *s->idle);
    s->scores = calloc((size_t)result->instance_count + 1, sizeof *s->scores);
    if (!ok || !s->passed || !s->idle || !s->scores || !find_strays(s)) {
        cli_fail("out of memory for the hypotheses");
        return false;
    }
    make_probes(s);
    ok = try_singles(s);
    if (ok && !result->exact_count) ok = try_pairs(s);
    if (ok && !result->exact_count) return find_closest(s);
    while (result->closest_count) free(result->closest[--result->closest_count].positions);
    return ok;
}

bool dg_search(const dg_call *call, dg_result *result) {
    double start = cli_now();
    search s = {.call = call, .result = result};
    bool ok = true;
    s.workers = calloc((size_t)call->threads, sizeof *s.workers);
    for (int i = 0; i < call->threads && ok; ++i) {
        if (s.workers) s.workers[i] = dg_worker_make(call);
        ok = s.workers && s.workers[i];
    }
    if (!ok) cli_fail("out of memory for %d threads", call->threads);
    pthread_mutex_init(&s.lock, NULL);
    ok = ok && run(&s);
    pthread_mutex_destroy(&s.lock);
    cli_progress_clear();
    for (int i = 0; s.workers && i < call->threads; ++i) dg_worker_free(s.workers[i]);
    free(s.workers);
    free(s.passed);
    free(s.idle);
    free(s.scores);
    free(s.pairs);
    result->seconds = cli_now() - start;
    return ok;
}

void dg_result_free(dg_result *result) {
    for (int i = 0; i < result->exact_count; ++i) free(result->exact[i].positions);
    for (int i = 0; i < result->closest_count; ++i) free(result->closest[i].positions);
    free(result->instances);
    dg_content_free(&result->base);
    *result = (dg_result){0};
}
