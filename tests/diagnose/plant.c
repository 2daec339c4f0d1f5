// SPDX-License-Identifier: Apache-2.0
// The chain once more, a value at a time and independent of ctxkv diagnose, with faults planted by
// name: plant MODEL CONTEXT OUT BLOCK_SIZE BLOCKS FILL TP_SIZE TP_RANK CACHE_TYPE [FAULT ...]
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generator.h"
#include "plant.h"

static char **faults;
static int fault_count;
static uint8_t asked[64];
io_draft draft;
static io_draft other;
io_context ctx;
int64_t L, T, H, D, dim;
static int64_t BS, NB, tp_size, tp_rank;
int muse, kind;

int on(const char *name) {
    for (int i = 0; i < fault_count; ++i) {
        if (strcmp(faults[i], name)) continue;
        asked[i] = 1;
        return 1;
    }
    return 0;
}

void die(const char *text) {
    fprintf(stderr, "plant: %s\n", text);
    exit(2);
}

float wide(uint16_t h) {
    uint32_t b = (uint32_t)h << 16;
    float x;
    memcpy(&x, &b, 4);
    return x;
}

float round16(float x) {
    return wide(ctxkv_bf16(x));
}

float at(const io_view *view, int64_t i) {
    float x;
    if (view->tensor.dtype.bits == 16) return wide(((const uint16_t *)view->tensor.data)[i]);
    memcpy(&x, (const char *)view->tensor.data + 4 * i, 4);
    return x;
}

int64_t layer_of(int64_t l, const char *first, const char *forward, const char *back) {
    if (on(first) || on("layer0_weights")) return 0;
    if (on(forward) || on("layers_rotated_forward")) return (l + 1) % L;
    if (on(back) || on("layers_rotated_back")) return (l + L - 1) % L;
    return l;
}

// ---- norms -------------------------------------------------------------------------------------
float tree(float *s, int n) {
    for (; n > 1; n /= 2)
        for (int i = 0; i < n / 2; ++i) s[i] += s[i + n / 2];
    return s[0];
}

static float adjacent(float *s, int n) {
    for (; n > 1; n /= 2)
        for (int i = 0; i < n / 2; ++i) s[i] = s[2 * i] + s[2 * i + 1];
    return s[0];
}

static float lane_sum(const float *v, int t, int contract) {
    float q[32], p[16], e[2][8], a = 0;
    for (int i = 0; i < 32; ++i) q[i] = v[t * 8 + i / 8 * 2048 + i % 8];
    if (on("order_thread_fma") || on("order_thread")) {
        for (int i = 0; i < 32; ++i) a = on("order_thread") ? a + q[i] * q[i] : fmaf(q[i], q[i], a);
        return a;
    }
    if (on("order_packed")) {
        for (int j = 0; j < 16; ++j) {
            float x = q[4 * (j / 2) + j % 2], y = q[4 * (j / 2) + 2 + j % 2];
            e[j % 2][j / 2] = contract ? fmaf(x, x, y * y) : x * x + y * y;
        }
        return adjacent(e[0], 8) + adjacent(e[1], 8);
    }
    for (int i = 0; i < 16; ++i) {
        p[i] = fmaf(q[2 * i], q[2 * i], q[2 * i + 1] * q[2 * i + 1]);
    }
    return adjacent(p, 16);
}

static float muse_sum(const float *v, int contract) {
    float lanes[256], warps[8], a = 0;
    if (on("order_row") || on("order_row_fma")) {
        for (int64_t i = 0; i < D; ++i) a = on("order_row") ? a + v[i] * v[i] : fmaf(v[i], v[i], a);
        return a;
    }
    for (int t = 0; t < 256; ++t) lanes[t] = lane_sum(v, t, contract);
    for (int w = 0; w < 8; ++w) warps[w] = tree(lanes + 32 * w, 32);
    return tree(warps, 8);
}

float rms_sum(const float *v, int64_t n, int64_t most) {
    int64_t threads = n / 8 < most ? n / 8 : most;
    float total = 0;
    for (int64_t w = 0; w * 32 < threads; ++w) {
        float lane[64] = {0};
        for (int64_t t = w * 32; t < w * 32 + 32 && t < threads; ++t)
            for (int64_t i = 0; i < n; ++i)
                if (i / 8 % threads == t) lane[t - w * 32] = fmaf(v[i], v[i], lane[t - w * 32]);
        // Lanes that are not there are zero, which adds nothing.
        for (int step = 1; step < 32; step *= 2)
            for (int i = 0; i < 32; i += 2 * step) lane[i] += lane[i + step];
        total = w ? total + lane[0] : lane[0];
    }
    return total;
}

float eps_of(const char *suffix) {
    static const struct {
        const char *name;
        float eps;
    } values[] = {{"eps_1e_5", 1e-5f}, {"eps_1e_6", 1e-6f}, {"eps_0", 0}};
    for (int i = 0; i < 3; ++i) {
        char name[32];
        snprintf(name, sizeof name, "%s_%s", values[i].name, suffix);
        if (on(values[i].name) || on(name)) return values[i].eps;
    }
    return draft.config.eps;
}

static void norm(float *v, const io_view *weight, const char *suffix) {
    char missing[48], twice[48], side[48], none[48];
    snprintf(missing, sizeof missing, "gain_centre_missing_%s", suffix);
    snprintf(twice, sizeof twice, "gain_centre_twice_%s", suffix);
    snprintf(side, sizeof side, "weight_side_%s", suffix);
    snprintf(none, sizeof none, "%s_weight_missing", suffix);
    float centre = draft.config.zero_centered ? 1 : 0;
    if (on("gain_centre_missing") || on(missing)) centre = 0;
    if (on("gain_centre_twice") || on(twice)) centre += 1;
    int weighted = weight && weight->tensor.data && !on(none);
    int input = on("weight_side") || on(side);
    float *g = malloc((size_t)D * sizeof *g);
    for (int64_t i = 0; i < D; ++i) {
        g[i] = weighted ? at(weight, i) + centre : 1;
        if (on("gain_in_bf16")) g[i] = round16(g[i]);
        if (weighted && input) v[i] *= g[i];
    }
    float r, eps = eps_of(suffix);
    if (muse) {
        int contract = weighted && (weight->tensor.dtype.bits == 32 || input);
        float mean = fmaf(muse_sum(v, contract), 1.0f / 8192, eps);
        r = on("norm_rsqrt_nearest")  ? (float)(1 / sqrt((double)mean))
            : on("norm_rsqrt_divide") ? 1 / sqrtf(mean)
                                      : ctxkv_rsqrt(mean, 1);
    } else {
        int large = (draft.config.family == IO_FAMILY_LAGUNA ? L * T : T) >= 256;
        if (on("order_rms_256")) large = 1;
        if (on("order_rms_1024")) large = 0;
        r = ctxkv_rsqrt(rms_sum(v, D, large ? 256 : 1024) / (float)D + eps, 0);
    }
    for (int64_t i = 0; i < D; ++i) {
        v[i] = r * v[i];
        if (weighted && !input) v[i] *= g[i];
    }
    free(g);
}

static void normed(int64_t l, int64_t t, uint16_t *out) {
    float *v = malloc((size_t)D * sizeof *v);
    for (int64_t i = 0; i < D; ++i) v[i] = wide(ctx.hidden[t * D + i]);
    int laguna = draft.config.family == IO_FAMILY_LAGUNA;
    if (!laguna && !on("hidden_norm_skipped")) norm(v, &draft.hidden, "hidden");
    for (int64_t i = 0; i < D && !on("hidden_norm_unrounded"); ++i) v[i] = round16(v[i]);
    int64_t from = layer_of(
        l, "layer0_norm_weight", "norm_weights_rotated_forward", "norm_weights_rotated_back");
    const io_view *weight = draft.layer_norms ? &draft.layer_norms[from] : NULL;
    if (on("hidden_weight_for_layers")) weight = &draft.hidden;
    if ((muse || laguna) && !on("layer_norm_skipped")) norm(v, weight, "layer");
    for (int64_t i = 0; i < D; ++i) out[i] = ctxkv_bf16(v[i]);
    free(v);
}

// ---- projection --------------------------------------------------------------------------------
static float part_sum(const uint16_t *x, const uint16_t *w, int64_t n) {
    float a = 0;
    for (int64_t k = 0; k < n; k += 16) a = ctxkv_mma16(x + k, w + k, a);
    return a;
}

static float dot(const uint16_t *x, const uint16_t *w) {
    float a = 0;
    double d = 0;
    for (int n = 2; n <= 8; ++n) {
        char name[48], bf16[48];
        snprintf(name, sizeof name, "split_k_%d", n);
        snprintf(bf16, sizeof bf16, "projection_bf16_parts_%d", n);
        if (!on(name) && !on(bf16)) continue;
        int64_t size = (D / 16 + n - 1) / n * 16;
        for (int64_t k = 0; k < D; k += size) {
            float p = part_sum(x + k, w + k, k + size < D ? size : D - k);
            a += on(bf16) ? round16(p) : p;
        }
        return a;
    }
    if (on("projection_fp32")) {
        for (int64_t k = 0; k < D; ++k) a = fmaf(wide(x[k]), wide(w[k]), a);
    } else if (on("projection_fp64")) {
        for (int64_t k = 0; k < D; ++k) d += (double)wide(x[k]) * (double)wide(w[k]);
        a = (float)d;
    } else if (on("projection_bf16_steps")) {
        for (int64_t k = 0; k < D; k += 16) a = round16(ctxkv_mma16(x + k, w + k, a));
    } else if (on("projection_bf16_terms")) {
        for (int64_t k = 0; k < D; ++k) a = round16(a + wide(x[k]) * wide(w[k]));
    } else {
        a = part_sum(x, w, D);
    }
    return a;
}

static const uint16_t *q_rows(int64_t l) {
    char name[96];
    io_error error;
    const io_tensor *tensor = NULL;
    const char *path;
    snprintf(name, sizeof name, "layers.%" PRId64 ".self_attn.q_proj.weight", l);
    io_checkpoint_find(&draft.checkpoint, name, &tensor, &path, &error);
    if (!tensor) die("no Q rows");
    return (const uint16_t *)tensor->data;
}

// The projection's output with its bias, as BF16.
static float projected(int64_t l, int part, int64_t n, float sum) {
    int after = draft.config.family == IO_FAMILY_LAGUNA;
    const io_view *bias = on("other_tp_rank") ? &other.bias : &draft.bias;
    if (on("bias_after_rounding")) after = 1;
    if (on("bias_before_rounding")) after = 0;
    if (draft.parts == 1 || on("v_of_k")) part = 0;
    if (!bias->tensor.data || on("bias_missing") || on(part ? "bias_missing_v" : "bias_missing_k"))
        return round16(sum);
    if (on("kv_bias_swapped")) part = 1 - part;
    if (on("layer0_bias") || on("layer0_weights")) l = 0;
    float b = at(bias, (draft.parts * l + part) * H * dim + n);
    return round16((after ? round16(sum) : sum) + b);
}

// One weight row, copied.
static void weight_row(int64_t layer, int part, int64_t n, uint16_t *w) {
    int64_t l = layer_of(
        layer, "layer0_kv_weight", "kv_weights_rotated_forward", "kv_weights_rotated_back");
    int64_t N = H * dim;
    const io_view *views = on("other_tp_rank") ? other.weights : draft.weights;
    if (on("kv_weights_swapped")) part = 1 - part;
    int64_t parts = draft.parts;
    if (on("v_of_k") || parts == 1) part = 0;
    const uint16_t *k = views[parts * l].tensor.data, *v = views[parts * l + parts - 1].tensor.data;
    const uint16_t *own = part ? v : k;
    for (int64_t i = 0; i < D; ++i) {
        int64_t flat = i * 2 * N + part * N + n;
        w[i] = own[n * D + i];
        if (on("weights_transposed")) w[i] = own[i * N + n];
        if (on("weights_transposed_stacked")) w[i] = flat < N * D ? k[flat] : v[flat - N * D];
        if (on("q_rows_for_kv")) w[i] = q_rows(l)[(part * N + n) * D + i];
        if (on("q_rows_for_k") && !part) w[i] = q_rows(l)[n * D + i];
    }
}

// Element offset of a row's head; -1: not written.
static int64_t offset_of(int64_t l, int64_t t, int64_t h) {
    static const int sizes[] = {1, 8, 16, 32, 64, 128, 256};
    int64_t R = ctx.slot_rows, size = BS, page = BS;
    if (t >= R || (on("stale_rows") && (t == 1 || (t == 2 && l)))) return -1;
    int64_t slot = ctx.slots[(ctx.slot_lists > 1 && !on("slots_layer0") ? l : 0) * R + t];
    if (slot < 0 && on("padding_to_last_slot"))
        slot = NB * BS + slot;
    else if (slot < 0 && !on("slots_plus_1_padding"))
        return -1;
    slot += on("slots_plus_1") + on("slots_plus_1_padding") - on("slots_minus_1");
    if (on("neighbour_slot") && t == 1) slot += 1;
    for (int i = 0; i < 9; ++i) {
        char name[32], shape[40];
        int s = i < 7 ? sizes[i] : i == 7 ? (int)BS / 2 : (int)BS * 2;
        if (i < 7)
            snprintf(name, sizeof name, "block_size_%d", s);
        else
            snprintf(name, sizeof name, "block_size_%s", i == 7 ? "half" : "double");
        snprintf(shape, sizeof shape, "%s_shape", name);
        if (on(name) || on(shape)) size = s;
        if (on(shape)) page = s;
    }
    if (slot < 0) return -1;
    int64_t block = slot / size, o = slot % size, cell = (block * H + h) * page + o;
    if (page == BS && block >= NB) return -1;
    if (on("heads_after_rows")) cell = (block * BS + o) * H + h;
    return cell < NB * H * BS ? cell * 2 * dim : -1;
}

static void compute(uint16_t *const *caches) {
    uint16_t *x = malloc((size_t)(T * D) * 2), *w = malloc((size_t)D * 2);
    float *kv = malloc((size_t)(T * H * 2 * dim) * sizeof *kv);
    for (int64_t l = 0; l < L; ++l) {
        for (int64_t t = 0; t < T; ++t) normed(l, t, x + t * D);
        for (int64_t i = 0; i < H * 2 * dim; ++i) {
            int64_t h = i / 2 / dim, part = i / dim % 2, n = h * dim + i % dim;
            weight_row(l, (int)part, n, w);
            for (int64_t t = 0; t < T; ++t)
                kv[t * H * 2 * dim + i] = projected(l, (int)part, n, dot(x + t * D, w));
        }
        for (int64_t t = 0; t < T; ++t)
            for (int64_t h = 0; h < H; ++h) {
                uint16_t cell[2 * MAX_DIM];
                int64_t to = offset_of(l, t, h);
                finish(l, t, kv + (t * H + h) * 2 * dim, cell);
                if (to >= 0) memcpy(caches[l] + to, cell, (size_t)dim * 4);
            }
    }
    free(x);
    free(w);
    free(kv);
}

// A file of caches filled as before the call: one value, or values of a seed ("random").
static void fill(uint16_t *cache, int64_t count, const char *how, uint64_t seed) {
    uint16_t value = (uint16_t)strtol(how, NULL, 16);
    if (!strcmp(how, "random"))
        io_fill_bf16(cache, (size_t)count, 900 + seed, 0, 1.0f);
    else
        for (int64_t i = 0; i < count; ++i) cache[i] = value;
}

// ---- rows on which a faulty rsqrt of the K norm shows at all
// ------------------------------------- For weights with one value in each K row. Bit 0: a
// correctly rounded rsqrt gives other bytes; bit 1: 1/sqrt gives other bytes than that.
static int rsqrt_shows(int64_t t) {
    uint16_t *x = malloc((size_t)D * 2);
    int shows = 0;
    for (int64_t l = 0; l < L; ++l) {
        const uint16_t *w = draft.weights[2 * l].tensor.data;
        float k[64], s[64];
        normed(l, t, x);
        for (int64_t i = 0; i < 64; ++i) {
            int64_t c = 0;
            while (c < D - 1 && !w[i * D + c]) ++c;
            k[i] = round16(wide(x[c]) * wide(w[i * D + c]));
            s[i] = k[i] * k[i];
        }
        float mean = fmaf(tree(s, 64), 1.0f / 64, draft.config.eps);
        float r[3] = {ctxkv_rsqrt(mean, 0), (float)(1 / sqrt((double)mean)), 1 / sqrtf(mean)};
        for (int i = 0; i < 64; ++i) {
            uint16_t y[3];
            for (int j = 0; j < 3; ++j) y[j] = ctxkv_bf16(k[i] * r[j]);
            shows |= (y[0] != y[1]) | (y[1] != y[2]) << 1;
        }
    }
    free(x);
    return shows;
}

// Whether the row's normed values differ under the fault; for the K norm's rsqrt see above.
static int norm_shows(int64_t t, char *fault) {
    size_t bytes = (size_t)D * 2;
    uint16_t *x = malloc(2 * bytes);
    normed(0, t, x);
    faults = &fault;
    fault_count = 1;
    normed(0, t, x + D);
    fault_count = 0;
    int shows = memcmp(x, x + D, bytes) != 0;
    free(x);
    return shows;
}

// A context whose rows show the faults, each in turn.
static int find_rows(const char *path, char **names, int count) {
    io_error error;
    uint16_t *hidden = malloc((size_t)(T * D) * 2);
    ctx.hidden = hidden;
    fault_count = 0;
    uint64_t seed = 7000;
    for (int64_t t = 0; t < T; ++t) {
        char *name = names[t % count];
        int shows = 0;
        while (!shows) {
            io_fill_bf16(hidden + t * D, (size_t)D, ++seed, 0, 1.0f);
            if (!strcmp(name, "k_norm_rsqrt_nearest"))
                shows = rsqrt_shows(t) & 1;
            else if (!strcmp(name, "k_norm_rsqrt_divide"))
                shows = rsqrt_shows(t) & 2;
            else
                shows = norm_shows(t, name);
            if (seed > 200000) die("no row found");
        }
    }
    io_entry entry = {"hidden_states", IO_BF16, 2, {T, D}, hidden};
    return io_safetensors_write(path, &entry, 1, NULL, NULL, &error) ? 0 : 2;
}

int main(int argc, char **argv) {
    io_error error;
    static const char *const kinds[] = {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2"};
    static const io_dtype dtypes[] = {IO_BF16, IO_F16, IO_F8_E4M3, IO_F8_E5M2};
    if (argc < 10) die("usage: plant MODEL CONTEXT OUT BLOCK_SIZE BLOCKS FILL TP_SIZE TP_RANK ...");
    faults = argv + 10;
    fault_count = argc - 10;
    while (strcmp(kinds[kind], argv[9])) ++kind;
    BS = atoll(argv[4]), NB = atoll(argv[5]), tp_size = atoll(argv[7]), tp_rank = atoll(argv[8]);
    if (!io_draft_open(&draft, argv[1], tp_size, tp_rank, &error) ||
        !io_draft_open(&other, argv[1], tp_size, (tp_rank + 1) % tp_size, &error) ||
        !io_context_open(&ctx, argv[2], &draft.config, &error)) {
        die(error.text);
    }
    muse = draft.config.family == IO_FAMILY_MUSE;
    L = draft.config.layers, T = ctx.rows, H = draft.kv_heads;
    D = draft.config.hidden_size, dim = draft.config.head_dim;
    if (on("find_rows")) return find_rows(argv[3], faults + 1, fault_count - 1);
    int64_t count = NB * H * BS * 2 * dim;
    uint16_t **caches = calloc((size_t)L, sizeof *caches);
    io_entry *entries = calloc((size_t)L, sizeof *entries);
    for (int64_t l = 0; l < L; ++l) {
        caches[l] = malloc((size_t)count * 2);
        fill(caches[l], count, argv[6], (uint64_t)l);
        entries[l] = (io_entry){
            .dtype = dtypes[kind], .rank = 4, .shape = {NB, H, BS, 2 * dim}, .data = caches[l]};
        snprintf(entries[l].name, sizeof entries[l].name, "kv_cache.%" PRId64, l);
    }
    if (!on("nothing_written")) compute(caches);
    for (int i = 0; i < fault_count; ++i) {
        if (!asked[i]) die(faults[i]);
    }
    for (int64_t l = 0; l < L && kind >= 2; ++l) // an FP8 value is a byte
        for (int64_t i = 0; i < count; ++i) ((uint8_t *)caches[l])[i] = (uint8_t)caches[l][i];
    if (!io_safetensors_write(argv[3], entries, (size_t)L, NULL, NULL, &error)) die(error.text);
    for (int64_t l = 0; l < L; ++l) free(caches[l]);
    free(caches);
    free(entries);
    io_context_close(&ctx);
    io_draft_close(&draft);
    io_draft_close(&other);
    return 0;
}
