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

static const io_dtype dtypes[] = {IO_BF16, IO_F16, IO_F8_E4M3, IO_F8_E5M2}; // by cache type

// What the first cache holds: as its dtype says, or, of bytes, as --cache-type says.
static bool set_kind(dg_call *call, const char *path, const io_tensor *tensor) {
    int asked = call->cache_type, kind = 0;
    if (tensor->dtype == IO_U8) {
        call->kind = (ctxkv_cache_type)asked;
        if (asked >= CTXKV_CACHE_FP8_E4M3) return true;
        cli_fail(
            "%s: tensor '%s' is U8: --cache-type must be given, fp8_e4m3 or fp8_e5m2", path,
            tensor->name);
        return false;
    }
    while (kind < 4 && dtypes[kind] != tensor->dtype) ++kind;
    call->kind = (ctxkv_cache_type)kind;
    if (kind < 4 && (asked < 0 || asked == kind)) return true;
    cli_fail(
        "%s: tensor '%s' is %s, must be %s", path, tensor->name, io_dtype_name(tensor->dtype),
        asked < 0 ? "BF16, F16, F8_E4M3, F8_E5M2 or U8" : io_dtype_name(dtypes[asked]));
    return false;
}

static const uint8_t *widen(dg_call *call, int64_t index, const io_tensor *tensor) {
    if (io_dtype_bits(tensor->dtype) == 16) return tensor->data;
    if (!call->widened) call->widened = calloc((size_t)call->L * 2, sizeof *call->widened);
    uint16_t *words = call->widened ? malloc(tensor->bytes * sizeof *words + 1) : NULL;
    if (!words) return NULL;
    for (uint64_t i = 0; i < tensor->bytes; ++i) words[i] = tensor->data[i];
    call->widened[index] = words;
    return (const uint8_t *)words;
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
        if (first && !l && !set_kind(call, file->path, tensor)) return false;
        const int64_t shape[4] = {call->blocks, call->H, call->block_size, 2 * call->dim};
        io_dtype own = dtypes[call->kind];
        bool same = tensor->dtype == own || (tensor->dtype == IO_U8 && io_dtype_bits(own) == 8);
        snprintf(
            must, sizeof must, "[%s, %" PRId64 ", %s, %" PRId64 "]", "num_blocks", call->H,
            "block_size", 2 * call->dim);
        if (!same || tensor->rank != 4 || memcmp(tensor->shape, shape, sizeof shape)) {
            cli_fail(
                "%s: tensor '%s' is %s %s, must be %s %s", file->path, name,
                io_dtype_name(tensor->dtype), io_shape(tensor->shape, tensor->rank).text,
                io_dtype_name(own), first && !l ? must : io_shape(shape, 4).text);
            return false;
        }
        data[l] = widen(call, first ? l : call->L + l, tensor);
        if (!data[l]) return out_of_memory();
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
    int64_t n = call->D;
    call->gains = calloc((size_t)((1 + call->L) * n), sizeof *call->gains);
    if (!call->gains) return out_of_memory();
    for (int64_t i = 0; i <= call->L; ++i) {
        const io_view *view =
            i ? draft->layer_norms ? &draft->layer_norms[i - 1] : NULL : &draft->hidden;
        if (!view || !view->tensor.data) continue;
        ctxkv__gains(
            view->tensor.data, view->tensor.dtype.bits == 32, n, 0.0f, call->gains + i * n);
    }
    return true;
}

static void set_norms(dg_call *call, dg_norms *p) {
    const io_config *config = &call->draft.config;
    bool muse = config->family == IO_FAMILY_MUSE, laguna = config->family == IO_FAMILY_LAGUNA;
    float centre = config->zero_centered ? 1.0f : 0.0f;
    int gain = config->affine ? DG_GAIN_OWN : DG_GAIN_NONE;
    p->hidden = p->layer = (dg_norm){1, gain, 0, DG_RSQRT_GPU, centre, config->eps};
    p->hidden.present = !laguna;
    p->layer.present = muse || laguna;
    int64_t rows = laguna ? call->L * call->T : call->T;
    bool few = rows < 256 || call->numerics == CTXKV_NUMERICS_INVARIANT;
    p->order = few ? DG_ORDER_RMS_1024 : DG_ORDER_RMS_256;
    if (muse) p->order = DG_ORDER_PAIR;
    if (muse && call->numerics == CTXKV_NUMERICS_PACKED) p->order = DG_ORDER_PACKED;
}

static void set_values(dg_call *call, dg_params *p) {
    const io_config *config = &call->draft.config;
    bool muse = config->family == IO_FAMILY_MUSE, alone = call->draft.parts == 1;
    p->key = (dg_key){.norm = muse ? CTXKV__K_PLAIN : CTXKV__K_RMS, .times = 1};
    p->key.gain = call->draft.k_norm.tensor.data != NULL;
    p->key.centre = config->zero_centered ? 1.0f : 0.0f;
    p->key.rope = !config->rope  ? CTXKV__ROPE_NONE
                  : config->neox ? CTXKV__ROPE_NEOX
                                 : CTXKV__ROPE_GPTJ;
    p->key.rotary = (int32_t)config->rotary_dim;
    p->key.table = call->context.cos_sin ? DG_TABLE_GIVEN : DG_TABLE_GPU;
    p->key.eps = config->eps;
    p->key.theta = config->theta;
    p->value = (dg_value){.times = 1, .scale = config->v_scale, .eps = config->eps};
    p->value.source = alone ? DG_V_RAW_K : DG_V_PROJECTED;
    p->value.norm = alone ? DG_V_NORMED : DG_V_PLAIN;
    p->store.kind = (int32_t)call->kind;
}

static bool set_base(dg_call *call) {
    const io_config *config = &call->draft.config;
    bool given = call->context.cos_sin != NULL, laguna = config->family == IO_FAMILY_LAGUNA;
    if (config->rope && !given && (config->rope_scaling[0] || !config->max_position)) {
        cli_fail(
            "%s: RoPE of this config needs its table: cos_sin_cache must be given",
            call->context.file.path);
        return false;
    }
    if (call->context.k_scales && call->kind < CTXKV_CACHE_FP8_E4M3) {
        cli_fail(
            "%s: k_scales are given, the caches are %s, must be F8_E4M3 or F8_E5M2",
            call->context.file.path, io_dtype_name(dtypes[call->kind]));
        return false;
    }
    dg_params *p = &call->base;
    set_norms(call, &p->norms);
    p->project = (dg_project){.rows = {DG_K_ROWS, DG_V_ROWS}, .rank = call->facts.tp_rank};
    if (call->draft.bias.tensor.data) p->project.bias = laguna ? DG_BIAS_AFTER : DG_BIAS_BEFORE;
    set_values(call, p);
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
    call->facts = (dg_facts){(int32_t)(call->D / 16), (int32_t)call->block_size,
                             (int32_t)tp_size,        (int32_t)tp_rank,
                             (int32_t)call->dim,      (int32_t)call->draft.config.rotary_dim,
                             call->draft.config.eps};
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
    for (int64_t i = 0; call->widened && i < 2 * call->L; ++i) free(call->widened[i]);
    free(call->widened);
    io_safetensors_close(&call->before_file);
    io_safetensors_close(&call->cache);
    io_context_close(&call->context);
    io_draft_close(&call->draft);
}
