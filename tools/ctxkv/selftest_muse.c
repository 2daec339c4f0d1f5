// SPDX-License-Identifier: Apache-2.0
// The golden cases of Muse Spark: norms.csv, store.csv, chain.csv.
#include <string.h>

#include "generator.h"
#include "selftest.h"

static float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static void scale_row(uint16_t *row, int64_t width, float factor) {
    for (int64_t i = 0; i < width; ++i) row[i] = io_bf16(from_bf16(row[i]) * factor);
}

static void set_row(uint16_t *row, int64_t width, int64_t step, uint16_t value) {
    for (int64_t i = 0; i < width; i += step) row[i] = value;
}

// 2^-133 is the BF16 subnormal with bits 1.
static void special_norm_rows(uint16_t *x, int64_t rows, int64_t width) {
    for (int64_t t = 0; t < rows && t < 8; ++t) {
        uint16_t *row = x + t * width;
        switch (t) {
        case 0:
            set_row(row, width, 1, 0);
            break;
        case 1:
            set_row(row, width, 1, io_bf16(3.0e38f));
            break;
        case 2:
            row[17] = 0x7F80;
            break;
        case 3:
            row[4099] = 0x7FC0;
            break;
        case 4:
            scale_row(row, width, 0x1p-120f);
            break;
        case 5:
            set_row(row, width, 1, 1);
            break;
        case 6:
            set_row(row, width, 2, 0x8000);
            break;
        default:
            scale_row(row, width, 0x1p60f);
        }
    }
}

static void special_store_rows(uint16_t *kv, int64_t layers, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < layers * rows; ++i) {
        uint16_t *row = kv + i * width;
        switch (i % rows) {
        case 0:
            set_row(row, width, 1, 0);
            break;
        case 1:
            scale_row(row, width, 0x1p-70f);
            break;
        case 2:
            row[3] = 0x7F80;
            break;
        case 3:
            row[5] = 0x7FC0;
            break;
        case 4:
            set_row(row, width, 1, io_bf16(3.0e38f));
            break;
        case 5:
            set_row(row, width, 3, 0x8000);
            break;
        case 6:
            set_row(row, width, 1, 1);
            break;
        default:
            break;
        }
    }
}

typedef struct norm_case {
    cli_tensor x, hidden, layer, out;
    const DLTensor *layers[1];
    ctxkv_norms_desc desc;
} norm_case;

static bool is_input(char kind) {
    return kind == 'B' || kind == 'F';
}

// The stock column is that of sm_90, whatever this device's own stock is.
static ctxkv_numerics stock_sm90(const selftest *st) {
    return st->place.info.cuda_arch >= 100 ? CTXKV_NUMERICS_PAIR : CTXKV_NUMERICS_STOCK;
}

static bool make_norms(selftest *st, const st_row *row, norm_case *it) {
    uint64_t seed = (uint64_t)row->seed;
    uint16_t *x = st_bf16(st, (size_t)(row->T * row->D), seed, 1.0f);
    if (x && row->special) special_norm_rows(x, row->T, row->D);
    const int64_t layers[2] = {row->L, row->D};
    if (!x || !st_input(st, &it->x, x, CLI_BF16, 2, (int64_t[]){row->T, row->D}) ||
        !st_gain(st, &it->hidden, row->hidden, 1, &row->D, seed + 1, row->hidden_gain) ||
        !st_gain(st, &it->layer, row->layer, 2, layers, seed + 2, row->layer_gain) ||
        !st_output(st, &it->out, CLI_BF16, 3, (int64_t[]){row->L, row->T, row->D})) {
        return false;
    }
    ctxkv_norms_desc_init(&it->desc);
    it->desc.hidden_size = row->D;
    it->desc.num_layers = row->L;
    it->desc.hidden =
        (ctxkv_norm){CTXKV_NORM_ROW, row->hidden_eps, row->hidden_gain, is_input(row->hidden)};
    it->desc.layer =
        (ctxkv_norm){CTXKV_NORM_ROW, row->layer_eps, row->layer_gain, is_input(row->layer)};
    it->layers[0] = &it->layer.tensor;
    if (row->hidden != 'n') it->desc.hidden_weight = &it->hidden.tensor;
    if (row->layer != 'n') {
        it->desc.layer_weights = it->layers;
        it->desc.layer_weight_count = 1;
    }
    it->desc.numerics = stock_sm90(st);
    return true;
}

static void check_norms(
    selftest *st, const st_row *row, norm_case *it, const char *what, uint32_t want) {
    ctxkv_norms *plan = NULL;
    uint32_t crc;
    bool ok = !ctxkv_norms_create(st->place.device, &it->desc, &plan) &&
              !ctxkv_norms_run(plan, &it->x.tensor, &it->out.tensor, NULL) &&
              cli_sync(&st->place) &&
              st_crc(st, it->out.tensor.data, (size_t)(row->L * row->T * row->D) * 2, &crc);
    if (ok) {
        st_check(st, row->name, what, crc, want);
    } else {
        st_broken(st, row->name, 1);
    }
    ctxkv_norms_destroy(plan);
}

static void finish(selftest *st, const char *table, size_t done, size_t total) {
    char label[48];
    snprintf(label, sizeof label, "%s %s", st->label, table);
    cli_place_reset(&st->place);
    cli_place_reset(&st->host);
    cli_progress(label, done, total);
}

bool st_norms(selftest *st, const io_csv *csv) {
    static const char *const integers[] = {"T", "L", "seed", "special", NULL};
    static const char *const numbers[] = {
        "hidden_eps", "layer_eps", "hidden_gain", "layer_gain", NULL};
    for (size_t i = 0; i < csv->rows; ++i) {
        st_row row;
        norm_case it;
        if (!st_read(csv, i, integers, numbers, &row)) return false;
        if (!make_norms(st, &row, &it)) return false;
        check_norms(st, &row, &it, "stock on sm_90", row.crc[0]);
        it.desc.numerics = CTXKV_NUMERICS_PACKED;
        check_norms(st, &row, &it, "packed", row.crc[1]);
        finish(st, csv->path, i + 1, csv->rows);
    }
    return true;
}

// ---- store -------------------------------------------------------------------------------------
static void describe_store(const st_row *row, const cli_tensor *table, ctxkv_store_desc *desc) {
    ctxkv_store_desc_init(desc);
    desc->num_layers = row->L;
    desc->num_kv_heads = row->H;
    desc->head_dim = row->dim;
    desc->k_norm = CTXKV_K_NORM_PLAIN;
    desc->k_eps = row->k_eps;
    desc->rope = row->rope ? CTXKV_ROPE_GPTJ : CTXKV_ROPE_NONE;
    desc->cos_sin = row->rope ? &table->tensor : NULL;
}

static bool store_case(selftest *st, const st_row *row) {
    cli_tensor k, v, positions, table, slots[ST_MAX_LAYERS];
    const DLTensor *lists[ST_MAX_LAYERS];
    cli_caches caches;
    uint64_t seed = (uint64_t)row->seed;
    int64_t width = 2 * row->H * row->dim;
    uint16_t *kv = st_bf16(st, (size_t)(row->L * row->T * width), seed, 4.0f);
    uint16_t *cs = st_bf16(st, (size_t)(row->max_position * row->dim), seed + 2, 1.0f);
    if (!kv || !cs) return false;
    if (row->special) special_store_rows(kv, row->L, row->T, width);
    const int64_t shape[4] = {row->L, row->T, row->H, row->dim};
    const int64_t strides[4] = {row->T * width, width, row->dim, 1};
    if (!st_input(st, &k, kv, CLI_BF16, 3, (int64_t[]){row->L, row->T, width}) ||
        !st_input(st, &table, cs, CLI_BF16, 2, (int64_t[]){row->max_position, row->dim}) ||
        !st_positions(st, &positions, row->T, seed + 1, row->max_position) ||
        !st_slots(st, slots, lists, row->L, row->R, seed, row->num_blocks * row->block_size) ||
        !cli_caches_make(
            &caches, &st->place, row->L, row->num_blocks, row->H, row->block_size, row->dim,
            0x5A)) {
        return false;
    }
    const uint16_t *data = k.tensor.data;
    cli_tensor_set(&k, &st->place, data, CLI_BF16, 4, shape);
    cli_tensor_set(&v, &st->place, data + row->H * row->dim, CLI_BF16, 4, shape);
    memcpy(k.strides, strides, sizeof strides);
    memcpy(v.strides, strides, sizeof strides);
    ctxkv_store_desc desc;
    describe_store(row, &table, &desc);
    ctxkv_store *plan = NULL;
    bool ok = !ctxkv_store_create(st->place.device, &desc, &plan) &&
              !ctxkv_store_bind_caches(plan, caches.keys, caches.values, row->L) &&
              !ctxkv_store_run(
                  plan, &k.tensor, &v.tensor, row->rope ? &positions.tensor : NULL, lists, row->L,
                  NULL) &&
              cli_sync(&st->place);
    if (ok) {
        st_caches(st, row->name, &caches, row->caches);
    } else {
        st_broken(st, row->name, (uint64_t)row->L);
    }
    ctxkv_store_destroy(plan);
    cli_caches_free(&caches);
    return true;
}

bool st_store(selftest *st, const io_csv *csv) {
    static const char *const integers[] = {"H",          "L",    "T",    "R",       "block_size",
                                           "num_blocks", "rope", "seed", "special", "max_position",
                                           NULL};
    static const char *const numbers[] = {"eps", NULL};
    for (size_t i = 0; i < csv->rows; ++i) {
        st_row row;
        if (!st_read(csv, i, integers, numbers, &row)) return false;
        row.k_eps = row.eps;
        if (!store_case(st, &row)) return false;
        finish(st, csv->path, i + 1, csv->rows);
    }
    return true;
}

// ---- chain -------------------------------------------------------------------------------------
typedef struct chain_case {
    norm_case norms;
    cli_tensor weights, kv, positions, table, slots[ST_MAX_LAYERS];
    const DLTensor *weight_list[1], *lists[ST_MAX_LAYERS];
    cli_caches caches;
    ctxkv_projection_desc projection;
    ctxkv_store_desc store;
} chain_case;

static bool make_chain(selftest *st, const st_row *row, chain_case *it) {
    uint64_t seed = (uint64_t)row->seed;
    int64_t width = 2 * row->H * row->dim;
    uint16_t *w = st_bf16(st, (size_t)(row->L * width * row->D), seed + 3, 0x1p-5f);
    uint16_t *cs = st_bf16(st, (size_t)(row->max_position * row->dim), seed + 5, 1.0f);
    if (!w || !cs || !make_norms(st, row, &it->norms) ||
        !st_input(st, &it->weights, w, CLI_BF16, 3, (int64_t[]){row->L, width, row->D}) ||
        !st_output(st, &it->kv, CLI_BF16, 3, (int64_t[]){row->L, row->T, width}) ||
        !st_input(st, &it->table, cs, CLI_BF16, 2, (int64_t[]){row->max_position, row->dim}) ||
        !st_positions(st, &it->positions, row->T, seed + 4, row->max_position) ||
        !st_slots(
            st, it->slots, it->lists, row->L, row->T, seed, row->num_blocks * row->block_size) ||
        !cli_caches_make(
            &it->caches, &st->place, row->L, row->num_blocks, row->H, row->block_size, row->dim,
            0x5A)) {
        return false;
    }
    ctxkv_projection_desc_init(&it->projection);
    it->projection.hidden_size = row->D;
    it->projection.num_layers = row->L;
    it->projection.num_kv_heads = row->H;
    it->projection.head_dim = row->dim;
    it->weight_list[0] = &it->weights.tensor;
    it->projection.weights = it->weight_list;
    it->projection.weight_count = 1;
    it->projection.max_rows = row->T;
    it->projection.mode = st->projection;
    describe_store(row, &it->table, &it->store);
    return true;
}

static void check_projection(selftest *st, const st_row *row, chain_case *it) {
    ctxkv_projection *plan = NULL;
    uint32_t crc;
    size_t bytes = (size_t)(row->L * row->T * 2 * row->H * row->dim) * 2;
    bool ok = !ctxkv_projection_create(st->place.device, &it->projection, &plan) &&
              !ctxkv_projection_run(plan, &it->norms.out.tensor, &it->kv.tensor, NULL) &&
              cli_sync(&st->place) && st_crc(st, it->kv.tensor.data, bytes, &crc);
    if (ok) {
        st_check(st, row->name, "projection", crc, row->crc[1]);
    } else {
        st_broken(st, row->name, 1);
    }
    ctxkv_projection_destroy(plan);
}

static void check_chain(selftest *st, const st_row *row, chain_case *it) {
    ctxkv_chain_desc desc;
    ctxkv_chain *plan = NULL;
    ctxkv_chain_desc_init(&desc);
    desc.norms = &it->norms.desc;
    desc.projection = &it->projection;
    desc.store = &it->store;
    desc.max_rows = row->T;
    bool ok = !ctxkv_chain_create(st->place.device, &desc, &plan) &&
              !ctxkv_chain_bind_caches(plan, it->caches.keys, it->caches.values, row->L) &&
              !ctxkv_chain_run(
                  plan, &it->norms.x.tensor, &it->positions.tensor, it->lists, row->L, NULL) &&
              cli_sync(&st->place);
    if (ok) {
        st_caches(st, row->name, &it->caches, row->caches);
    } else {
        st_broken(st, row->name, (uint64_t)row->L);
    }
    ctxkv_chain_destroy(plan);
}

bool st_chain(selftest *st, const io_csv *csv) {
    static const char *const integers[] = {
        "H", "T", "L", "block_size", "num_blocks", "max_position", "seed", NULL};
    static const char *const numbers[] = {"hidden_eps",  "layer_eps",  "k_eps",
                                          "hidden_gain", "layer_gain", NULL};
    for (size_t i = 0; i < csv->rows; ++i) {
        st_row row;
        chain_case it;
        if (!st_read(csv, i, integers, numbers, &row)) return false;
        row.rope = 1;
        if (!make_chain(st, &row, &it)) return false;
        check_norms(st, &row, &it.norms, "norms", row.crc[0]);
        check_projection(st, &row, &it);
        check_chain(st, &row, &it);
        cli_caches_free(&it.caches);
        finish(st, csv->path, i + 1, csv->rows);
    }
    return true;
}
