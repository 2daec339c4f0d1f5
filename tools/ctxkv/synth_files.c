// SPDX-License-Identifier: Apache-2.0
// Writing what synth made: all of it or nothing, and never over another's checkpoint.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "file.h"
#include "json.h"
#include "synth.h"

// The path of a file about to be written, with room in the list for it; keep() adds it.
static char *path_of(synth *all, const char *name) {
    char *path = io_join(all->args->folder, name);
    char **list = realloc(all->written, (all->written_count + 1) * sizeof *list);
    if (list) all->written = list;
    if (path && list) return path;
    free(path);
    cli_fail("%s: out of memory for its path", name);
    return NULL;
}

// Only what was written is removed after a failure, not what was there before.
static bool keep(synth *all, char *path, bool written, const io_error *error) {
    if (written) {
        all->written[all->written_count++] = path;
        return true;
    }
    cli_fail("%s", error->text);
    free(path);
    return false;
}

// json_pack and the like were called after io_json_begin.
static bool write_json(synth *all, const char *name, json_t *root) {
    io_error error;
    char *text = io_json_text(root, JSON_INDENT(2));
    if (!text) cli_fail("%s: out of memory for its JSON", name);
    char *path = text ? path_of(all, name) : NULL;
    bool ok = path && keep(all, path, io_write_text(path, text, &error), &error);
    free(text);
    return ok;
}

static bool write_tensors(synth *all, const char *name, const io_entry *entries, size_t count) {
    io_error error;
    char *path = path_of(all, name);
    if (!path) return false;
    return keep(
        all, path, io_safetensors_write(path, entries, count, cli_progress, (void *)name, &error),
        &error);
}

// A single file is read before an index: what an earlier run left must not hide this one's.
static bool remove_other_form(const synth_args *args) {
    const char *name = args->shards > 1 ? "model.safetensors" : "model.safetensors.index.json";
    char *path = io_join(args->folder, name);
    bool ok = path && (!unlink(path) || errno == ENOENT);
    if (!path) cli_fail("%s: out of memory for its path", name);
    if (path && !ok) cli_fail("%s: cannot be removed: %s", path, strerror(errno));
    free(path);
    return ok;
}

static void shard_name(const synth *all, size_t shard, char *to, size_t size) {
    size_t shards = (size_t)all->args->shards;
    snprintf(to, size, "model.safetensors");
    if (shards > 1) snprintf(to, size, "model-%05zu-of-%05zu.safetensors", shard + 1, shards);
}

// Shard i holds the tensors from first_of(i) up to first_of(i + 1).
static size_t first_of(const synth *all, size_t shard) {
    return all->count * shard / (size_t)all->args->shards;
}

static json_t *index_json(const synth *all) {
    uint64_t total = 0;
    io_json_begin();
    json_t *map = json_object();
    for (size_t shard = 0; shard < (size_t)all->args->shards; ++shard) {
        char name[64];
        shard_name(all, shard, name, sizeof name);
        for (size_t i = first_of(all, shard); i < first_of(all, shard + 1); ++i) {
            json_object_set_new(map, all->tensors[i].entry.name, json_string(name));
            total += io_entry_bytes(&all->tensors[i].entry);
        }
    }
    return json_pack(
        "{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
}

static bool write_checkpoint(synth *all) {
    size_t shards = (size_t)all->args->shards;
    io_entry *entries = calloc(all->count + 1, sizeof *entries);
    bool ok = entries != NULL;
    if (!ok) cli_fail("%s: out of memory for the checkpoint", all->args->folder);
    ok = ok && remove_other_form(all->args);
    for (size_t i = 0; ok && i < all->count; ++i) entries[i] = all->tensors[i].entry;
    for (size_t shard = 0; ok && shard < shards; ++shard) {
        size_t first = first_of(all, shard), count = first_of(all, shard + 1) - first;
        char name[64];
        shard_name(all, shard, name, sizeof name);
        ok = !count || write_tensors(all, name, entries + first, count);
    }
    free(entries);
    return ok && (shards == 1 || write_json(all, "model.safetensors.index.json", index_json(all)));
}

static bool write_context(synth *all) {
    io_entry entries[SYNTH_CONTEXT];
    memset(entries, 0, sizeof entries);
    size_t count;
    bool ok = synth_context(all->args, entries, &count);
    if (!ok) cli_fail("%s: out of memory for context.safetensors", all->args->folder);
    ok = ok && write_tensors(all, "context.safetensors", entries, count);
    for (size_t i = 0; i < SYNTH_CONTEXT; ++i) free((void *)entries[i].data);
    return ok;
}

// A folder is ours to write in when it holds no checkpoint, or one that synth made.
static bool made_by_synth(const char *path, io_error *error) {
    io_map map;
    if (!io_map_open(&map, path, error)) return false;
    json_t *root = io_json_parse((const char *)map.data, map.size, 0, "", path, error);
    bool ok = json_is_true(json_object_get(root, SYNTH_MARK));
    if (root && !ok) {
        io_fail(error, "%s: was not written by ctxkv synth, must not be replaced", path);
    }
    io_map_close(&map);
    json_decref(root);
    return ok;
}

static bool may_write(const char *folder) {
    char *path = io_join(folder, "config.json"), *model = io_join(folder, "model.safetensors");
    io_error error;
    bool config = false, weights = false;
    bool ok = path && model;
    if (!ok) io_fail(&error, "%s: out of memory for its path", folder);
    ok = ok && io_exists(path, &config, &error) && io_exists(model, &weights, &error);
    if (ok && config) {
        ok = made_by_synth(path, &error);
    } else if (ok && weights) {
        ok = io_fail(&error, "%s: was not written by ctxkv synth, must not be replaced", model);
    }
    if (!ok) cli_fail("%s", error.text);
    free(path);
    free(model);
    return ok;
}

int synth_write(synth *all) {
    const synth_args *args = all->args;
    bool made = !mkdir(args->folder, 0777);
    if (!made && errno != EEXIST) {
        return cli_fail("%s: cannot be created: %s", args->folder, strerror(errno));
    }
    struct stat status;
    if (!stat(args->folder, &status) && !S_ISDIR(status.st_mode)) {
        return cli_fail("%s: is a file, must be a folder or not exist", args->folder);
    }
    bool ok = may_write(args->folder) && synth_plan(all);
    if (ok) cli_parallel(cli_cpus(), (int64_t)all->count, synth_fill, all);
    io_json_begin();
    ok = ok && write_json(all, "config.json", synth_config(args)) && write_checkpoint(all) &&
         write_context(all);
    for (size_t i = 0; i < all->written_count; ++i) {
        if (!ok) unlink(all->written[i]);
        if (ok) puts(all->written[i]);
    }
    if (!ok && made) rmdir(args->folder);
    return ok ? 0 : 2;
}
