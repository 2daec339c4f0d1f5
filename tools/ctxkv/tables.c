// SPDX-License-Identifier: Apache-2.0
// Tables given with a context or made from theta, and the scales of FP8 caches.
#include "tables.h"

#include <inttypes.h>
#include <stdlib.h>

static DLDataType dtype_of(io_dtype dtype) {
    return dtype == IO_F32 ? CLI_F32 : dtype == IO_F16 ? (DLDataType){kDLFloat, 16, 1} : CLI_BF16;
}

// Only rows that a position in range names are computed; the others stay zero and are never read.
static const void *from_theta(
    cli_tables *to, const io_config *config, const io_context *context, const char *model,
    const char *name) {
    if (config->rope_scaling[0]) {
        cli_fail(
            "%s/config.json: RoPE of type '%s' needs its table: cos_sin_cache must be in %s", model,
            config->rope_scaling, name);
        return NULL;
    }
    if (!to->rows) {
        cli_fail(
            "%s/config.json: max_position_embeddings is missing, must be given for RoPE", model);
        return NULL;
    }
    int64_t used = 1, columns = config->rotary_dim;
    for (int64_t t = 0; t < context->rows; ++t) {
        int64_t position = context->positions[t];
        if (position < to->rows && position >= used) used = position + 1;
    }
    to->made = calloc((size_t)(to->rows * columns), sizeof(uint16_t));
    if (!to->made) {
        cli_fail("out of memory for a table of %" PRId64 " positions", to->rows);
        return NULL;
    }
    cli_tensor part;
    const cli_place host = {.where = {kDLCPU, 0}};
    cli_tensor_set(&part, &host, to->made, CLI_BF16, 2, (int64_t[]){used, columns});
    if (!ctxkv_rope_table(config->theta, columns, used, &part.tensor)) return to->made;
    cli_fail_status("rope_theta");
    return NULL;
}

static bool set_tables(
    cli_tables *to, cli_place *place, const io_config *config, const io_context *context,
    const char *model, const char *name) {
    const void *data = context->cos_sin;
    to->count = data ? context->table_lists : 1;
    to->rows = data ? context->table_rows : config->max_position;
    if (!data) data = from_theta(to, config, context, model, name);
    if (!data) return false;
    DLDataType dtype = context->cos_sin ? dtype_of(context->table_dtype) : CLI_BF16;
    const int64_t shape[2] = {to->rows, config->rotary_dim};
    size_t bytes = (size_t)(shape[0] * shape[1]) * dtype.bits / 8;
    to->tables = calloc((size_t)to->count, sizeof *to->tables);
    for (int64_t i = 0; to->tables && i < to->count; ++i) {
        // to->made is freed by cli_tables_free.
        void *at = cli_share( // NOLINT(clang-analyzer-unix.Malloc)
            place, (const char *)data + (size_t)i * bytes, bytes);
        if (!at) return false;
        cli_tensor_set(&to->tensors[i], place, at, dtype, 2, shape);
        to->tables[i] = &to->tensors[i].tensor;
    }
    if (!to->tables) cli_fail("out of memory for the call's addresses");
    return to->tables != NULL;
}

static bool set_scales(
    cli_tables *to, cli_place *place, const io_config *config, const io_context *context) {
    const float *given[2] = {context->k_scales, context->v_scales};
    static const int64_t one = 1;
    to->scales = calloc((size_t)config->layers * 2, sizeof *to->scales);
    if (!to->scales) {
        cli_fail("out of memory for the call's addresses");
        return false;
    }
    for (int64_t i = 0; i < 2 * config->layers; ++i) {
        cli_tensor *tensor = &to->tensors[config->layers + i];
        void *at = cli_share(place, given[i / config->layers] + i % config->layers, sizeof(float));
        if (!at) return false;
        cli_tensor_set(tensor, place, at, CLI_F32, 1, &one);
        to->scales[i] = &tensor->tensor;
    }
    return true;
}

bool cli_tables_make(
    cli_tables *to, cli_place *place, const io_config *config, const io_context *context,
    const char *model, const char *name) {
    *to = (cli_tables){0};
    to->tensors = calloc((size_t)config->layers * 3, sizeof *to->tensors);
    if (!to->tensors) {
        cli_fail("out of memory for the call's addresses");
        return false;
    }
    return (!config->rope || set_tables(to, place, config, context, model, name)) &&
           (!context->k_scales || set_scales(to, place, config, context));
}

void cli_tables_free(cli_tables *tables) {
    free(tables->made);
    free(tables->tensors);
    free(tables->tables);
    free(tables->scales);
}
