// SPDX-License-Identifier: Apache-2.0
// What ctxkv diagnose reads: the inputs of a call and the caches that somebody's engine left.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "diagnose.h"

static bool out_of_memory(void) {
    cli_fail("out of memory for the call's tables");
    return false;
}

// Binds kv_cache.0, 1, ... of a file; the first file sets the shape, a second must have it.
static bool bind_caches(
    dg_call *call, const io_safetensors *file, bool first, const uint8_t ***layers) {
    const uint8_t **data = *layers = calloc((size_t)call->L, sizeof *data);
    if (!data) return out_of_memory();
    for (int64_t l = 0; l < call->L; ++l) {
        char name[40], must[96];
        snprintf(name, sizeof name, "kv_cache.%" PRId64, l);
        const io_tensor *tensor = io_safetensors_find(file, name);
        if (!tensor) {
            cli_fail(
                "%s: tensor '%s' is missing, must be there for each of %" PRId64 " layers",
                file->path, name, call->L);
            return false;
        }
        if (first && !l && tensor->rank == 4) {
            call->blocks = tensor->shape[0];
            call->block_size = tensor->shape[2];
        }
        const int64_t shape[4] = {call->blocks, call->H, call->block_size, 2 * call->dim};
        snprintf(
            must, sizeof must, "[%s, %" PRId64 ", %s, %" PRId64 "]", "num_blocks", call->H,
            "block_size", 2 * call->dim);
        if (tensor->dtype != IO_BF16 || tensor->rank != 4 ||
            memcmp(tensor->shape, shape, sizeof shape)) {
            cli_fail(
                "%s: tensor '%s' is %s %s, must be BF16 %s", file->path, name,
                io_dtype_name(tensor->dtype), io_shape(tensor->shape, tensor->rank).text,
                first && !l ? must : io_shape(shape, 4).text);
            return false;
        }
        data[l] = tensor->data;
    }
    call->cells = call->blocks * call->H * call->block_size;
    return true;
}

const uint8_t *dg_recorded(const dg_call *call, int64_t layer, int64_t cell) {
    return call->recorded[layer] + (size_t)(cell * call->dim) * 4;
}

static bool constant(const uint8_t *data, int64_t count, uint16_t *value) {
    memcpy(value, data, 2);
    return !memcmp(data, data + 2, (size_t)(count - 1) * 2);
}

bool dg_untouched(const dg_call *call, int64_t layer, int64_t cell) {
    const uint8_t *data = dg_recorded(call, layer, cell);
    size_t bytes = (size_t)call->dim * 4;
    uint16_t value;
    if (call->before) return !memcmp(data, call->before[layer] + (size_t)cell * bytes, bytes);
    return call->fill_known && constant(data, call->dim * 2, &value) && value == call->fill;
}

// Without --before: what most places that no slot names hold, or, where slots name all places,
// rows of one value only. Caches are commonly cleared or poisoned with one value.
static bool guess_fill(dg_call *call) {
    const dg_place plain = {0};
    uint64_t *counts = calloc(2 * 65536, sizeof *counts), total[2] = {0};
    uint8_t *named = malloc((size_t)call->cells + 1);
    if (!counts || !named) {
        free(counts);
        free(named);
        return out_of_memory();
    }
    for (int64_t l = 0; l < call->L; ++l) {
        memset(named, 0, (size_t)call->cells);
        for (int64_t t = 0; t < call->T; ++t) {
            for (int64_t h = 0; h < call->H; ++h) {
                int64_t cell = dg_cell(call, &plain, l, t, h);
                if (cell >= 0) named[cell] = 1;
            }
        }
        for (int64_t cell = 0; cell < call->cells; ++cell) {
            uint16_t value;
            bool one = constant(dg_recorded(call, l, cell), 2 * call->dim, &value);
            if (one) ++counts[named[cell] * 65536 + value];
            total[named[cell]] += !named[cell] || one;
        }
    }
    int from = total[0] ? 0 : 1;
    for (int value = 0; value < 65536; ++value) {
        if (!total[from] || counts[from * 65536 + value] * 2 < total[from]) continue;
        call->fill_known = true;
        call->fill = (uint16_t)value;
    }
    free(counts);
    free(named);
    return true;
}

// The rank's Q rows of every layer, where the checkpoint has them.
static bool find_q_rows(dg_call *call) {
    const io_config *config = &call->draft.config;
    int64_t q_heads = config->attention_heads / call->facts.tp_size;
    call->q_rows = calloc((size_t)call->L, sizeof *call->q_rows);
    if (!call->q_rows) return out_of_memory();
    for (int64_t l = 0; l < call->L && q_heads; ++l) {
        static const char *const names[] = {
            "layers.%" PRId64 ".self_attn.q_proj.weight",
            "model.layers.%" PRId64 ".self_attn.q_proj.weight",
            "layers.%" PRId64 ".self_attn.qkv_proj.weight",
            "model.layers.%" PRId64 ".self_attn.qkv_proj.weight"};
        for (int i = 0; i < 4 && !call->q_rows[l]; ++i) {
            char name[96];
            const io_tensor *tensor;
            const char *path;
            io_error error;
            snprintf(name, sizeof name, names[i], l);
            if (!io_checkpoint_find(&call->draft.checkpoint, name, &tensor, &path, &error)) {
                cli_fail("%s", error.text);
                return false;
            }
            bool fits = tensor && tensor->dtype == IO_BF16 && tensor->rank == 2 &&
                        tensor->shape[1] == call->D &&
                        tensor->shape[0] >= config->attention_heads * call->dim;
            if (!fits) continue;
            int64_t first = call->facts.tp_rank * q_heads * call->dim;
            call->q_rows[l] = tensor->data + (size_t)(first * call->D) * 2;
        }
        if (!call->q_rows[l]) q_heads = 0;
    }
    call->q_count = q_heads * call->dim;
    return true;
}

static bool make_gains(dg_call *call) {
    const io_draft *draft = &call->draft;
    int64_t n = call->D, width = 2 * call->H * call->dim;
    call->gains = calloc((size_t)((1 + call->L) * n), sizeof *call->gains);
    if (!call->gains) return out_of_memory();
    for (int64_t i = 0; i <= call->L; ++i) {
        const io_view *view =
            i ? draft->layer_norms ? &draft->layer_norms[i - 1] : NULL : &draft->hidden;
        if (!view || !view->tensor.data) continue;
        ctxkv__gains(
            view->tensor.data, view->tensor.dtype.bits == 32, n, 0.0f, call->gains + i * n);
    }
    if (!draft->bias.tensor.data) return true;
    // NOLINTNEXTLINE(clang-analyzer-optin.portability.UnixAPI): a layer has columns
    call->bias = calloc((size_t)(call->L * width), sizeof *call->bias);
    if (!call->bias) return out_of_memory();
    ctxkv__gains(draft->bias.tensor.data, false, call->L * width, 0.0f, call->bias);
    return true;
}

// The search's arithmetic is that of the two families with BF16 caches and one table.
static bool known(const dg_call *call) {
    const io_config *config = &call->draft.config;
    const io_context *context = &call->context;
    const char *what = config->family == IO_FAMILY_LAGUNA || config->family == IO_FAMILY_GEMMA4
                           ? "drafts of Laguna and Gemma 4"
                       : config->rotary_dim != config->head_dim             ? "partial RoPE"
                       : config->v_scale != 0                               ? "a scale of V"
                       : config->family == IO_FAMILY_QWEN3 && !config->neox ? "GPT-J pairs"
                       : context->table_lists > 1 ? "a table for each layer"
                       : context->cos_sin && context->table_dtype != IO_BF16
                           ? "a table that is not BF16"
                       : context->k_scales ? "FP8 caches"
                                           : NULL;
    if (what) {
        cli_fail("%s: diagnose does not search %s: use ctxkv run and verify", call->model, what);
    }
    return !what;
}

static bool set_base(dg_call *call) {
    const io_config *config = &call->draft.config;
    if (!known(call)) return false;
    bool muse = config->family == IO_FAMILY_MUSE, given = call->context.cos_sin != NULL;
    if (config->rope && !given && (config->rope_scaling[0] || !config->max_position)) {
        cli_fail(
            "%s: RoPE of this config needs its table: cos_sin_cache must be given",
            call->context.file.path);
        return false;
    }
    float centre = config->zero_centered ? 1.0f : 0.0f;
    int gain = call->draft.hidden.tensor.data ? DG_GAIN_OWN : DG_GAIN_NONE;
    dg_params *p = &call->base;
    p->norms.hidden = (dg_norm){1, gain, 0, DG_RSQRT_GPU, centre, config->eps};
    p->norms.layer = p->norms.hidden;
    p->norms.layer.present = muse;
    bool few = call->T < 256 || call->numerics == CTXKV_NUMERICS_INVARIANT;
    p->norms.order = few ? DG_ORDER_RMS_1024 : DG_ORDER_RMS_256;
    if (muse) p->norms.order = DG_ORDER_PAIR;
    if (muse && call->numerics == CTXKV_NUMERICS_PACKED) p->norms.order = DG_ORDER_PACKED;
    p->project = (dg_project){.rows = {DG_K_ROWS, DG_V_ROWS}, .rank = call->facts.tp_rank};
    p->key = (dg_key){.norm = muse ? CTXKV__K_PLAIN : CTXKV__K_RMS, .times = 1, .gain = !muse};
    p->key.rope = !config->rope ? CTXKV__ROPE_NONE : muse ? CTXKV__ROPE_GPTJ : CTXKV__ROPE_NEOX;
    p->key.table = given ? DG_TABLE_GIVEN : DG_TABLE_GPU;
    p->key.eps = config->eps;
    p->key.theta = config->theta;
    call->table_rows = given                  ? call->context.table_rows
                       : config->max_position ? config->max_position
                                              : INT64_C(1) << 40;
    dg_normalise(call, p);
    return true;
}

static bool open_ranks(dg_call *call, int64_t tp_size) {
    io_error error;
    if (tp_size < 2 || tp_size > 64) return true;
    call->ranks = calloc((size_t)tp_size, sizeof *call->ranks);
    if (!call->ranks) return out_of_memory();
    for (int64_t r = 0; r < tp_size; ++r) {
        if (r == call->facts.tp_rank) continue;
        if (io_draft_open(&call->ranks[r], call->model, tp_size, r, &error)) continue;
        cli_fail("%s", error.text);
        return false;
    }
    return true;
}

static bool read_files(
    dg_call *call, const char *context, const char *cache, const char *before, int64_t tp_size,
    int64_t tp_rank) {
    io_error error;
    bool ok = io_draft_open(&call->draft, call->model, tp_size, tp_rank, &error) &&
              io_context_open(&call->context, context, &call->draft.config, &error) &&
              io_safetensors_open(&call->cache, cache, &error) &&
              (!before || io_safetensors_open(&call->before_file, before, &error));
    if (!ok) cli_fail("%s", error.text);
    return ok;
}

bool dg_open(
    dg_call *call, const char *model, const char *context, const char *cache, const char *before,
    int64_t tp_size, int64_t tp_rank) {
    call->model = model;
    call->cache_path = cache;
    if (!read_files(call, context, cache, before, tp_size, tp_rank)) return false;
    call->L = call->draft.config.layers;
    call->T = call->context.rows;
    call->H = call->draft.kv_heads;
    call->D = call->draft.config.hidden_size;
    call->dim = call->draft.config.head_dim;
    if (!bind_caches(call, &call->cache, true, &call->recorded) ||
        (before && !bind_caches(call, &call->before_file, false, &call->before))) {
        return false;
    }
    call->facts = (dg_facts){
        (int32_t)(call->D / 16), (int32_t)call->block_size, (int32_t)tp_size, (int32_t)tp_rank};
    return (before || guess_fill(call)) && find_q_rows(call) && make_gains(call) &&
           set_base(call) && open_ranks(call, tp_size);
}

void dg_close(dg_call *call) {
    for (int64_t r = 0; call->ranks && r < call->facts.tp_size; ++r)
        io_draft_close(&call->ranks[r]);
    free(call->ranks);
    free(call->recorded);
    free(call->before);
    free(call->q_rows);
    free(call->gains);
    free(call->bias);
    io_safetensors_close(&call->before_file);
    io_safetensors_close(&call->cache);
    io_context_close(&call->context);
    io_draft_close(&call->draft);
}
