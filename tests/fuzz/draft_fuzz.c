// SPDX-License-Identifier: Apache-2.0
// Any bytes as a checkpoint folder: config.json, an index, shards, a tensor-parallel rank. Every
// element of every view of an accepted draft lies in memory.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "draft.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[64];

static void remove_folder(void) {
    rmdir(folder);
}

static uint8_t next(const uint8_t **data, size_t *size) {
    if (!*size) return 0;
    --*size;
    return *(*data)++;
}

// length (two bytes), then so many bytes; a head gets its own length before it and a tail of zeros.
static void put(const char *name, bool head, const uint8_t **data, size_t *size) {
    size_t length = next(data, size), tail = 0;
    length += (size_t)next(data, size) << 8;
    if (head) tail = next(data, size);
    if (head) tail = (tail + ((size_t)next(data, size) << 8)) * 16;
    if (length > *size) length = *size;
    char *path = io_join(folder, name);
    FILE *file = path ? fopen(path, "wb") : NULL;
    if (!file) abort();
    for (size_t i = 0; head && i < 8; ++i) fputc((int)(length >> (8 * i) & 255), file);
    if (length && fwrite(*data, 1, length, file) != length) abort();
    off_t end = ftello(file);
    if (fflush(file) || ftruncate(fileno(file), end + (off_t)tail)) abort();
    fclose(file);
    free(path);
    *data += length;
    *size -= length;
}

static uint64_t sum(const io_view *view) {
    uint64_t total = 0;
    const DLTensor *t = &view->tensor;
    const uint16_t *row = t->data;
    if (!row) return 0;
    int64_t rows = t->ndim == 2 ? t->shape[0] : 1, columns = t->shape[t->ndim - 1];
    for (int64_t i = 0; i < rows;
         ++i, row += t->strides && i + 1 < rows ? t->strides[0] : columns) {
        for (int64_t k = 0; k < columns; ++k) total += row[k];
    }
    return total;
}

static void look(int64_t tp_size, int64_t tp_rank) {
    io_draft draft;
    io_error error = {""};
    if (!io_draft_open(&draft, folder, tp_size, tp_rank, &error)) {
        if (!strstr(error.text, folder) && !strstr(error.text, "tensor-parallel")) abort();
        return;
    }
    uint64_t total = sum(&draft.hidden) + sum(&draft.bias) + sum(&draft.k_norm);
    for (int64_t i = 0; i < draft.config.layers; ++i) {
        if (draft.layer_norms) total += sum(&draft.layer_norms[i]);
        for (int64_t part = 0; part < draft.parts; ++part)
            total += sum(&draft.weights[draft.parts * i + part]);
    }
    if (total > UINT64_MAX / 2) abort();
    io_draft_close(&draft);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const names[] = {
        "config.json", "model.safetensors.index.json", "model.safetensors", "a", "b"};
    if (!*folder) {
        bool shared = !access("/dev/shm", W_OK);
        snprintf(folder, sizeof folder, "%s/ctxkv-fuzz-XXXXXX", shared ? "/dev/shm" : "/tmp");
        if (!mkdtemp(folder) || atexit(remove_folder)) abort();
    }
    uint8_t kind = next(&data, &size);
    int64_t tp_size = 1 + (kind >> 5), tp_rank = next(&data, &size) % 8;
    for (int i = 0; i < 5; ++i) {
        if (kind >> i & 1) put(names[i], i >= 2, &data, &size);
    }
    look(tp_size, tp_rank % tp_size);
    for (int i = 0; i < 5; ++i) {
        char *path = io_join(folder, names[i]);
        if (path) unlink(path);
        free(path);
    }
    return 0;
}
