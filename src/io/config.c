// SPDX-License-Identifier: Apache-2.0
// Reading config.json; what the chain does not support is refused by name.
#include "config.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "json.h"

#define CONFIG_LIMIT (16u << 20)

typedef struct reader {
    const json_t *root;
    const char *path;
    io_error *error;
} reader;

const char *io_family_name(io_family family) {
    static const char *const names[] = {"muse", "qwen3", "laguna", "gemma4"};
    return names[family];
}

static const json_t *lookup(const reader *in, const char *key) {
    const json_t *value = json_object_get(in->root, key);
    return json_is_null(value) ? NULL : value;
}

// A value as it stands in the file, for messages.
static const char *spelled(const json_t *value, char *to, size_t size) {
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    snprintf(to, size, "%.60s", text ? text : "?");
    free(text);
    return to;
}

static bool wrong(const reader *in, const char *key, const char *must) {
    char text[64];
    const json_t *value = lookup(in, key);
    if (!value) return io_fail(in->error, "%s: %s is missing, must be %s", in->path, key, must);
    spelled(value, text, sizeof text);
    return io_fail(in->error, "%s: %s is %s, must be %s", in->path, key, text, must);
}

// fallback < 0: the key is required.
static bool read_size(
    const reader *in, const char *key, int64_t high, int64_t fallback, int64_t *result) {
    const json_t *value = lookup(in, key);
    char must[64];
    snprintf(must, sizeof must, "an integer from 1 to %" PRId64, high);
    if (!value && fallback >= 0) {
        *result = fallback;
        return true;
    }
    *result = json_integer_value(value);
    bool ok = json_is_integer(value) && *result >= 1 && *result <= high;
    return ok || wrong(in, key, must);
}

static bool read_flag(const reader *in, const char *key, bool fallback, bool *result) {
    const json_t *value = lookup(in, key);
    *result = value ? json_is_true(value) : fallback;
    return !value || json_is_boolean(value) || wrong(in, key, "true or false");
}

// A JSON number as FP32; infinity where it is none or does not fit.
static float number_of(const json_t *value) {
    double number = json_number_value(value);
    return json_is_number(value) && fabs(number) <= FLT_MAX ? (float)number : INFINITY;
}

static bool read_eps(const reader *in, float fallback, float *result) {
    const json_t *value = lookup(in, "rms_norm_eps");
    *result = value ? number_of(value) : fallback;
    bool ok = isfinite(*result) && *result >= 0;
    return ok || wrong(in, "rms_norm_eps", "a finite number >= 0");
}

static bool read_theta(const reader *in, const json_t *value, float *result) {
    if (!value || json_is_null(value)) return true;
    *result = number_of(value);
    if (isfinite(*result) && *result > 1) return true;
    char text[64];
    return io_fail(
        in->error, "%s: rope_theta is %s, must be a finite number > 1", in->path,
        spelled(value, text, sizeof text));
}

static bool has(const char *text, const char *part) {
    return strstr(text, part) != NULL;
}

static bool any_of(const char *text, const char *const *parts) {
    for (; *parts; ++parts)
        if (has(text, *parts)) return true;
    return false;
}

// vLLM's DSparkDraftModel is DeepSeek-V4's, K3DSparkModel Kimi-K3's.
static bool is_mla(const char *name) {
    static const char *const parts[] = {"DeepSeek", "deepseek", "Deepseek", "Kimi",
                                        "kimi",     "K3DSpark", NULL};
    return name && (any_of(name, parts) || !strcmp(name, "DSparkDraftModel") ||
                    !strcmp(name, "DSparkV41DraftModel"));
}

// Keys whose presence with another value means arithmetic that the chain does not have.
static bool refuse_unsupported(const reader *in) {
    if (lookup(in, "quantization_config") || lookup(in, "compression_config")) {
        return io_fail(
            in->error, "%s: quantization_config is given, quantised weights are not supported",
            in->path);
    }
    const json_t *rank = lookup(in, "kv_lora_rank");
    if (rank) return wrong(in, "kv_lora_rank", "absent: MLA drafts are not supported");
    return true;
}

// A draft that the speculators library wrote: the layers' keys lie one level down, and the kind is
// told by a name of its own.
static bool open_speculators(reader *in, bool *found) {
    static const char *const kinds[] = {"dflash", "dflash2", "dspark"};
    const json_t *kind = lookup(in, "speculators_model_type");
    const char *name = json_string_value(kind);
    *found = kind != NULL;
    if (!kind) return true;
    bool known = false;
    for (size_t i = 0; name && i < sizeof kinds / sizeof *kinds; ++i)
        known |= !strcmp(name, kinds[i]);
    if (!known) return wrong(in, "speculators_model_type", "dflash, dflash2 or dspark");
    const json_t *layers = lookup(in, "transformer_layer_config");
    if (!json_is_object(layers)) return wrong(in, "transformer_layer_config", "an object");
    if (!refuse_unsupported(in)) return false;
    in->root = layers;
    return true;
}

static bool read_family(const reader *in, io_family *family) {
    static const char *const muse[] = {"MuseSpark", "muse_spark", "muse-spark", NULL};
    static const char *const drafts[] = {"DFlash",   "DSpark",      "XPress",
                                         "LiLiCorr", "MuseGlimmer", NULL};
    static const char *const types[] = {"qwen3", "dflash", "dspark", "laguna", "gemma4", NULL};
    const json_t *list = lookup(in, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    if (list && (!json_is_array(list) || (json_array_size(list) && !name))) {
        return wrong(in, "architectures", "a list of names");
    }
    const char *type = json_string_value(lookup(in, "model_type"));
    *family = IO_FAMILY_MUSE;
    if (!name && !type) return true;
    const char *shown = name ? name : type;
    if (is_mla(name) || is_mla(type)) {
        return io_fail(
            in->error, "%s: %s is an MLA draft, which has no K/V rows: not supported", in->path,
            shown);
    }
    if (any_of(shown, muse) || (!name && !any_of(shown, types))) return true;
    *family = has(shown, "Laguna") || has(shown, "laguna")   ? IO_FAMILY_LAGUNA
              : has(shown, "Gemma4") || has(shown, "gemma4") ? IO_FAMILY_GEMMA4
                                                             : IO_FAMILY_QWEN3;
    if (has(shown, "Beam")) {
        return io_fail(
            in->error, "%s: %s inserts by a kernel of its own: not supported", in->path, shown);
    }
    // vLLM puts DFlash before the name of a Laguna draft, whose file has the target's own.
    bool laguna = *family == IO_FAMILY_LAGUNA && json_is_object(lookup(in, "dflash_config"));
    if (!name || laguna || any_of(name, drafts)) return true;
    return io_fail(
        in->error, "%s: architectures names %s, must be a MuseSpark, DFlash or DSpark draft",
        in->path, name);
}

// ---- layers ----------------------------------------------------------------------------------
static const char *layer_type(const reader *in, size_t layer) {
    const char *name = json_string_value(json_array_get(lookup(in, "layer_types"), layer));
    return name ? name : "full_attention";
}

// The stock chains of Laguna and Gemma 4 take layers of one kind only.
static bool check_layer_types(const reader *in, const io_config *config) {
    const json_t *list = lookup(in, "layer_types");
    if (list && (!json_is_array(list) || json_array_size(list) != (size_t)config->layers))
        return wrong(in, "layer_types", "a list of num_hidden_layers names");
    bool gemma = config->family == IO_FAMILY_GEMMA4, flag;
    for (size_t i = 0; (gemma || config->family == IO_FAMILY_LAGUNA) && i < json_array_size(list);
         ++i) {
        if (gemma && strcmp(layer_type(in, i), "full_attention"))
            return wrong(in, "layer_types", "full_attention for every layer");
        if (strcmp(layer_type(in, i), layer_type(in, 0)))
            return wrong(in, "layer_types", "one type for all layers");
    }
    if (!read_flag(in, "attention_k_eq_v", false, &flag)) return false;
    return !gemma || flag || wrong(in, "attention_k_eq_v", "true: V has no projection here");
}

// ---- RoPE ------------------------------------------------------------------------------------
// The parameters of all layers; those by layer type are Laguna's and Gemma 4's.
static bool rope_parameters(const reader *in, const io_config *config, const json_t **found) {
    const char *key;
    json_t *item;
    const json_t *all = lookup(in, "rope_parameters"), *swa = lookup(in, "swa_rope_parameters");
    if (all && !json_is_object(all)) return wrong(in, "rope_parameters", "an object");
    if (swa && !json_is_object(swa)) return wrong(in, "swa_rope_parameters", "an object");
    bool nested = false;
    json_object_foreach((json_t *)all, key, item) nested |= json_is_object(item);
    *found = all;
    if (config->family == IO_FAMILY_LAGUNA && swa &&
        !strcmp(layer_type(in, 0), "sliding_attention"))
        *found = swa;
    else if (nested && (config->family == IO_FAMILY_LAGUNA || config->family == IO_FAMILY_GEMMA4)) {
        *found = json_object_get(all, layer_type(in, 0));
        if (!*found) *found = json_object_get(all, "full_attention");
        if (*found && !json_is_object(*found)) return wrong(in, "rope_parameters", "an object");
    } else if (nested) {
        return wrong(in, "rope_parameters", "one set for all layers: others are not supported");
    }
    return true;
}

// int(head_dim * factor), as vLLM has it.
static bool read_rotary(const reader *in, const json_t *parameters, io_config *config) {
    const json_t *value = json_object_get(parameters, "partial_rotary_factor");
    if (!value || json_is_null(value)) value = lookup(in, "partial_rotary_factor");
    config->rotary_dim = config->head_dim;
    // A proportional table spans the head: what does not rotate has cos 1, sin 0.
    if (!value || !strcmp(config->rope_scaling, "proportional")) return true;
    double factor = json_number_value(value);
    bool ok = json_is_number(value) && factor > 0 && factor <= 1;
    if (ok) config->rotary_dim = (int64_t)((double)config->head_dim * factor);
    if (ok && config->rotary_dim >= 2 && config->rotary_dim % 2 == 0 &&
        (config->family != IO_FAMILY_MUSE || config->rotary_dim == config->head_dim))
        return true;
    char text[64];
    return io_fail(
        in->error, "%s: partial_rotary_factor is %s, must be %s", in->path,
        spelled(value, text, sizeof text),
        config->family == IO_FAMILY_MUSE ? "1 for Muse Spark"
                                         : "in 0..1 and give an even number of columns");
}

static bool read_position_mode(const reader *in, io_config *config) {
    const json_t *mode = lookup(in, "draft_position_mode");
    if (!read_flag(in, "use_rope", true, &config->rope)) return false;
    if (!mode) return true;
    const char *text = json_string_value(mode);
    if (!text || (strcmp(text, "rope") && strcmp(text, "nope"))) {
        return wrong(in, "draft_position_mode", "\"rope\" or \"nope\"");
    }
    bool rope = !strcmp(text, "rope");
    if (lookup(in, "use_rope") && rope != config->rope) {
        return wrong(in, "draft_position_mode", "the same as use_rope");
    }
    config->rope = rope;
    return true;
}

static bool read_rope(const reader *in, io_config *config) {
    const json_t *parameters = NULL, *scaling = lookup(in, "rope_scaling");
    if (!read_position_mode(in, config) || !rope_parameters(in, config, &parameters)) return false;
    config->theta = config->family == IO_FAMILY_MUSE ? 500000.0f : 10000.0f;
    if (scaling && !json_is_object(scaling)) return wrong(in, "rope_scaling", "an object");
    const json_t *own = json_object_get(parameters, "rope_theta");
    if (!read_theta(in, lookup(in, "rope_theta"), &config->theta)) return false;
    if (own && !read_theta(in, own, &config->theta)) return false;
    const json_t *type = json_object_get(parameters, "rope_type");
    if (!type) type = json_object_get(scaling, "rope_type");
    if (!type) type = json_object_get(scaling, "type");
    const char *name = json_string_value(type);
    if (scaling && !name) name = "scaled";
    if (name && strcmp(name, "default")) {
        snprintf(config->rope_scaling, sizeof config->rope_scaling, "%s", name);
    }
    return read_rotary(in, parameters, config);
}

// Which elements pair: NeoX halves, or neighbours.
static bool read_pairs(const reader *in, io_config *config) {
    static const char *const neox[] = {"is_neox_style", "rope_is_neox_style", "use_neox_rope"};
    bool muse = config->family == IO_FAMILY_MUSE, qwen3 = config->family == IO_FAMILY_QWEN3, flag;
    config->neox = !muse;
    for (size_t i = 0; i < sizeof neox / sizeof *neox; ++i) {
        if (!read_flag(in, neox[i], config->neox, &flag)) return false;
        if (qwen3) config->neox = flag;
        if (flag == config->neox) continue;
        return wrong(
            in, neox[i],
            muse ? "false: NeoX pairs are not supported for Muse Spark"
                 : "true: drafts of this kind rotate NeoX pairs");
    }
    return true;
}

static bool read_v_scale(const reader *in, io_config *config) {
    const json_t *own = lookup(in, "dflash_config");
    const json_t *value = json_object_get(own, "attention_value_scale");
    if (!value || json_is_null(value)) return true;
    config->v_scale = number_of(value);
    if (config->family != IO_FAMILY_MUSE && isfinite(config->v_scale) && config->v_scale != 0)
        return true;
    char text[64];
    return io_fail(
        in->error, "%s: attention_value_scale is %s, must be %s", in->path,
        spelled(value, text, sizeof text),
        config->family == IO_FAMILY_MUSE ? "left out for Muse Spark" : "a finite number, not 0");
}

static bool check_shape(const reader *in, const io_config *config) {
    if (config->family == IO_FAMILY_MUSE) {
        if (config->hidden_size != 8192) return wrong(in, "hidden_size", "8192 for Muse Spark");
        if (config->head_dim != 64) {
            return io_fail(
                in->error, "%s: head_dim is %" PRId64 ", must be 64 for Muse Spark", in->path,
                config->head_dim);
        }
        return !config->bias || wrong(in, "attention_bias", "false for Muse Spark");
    }
    if (config->hidden_size % 16) return wrong(in, "hidden_size", "a multiple of 16");
    int64_t dim = config->head_dim;
    if (dim != 64 && dim != 128 && dim != 256 && dim != 512) {
        return io_fail(
            in->error, "%s: head_dim is %" PRId64 ", must be 64, 128, 256 or 512", in->path, dim);
    }
    return true;
}

static bool read_config(reader *in, io_config *config) {
    bool speculators;
    if (!open_speculators(in, &speculators)) return false;
    config->family = IO_FAMILY_QWEN3;
    if (!speculators && !read_family(in, &config->family)) return false;
    bool muse = config->family == IO_FAMILY_MUSE, gemma = config->family == IO_FAMILY_GEMMA4;
    // The heads of Gemma 4's full attention are of another number and width.
    const char *kv_key = gemma && lookup(in, "num_global_key_value_heads")
                             ? "num_global_key_value_heads"
                             : "num_key_value_heads";
    const char *dim_key = gemma && lookup(in, "global_head_dim") ? "global_head_dim" : "head_dim";
    if (!read_size(in, "hidden_size", 1 << 20, -1, &config->hidden_size) ||
        !read_size(in, "num_hidden_layers", 1024, -1, &config->layers) ||
        !read_size(in, "num_attention_heads", 65536, 0, &config->attention_heads)) {
        return false;
    }
    int64_t heads = config->attention_heads ? config->attention_heads : -1;
    int64_t head_dim = muse ? 64 : heads > 0 ? config->hidden_size / heads : -1;
    if (!read_size(in, kv_key, 65536, heads, &config->kv_heads) ||
        !read_size(in, dim_key, 65536, head_dim, &config->head_dim) ||
        !read_size(in, "max_position_embeddings", 1 << 28, 0, &config->max_position) ||
        !read_eps(in, muse ? 1e-5f : 1e-6f, &config->eps) ||
        !read_flag(in, "norm_affine", true, &config->affine) ||
        !read_flag(in, "norm_zero_centered_gamma", false, &config->zero_centered) ||
        !read_flag(in, "attention_bias", false, &config->bias) || !check_layer_types(in, config) ||
        !read_rope(in, config) || !read_pairs(in, config) || !read_v_scale(in, config)) {
        return false;
    }
    return check_shape(in, config) && refuse_unsupported(in);
}

bool io_config_parse(
    io_config *config, const char *data, size_t size, const char *path, io_error *error) {
    *config = (io_config){0};
    if (size > CONFIG_LIMIT) {
        return io_fail(error, "%s: %zu bytes, at most %u are read", path, size, CONFIG_LIMIT);
    }
    json_t *root = io_json_parse(data, size, JSON_REJECT_DUPLICATES, "", path, error);
    if (!root) return false;
    reader in = {root, path, error};
    bool ok = json_is_object(root) ? read_config(&in, config)
                                   : io_fail(error, "%s: must hold a JSON object", path);
    json_decref(root);
    return ok;
}

bool io_config_open(io_config *config, const char *path, io_error *error) {
    io_map map;
    if (!io_map_open(&map, path, error)) return false;
    bool ok = io_config_parse(config, (const char *)map.data, map.size, path, error);
    io_map_close(&map);
    return ok;
}
