// SPDX-License-Identifier: Apache-2.0
// Inputs and checks that the golden tables share.
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "crc32.h"
#include "generator.h"
#include "selftest.h"

#define SLICE (1 << 18)

void st_check(selftest *st, const char *name, const char *what, uint32_t got, uint32_t want) {
    bool ok = got == want;
    ok ? ++st->passed : ++st->failed;
    if (ok && !st->verbose) return;
    cli_progress_clear();
    printf("%s %s: %s: %08x%s", ok ? "pass" : "FAIL", name, what, got, ok ? "\n" : ", must be ");
    if (!ok) printf("%08x\n", want);
}

void st_broken(selftest *st, const char *name, uint64_t checks) {
    st->failed += checks;
    cli_progress_clear();
    printf("FAIL %s: %s\n", name, ctxkv_last_error());
}

bool st_crc(selftest *st, const void *data, size_t bytes, uint32_t *crc) {
    const void *from = data;
    if (st->place.memory) {
        void *copy = cli_alloc(&st->host, bytes);
        if (!copy || !cli_to_host(&st->place, copy, data, bytes)) return false;
        from = copy;
    }
    *crc = io_crc32(0, from, bytes);
    return true;
}

typedef struct fill {
    uint16_t *to;
    size_t count;
    uint64_t seed;
    float scale;
} fill;

static void fill_slice(void *user, int64_t index) {
    const fill *all = user;
    size_t first = (size_t)index * SLICE, left = all->count - first;
    io_fill_bf16(all->to + first, left < SLICE ? left : SLICE, all->seed, first, all->scale);
}

uint16_t *st_bf16(selftest *st, size_t count, uint64_t seed, float scale) {
    fill all = {cli_alloc(&st->host, count * sizeof(uint16_t)), count, seed, scale};
    if (all.to) cli_parallel(st->threads, (int64_t)((count + SLICE - 1) / SLICE), fill_slice, &all);
    return all.to;
}

bool st_input(
    selftest *st, cli_tensor *tensor, const void *host, DLDataType dtype, int rank,
    const int64_t *shape) {
    size_t bytes = dtype.bits / 8u;
    for (int i = 0; i < rank; ++i) bytes *= (size_t)shape[i];
    void *data = host ? cli_share(&st->place, host, bytes) : NULL;
    cli_tensor_set(tensor, &st->place, data, dtype, rank, shape);
    return data != NULL;
}

bool st_output(selftest *st, cli_tensor *tensor, DLDataType dtype, int rank, const int64_t *shape) {
    size_t bytes = dtype.bits / 8u;
    for (int i = 0; i < rank; ++i) bytes *= (size_t)shape[i];
    void *data = cli_alloc(&st->place, bytes);
    cli_tensor_set(tensor, &st->place, data, dtype, rank, shape);
    return data != NULL;
}

bool st_gain(
    selftest *st, cli_tensor *tensor, char kind, int rank, const int64_t *shape, uint64_t seed,
    float centre) {
    size_t count = 1;
    for (int i = 0; i < rank; ++i) count *= (size_t)shape[i];
    memset(tensor, 0, sizeof *tensor);
    if (kind == 'n') return true;
    bool wide = kind == 'f' || kind == 'F';
    void *host = cli_alloc(&st->host, count * 4);
    if (!host) return false;
    if (wide) {
        io_fill_gain_f32(host, count, seed, centre);
    } else {
        io_fill_gain_bf16(host, count, seed, centre);
    }
    return st_input(st, tensor, host, wide ? CLI_F32 : CLI_BF16, rank, shape);
}

bool st_slots(
    selftest *st, cli_tensor *tensors, const DLTensor **pointers, int64_t layers, int64_t count,
    uint64_t seed, int64_t places) {
    for (int64_t i = 0; i < layers; ++i) {
        int64_t *host = cli_alloc(&st->host, (size_t)count * sizeof *host);
        if (!host ||
            !io_fill_slots(
                host, (size_t)count, seed + 10 + (uint64_t)i, (size_t)places, i % 2 == 1) ||
            !st_input(st, &tensors[i], host, CLI_I64, 1, &count)) {
            return false;
        }
        pointers[i] = &tensors[i].tensor;
    }
    return true;
}

bool st_positions(
    selftest *st, cli_tensor *tensor, int64_t count, uint64_t seed, int64_t max_position) {
    int64_t *host = cli_alloc(&st->host, (size_t)count * sizeof *host);
    if (!host) return false;
    io_fill_positions(host, (size_t)count, seed, max_position);
    return st_input(st, tensor, host, CLI_I64, 1, &count);
}

void st_caches(selftest *st, const char *name, const cli_caches *caches, const uint32_t *want) {
    for (int64_t i = 0; i < caches->layers; ++i) {
        char what[48];
        uint32_t crc = 0;
        snprintf(what, sizeof what, "cache of layer %" PRId64, i);
        if (!st_crc(st, caches->storage[i], caches->bytes, &crc)) crc = ~want[i];
        st_check(st, name, what, crc, want[i]);
    }
}

// ---- rows ----------------------------------------------------------------------------------
typedef struct field {
    const char *name;
    size_t offset;
    int64_t low, high;
} field;

#define FIELD(column, member, low, high)                                                           \
    { column, offsetof(st_row, member), low, high }
static const field integer_fields[] = {
    FIELD("D", D, 16, 65536),
    FIELD("H", H, 1, 1024),
    FIELD("head_dim", dim, 64, 512),
    FIELD("L", L, 1, ST_MAX_LAYERS),
    FIELD("T", T, 0, 1 << 20),
    FIELD("R", R, 0, 1 << 20),
    FIELD("block_size", block_size, 1, 1 << 16),
    FIELD("num_blocks", num_blocks, 1, 1 << 16),
    FIELD("max_position", max_position, 1, 1 << 22),
    FIELD("rope", rope, 0, 1),
    FIELD("special", special, 0, 1),
    FIELD("seed", seed, 0, INT64_MAX)};
static const field number_fields[] = {
    FIELD("eps", eps, 0, 0),
    FIELD("hidden_eps", hidden_eps, 0, 0),
    FIELD("layer_eps", layer_eps, 0, 0),
    FIELD("k_eps", k_eps, 0, 0),
    FIELD("hidden_gain", hidden_gain, 0, 0),
    FIELD("layer_gain", layer_gain, 0, 0)};

static const field *field_of(const field *fields, size_t count, const char *name) {
    for (size_t i = 0; i < count; ++i) {
        if (!strcmp(fields[i].name, name)) return &fields[i];
    }
    return NULL;
}

static bool read_kind(
    const io_csv *csv, size_t row, const char *column, char *kind, io_error *error) {
    const char *text;
    if (!io_csv_text(csv, row, column, &text, error)) return false;
    *kind = text[0];
    if (strlen(text) == 1 && strchr("nbBfF", text[0])) return true;
    return io_fail(
        error, "%s: row %zu: %s '%s' must be one of n, b, B, f, F", csv->path, row + 1, column,
        text);
}

bool st_read(
    const io_csv *csv, size_t row, const char *const *integers, const char *const *numbers,
    st_row *to) {
    io_error error;
    *to = (st_row){.D = 8192, .dim = 64, .hidden = 'n', .layer = 'n'};
    bool ok = io_csv_text(csv, row, "name", &to->name, &error);
    for (; ok && *integers; ++integers) {
        const field *field =
            field_of(integer_fields, sizeof integer_fields / sizeof *integer_fields, *integers);
        int64_t *value = (int64_t *)((char *)to + field->offset);
        ok = io_csv_integer(csv, row, *integers, field->low, field->high, value, &error);
    }
    for (; ok && *numbers; ++numbers) {
        const field *field =
            field_of(number_fields, sizeof number_fields / sizeof *number_fields, *numbers);
        ok = io_csv_number(csv, row, *numbers, (float *)((char *)to + field->offset), &error);
    }
    static const char *const kinds[] = {"hidden", "layer"};
    for (size_t i = 0; ok && i < csv->columns; ++i) {
        for (int k = 0; ok && k < 2; ++k) {
            if (!strcmp(csv->cells[i], kinds[k])) {
                ok = read_kind(csv, row, kinds[k], k ? &to->layer : &to->hidden, &error);
            }
        }
        const char *column = csv->cells[i];
        if (!ok || strncmp(column, "crc", 3)) continue;
        if (!strcmp(column, "crc_cache_per_layer")) {
            ok = io_csv_words(csv, row, column, to->caches, (size_t)to->L, &error);
        } else {
            int place = !strcmp(column, "crc_packed") || !strcmp(column, "crc_projection");
            ok = io_csv_words(csv, row, column, &to->crc[place], 1, &error);
        }
    }
    if (!ok) cli_fail("%s", error.text);
    return ok;
}
