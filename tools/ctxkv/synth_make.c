// SPDX-License-Identifier: Apache-2.0
// The tensors and keys of each family's draft, and the context rows.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "generator.h"
#include "synth.h"

bool synth_slides(const synth_args *args, int64_t layer) {
    return args->window && layer % 2 == 0;
}

// A model's sliding layers commonly have a theta of their own.
float synth_theta(const synth_args *args, int64_t layer) {
    if (args->layer_tables && layer % 2 == 1) return 20000.0f;
    return args->family == IO_FAMILY_MUSE ? 500000.0f : 1000000.0f;
}

// ---- the checkpoint ----------------------------------------------------------------------------
static bool add(synth *all, const char *name, int64_t rows, int64_t columns, bool gain) {
    const synth_args *args = all->args;
    synth_tensor *plan = &all->tensors[all->count];
    io_dtype dtype = gain && args->fp32_norms ? IO_F32 : IO_BF16;
    plan->entry = (io_entry){.dtype = dtype, .rank = rows ? 2 : 1, .shape = {rows, columns}};
    if (!rows) plan->entry.shape[0] = columns;
    snprintf(plan->entry.name, sizeof plan->entry.name, "%s", name);
    plan->seed = (uint64_t)args->seed * 1000003 + 10 + all->count;
    plan->gain = gain;
    plan->scale = gain ? (args->zero_centered ? 1.0f : 0.0f) : rows ? 0x1p-5f : 1.0f;
    plan->entry.data = malloc(io_entry_bytes(&plan->entry));
    ++all->count;
    if (!plan->entry.data) cli_fail("out of memory for tensor '%s'", name);
    return plan->entry.data != NULL;
}

static bool add_layer(synth *all, int64_t layer) {
    const synth_args *args = all->args;
    bool muse = args->family == IO_FAMILY_MUSE, laguna = args->family == IO_FAMILY_LAGUNA;
    bool affine = !args->no_affine, v = args->family != IO_FAMILY_GEMMA4;
    int64_t rows = args->kv_heads * args->head_dim, D = args->hidden_size;
    const struct {
        const char *name;
        bool there, gain;
        int64_t rows, columns;
    } parts[] = {
        {"self_attn.pre_qkv_proj_norm.weight", muse && affine, true, 0, D},
        {"input_layernorm.weight", laguna && affine, true, 0, D},
        {"self_attn.k_norm.weight", !muse && affine, true, 0, args->head_dim},
        {"self_attn.k_proj.weight", true, false, rows, D},
        {"self_attn.v_proj.weight", v, false, rows, D},
        {"self_attn.k_proj.bias", args->bias, false, 0, rows},
        {"self_attn.v_proj.bias", args->bias && v, false, 0, rows}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; ++i) {
        char name[96];
        snprintf(name, sizeof name, "layers.%" PRId64 ".%s", layer, parts[i].name);
        if (parts[i].there && !add(all, name, parts[i].rows, parts[i].columns, parts[i].gain))
            return false;
    }
    return true;
}

bool synth_plan(synth *all) {
    const synth_args *args = all->args;
    all->tensors = calloc((size_t)args->layers * 6 + 1, sizeof *all->tensors);
    if (!all->tensors) {
        cli_fail("%s: out of memory for the tensors", args->folder);
        return false;
    }
    bool hidden = !args->no_affine && args->family != IO_FAMILY_LAGUNA;
    if (hidden && !add(all, "hidden_norm.weight", 0, args->hidden_size, true)) return false;
    for (int64_t i = 0; i < args->layers; ++i)
        if (!add_layer(all, i)) return false;
    return true;
}

void synth_fill(void *user, int64_t index) {
    const synth_tensor *plan = &((synth *)user)->tensors[index];
    size_t bytes = (size_t)io_entry_bytes(&plan->entry);
    void *data = (void *)plan->entry.data;
    if (plan->gain && plan->entry.dtype == IO_F32) {
        io_fill_gain_f32(data, bytes / 4, plan->seed, plan->scale);
    } else if (plan->gain) {
        io_fill_gain_bf16(data, bytes / 2, plan->seed, plan->scale);
    } else {
        io_fill_bf16(data, bytes / 2, plan->seed, 0, plan->scale);
    }
}

// ---- config.json -------------------------------------------------------------------------------
static json_t *layer_types(const synth_args *args) {
    json_t *list = json_array();
    for (int64_t i = 0; i < args->layers; ++i) {
        const char *name = synth_slides(args, i) ? "sliding_attention" : "full_attention";
        json_array_append_new(list, json_string(name));
    }
    return list;
}

// Where each kind of draft says what rotates: by layer type, or for all.
static void put_rope(json_t *root, const synth_args *args) {
    double theta = (double)synth_theta(args, 0), share = 1.0;
    bool by_type = args->family == IO_FAMILY_LAGUNA || args->family == IO_FAMILY_GEMMA4;
    if (args->rotary_dim) share = (double)args->rotary_dim / (double)args->head_dim;
    if (!by_type) {
        json_object_set_new(root, "rope_theta", json_real(theta));
        if (share < 1) json_object_set_new(root, "partial_rotary_factor", json_real(share));
        return;
    }
    json_t *own = json_pack("{s:f, s:s}", "rope_theta", theta, "rope_type", "default");
    if (share < 1) json_object_set_new(own, "partial_rotary_factor", json_real(share));
    json_object_set_new(root, "rope_parameters", json_pack("{s:o}", "full_attention", own));
    json_object_set_new(root, "layer_types", layer_types(args));
}

static void put_heads(json_t *root, const synth_args *args) {
    bool gemma = args->family == IO_FAMILY_GEMMA4;
    // Of Gemma 4's sliding layers, which its drafts do not have, the heads are others.
    const json_int_t heads = (json_int_t)args->kv_heads, dim = (json_int_t)args->head_dim;
    json_object_set_new(root, "num_attention_heads", json_integer(4 * heads));
    json_object_set_new(root, "num_key_value_heads", json_integer(gemma ? 2 * heads : heads));
    json_object_set_new(root, "head_dim", json_integer(gemma ? dim / 2 : dim));
    if (!gemma) return;
    json_object_set_new(root, "num_global_key_value_heads", json_integer(heads));
    json_object_set_new(root, "global_head_dim", json_integer(dim));
    json_object_set_new(root, "attention_k_eq_v", json_true());
}

json_t *synth_config(const synth_args *args) {
    static const char *const names[] = {
        "MuseSparkDSparkModel", "DFlashDraftModel", "DFlashLagunaForCausalLM", "Gemma4DSparkModel"};
    bool muse = args->family == IO_FAMILY_MUSE;
    json_t *root = json_pack(
        "{s:[s], s:I, s:I, s:f, s:I, s:s, s:b, s:b}", "architectures", names[args->family],
        "hidden_size", (json_int_t)args->hidden_size, "num_hidden_layers", (json_int_t)args->layers,
        "rms_norm_eps", muse ? 1e-5 : 1e-6, "max_position_embeddings",
        (json_int_t)args->max_position, "torch_dtype", "bfloat16", SYNTH_MARK, 1, "use_rope",
        (int)!args->nope);
    put_heads(root, args);
    put_rope(root, args);
    if (muse || args->no_affine)
        json_object_set_new(root, "norm_affine", json_boolean(!args->no_affine));
    if (muse || args->zero_centered)
        json_object_set_new(root, "norm_zero_centered_gamma", json_boolean(args->zero_centered));
    if (args->bias) json_object_set_new(root, "attention_bias", json_true());
    if (args->gptj) json_object_set_new(root, "is_neox_style", json_false());
    if (args->v_scale != 0) {
        json_t *own = json_pack("{s:f}", "attention_value_scale", args->v_scale);
        json_object_set_new(root, "dflash_config", own);
    }
    if (args->window) {
        json_object_set_new(root, "layer_types", layer_types(args));
        json_object_set_new(root, "sliding_window", json_integer((json_int_t)args->window));
    }
    return root;
}

// ---- the context -------------------------------------------------------------------------------
// Distinct places; one row in five is not stored where holes is set, and in a sliding layer only
// the last rows are.
static bool fill_slots(const synth_args *args, int64_t lists, int64_t *slots) {
    int64_t rows = args->rows;
    uint64_t seed = (uint64_t)args->seed * 1000003;
    size_t places = ((size_t)rows * 5 / 4 + 15) / 16 * 16;
    for (int64_t i = 0; i < lists; ++i) {
        int64_t *own = slots + i * rows;
        bool holes = lists == 1 || i % 2;
        if (!io_fill_slots(own, (size_t)rows, seed + 2 + (uint64_t)i, places, holes)) return false;
        for (int64_t t = 0; synth_slides(args, i) && t < rows - args->window; ++t) own[t] = -1;
    }
    return true;
}

static bool add_tables(const synth_args *args, io_entry *entry) {
    static const io_dtype dtypes[] = {IO_BF16, IO_F16, IO_F32};
    static const DLDataType types[] = {{kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {kDLFloat, 32, 1}};
    int64_t columns = args->rotary_dim ? args->rotary_dim : args->head_dim;
    int64_t shape[2] = {args->max_position, columns};
    int64_t count = args->layer_tables ? args->layers : 1;
    size_t bytes = (size_t)(shape[0] * shape[1]) * (types[args->table_type].bits / 8);
    uint8_t *data = malloc((size_t)count * bytes);
    *entry =
        (io_entry){"cos_sin_cache", dtypes[args->table_type], 3, {count, shape[0], shape[1]}, data};
    if (!args->layer_tables) {
        entry->rank = 2;
        memcpy(entry->shape, shape, sizeof shape);
    }
    for (int64_t i = 0; data && i < count; ++i) {
        DLTensor table = {
            .data = data + (size_t)i * bytes,
            .device = {kDLCPU, 0},
            .ndim = 2,
            .dtype = types[args->table_type],
            .shape = shape};
        if (ctxkv_rope_table(synth_theta(args, i), columns, shape[0], &table)) return false;
    }
    return data != NULL;
}

bool synth_context(const synth_args *args, io_entry *entries, size_t *count) {
    uint64_t seed = (uint64_t)args->seed * 1000003;
    int64_t rows = args->rows, layers = args->layers;
    int64_t lists = args->per_layer_slots || args->window ? layers : 1;
    size_t cells = (size_t)rows * (size_t)args->hidden_size;
    int64_t *positions = malloc((size_t)(rows + 1) * sizeof *positions);
    int64_t *slots = malloc((size_t)(rows * lists + 1) * sizeof *slots);
    uint16_t *hidden = malloc((cells + 1) * sizeof *hidden);
    entries[0] = (io_entry){"positions", IO_I64, 1, {rows}, positions};
    entries[1] = (io_entry){"slot_mapping", IO_I64, 1, {rows}, slots};
    if (lists > 1) entries[1] = (io_entry){"slot_mapping", IO_I64, 2, {lists, rows}, slots};
    entries[2] = (io_entry){"hidden_states", IO_BF16, 2, {rows, args->hidden_size}, hidden};
    *count = 3;
    if (!positions || !slots || !hidden || !fill_slots(args, lists, slots)) return false;
    io_fill_positions(positions, (size_t)rows, seed + 1, args->max_position);
    io_fill_bf16(hidden, cells, seed, 0, 1.0f);
    for (int part = 0; args->scales && part < 2; ++part) {
        float *scales = malloc((size_t)layers * sizeof *scales);
        entries[*count] = (io_entry){"", IO_F32, 1, {layers}, scales};
        snprintf(entries[*count].name, sizeof entries->name, "%c_scales", "kv"[part]);
        ++*count;
        if (!scales) return false;
        io_fill_gain_f32(scales, (size_t)layers, seed + 5 + (uint64_t)part, 0);
    }
    return !(args->table || args->layer_tables) || add_tables(args, &entries[(*count)++]);
}
