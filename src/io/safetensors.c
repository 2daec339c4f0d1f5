// SPDX-License-Identifier: Apache-2.0
// The reader: head, entries, and the rule that the tensors cover the file without holes.
#include "safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

static const struct {
    const char *name;
    int bits;
} dtypes[] = {
#define IO_DTYPE(name, bits) {#name, bits},
#include "dtypes.inc"
#undef IO_DTYPE
};

const char *io_dtype_name(io_dtype dtype) {
    return dtypes[dtype].name;
}
int io_dtype_bits(io_dtype dtype) {
    return dtypes[dtype].bits;
}

io_shape_text io_shape(const int64_t *shape, int rank) {
    io_shape_text result = {"["};
    size_t used = 1;
    for (int i = 0; i < rank && used < sizeof result.text - 26; ++i) {
        used += (size_t)snprintf(
            result.text + used, sizeof result.text - used, "%s%" PRId64, i ? ", " : "", shape[i]);
    }
    snprintf(result.text + used, sizeof result.text - used, "]");
    return result;
}

static bool read_dtype(io_tensor *tensor, const json_t *value, const char *path, io_error *error) {
    const char *name = json_string_value(value);
    if (!name) return io_fail(error, "%s: tensor '%s': dtype must be a string", path, tensor->name);
    for (int i = 0; i < IO_DTYPE_COUNT; ++i) {
        if (!strcmp(name, dtypes[i].name)) {
            tensor->dtype = (io_dtype)i;
            return true;
        }
    }
    return io_fail(
        error, "%s: tensor '%s': dtype '%s' is none of the format", path, tensor->name, name);
}

static bool read_shape(
    io_tensor *tensor, const json_t *value, int64_t *shape, const char *path, io_error *error) {
    if (!json_is_array(value)) {
        return io_fail(error, "%s: tensor '%s': shape must be a list", path, tensor->name);
    }
    uint64_t bits = (uint64_t)io_dtype_bits(tensor->dtype);
    size_t rank = json_array_size(value);
    for (size_t i = 0; i < rank; ++i) {
        const json_t *item = json_array_get(value, i);
        json_int_t size = json_integer_value(item);
        if (!json_is_integer(item) || size < 0) {
            return io_fail(
                error, "%s: tensor '%s': shape must hold integers >= 0", path, tensor->name);
        }
        shape[i] = size;
        if (__builtin_mul_overflow(bits, (uint64_t)size, &bits)) {
            return io_fail(error, "%s: tensor '%s': shape overflows 64 bits", path, tensor->name);
        }
    }
    if (bits % 8) {
        return io_fail(
            error, "%s: tensor '%s': %" PRIu64 " bits do not end on a byte", path, tensor->name,
            bits);
    }
    tensor->rank = (int)rank;
    tensor->shape = shape;
    tensor->bytes = bits / 8;
    return true;
}

static bool read_range(
    io_tensor *tensor, const json_t *value, uint64_t limit, const char *path, io_error *error) {
    const json_t *first = json_array_get(value, 0), *last = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(first) || !json_is_integer(last) ||
        json_integer_value(first) < 0 || json_integer_value(last) < json_integer_value(first)) {
        return io_fail(
            error, "%s: tensor '%s': data_offsets must be [begin, end] with 0 <= begin <= end",
            path, tensor->name);
    }
    uint64_t begin = (uint64_t)json_integer_value(first), end = (uint64_t)json_integer_value(last);
    if (end > limit) {
        return io_fail(
            error,
            "%s: tensor '%s': ends at byte %" PRIu64 " of %" PRIu64 " data bytes in the file", path,
            tensor->name, end, limit);
    }
    if (end - begin != tensor->bytes) {
        return io_fail(
            error, "%s: tensor '%s': %" PRIu64 " bytes stored, %s %s needs %" PRIu64, path,
            tensor->name, end - begin, io_dtype_name(tensor->dtype),
            io_shape(tensor->shape, tensor->rank).text, tensor->bytes);
    }
    tensor->begin = begin;
    return true;
}

static int by_place(const void *left, const void *right) {
    const io_tensor *a = left, *b = right;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes;
}

static int by_name(const void *left, const void *right) {
    return strcmp(((const io_tensor *)left)->name, ((const io_tensor *)right)->name);
}

static bool check_cover(io_safetensors *file, uint64_t limit, io_error *error) {
    uint64_t end = 0;
    if (file->count) qsort(file->tensors, file->count, sizeof *file->tensors, by_place);
    for (size_t i = 0; i < file->count; ++i) {
        const io_tensor *tensor = &file->tensors[i];
        if (tensor->begin != end) {
            return io_fail(
                error,
                "%s: tensor '%s': begins at byte %" PRIu64 ", must begin at %" PRIu64 " (%s)",
                file->path, tensor->name, tensor->begin, end,
                tensor->begin < end ? "overlap" : "hole");
        }
        end += tensor->bytes;
    }
    if (end != limit) {
        return io_fail(
            error, "%s: %" PRIu64 " data bytes, the head describes %" PRIu64, file->path, limit,
            end);
    }
    if (file->count) qsort(file->tensors, file->count, sizeof *file->tensors, by_name);
    return true;
}

static bool check_metadata(const json_t *value, const char *path, io_error *error) {
    const char *key;
    json_t *item;
    if (json_is_null(value)) return true;
    if (!json_is_object(value)) {
        return io_fail(error, "%s: __metadata__ must be an object of strings", path);
    }
    json_object_foreach((json_t *)value, key, item) {
        if (!json_is_string(item)) {
            return io_fail(error, "%s: __metadata__ '%s' must be a string", path, key);
        }
    }
    return true;
}

static bool read_entries(
    io_safetensors *file, const uint8_t *data, uint64_t limit, io_error *error) {
    const char *name;
    json_t *value;
    size_t sizes = 0;
    json_object_foreach((json_t *)file->json, name, value) {
        sizes += json_array_size(json_object_get(value, "shape"));
    }
    file->shapes = calloc(sizes + 1, sizeof *file->shapes);
    file->tensors = calloc(json_object_size(file->json) + 1, sizeof *file->tensors);
    if (!file->shapes || !file->tensors) return io_fail(error, "%s: out of memory", file->path);
    int64_t *shape = file->shapes;
    json_object_foreach((json_t *)file->json, name, value) {
        if (!strcmp(name, "__metadata__")) {
            if (!check_metadata(value, file->path, error)) return false;
            continue;
        }
        io_tensor *tensor = &file->tensors[file->count];
        tensor->name = name;
        if (!json_is_object(value)) {
            return io_fail(error, "%s: tensor '%s': must be an object", file->path, name);
        }
        if (!read_dtype(tensor, json_object_get(value, "dtype"), file->path, error) ||
            !read_shape(tensor, json_object_get(value, "shape"), shape, file->path, error) ||
            !read_range(tensor, json_object_get(value, "data_offsets"), limit, file->path, error)) {
            return false;
        }
        tensor->data = data + tensor->begin;
        shape += tensor->rank;
        file->count++;
    }
    return check_cover(file, limit, error);
}

static bool parse_head(io_safetensors *file, const uint8_t *data, size_t size, io_error *error) {
    if (size < 8) {
        return io_fail(error, "%s: %zu bytes, a safetensors file has at least 8", file->path, size);
    }
    uint64_t head = 0;
    for (int i = 7; i >= 0; --i) head = head << 8 | data[i];
    if (head > IO_HEAD_LIMIT) {
        return io_fail(
            error, "%s: head of %" PRIu64 " bytes in a file of %zu, at most %u are allowed",
            file->path, head, size, IO_HEAD_LIMIT);
    }
    if (head > size - 8) {
        return io_fail(
            error, "%s: head of %" PRIu64 " bytes in a file of %zu: the file is cut short",
            file->path, head, size);
    }
    file->json = io_json_parse(
        (const char *)data + 8, (size_t)head, JSON_REJECT_DUPLICATES, "head ", file->path, error);
    if (!file->json) return false;
    if (!json_is_object((json_t *)file->json)) {
        return io_fail(error, "%s: head must be a JSON object", file->path);
    }
    return read_entries(file, data + 8 + head, size - 8 - (size_t)head, error);
}

bool io_safetensors_parse(
    io_safetensors *file, const uint8_t *data, size_t size, const char *path, io_error *error) {
    *file = (io_safetensors){.path = strdup(path)};
    if (!file->path) return io_fail(error, "%s: out of memory", path);
    if (parse_head(file, data, size, error)) return true;
    io_safetensors_close(file);
    return false;
}

bool io_safetensors_open(io_safetensors *file, const char *path, io_error *error) {
    io_map map;
    *file = (io_safetensors){0};
    if (!io_map_open(&map, path, error)) return false;
    if (!io_safetensors_parse(file, map.data, map.size, path, error)) {
        io_map_close(&map);
        return false;
    }
    file->map = map;
    return true;
}

void io_safetensors_close(io_safetensors *file) {
    json_decref((json_t *)file->json);
    free(file->shapes);
    free(file->tensors);
    free(file->path);
    io_map_close(&file->map);
    *file = (io_safetensors){0};
}

const io_tensor *io_safetensors_find(const io_safetensors *file, const char *name) {
    io_tensor key = {.name = name};
    if (!file->count) return NULL;
    return bsearch(&key, file->tensors, file->count, sizeof key, by_name);
}
