// SPDX-License-Identifier: Apache-2.0
// A whole chain, every operand of it spread past 2^32 bytes: the caches of a compact twin, and not
// a byte elsewhere.
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "checks.h"

#define L 2
#define H 2
#define N 64
#define C (2 * H * N)
#define PAGE 2
#define MOST_T 131 // more than the CPU takes in one pass
#define MOST_D 8192
#define FAR_POSITION (INT64_C(1) << 26) // of 64 columns: 2^32 elements
#define WEIGHT_ROW ((INT64_C(1) << 24) + 16)
#define MAPS 16

static const struct draft {
    const char *name;
    int64_t hidden_size, rows, step;
    ctxkv_cache_type cache;
    bool family; // the Qwen3 family's options, else Muse Spark
} drafts[] = {
    {"Muse Spark", 8192, 3, (INT64_C(1) << 31) - 64, CTXKV_CACHE_BF16, false},
    {"Muse Spark", 8192, 3, (INT64_C(1) << 32) + 64, CTXKV_CACHE_BF16, false},
    {"Qwen3", 64, 3, INT64_C(1) << 32, CTXKV_CACHE_BF16, true},
    {"Qwen3, two passes", 64, MOST_T, (INT64_C(1) << 25) + 64, CTXKV_CACHE_BF16, true},
    {"Qwen3, FP8", 64, 3, (INT64_C(1) << 32) + 64, CTXKV_CACHE_FP8_E4M3, true},
    {"Qwen3, FP8, two passes", 64, MOST_T, (INT64_C(1) << 26) + 64, CTXKV_CACHE_FP8_E4M3, true},
};

static uint16_t x[MOST_T * MOST_D], hidden[MOST_D], layers[L * MOST_D], k_gain[L * N], bias[L * C];
static uint16_t weights[L * C * MOST_D];
static uint16_t table[MOST_T * N];
static struct place place;

// Address space without memory behind it until it is written, a small page at a time.
static struct map {
    char *data;
    size_t bytes;
} maps[MAPS];
static int map_count;

static char *sparse(int64_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *map = mmap(0, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (map == MAP_FAILED || map_count == MAPS) die("mmap of %lld bytes", (long long)bytes);
    madvise(map, (size_t)bytes, MADV_NOHUGEPAGE);
    maps[map_count++] = (struct map){map, (size_t)bytes};
    return map;
}
static void unmap_all(void) {
    while (map_count) map_count--, munmap(maps[map_count].data, maps[map_count].bytes);
}
// Whether no byte of the map is set: of the pages in memory, the rest was never touched.
static bool all_zero(const struct map *map) {
    static unsigned char in_memory[1 << 16];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), window = page * sizeof in_memory;
    for (size_t begin = 0; begin < map->bytes; begin += window) {
        size_t left = map->bytes - begin < window ? map->bytes - begin : window;
        if (mincore(map->data + begin, left, in_memory)) die("mincore");
        for (size_t p = 0; p * page < left; p++) {
            const char *at = map->data + begin + p * page;
            size_t bytes = left - p * page < page ? left - p * page : page;
            if (in_memory[p] & 1 && (at[0] || memcmp(at, at + 1, bytes - 1))) return false;
        }
    }
    return true;
}

// BF16 rows [layers, rows, columns] at those strides, in elements.
static char *spread(
    const uint16_t *near, int64_t layer_count, int64_t layer_stride, int64_t rows,
    int64_t row_stride, int64_t columns) {
    int64_t last = (layer_count - 1) * layer_stride + (rows - 1) * row_stride + columns;
    char *far = sparse(2 * last);
    for (int64_t l = 0; l < layer_count; l++)
        for (int64_t r = 0; r < rows; r++)
            memcpy(
                far + 2 * (l * layer_stride + r * row_stride), near + (l * rows + r) * columns,
                (size_t)columns * 2);
    return far;
}

// One chain of the draft and what a run of it needs; near or far.
struct side {
    struct tensor hidden, layer, k_gain, bias, weights, table, x, positions, slots[L];
    struct tensor keys[L], values[L];
    int64_t position[MOST_T], slot[L][MOST_T], x_row;
    int64_t cache_stride[4];
    struct map cache[L]; // K, then V, of each head
    ctxkv_chain *chain;
};

static ctxkv_chain *chain_of(const struct draft *draft, struct side *s) {
    struct chain_descs d;
    ctxkv_chain *chain;
    chain_descs_init(&d, draft->hidden_size, L, H, draft->rows);
    const DLTensor *layer = &s->layer.t, *w = &s->weights.t,
                   *tables[L] = {&s->table.t, &s->table.t};
    d.norms.hidden.kind = d.norms.layer.kind = draft->family ? CTXKV_NORM_RMS : CTXKV_NORM_ROW;
    d.norms.hidden_weight = &s->hidden.t;
    d.norms.layer_weights = &layer;
    d.norms.layer_weight_count = 1;
    d.projection.weights = &w;
    d.projection.weight_count = 1;
    d.projection.bias = &s->bias.t;
    d.store.rope = draft->family ? CTXKV_ROPE_NEOX : CTXKV_ROPE_GPTJ;
    d.store.cache_type = draft->cache;
    if (draft->family) {
        d.store.k_norm = CTXKV_K_NORM_RMS;
        d.store.k_norm_weight = &s->k_gain.t;
        d.store.layer_cos_sin = tables;
        d.store.layer_cos_sin_count = L;
    } else {
        d.store.cos_sin = &s->table.t;
    }
    assert_ok(ctxkv_chain_create(place.device, &d.chain, &chain));
    return chain;
}

static void bind_caches(const struct draft *draft, struct side *s, int64_t blocks) {
    enum type type = draft->cache == CTXKV_CACHE_BF16 ? BF16 : U8;
    int64_t size = type == BF16 ? 2 : 1;
    const DLTensor *keys[L], *values[L];
    for (int l = 0; l < L; l++) {
        s->cache[l] = (struct map){sparse(blocks * s->cache_stride[0] * size), 0};
        s->cache[l].bytes = maps[map_count - 1].bytes;
        char *k = s->cache[l].data;
        const int64_t *shape = DIMS(blocks, PAGE, H, N);
        keys[l] = tensor_on(&s->keys[l], &place, k, type, 4, shape, s->cache_stride);
        values[l] = tensor_on(&s->values[l], &place, k + N * size, type, 4, shape, s->cache_stride);
    }
    assert_ok(ctxkv_chain_bind_caches(s->chain, keys, values, L));
}

// far: every stride in steps; else row-major.
static void side_new(const struct draft *draft, struct side *s, bool far) {
    const int64_t D = draft->hidden_size, T = draft->rows, step = draft->step;
    const int64_t w_layer = far ? C * WEIGHT_ROW + step : C * D, w_row = far ? WEIGHT_ROW : D;
    const int64_t head = far ? step : 2 * N, rows = far ? FAR_POSITION + T : T;
    const int64_t blocks = (T + PAGE - 1) / PAGE + 1;
    memcpy(s->cache_stride, DIMS(PAGE * H * head, H * head, head, 1), sizeof s->cache_stride);
    s->x_row = far ? step : D;
    tensor_on(&s->hidden, &place, hidden, BF16, 1, DIMS(D), 0);
    char *data = spread(layers, L, far ? step : D, 1, 0, D);
    tensor_on(&s->layer, &place, data, BF16, 2, DIMS(L, D), DIMS(far ? step : D, 1));
    data = spread(k_gain, L, far ? step : N, 1, 0, N);
    tensor_on(&s->k_gain, &place, data, BF16, 2, DIMS(L, N), DIMS(far ? step : N, 1));
    data = spread(bias, L, far ? step : C, 1, 0, C);
    tensor_on(&s->bias, &place, data, BF16, 2, DIMS(L, C), DIMS(far ? step : C, 1));
    data = spread(weights, L, w_layer, C, w_row, D);
    tensor_on(&s->weights, &place, data, BF16, 3, DIMS(L, C, D), DIMS(w_layer, w_row, 1));
    data = spread(x, T, s->x_row, 1, 0, D);
    tensor_on(&s->x, &place, data, BF16, 2, DIMS(T, D), DIMS(s->x_row, 1));
    // Odd rows have their angles at the table's far end.
    data = sparse(rows * N * 2);
    for (int64_t t = 0; t < T; t++) {
        s->position[t] = t + (far && t % 2 ? FAR_POSITION : 0);
        memcpy(data + s->position[t] * N * 2, table + t * N, N * 2);
        for (int l = 0; l < L; l++) s->slot[l][t] = t == 1 + l ? -1 : blocks * PAGE - 1 - t - l;
    }
    tensor_on(&s->table, &place, data, BF16, 2, DIMS(rows, N), 0);
    tensor_on(&s->positions, &place, s->position, I64, 1, DIMS(T), 0);
    s->chain = chain_of(draft, s);
    bind_caches(draft, s, blocks);
}

// By tensors, or by raw addresses.
static void run(const struct draft *draft, struct side *s, bool raw) {
    const DLTensor *slots[L];
    const int64_t *lists[L], counts[L] = {draft->rows, draft->rows};
    for (int l = 0; l < L; l++) {
        slots[l] = tensor_on(&s->slots[l], &place, s->slot[l], I64, 1, DIMS(draft->rows), 0);
        lists[l] = s->slot[l];
    }
    if (!raw) {
        assert_ok(ctxkv_chain_run(s->chain, &s->x.t, &s->positions.t, slots, L, 0));
        return;
    }
    ctxkv_chain_call call;
    ctxkv_chain_call_init(&call);
    call.x = s->x.t.data;
    call.x_row_stride = s->x_row;
    call.rows = draft->rows;
    call.positions = s->position;
    call.slots = lists;
    call.slot_rows = counts;
    call.slot_count = L;
    assert_ok(ctxkv_chain_run_call(s->chain, &call));
}

// Takes what was stored out of the far caches, head by head; then nothing may be left.
static void compare(const struct draft *draft, const struct side *near, const struct side *far) {
    const int64_t size = draft->cache == CTXKV_CACHE_BF16 ? 2 : 1;
    static const char nothing[2 * N * 2];
    for (int l = 0; l < L; l++) {
        for (int64_t t = 0; t < draft->rows; t++)
            for (int h = 0; h < H && near->slot[l][t] >= 0; h++) {
                int64_t slot = near->slot[l][t], at[2];
                for (int i = 0; i < 2; i++) {
                    const int64_t *stride = i ? far->cache_stride : near->cache_stride;
                    at[i] = slot / PAGE * stride[0] + slot % PAGE * stride[1] + h * stride[2];
                }
                char *got = far->cache[l].data + at[1] * size;
                assert_memory_equal(got, near->cache[l].data + at[0] * size, 2 * N * size);
                assert_memory_not_equal(got, nothing, 2 * N * size);
                memset(got, 0, 2 * N * size);
            }
        assert_true(all_zero(&far->cache[l]));
    }
}

static void tier(uint32_t mask) {
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.cpu_mask = mask;
    options.threads = 2;
    assert_ok(ctxkv_device_open("cpu", &options, &place.device));
    for (size_t i = 0; i < sizeof drafts / sizeof *drafts; i++) {
        static struct side near, far;
        print_message("%s, step %lld\n", drafts[i].name, (long long)drafts[i].step);
        side_new(&drafts[i], &near, false);
        side_new(&drafts[i], &far, true);
        run(&drafts[i], &near, false);
        for (int raw = 0; raw < 2; raw++) {
            run(&drafts[i], &far, raw);
            compare(&drafts[i], &near, &far);
        }
        ctxkv_chain_destroy(near.chain);
        ctxkv_chain_destroy(far.chain);
        unmap_all();
    }
    ctxkv_device_close(place.device);
}

static void scalar(void **state) {
    (void)state;
    tier(CTXKV_CPU_SCALAR);
}
static void avx2(void **state) {
    (void)state;
    tier(CTXKV_CPU_SCALAR | CTXKV_CPU_AVX2);
}
static void best(void **state) {
    (void)state;
    tier(0);
}

int main(void) {
    fill_bf16(x, MOST_T * MOST_D, 1, 2.0f);
    fill_bf16(hidden, MOST_D, 2, 1.0f);
    fill_bf16(layers, L * MOST_D, 3, 1.0f);
    fill_bf16(k_gain, L * N, 4, 1.0f);
    fill_bf16(bias, L * C, 5, 1.0f);
    fill_bf16(weights, L * C * MOST_D, 6, 0.1f);
    fill_bf16(table, MOST_T * N, 7, 1.0f);
    // Sums so small that the vector tiers do them again, from the weights.
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        if (i / 64 % 51 == 50) weights[i] &= 0x807F;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scalar), cmocka_unit_test(avx2), cmocka_unit_test(best)};
    return cmocka_run_group_tests(tests, 0, 0);
}
