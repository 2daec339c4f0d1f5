// SPDX-License-Identifier: Apache-2.0
// Finding the chain's tensors in a checkpoint, checking them, and cutting out a rank's heads.
#include "draft.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct loader {
    io_draft *draft;
    const char *folder;
    io_error *error;
} loader;

typedef struct found {
    const io_tensor *tensor;
    const char *path, *name;
} found;

bool io_tensor_parallel(
    int64_t heads, int64_t tp_size, int64_t tp_rank, int64_t *local, int64_t *first,
    io_error *error) {
    if (tp_size < 1 || tp_rank < 0 || tp_rank >= tp_size) {
        return io_fail(
            error,
            "tensor-parallel rank %" PRId64 " of %" PRId64 " ranks: must be from 0 to %" PRId64,
            tp_rank, tp_size, tp_size - 1);
    }
    bool split = heads >= tp_size;
    if (split ? heads % tp_size : tp_size % heads) {
        return io_fail(
            error,
            "%" PRId64 " KV heads on %" PRId64 " tensor-parallel ranks: one must be a multiple of "
            "the other",
            heads, tp_size);
    }
    *local = split ? heads / tp_size : 1;
    *first = split ? tp_rank * *local : tp_rank / (tp_size / heads);
    return true;
}

// Looks a name up, with and without a leading "model."; tensor NULL when there is none.
static bool find(const loader *in, char *name, size_t size, const char *base, found *result) {
    static const char *const prefixes[] = {"", "model."};
    result->tensor = NULL;
    for (int i = 0; i < 2 && !result->tensor; ++i) {
        snprintf(name, size, "%s%s", prefixes[i], base);
        if (!io_checkpoint_find(
                &in->draft->checkpoint, name, &result->tensor, &result->path, in->error)) {
            return false;
        }
    }
    result->name = name;
    return true;
}

static bool missing(const loader *in, const char *name) {
    return io_fail(in->error, "%s: tensor '%s' is missing", in->folder, name);
}

static bool check_dtype(const loader *in, const found *item, bool f32_too) {
    io_dtype dtype = item->tensor->dtype;
    if (dtype == IO_BF16 || (f32_too && dtype == IO_F32)) return true;
    return io_fail(
        in->error, "%s: tensor '%s' is %s, must be BF16%s", item->path, item->name,
        io_dtype_name(dtype), f32_too ? " or F32" : "");
}

static bool check_shape(const loader *in, const found *item, int64_t rows, int64_t columns) {
    int64_t want[2] = {rows ? rows : columns, columns};
    int rank = rows ? 2 : 1;
    const io_tensor *tensor = item->tensor;
    if (tensor->rank == rank && !memcmp(tensor->shape, want, (size_t)rank * sizeof *want)) {
        return true;
    }
    return io_fail(
        in->error, "%s: tensor '%s' has shape %s, must be %s", item->path, item->name,
        io_shape(tensor->shape, tensor->rank).text, io_shape(want, rank).text);
}

static DLDataType data_type(io_dtype dtype) {
    return dtype == IO_F32 ? (DLDataType){kDLFloat, 32, 1} : (DLDataType){kDLBfloat, 16, 1};
}

// rows = 0: one dimension. Copies only where the file's bytes are misaligned.
static bool set_view(
    const loader *in, io_view *view, const uint8_t *data, io_dtype dtype, int64_t rows,
    int64_t columns) {
    size_t unit = (size_t)io_dtype_bits(dtype) / 8;
    if ((uintptr_t)data % unit) {
        size_t bytes = (size_t)((rows ? rows : 1) * columns) * unit;
        view->owned = malloc(bytes);
        if (!view->owned) return io_fail(in->error, "%s: out of memory", in->folder);
        memcpy(view->owned, data, bytes);
        data = view->owned;
    }
    view->shape[0] = rows ? rows : columns;
    view->shape[1] = columns;
    view->tensor = (DLTensor){
        .data = (void *)data,
        .device = {kDLCPU, 0},
        .ndim = rows ? 2 : 1,
        .dtype = data_type(dtype),
        .shape = view->shape};
    return true;
}

static bool load_norm(const loader *in, const char *base, io_view *view) {
    char name[128];
    found item;
    int64_t size = in->draft->config.hidden_size;
    if (!find(in, name, sizeof name, base, &item)) return false;
    if (!item.tensor) return missing(in, base);
    return check_dtype(in, &item, true) && check_shape(in, &item, 0, size) &&
           set_view(in, view, item.tensor->data, item.tensor->dtype, 0, size);
}

// The first row of K (part 0) or V (part 1) in a merged tensor of Q, K, V and perhaps gate rows.
static bool merged_row(const loader *in, const found *item, int part, int64_t *row) {
    const io_config *config = &in->draft->config;
    int64_t heads = config->attention_heads, dim = config->head_dim;
    int64_t least = (heads + 2 * config->kv_heads) * dim;
    if (!heads) {
        return io_fail(
            in->error, "%s: num_attention_heads is missing, must be given for a merged '%s'",
            in->folder, item->name);
    }
    int64_t rows = item->tensor->rank > 0 ? item->tensor->shape[0] : 0;
    if (rows != least && rows != least + heads * dim) {
        return io_fail(
            in->error,
            "%s: tensor '%s' has %" PRId64 " rows, must be %" PRId64 " (Q, K, V) or %" PRId64
            " (and gate)",
            item->path, item->name, rows, least, least + heads * dim);
    }
    *row = (heads + part * config->kv_heads) * dim;
    return true;
}

// Finds the rows of this rank in layer's K (part 0) or V (part 1) of "weight" or "bias".
static bool rank_rows(
    const loader *in, int64_t layer, int part, const char *what, bool vector, found *item,
    char *name, size_t size, const uint8_t **data) {
    const io_draft *draft = in->draft;
    const io_config *config = &draft->config;
    int64_t columns = vector ? 1 : config->hidden_size, row = 0;
    int64_t total = config->kv_heads * config->head_dim;
    char base[96], merged[96];
    snprintf(
        base, sizeof base, "layers.%" PRId64 ".self_attn.%c_proj.%s", layer, part ? 'v' : 'k',
        what);
    snprintf(merged, sizeof merged, "layers.%" PRId64 ".self_attn.qkv_proj.%s", layer, what);
    if (!find(in, name, size, base, item)) return false;
    if (!item->tensor) {
        if (!find(in, name, size, merged, item)) return false;
        if (!item->tensor) return missing(in, base);
        if (!merged_row(in, item, part, &row)) return false;
        total = item->tensor->shape[0];
    }
    bool ok = check_dtype(in, item, false) &&
              (vector ? check_shape(in, item, 0, total) : check_shape(in, item, total, columns));
    if (!ok) return false;
    row += draft->first_head * config->head_dim;
    *data = item->tensor->data + (size_t)(row * columns) * 2;
    return true;
}

static bool load_weights(const loader *in) {
    io_draft *draft = in->draft;
    const io_config *config = &draft->config;
    int64_t parts = draft->parts;
    draft->weights = calloc((size_t)(config->layers * parts), sizeof *draft->weights);
    if (!draft->weights) return io_fail(in->error, "%s: out of memory", in->folder);
    for (int64_t i = 0; i < config->layers * parts; ++i) {
        char name[128];
        found item;
        const uint8_t *data;
        if (!rank_rows(
                in, i / parts, (int)(i % parts), "weight", false, &item, name, sizeof name,
                &data) ||
            !set_view(
                in, &draft->weights[i], data, IO_BF16, draft->kv_heads * config->head_dim,
                config->hidden_size)) {
            return false;
        }
    }
    return true;
}

static bool load_bias(const loader *in) {
    io_draft *draft = in->draft;
    const io_config *config = &draft->config;
    size_t part = (size_t)(draft->kv_heads * config->head_dim);
    int64_t parts = draft->parts;
    uint16_t *rows = calloc((size_t)(config->layers * parts), part * sizeof *rows);
    draft->bias.owned = rows;
    if (!rows) return io_fail(in->error, "%s: out of memory", in->folder);
    for (int64_t i = 0; i < config->layers * parts; ++i) {
        char name[128];
        found item;
        const uint8_t *data;
        if (!rank_rows(
                in, i / parts, (int)(i % parts), "bias", true, &item, name, sizeof name, &data)) {
            return false;
        }
        memcpy(rows + (size_t)i * part, data, part * sizeof *rows);
    }
    return set_view(
        in, &draft->bias, (const uint8_t *)rows, IO_BF16, config->layers, (int64_t)part * parts);
}

static bool load_k_norm(const loader *in) {
    io_draft *draft = in->draft;
    int64_t dim = draft->config.head_dim, layers = draft->config.layers;
    uint8_t *rows = NULL;
    io_dtype dtype = IO_BF16;
    for (int64_t i = 0; i < layers; ++i) {
        char base[96], name[128];
        found item;
        snprintf(base, sizeof base, "layers.%" PRId64 ".self_attn.k_norm.weight", i);
        if (!find(in, name, sizeof name, base, &item)) return false;
        if (!item.tensor) return missing(in, base);
        if (!check_dtype(in, &item, true) || !check_shape(in, &item, 0, dim)) return false;
        if (!i) {
            dtype = item.tensor->dtype;
            rows = draft->k_norm.owned = calloc((size_t)(layers * dim), 4);
            if (!rows) return io_fail(in->error, "%s: out of memory", in->folder);
        }
        if (item.tensor->dtype != dtype) {
            return io_fail(
                in->error, "%s: tensor '%s' is %s, must be %s as that of layer 0", item.path, name,
                io_dtype_name(item.tensor->dtype), io_dtype_name(dtype));
        }
        memcpy(rows + (size_t)i * item.tensor->bytes, item.tensor->data, item.tensor->bytes);
    }
    return set_view(in, &draft->k_norm, rows, dtype, layers, dim);
}

static bool load_layer_norms(const loader *in) {
    io_draft *draft = in->draft;
    size_t layers = (size_t)draft->config.layers;
    draft->layer_norms = calloc(layers, sizeof *draft->layer_norms);
    if (!draft->layer_norms) return io_fail(in->error, "%s: out of memory", in->folder);
    for (size_t i = 0; i < layers; ++i) {
        char base[96];
        bool muse = draft->config.family == IO_FAMILY_MUSE;
        snprintf(
            base, sizeof base, "layers.%zu.%s.weight", i,
            muse ? "self_attn.pre_qkv_proj_norm" : "input_layernorm");
        if (!load_norm(in, base, &draft->layer_norms[i])) return false;
        if (draft->layer_norms[i].tensor.dtype.bits != draft->layer_norms[0].tensor.dtype.bits) {
            return io_fail(
                in->error, "%s: tensor '%s': must have the dtype of layer 0's", in->folder, base);
        }
    }
    return true;
}

static bool load(const loader *in) {
    const io_config *config = &in->draft->config;
    bool muse = config->family == IO_FAMILY_MUSE, laguna = config->family == IO_FAMILY_LAGUNA;
    in->draft->parts = config->family == IO_FAMILY_GEMMA4 ? 1 : 2;
    // Laguna's hidden norm belongs to what comes before the chain.
    bool hidden = config->affine && !laguna, layers = config->affine && (muse || laguna);
    if (hidden && !load_norm(in, "hidden_norm.weight", &in->draft->hidden)) return false;
    if (layers && !load_layer_norms(in)) return false;
    if (!muse && config->affine && !load_k_norm(in)) return false;
    if (config->bias && !load_bias(in)) return false;
    return load_weights(in);
}

bool io_draft_open(
    io_draft *draft, const char *folder, int64_t tp_size, int64_t tp_rank, io_error *error) {
    *draft = (io_draft){0};
    loader in = {draft, folder, error};
    char *path = io_join(folder, "config.json");
    if (!path) return io_fail(error, "%s: out of memory", folder);
    bool ok = io_config_open(&draft->config, path, error);
    free(path);
    ok = ok &&
         io_tensor_parallel(
             draft->config.kv_heads, tp_size, tp_rank, &draft->kv_heads, &draft->first_head,
             error) &&
         io_checkpoint_open(&draft->checkpoint, folder, error) && load(&in);
    if (!ok) io_draft_close(draft);
    return ok;
}

void io_draft_close(io_draft *draft) {
    size_t layers = (size_t)draft->config.layers;
    for (size_t i = 0; i < layers && draft->layer_norms; ++i) free(draft->layer_norms[i].owned);
    size_t weights = layers * (size_t)draft->parts;
    for (size_t i = 0; i < weights && draft->weights; ++i) free(draft->weights[i].owned);
    free(draft->hidden.owned);
    free(draft->bias.owned);
    free(draft->k_norm.owned);
    free(draft->layer_norms);
    free(draft->weights);
    io_checkpoint_close(&draft->checkpoint);
    *draft = (io_draft){0};
}
