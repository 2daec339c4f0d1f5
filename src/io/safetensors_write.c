// SPDX-License-Identifier: Apache-2.0
// The writer of the format.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

#include "safetensors.h"

uint64_t io_entry_bytes(const io_entry *entry) {
    uint64_t bytes = (uint64_t)io_dtype_bits(entry->dtype) / 8;
    for (int i = 0; i < entry->rank; ++i) bytes *= (uint64_t)entry->shape[i];
    return bytes;
}

static char *head_text(const io_entry *entries, size_t count) {
    io_json_begin();
    json_t *head = json_object();
    json_object_set_new(head, "__metadata__", json_pack("{s:s}", "format", "pt"));
    uint64_t begin = 0;
    for (size_t i = 0; i < count; ++i) {
        const io_entry *entry = &entries[i];
        json_t *shape = json_array();
        for (int k = 0; k < entry->rank; ++k) {
            json_array_append_new(shape, json_integer(entry->shape[k]));
        }
        uint64_t end = begin + io_entry_bytes(entry);
        json_object_set_new(
            head, entry->name,
            json_pack(
                "{s:s, s:o, s:[I, I]}", "dtype", io_dtype_name(entry->dtype), "shape", shape,
                "data_offsets", (json_int_t)begin, (json_int_t)end));
        begin = end;
    }
    return io_json_text(head, JSON_COMPACT);
}

static bool write_head(io_writer *writer, const char *text, io_error *error) {
    size_t used = strlen(text), size = (used + 7) / 8 * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; ++i) length[i] = (uint8_t)((uint64_t)size >> (8 * i));
    return io_writer_write(writer, length, sizeof length, error) &&
           io_writer_write(writer, text, used, error) &&
           io_writer_write(writer, "        ", size - used, error);
}

static bool write_data(
    io_writer *writer, const io_entry *entries, size_t count, io_progress progress, void *user,
    io_error *error) {
    const size_t step = 16u << 20;
    uint64_t total = 0, done = 0;
    for (size_t i = 0; i < count; ++i) total += io_entry_bytes(&entries[i]);
    for (size_t i = 0; i < count; ++i) {
        const uint8_t *data = entries[i].data;
        uint64_t left = io_entry_bytes(&entries[i]);
        while (left) {
            size_t part = left < step ? (size_t)left : step;
            if (!io_writer_write(writer, data, part, error)) return false;
            data += part;
            left -= part;
            done += part;
            if (progress) progress(user, done, total);
        }
    }
    return true;
}

bool io_safetensors_write(
    const char *path, const io_entry *entries, size_t count, io_progress progress, void *user,
    io_error *error) {
    char *text = head_text(entries, count);
    if (!text) return io_fail(error, "%s: out of memory for the head", path);
    io_writer writer;
    if (!io_writer_open(&writer, path, error)) {
        free(text);
        return false;
    }
    bool ok = write_head(&writer, text, error) &&
              write_data(&writer, entries, count, progress, user, error);
    free(text);
    if (ok) return io_writer_commit(&writer, error);
    io_writer_abort(&writer);
    return false;
}
