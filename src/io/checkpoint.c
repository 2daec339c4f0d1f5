// SPDX-License-Identifier: Apache-2.0
// Opening a checkpoint's files and finding a tensor in them.
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "json.h"

#define SHARD_LIMIT 4096

static size_t shard_of(const io_checkpoint *checkpoint, const char *name) {
    size_t i = 0;
    while (i < checkpoint->count && strcmp(checkpoint->shard_names[i], name)) ++i;
    return i;
}

static bool add_shard(
    io_checkpoint *checkpoint, const char *tensor, const json_t *value, io_error *error) {
    const char *path = checkpoint->index_path, *name = json_string_value(value);
    if (!name) return io_fail(error, "%s: weight_map '%s' must be a file name", path, tensor);
    if (!*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, "..")) {
        return io_fail(
            error, "%s: weight_map '%s' is '%s', must be a file name without a slash", path, tensor,
            name);
    }
    if (shard_of(checkpoint, name) < checkpoint->count) return true;
    if (checkpoint->count == SHARD_LIMIT) {
        return io_fail(error, "%s: names more than %d files", path, SHARD_LIMIT);
    }
    char *copy = strdup(name);
    char **names =
        realloc(checkpoint->shard_names, (checkpoint->count + 1) * sizeof *checkpoint->shard_names);
    if (names) checkpoint->shard_names = names;
    if (!copy || !names) {
        free(copy);
        return io_fail(error, "%s: out of memory", path);
    }
    names[checkpoint->count++] = copy;
    return true;
}

bool io_index_parse(
    io_checkpoint *checkpoint, const char *data, size_t size, const char *path, io_error *error) {
    const char *name;
    json_t *value;
    *checkpoint = (io_checkpoint){.index_path = strdup(path)};
    if (!checkpoint->index_path) return io_fail(error, "%s: out of memory", path);
    json_t *root = NULL;
    if (size > IO_HEAD_LIMIT) {
        io_fail(error, "%s: %zu bytes, at most %u are read", path, size, IO_HEAD_LIMIT);
    } else {
        root = io_json_parse(data, size, JSON_REJECT_DUPLICATES, "", path, error);
    }
    bool ok = root != NULL;
    if (ok) {
        checkpoint->weight_map = json_incref(json_object_get(root, "weight_map"));
        ok = json_is_object((json_t *)checkpoint->weight_map) ||
             io_fail(error, "%s: weight_map must be an object", path);
    }
    if (ok) {
        json_object_foreach((json_t *)checkpoint->weight_map, name, value) {
            if (!(ok = add_shard(checkpoint, name, value, error))) break;
        }
    }
    json_decref(root);
    if (!ok) io_checkpoint_close(checkpoint);
    return ok;
}

static bool open_shards(io_checkpoint *checkpoint, const char *folder, io_error *error) {
    checkpoint->shards = calloc(checkpoint->count + 1, sizeof *checkpoint->shards);
    bool ok = checkpoint->shards != NULL;
    if (!ok) io_fail(error, "%s: out of memory", folder);
    for (size_t i = 0; ok && i < checkpoint->count; ++i) {
        char *path = io_join(folder, checkpoint->shard_names[i]);
        ok = path ? io_safetensors_open(&checkpoint->shards[i], path, error)
                  : io_fail(error, "%s: out of memory", folder);
        free(path);
    }
    if (!ok) io_checkpoint_close(checkpoint);
    return ok;
}

static bool open_index(
    io_checkpoint *checkpoint, const char *folder, const char *path, io_error *error) {
    io_map map;
    if (!io_map_open(&map, path, error)) return false;
    bool ok = io_index_parse(checkpoint, (const char *)map.data, map.size, path, error);
    io_map_close(&map);
    return ok && open_shards(checkpoint, folder, error);
}

bool io_checkpoint_open(io_checkpoint *checkpoint, const char *folder, io_error *error) {
    *checkpoint = (io_checkpoint){0};
    struct stat status;
    if (!stat(folder, &status) && !S_ISDIR(status.st_mode)) {
        return io_fail(error, "%s: is a file, must be a checkpoint's folder", folder);
    }
    char *single = io_join(folder, "model.safetensors");
    char *index = io_join(folder, "model.safetensors.index.json");
    bool whole = false, pieces = false;
    bool ok = single && index;
    if (!ok) {
        io_fail(error, "%s: out of memory", folder);
    } else if (!io_exists(single, &whole, error) || !io_exists(index, &pieces, error)) {
        ok = false;
    } else if (!whole && pieces) {
        ok = open_index(checkpoint, folder, index, error);
    } else {
        checkpoint->shards = calloc(1, sizeof *checkpoint->shards);
        checkpoint->count = 1;
        ok = checkpoint->shards ? io_safetensors_open(checkpoint->shards, single, error)
                                : io_fail(error, "%s: out of memory", folder);
        if (!ok) io_checkpoint_close(checkpoint);
    }
    free(single);
    free(index);
    return ok;
}

void io_checkpoint_close(io_checkpoint *checkpoint) {
    for (size_t i = 0; i < checkpoint->count; ++i) {
        if (checkpoint->shards) io_safetensors_close(&checkpoint->shards[i]);
        if (checkpoint->shard_names) free(checkpoint->shard_names[i]);
    }
    free(checkpoint->shards);
    free(checkpoint->shard_names);
    free(checkpoint->index_path);
    json_decref((json_t *)checkpoint->weight_map);
    *checkpoint = (io_checkpoint){0};
}

bool io_checkpoint_find(
    const io_checkpoint *checkpoint, const char *name, const io_tensor **tensor, const char **path,
    io_error *error) {
    size_t shard = 0;
    *tensor = NULL;
    if (checkpoint->weight_map) {
        const char *file = json_string_value(json_object_get(checkpoint->weight_map, name));
        if (!file) return true;
        shard = shard_of(checkpoint, file);
    }
    *tensor = io_safetensors_find(&checkpoint->shards[shard], name);
    *path = checkpoint->shards[shard].path;
    if (*tensor || !checkpoint->weight_map) return true;
    return io_fail(error, "%s: tensor '%s' is not there, the index says it is", *path, name);
}
