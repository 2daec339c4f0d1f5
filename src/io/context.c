// SPDX-License-Identifier: Apache-2.0
// Checking a context file against the draft's config.
#include "context.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// NULL with *ok true when an optional tensor is not there.
static const io_tensor *get(
    const io_context *context, const char *name, io_dtype dtype, bool needed, bool *ok,
    io_error *error) {
    const io_tensor *tensor = io_safetensors_find(&context->file, name);
    *ok = true;
    if (!tensor) {
        if (needed) *ok = io_fail(error, "%s: tensor '%s' is missing", context->file.path, name);
    } else if (tensor->dtype != dtype) {
        *ok = io_fail(
            error, "%s: tensor '%s' is %s, must be %s", context->file.path, name,
            io_dtype_name(tensor->dtype), io_dtype_name(dtype));
    }
    return *ok ? tensor : NULL;
}

static bool wrong_shape(
    const io_context *context, const io_tensor *tensor, const char *must, io_error *error) {
    return io_fail(
        error, "%s: tensor '%s' has shape %s, must be %s", context->file.path, tensor->name,
        io_shape(tensor->shape, tensor->rank).text, must);
}

// The tensor's data, copied where the file's bytes are misaligned for its dtype.
static const void *aligned(
    io_context *context, const io_tensor *tensor, int slot, io_error *error) {
    size_t unit = (size_t)io_dtype_bits(tensor->dtype) / 8;
    if ((uintptr_t)tensor->data % unit == 0) return tensor->data;
    context->owned[slot] = malloc(tensor->bytes + 1);
    if (!context->owned[slot]) {
        io_fail(error, "%s: out of memory for '%s'", context->file.path, tensor->name);
        return NULL;
    }
    return memcpy(context->owned[slot], tensor->data, tensor->bytes);
}

static bool bind_hidden(io_context *context, const io_config *config, io_error *error) {
    bool ok;
    const io_tensor *tensor = get(context, "hidden_states", IO_BF16, true, &ok, error);
    if (!ok) return false;
    if (tensor->rank != 2 || tensor->shape[1] != config->hidden_size) {
        char must[64];
        snprintf(must, sizeof must, "[rows, %" PRId64 "]", config->hidden_size);
        return wrong_shape(context, tensor, must, error);
    }
    context->rows = tensor->shape[0];
    context->hidden = aligned(context, tensor, 0, error);
    return context->hidden != NULL;
}

static bool bind_positions(io_context *context, const io_config *config, io_error *error) {
    bool ok;
    const io_tensor *tensor = get(context, "positions", IO_I64, config->rope, &ok, error);
    if (!ok || !tensor) return ok;
    if (tensor->rank != 1 || tensor->shape[0] != context->rows) {
        char must[64];
        snprintf(must, sizeof must, "[%" PRId64 "], one per row", context->rows);
        return wrong_shape(context, tensor, must, error);
    }
    context->positions = aligned(context, tensor, 1, error);
    return context->positions != NULL;
}

static bool default_slots(io_context *context, io_error *error) {
    int64_t *slots = malloc(((size_t)context->rows + 1) * sizeof *slots);
    context->owned[2] = slots;
    if (!slots) return io_fail(error, "%s: out of memory for the slots", context->file.path);
    for (int64_t i = 0; i < context->rows; ++i) slots[i] = i;
    context->slots = slots;
    context->slot_lists = 1;
    context->slot_rows = context->rows;
    return true;
}

static bool bind_slots(io_context *context, const io_config *config, io_error *error) {
    bool ok;
    const io_tensor *tensor = get(context, "slot_mapping", IO_I64, false, &ok, error);
    if (!ok) return false;
    if (!tensor) return default_slots(context, error);
    int rank = tensor->rank;
    if (rank < 1 || rank > 2 || tensor->shape[rank - 1] > context->rows ||
        (rank == 2 && tensor->shape[0] != config->layers)) {
        char must[96];
        snprintf(
            must, sizeof must, "[R] or [%" PRId64 ", R], R at most %" PRId64, config->layers,
            context->rows);
        return wrong_shape(context, tensor, must, error);
    }
    context->slot_lists = rank == 2 ? tensor->shape[0] : 1;
    context->slot_rows = tensor->shape[rank - 1];
    context->slots = aligned(context, tensor, 2, error);
    return context->slots != NULL;
}

static bool bind_table(io_context *context, const io_config *config, io_error *error) {
    const io_tensor *tensor = io_safetensors_find(&context->file, "cos_sin_cache");
    if (!tensor) return true;
    int64_t columns = config->rotary_dim;
    if (tensor->dtype != IO_BF16 && tensor->dtype != IO_F16 && tensor->dtype != IO_F32)
        return io_fail(
            error, "%s: tensor 'cos_sin_cache' is %s, must be BF16, F16 or F32", context->file.path,
            io_dtype_name(tensor->dtype));
    int rank = tensor->rank;
    if (rank < 2 || rank > 3 || tensor->shape[rank - 1] != columns || tensor->shape[rank - 2] < 1 ||
        (rank == 3 && tensor->shape[0] != config->layers)) {
        char must[128];
        snprintf(
            must, sizeof must,
            "[max_position, %" PRId64 "] or [%" PRId64 ", max_position, %" PRId64 "]", columns,
            config->layers, columns);
        return wrong_shape(context, tensor, must, error);
    }
    context->table_lists = rank == 3 ? tensor->shape[0] : 1;
    context->table_rows = tensor->shape[rank - 2];
    context->table_dtype = tensor->dtype;
    context->cos_sin = aligned(context, tensor, 3, error);
    return context->cos_sin != NULL;
}

static bool bind_scales(
    io_context *context, const io_config *config, const char *name, int slot, const float **to,
    io_error *error) {
    bool ok;
    const io_tensor *tensor = get(context, name, IO_F32, false, &ok, error);
    if (!ok || !tensor) return ok;
    if (tensor->rank != 1 || tensor->shape[0] != config->layers) {
        char must[64];
        snprintf(must, sizeof must, "[%" PRId64 "], one per layer", config->layers);
        return wrong_shape(context, tensor, must, error);
    }
    *to = aligned(context, tensor, slot, error);
    return *to != NULL;
}

static bool both_scales(const io_context *context, io_error *error) {
    if (!context->k_scales == !context->v_scales) return true;
    return io_fail(
        error, "%s: tensor '%s' is missing, must be given beside the other's scales",
        context->file.path, context->k_scales ? "v_scales" : "k_scales");
}

static bool bind(io_context *context, const io_config *config, io_error *error) {
    if (bind_hidden(context, config, error) && bind_positions(context, config, error) &&
        bind_slots(context, config, error) && bind_table(context, config, error) &&
        bind_scales(context, config, "k_scales", 4, &context->k_scales, error) &&
        bind_scales(context, config, "v_scales", 5, &context->v_scales, error) &&
        both_scales(context, error)) {
        return true;
    }
    io_context_close(context);
    return false;
}

bool io_context_parse(
    io_context *context, const uint8_t *data, size_t size, const char *path,
    const io_config *config, io_error *error) {
    *context = (io_context){0};
    return io_safetensors_parse(&context->file, data, size, path, error) &&
           bind(context, config, error);
}

bool io_context_open(
    io_context *context, const char *path, const io_config *config, io_error *error) {
    *context = (io_context){0};
    return io_safetensors_open(&context->file, path, error) && bind(context, config, error);
}

void io_context_close(io_context *context) {
    for (int i = 0; i < 6; ++i) free(context->owned[i]);
    io_safetensors_close(&context->file);
    *context = (io_context){0};
}
