// SPDX-License-Identifier: Apache-2.0
// ctxkv synth: a checkpoint and a context in the real format, made from a seed.
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "file.h"
#include "generator.h"
#include "json.h"
#include "safetensors.h"

#define MARK "made_by_ctxkv_synth"

typedef struct synth_args {
    const char *folder;
    int64_t kv_heads, layers, rows, seed, shards, hidden_size, head_dim, max_position;
    int family; // 0 muse, 1 qwen3
    bool zero_centered, no_affine, nope, per_layer_slots, table;
} synth_args;

typedef struct tensor_plan {
    io_entry entry;
    uint64_t seed;
    bool gain;
    float scale; // of values, or the gain's centre
} tensor_plan;

typedef struct synth {
    const synth_args *args;
    tensor_plan *tensors;
    size_t count;
    char **written;
    size_t written_count;
} synth;

enum {
    KEY_HEADS = 300,
    KEY_LAYERS,
    KEY_ROWS,
    KEY_SEED,
    KEY_SHARDS,
    KEY_ZERO,
    KEY_NO_AFFINE,
    KEY_NOPE,
    KEY_FAMILY,
    KEY_HIDDEN,
    KEY_DIM,
    KEY_POSITION,
    KEY_SLOTS,
    KEY_TABLE
};

static error_t parse_end(const synth_args *args) {
    bool muse = args->family == 0;
    if (!args->folder) {
        cli_fail("DIR: is missing, must name the folder to write");
    } else if (
        muse && ((args->hidden_size && args->hidden_size != 8192) ||
                 (args->head_dim && args->head_dim != 64))) {
        cli_fail("--hidden-size, --head-dim: must be 8192 and 64 for --family muse");
    } else if (!muse && (args->zero_centered || args->no_affine)) {
        cli_fail("--zero-centered, --no-affine: must be left out for --family qwen3");
    } else if (args->hidden_size % 16) {
        cli_fail("--hidden-size: is %" PRId64 ", must be a multiple of 16", args->hidden_size);
    } else if (args->head_dim & (args->head_dim - 1)) {
        cli_fail("--head-dim: is %" PRId64 ", must be 64, 128, 256 or 512", args->head_dim);
    } else {
        return 0;
    }
    return CLI_REPORTED;
}

static error_t parse(int key, char *text, struct argp_state *state) {
    static const char *const families[] = {"muse", "qwen3", NULL};
    synth_args *args = state->input;
    switch (key) {
    case KEY_HEADS:
        return cli_integer("--kv-heads", text, 1, 1024, &args->kv_heads);
    case KEY_LAYERS:
        return cli_integer("--layers", text, 1, 256, &args->layers);
    case KEY_ROWS:
        return cli_integer("--rows", text, 0, 1 << 24, &args->rows);
    case KEY_SEED:
        return cli_integer("--seed", text, 0, INT64_MAX, &args->seed);
    case KEY_SHARDS:
        return cli_integer("--shards", text, 1, 999, &args->shards);
    case KEY_ZERO:
        args->zero_centered = true;
        return 0;
    case KEY_NO_AFFINE:
        args->no_affine = true;
        return 0;
    case KEY_NOPE:
        args->nope = true;
        return 0;
    case KEY_FAMILY:
        return cli_choice("--family", text, families, &args->family);
    case KEY_HIDDEN:
        return cli_integer("--hidden-size", text, 16, 1 << 20, &args->hidden_size);
    case KEY_DIM:
        return cli_integer("--head-dim", text, 64, 512, &args->head_dim);
    case KEY_POSITION:
        return cli_integer("--max-position", text, 1, 1 << 28, &args->max_position);
    case KEY_SLOTS:
        args->per_layer_slots = true;
        return 0;
    case KEY_TABLE:
        args->table = true;
        return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num) return cli_extra(text);
        args->folder = text;
        return 0;
    case ARGP_KEY_END:
        return parse_end(args);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {"kv-heads", KEY_HEADS, "N", 0, "KV heads (default 16; qwen3: 8)", 0},
    {"layers", KEY_LAYERS, "N", 0, "Draft layers (default 5)", 0},
    {"rows", KEY_ROWS, "N", 0, "Context rows (default 64)", 0},
    {"seed", KEY_SEED, "N", 0, "Seed of every value (default 1)", 0},
    {"shards", KEY_SHARDS, "N", 0, "Files of the checkpoint, with an index if more than 1", 0},
    {"zero-centered", KEY_ZERO, NULL, 0, "Norm weights to which 1 is added", 0},
    {"no-affine", KEY_NO_AFFINE, NULL, 0, "Norms without weights", 0},
    {"nope", KEY_NOPE, NULL, 0, "No RoPE", 0},
    {"family", KEY_FAMILY, "muse|qwen3", 0, "Kind of draft (default muse)", 1},
    {"hidden-size", KEY_HIDDEN, "N", 0, "Columns of a row (muse: 8192; qwen3: default 4096)", 1},
    {"head-dim", KEY_DIM, "N", 0, "Columns of a head (muse: 64; qwen3: default 128)", 1},
    {"max-position", KEY_POSITION, "N", 0, "Positions of the model (default 131072)", 1},
    {"per-layer-slots", KEY_SLOTS, NULL, 0, "slot_mapping of each layer, [L, T]", 1},
    {"table", KEY_TABLE, NULL, 0, "Put the cos/sin table into the context file", 1},
    {0}};
static const struct argp synth_argp = {
    .options = options,
    .parser = parse,
    .args_doc = "DIR",
    .doc =
        "Writes config.json, model.safetensors (or shards) and context.safetensors into DIR: the "
        "same bytes for the same options. Refuses a folder holding a checkpoint of another "
        "origin."};

static bool add(synth *all, const char *name, int64_t rows, int64_t columns, bool gain) {
    tensor_plan *plan = &all->tensors[all->count];
    plan->entry = (io_entry){.dtype = IO_BF16, .rank = rows ? 2 : 1, .shape = {rows, columns}};
    if (!rows) plan->entry.shape[0] = columns;
    snprintf(plan->entry.name, sizeof plan->entry.name, "%s", name);
    plan->seed = (uint64_t)all->args->seed * 1000003 + 10 + all->count;
    plan->gain = gain;
    plan->scale = gain ? (all->args->zero_centered ? 1.0f : 0.0f) : 0x1p-5f;
    plan->entry.data = malloc(io_entry_bytes(&plan->entry));
    ++all->count;
    if (!plan->entry.data) cli_fail("out of memory for tensor '%s'", name);
    return plan->entry.data != NULL;
}

static bool plan_tensors(synth *all) {
    const synth_args *args = all->args;
    int64_t rows = args->kv_heads * args->head_dim;
    all->tensors = calloc((size_t)args->layers * 4 + 1, sizeof *all->tensors);
    if (!all->tensors) {
        cli_fail("%s: out of memory for the tensors", args->folder);
        return false;
    }
    if (!args->no_affine && !add(all, "hidden_norm.weight", 0, args->hidden_size, true))
        return false;
    for (int64_t i = 0; i < args->layers; ++i) {
        static const char *const parts[] = {"pre_qkv_proj_norm", "k_norm", "k_proj", "v_proj"};
        for (int k = 0; k < 4; ++k) {
            char name[96];
            bool norm = k < 2;
            if (norm && (k != args->family || args->no_affine)) continue;
            snprintf(name, sizeof name, "layers.%" PRId64 ".self_attn.%s.weight", i, parts[k]);
            int64_t columns = k == 1 ? args->head_dim : args->hidden_size;
            if (!add(all, name, norm ? 0 : rows, columns, norm)) return false;
        }
    }
    return true;
}

static void fill(void *user, int64_t index) {
    const tensor_plan *plan = &((synth *)user)->tensors[index];
    size_t count = (size_t)io_entry_bytes(&plan->entry) / 2;
    uint16_t *data = (uint16_t *)plan->entry.data;
    if (plan->gain) {
        io_fill_gain_bf16(data, count, plan->seed, plan->scale);
    } else {
        io_fill_bf16(data, count, plan->seed, 0, plan->scale);
    }
}

// ---- files -----------------------------------------------------------------------------------
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

static json_t *config_json(const synth_args *args) {
    bool muse = args->family == 0;
    io_json_begin();
    json_t *root = json_pack(
        "{s:[s], s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:I, s:s, s:b}", "architectures",
        muse ? "MuseSparkDSparkModel" : "DFlashDraftModel", "hidden_size",
        (json_int_t)args->hidden_size, "num_hidden_layers", (json_int_t)args->layers,
        "num_attention_heads", (json_int_t)args->kv_heads * 4, "num_key_value_heads",
        (json_int_t)args->kv_heads, "head_dim", (json_int_t)args->head_dim, "rms_norm_eps",
        muse ? 1e-5 : 1e-6, "rope_theta", muse ? 500000.0 : 1000000.0, "max_position_embeddings",
        (json_int_t)args->max_position, "torch_dtype", "bfloat16", MARK, 1);
    if (muse) {
        json_object_set_new(root, "norm_affine", json_boolean(!args->no_affine));
        json_object_set_new(root, "norm_zero_centered_gamma", json_boolean(args->zero_centered));
    }
    json_object_set_new(root, "use_rope", json_boolean(!args->nope));
    return root;
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

// Slots of one list: distinct places, one row in five not stored where holes is set.
static bool fill_context(const synth_args *args, io_entry *entries, size_t *count) {
    uint64_t seed = (uint64_t)args->seed * 1000003;
    int64_t rows = args->rows, lists = args->per_layer_slots ? args->layers : 1;
    size_t cells = (size_t)rows * (size_t)args->hidden_size;
    int64_t *positions = malloc((size_t)(rows + 1) * sizeof *positions);
    int64_t *slots = malloc((size_t)(rows * lists + 1) * sizeof *slots);
    uint16_t *hidden = malloc((cells + 1) * sizeof *hidden);
    entries[0] = (io_entry){"positions", IO_I64, 1, {rows}, positions};
    entries[1] = (io_entry){"slot_mapping", IO_I64, 1, {rows}, slots};
    if (lists > 1) entries[1] = (io_entry){"slot_mapping", IO_I64, 2, {lists, rows}, slots};
    entries[2] = (io_entry){"hidden_states", IO_BF16, 2, {rows, args->hidden_size}, hidden};
    *count = 3;
    if (!positions || !slots || !hidden) return false;
    io_fill_positions(positions, (size_t)rows, seed + 1, args->max_position);
    io_fill_bf16(hidden, cells, seed, 0, 1.0f);
    size_t places = ((size_t)rows * 5 / 4 + 15) / 16 * 16;
    for (int64_t i = 0; i < lists; ++i) {
        if (!io_fill_slots(
                slots + i * rows, (size_t)rows, seed + 2 + (uint64_t)i, places,
                lists == 1 || i % 2)) {
            return false;
        }
    }
    return true;
}

static bool add_table(const synth_args *args, io_entry *entry) {
    int64_t shape[2] = {args->max_position, args->head_dim};
    uint16_t *rows = malloc((size_t)(shape[0] * shape[1]) * sizeof *rows);
    *entry = (io_entry){"cos_sin_cache", IO_BF16, 2, {shape[0], shape[1]}, rows};
    if (!rows) return false;
    DLTensor table = {
        .data = rows,
        .device = {kDLCPU, 0},
        .ndim = 2,
        .dtype = {kDLBfloat, 16, 1},
        .shape = shape};
    float theta = args->family ? 1000000.0f : 500000.0f;
    return !ctxkv_rope_table(theta, args->head_dim, args->max_position, &table);
}

static bool write_context(synth *all) {
    io_entry entries[4];
    memset(entries, 0, sizeof entries);
    size_t count;
    bool ok = fill_context(all->args, entries, &count);
    if (ok && all->args->table) ok = add_table(all->args, &entries[count++]);
    if (!ok) cli_fail("%s: out of memory for context.safetensors", all->args->folder);
    ok = ok && write_tensors(all, "context.safetensors", entries, count);
    for (size_t i = 0; i < 4; ++i) free((void *)entries[i].data);
    return ok;
}

// A folder is ours to write in when it holds no checkpoint, or one that synth made.
static bool made_by_synth(const char *path, io_error *error) {
    io_map map;
    if (!io_map_open(&map, path, error)) return false;
    json_t *root = io_json_parse((const char *)map.data, map.size, 0, "", path, error);
    bool ok = json_is_true(json_object_get(root, MARK));
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

static int execute(synth *all) {
    const synth_args *args = all->args;
    bool made = !mkdir(args->folder, 0777);
    if (!made && errno != EEXIST) {
        return cli_fail("%s: cannot be created: %s", args->folder, strerror(errno));
    }
    struct stat status;
    if (!stat(args->folder, &status) && !S_ISDIR(status.st_mode)) {
        return cli_fail("%s: is a file, must be a folder or not exist", args->folder);
    }
    bool ok = may_write(args->folder) && plan_tensors(all);
    if (ok) cli_parallel(cli_cpus(), (int64_t)all->count, fill, all);
    ok = ok && write_json(all, "config.json", config_json(args)) && write_checkpoint(all) &&
         write_context(all);
    for (size_t i = 0; i < all->written_count; ++i) {
        if (!ok) unlink(all->written[i]);
        if (ok) puts(all->written[i]);
    }
    if (!ok && made) rmdir(args->folder);
    return ok ? 0 : 2;
}

static void defaults(void *input) {
    *(synth_args *)input =
        (synth_args){.layers = 5, .rows = 64, .seed = 1, .shards = 1, .max_position = 131072};
}

static int run(void *input) {
    synth_args *args = input;
    if (!args->kv_heads) args->kv_heads = args->family ? 8 : 16;
    if (!args->hidden_size) args->hidden_size = args->family ? 4096 : 8192;
    if (!args->head_dim) args->head_dim = args->family ? 128 : 64;
    synth all = {.args = args};
    int status = execute(&all);
    for (size_t i = 0; i < all.count; ++i) free((void *)all.tensors[i].entry.data);
    for (size_t i = 0; i < all.written_count; ++i) free(all.written[i]);
    free(all.tensors);
    free(all.written);
    return status;
}

const cli_command cli_synth = {"synth",     "Make a checkpoint and a context from a seed",
                               &synth_argp, sizeof(synth_args),
                               defaults,    run};
