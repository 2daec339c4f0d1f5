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
    return family == IO_FAMILY_QWEN3 ? "qwen3" : "muse";
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

static bool read_family(const reader *in, io_family *family) {
    const json_t *list = lookup(in, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    if (list && (!json_is_array(list) || (json_array_size(list) && !name))) {
        return wrong(in, "architectures", "a list of names");
    }
    const char *type = json_string_value(lookup(in, "model_type"));
    *family = IO_FAMILY_MUSE;
    if (!name && !type) return true;
    const char *shown = name ? name : type;
    if (has(shown, "DeepSeek") || has(shown, "deepseek") || has(shown, "Kimi")) {
        return io_fail(
            in->error, "%s: %s is an MLA draft, which has no K/V rows: not supported", in->path,
            shown);
    }
    if (has(shown, "MuseSpark") || has(shown, "muse_spark") || has(shown, "muse-spark"))
        return true;
    if (!name && !has(shown, "qwen3") && !has(shown, "dflash") && !has(shown, "dspark"))
        return true;
    *family = IO_FAMILY_QWEN3;
    if (!name || has(name, "DFlash") || has(name, "DSpark")) return true;
    return io_fail(
        in->error, "%s: architectures names %s, must be a MuseSpark, DFlash or DSpark draft",
        in->path, name);
}

static bool read_rope(const reader *in, io_config *config) {
    const json_t *parameters = lookup(in, "rope_parameters");
    const json_t *scaling = lookup(in, "rope_scaling");
    const json_t *mode = lookup(in, "draft_position_mode");
    if (!read_flag(in, "use_rope", true, &config->rope)) return false;
    if (mode) {
        const char *text = json_string_value(mode);
        if (!text || (strcmp(text, "rope") && strcmp(text, "nope"))) {
            return wrong(in, "draft_position_mode", "\"rope\" or \"nope\"");
        }
        bool rope = !strcmp(text, "rope");
        if (lookup(in, "use_rope") && rope != config->rope) {
            return wrong(in, "draft_position_mode", "the same as use_rope");
        }
        config->rope = rope;
    }
    config->theta = config->family == IO_FAMILY_QWEN3 ? 10000.0f : 500000.0f;
    if (parameters && !json_is_object(parameters)) return wrong(in, "rope_parameters", "an object");
    if (scaling && !json_is_object(scaling)) return wrong(in, "rope_scaling", "an object");
    if (!read_theta(in, json_object_get(parameters, "rope_theta"), &config->theta)) return false;
    if (!read_theta(in, lookup(in, "rope_theta"), &config->theta)) return false;
    const char *key;
    json_t *item;
    json_object_foreach((json_t *)parameters, key, item) {
        if (json_is_object(item)) {
            return wrong(in, "rope_parameters", "one set for all layers: others are not supported");
        }
    }
    const json_t *type = json_object_get(parameters, "rope_type");
    if (!type) type = json_object_get(scaling, "rope_type");
    if (!type) type = json_object_get(scaling, "type");
    const char *name = json_string_value(type);
    if (scaling && !name) name = "scaled";
    if (name && strcmp(name, "default")) {
        snprintf(config->rope_scaling, sizeof config->rope_scaling, "%s", name);
    }
    return true;
}

// Keys whose presence with another value means arithmetic that the chain does not have.
static bool refuse_unsupported(const reader *in, const io_config *config) {
    bool muse = config->family == IO_FAMILY_MUSE, flag;
    if (lookup(in, "quantization_config") || lookup(in, "compression_config")) {
        return io_fail(
            in->error, "%s: quantization_config is given, quantised weights are not supported",
            in->path);
    }
    static const char *const neox[] = {"is_neox_style", "rope_is_neox_style", "use_neox_rope"};
    for (size_t i = 0; i < sizeof neox / sizeof *neox; ++i) {
        if (!read_flag(in, neox[i], !muse, &flag)) return false;
        if (flag == muse) {
            return wrong(
                in, neox[i],
                muse ? "false: NeoX pairs are not supported for Muse Spark"
                     : "true: drafts of this kind rotate NeoX pairs");
        }
    }
    const json_t *partial = lookup(in, "partial_rotary_factor");
    if (!partial) {
        partial = json_object_get(lookup(in, "rope_parameters"), "partial_rotary_factor");
    }
    if (partial && json_number_value(partial) != 1.0) {
        return io_fail(
            in->error, "%s: partial_rotary_factor must be 1: partial RoPE is not supported",
            in->path);
    }
    const json_t *rank = lookup(in, "kv_lora_rank");
    if (rank) return wrong(in, "kv_lora_rank", "absent: MLA drafts are not supported");
    return true;
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

static bool read_config(const reader *in, io_config *config) {
    if (!read_family(in, &config->family)) return false;
    bool muse = config->family == IO_FAMILY_MUSE;
    if (!read_size(in, "hidden_size", 1 << 20, -1, &config->hidden_size) ||
        !read_size(in, "num_hidden_layers", 1024, -1, &config->layers) ||
        !read_size(in, "num_attention_heads", 65536, 0, &config->attention_heads)) {
        return false;
    }
    int64_t heads = config->attention_heads ? config->attention_heads : -1;
    int64_t head_dim = muse ? 64 : heads > 0 ? config->hidden_size / heads : -1;
    if (!read_size(in, "num_key_value_heads", 65536, heads, &config->kv_heads) ||
        !read_size(in, "head_dim", 65536, head_dim, &config->head_dim) ||
        !read_size(in, "max_position_embeddings", 1 << 28, 0, &config->max_position) ||
        !read_eps(in, muse ? 1e-5f : 1e-6f, &config->eps) ||
        !read_flag(in, "norm_affine", true, &config->affine) ||
        !read_flag(in, "norm_zero_centered_gamma", false, &config->zero_centered) ||
        !read_flag(in, "attention_bias", false, &config->bias) || !read_rope(in, config)) {
        return false;
    }
    if (!muse && (!config->affine || config->zero_centered)) {
        const char *key = config->affine ? "norm_zero_centered_gamma" : "norm_affine";
        return wrong(in, key, "left out for drafts of this kind");
    }
    return check_shape(in, config) && refuse_unsupported(in, config);
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
