// SPDX-License-Identifier: Apache-2.0
// One digest of every op on tame and hostile inputs, per CPU tier; all must be the committed one.
// usage: ctxkv_digest [FILE]: without FILE it is printed, for scripts/matrix
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

#define N 64
#define MAX_COUNT (4 * 9 * 8192)

static struct place place;
static uint64_t digest;

static void add(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        digest = (digest ^ ((const unsigned char *)data)[i]) * UINT64_C(1099511628211);
}

static void must(ctxkv_status status) {
    if (status) die("digest");
}

// kind 0: tame; 1: any bits, NaN and infinities among them; 2: subnormals and zeros.
static void fill(uint16_t *values, size_t count, uint64_t seed, int kind) {
    fill_bf16(values, count, seed, 1.0f);
    for (size_t i = 0; i < count; i++) {
        uint64_t z = test_mix(seed + 99, i);
        if (kind == 1 && z % 64 == 0) values[i] = (uint16_t)(z >> 20);
        if (kind == 2 && z % 2) values[i] = (uint16_t)(z >> 20) & 0x80FF;
    }
}

static uint16_t x[MAX_COUNT], out[3 * MAX_COUNT], gains[4 * 8192];

static void norms(int64_t d, ctxkv_norm_kind kind, ctxkv_numerics numerics, int input, int noise) {
    enum { T = 9, L = 2 };
    struct tensor h, l, xt, dt;
    ctxkv_norms_desc n;
    ctxkv_norms_desc_init(&n);
    fill(x, (size_t)(T * d), 1, noise);
    fill(gains, (size_t)(3 * d), 2, noise == 1 ? 0 : noise);
    n.hidden_size = d;
    n.num_layers = L;
    n.hidden.kind = n.layer.kind = kind;
    n.layer.input_scale = input;
    n.hidden.gain_centre = 1.0f;
    n.numerics = numerics;
    n.hidden_weight = tensor_on(&h, &place, gains, BF16, 1, DIMS(d), 0);
    const DLTensor *list = tensor_on(&l, &place, gains + d, BF16, 2, DIMS(L, d), 0);
    n.layer_weights = &list;
    n.layer_weight_count = 1;
    ctxkv_norms *plan;
    must(ctxkv_norms_create(place.device, &n, &plan));
    must(ctxkv_norms_run(
        plan, tensor_on(&xt, &place, x, BF16, 2, DIMS(T, d), 0),
        tensor_on(&dt, &place, out, BF16, 3, DIMS(L, T, d), 0), 0));
    add(out, (size_t)(L * T * d) * 2);
    ctxkv_norms_destroy(plan);
}

static void projection(int64_t d, int noise) {
    enum { T = 13, L = 2, C = 2 * N };
    static uint16_t w[L * C * 1024], bias[L * C];
    struct tensor wt, bt, xt, dt;
    ctxkv_projection_desc p;
    ctxkv_projection_desc_init(&p);
    fill(x, (size_t)(L * T * d), 3, noise);
    fill(w, (size_t)(L * C * d), 4, noise);
    fill(bias, L * C, 5, 0);
    p.hidden_size = d;
    p.num_layers = L;
    p.num_kv_heads = 1;
    const DLTensor *list = tensor_on(&wt, &place, w, BF16, 3, DIMS(L, C, d), 0);
    p.weights = &list;
    p.weight_count = 1;
    p.bias = tensor_on(&bt, &place, bias, BF16, 2, DIMS(L, C), 0);
    ctxkv_projection *plan;
    must(ctxkv_projection_create(place.device, &p, &plan));
    must(ctxkv_projection_run(
        plan, tensor_on(&xt, &place, x, BF16, 3, DIMS(L, T, d), 0),
        tensor_on(&dt, &place, out, BF16, 3, DIMS(L, T, C), 0), 0));
    add(out, L * T * C * 2);
    ctxkv_projection_destroy(plan);
}

static void store(int64_t n, ctxkv_k_norm k_norm, ctxkv_rope rope, float eps, int noise) {
    enum { T = 40, L = 2, H = 3, P = 64 };
    static uint16_t table[P * 512], gain[L * 512], cache[L * T * H * 2 * 512];
    int64_t positions[T], slots[T];
    struct tensor ct, gt, kt, vt, pt, st, keys[L], values[L];
    const DLTensor *key_list[L], *value_list[L];
    struct tensor tt;
    must(ctxkv_rope_table(500000.0f, n, P, tensor_on(&tt, &place, table, BF16, 2, DIMS(P, n), 0)));
    fill(x, (size_t)(L * T * H * n * 2), 6, noise);
    fill(gain, (size_t)(L * n), 7, 0);
    memset(cache, POISON, sizeof cache);
    for (int t = 0; t < T; t++) positions[t] = (t * 5) % P, slots[t] = t % 9 ? (t * 7) % T : -1;
    ctxkv_store_desc s;
    ctxkv_store_desc_init(&s);
    s.num_layers = L;
    s.num_kv_heads = H;
    s.head_dim = n;
    s.k_norm = k_norm;
    s.k_eps = eps;
    s.rope = rope;
    if (k_norm == CTXKV_K_NORM_RMS)
        s.k_norm_weight = tensor_on(&gt, &place, gain, BF16, 2, DIMS(L, n), 0);
    if (rope) s.cos_sin = tensor_on(&ct, &place, table, BF16, 2, DIMS(P, n), 0);
    for (int l = 0; l < L; l++) {
        uint16_t *at = cache + l * T * H * 2 * n;
        key_list[l] = cache_half(&keys[l], &place, at, 0, T / 8, 8, H, n, 8 * H * 2 * n);
        value_list[l] = cache_half(&values[l], &place, at, 1, T / 8, 8, H, n, 8 * H * 2 * n);
    }
    ctxkv_store *plan;
    const DLTensor *slot = tensor_on(&st, &place, slots, I64, 1, DIMS(T), 0);
    must(ctxkv_store_create(place.device, &s, &plan));
    must(ctxkv_store_bind_caches(plan, key_list, value_list, L));
    must(ctxkv_store_run(
        plan, tensor_on(&kt, &place, x, BF16, 4, DIMS(L, T, H, n), 0),
        tensor_on(&vt, &place, x + L * T * H * n, BF16, 4, DIMS(L, T, H, n), 0),
        tensor_on(&pt, &place, positions, I64, 1, DIMS(T), 0), &slot, 1, 0));
    add(cache, sizeof cache);
    ctxkv_store_destroy(plan);
}

static void values(void) {
    for (uint32_t i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)test_mix(8, i);
        float in, result;
        uint16_t a[16], b[16];
        memcpy(&in, &bits, 4);
        result = ctxkv_rsqrt(in, i & 1);
        add(&result, 4);
        if (i % 32) continue;
        fill(a, 16, i, i % 3);
        fill(b, 16, i + 1, i % 3);
        result = ctxkv_mma16(a, b, in);
        add(&result, 4);
    }
}

static uint64_t digest_of(uint32_t tier) {
    ctxkv_device_options options;
    ctxkv_device_options_init(&options);
    options.threads = 2;
    options.cpu_mask = tier;
    must(ctxkv_device_open("cpu", &options, &place.device));
    digest = UINT64_C(1469598103934665603);
    for (int noise = 0; noise < 3; noise++) {
        for (int input = 0; input < 2; input++) {
            norms(8192, CTXKV_NORM_ROW, CTXKV_NUMERICS_PAIR, input, noise);
            norms(8192, CTXKV_NORM_ROW, CTXKV_NUMERICS_PACKED, input, noise);
        }
        norms(8192, CTXKV_NORM_RMS, CTXKV_NUMERICS_STOCK, 0, noise);
        norms(2560, CTXKV_NORM_RMS, CTXKV_NUMERICS_INVARIANT, 0, noise);
        norms(72, CTXKV_NORM_RMS, CTXKV_NUMERICS_STOCK, 0, noise);
        projection(1024, noise);
        projection(48, noise);
        for (int r = 0; r < 3; r++) {
            store(64, CTXKV_K_NORM_PLAIN, (ctxkv_rope)r, 0.0f, noise);
            store(64, CTXKV_K_NORM_RMS, (ctxkv_rope)r, 1e-6f, noise);
            store(128, CTXKV_K_NORM_RMS, (ctxkv_rope)r, 1e-6f, noise);
            store(512, CTXKV_K_NORM_ABSENT, (ctxkv_rope)r, 1e-6f, noise);
        }
    }
    values();
    ctxkv_device_close(place.device);
    return digest;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        uint32_t mask;
    } tiers[] = {
        {"scalar", CTXKV_CPU_SCALAR},
        {"avx2", CTXKV_CPU_SCALAR | CTXKV_CPU_AVX2},
        {"avx512", CTXKV_CPU_SCALAR | CTXKV_CPU_AVX2 | CTXKV_CPU_AVX512}};
    char want[32] = "", got[32];
    FILE *file = argc > 1 ? fopen(argv[1], "r") : 0;
    if (argc > 1 && (!file || !fgets(want, sizeof want, file))) die("%s", argv[1]);
    if (file) fclose(file);
    int bad = 0;
    for (size_t i = 0; i < 3; i++) { // a tier that the CPU lacks runs the best below it
        snprintf(got, sizeof got, "%016" PRIx64 "\n", digest_of(tiers[i].mask));
        if (!*want) strcpy(want, got);
        printf("%s %s", tiers[i].name, got);
        bad |= strcmp(got, want);
    }
    if (bad) printf("must be %s", want);
    return bad != 0;
}
