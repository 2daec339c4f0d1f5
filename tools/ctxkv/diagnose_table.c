// SPDX-License-Identifier: Apache-2.0
// The table of hypotheses, and what a call must have for one to be tried.
#include "diagnose.h"

#include <stdio.h>
#include <string.h>

#include "../../src/ops/numerics.h"
#include "json.h"

// k16 steps of one of `parts` parts, in whole tiles of 1, 4 or 8 steps.
static int32_t dg_part_steps(int32_t steps, int32_t parts, int32_t tiles) {
    static const int32_t sizes[] = {1, 4, 8};
    int32_t tile = sizes[tiles], count = (steps + tile - 1) / tile;
    return (count + parts - 1) / parts * tile;
}

#define H(name, first, count, changes, sentence, ...)                                              \
    static void apply_##name(dg_params *p, const dg_facts *f, int32_t v) {                         \
        (void)f, (void)v;                                                                          \
        __VA_ARGS__;                                                                               \
    }
#include "diagnose_hypotheses.inc"
#undef H

const dg_hypothesis dg_hypotheses[] = {
#define H(name, first, count, changes, sentence, ...)                                              \
    {#name, changes, sentence, apply_##name, first, count},
#include "diagnose_hypotheses.inc"
#undef H
};
const int dg_hypothesis_count = sizeof dg_hypotheses / sizeof *dg_hypotheses;

static void normalise_norm(dg_norm *norm) {
    if (!norm->present) memset(norm, 0, sizeof *norm);
    if (norm->gain == DG_GAIN_NONE) norm->input_scale = 0, norm->centre = 0.0f;
}

static void normalise_norms(const dg_call *call, dg_norms *p) {
    normalise_norm(&p->hidden);
    if (!call->draft.layer_norms && p->layer.gain == DG_GAIN_OWN) p->layer.gain = DG_GAIN_NONE;
    if (!call->draft.hidden.tensor.data && p->layer.gain == DG_GAIN_HIDDEN)
        p->layer.gain = DG_GAIN_NONE;
    normalise_norm(&p->layer);
    if (!p->layer.present || !p->hidden.present) p->unrounded = 0;
    if (p->layer.gain != DG_GAIN_OWN || call->L == 1) p->layers = DG_OWN;
    if (p->hidden.centre == 0.0f && p->layer.centre == 0.0f) p->gain_bf16 = 0;
}

static void normalise_project(const dg_call *call, dg_params *all) {
    dg_project *p = &all->project;
    if (p->mode == DG_SPLIT && p->steps >= call->facts.steps) {
        p->mode = DG_EXACT;
        p->steps = 0;
    }
    if (all->value.source != DG_V_PROJECTED) p->rows[1] = p->rows[0];
    if (call->draft.parts == 1) {
        if (p->transposed) p->transposed = 1;
        p->bias_parts = p->bias_parts == DG_BIAS_V_ONLY ? DG_BIAS_V_ONLY : DG_BIAS_BOTH;
    }
    if (!call->draft.bias.tensor.data) p->bias = DG_BIAS_NONE;
    if (p->bias == DG_BIAS_NONE) p->bias_layers = p->bias_parts = 0;
    if (call->L == 1) p->layers = p->bias_layers = DG_OWN;
}

static void normalise_key(const dg_call *call, dg_key *p) {
    if (p->norm != CTXKV__K_RMS || !call->draft.k_norm.tensor.data) p->gain = 0;
    if (!p->gain) p->layers = 0, p->centre = 0.0f;
    if (p->centre == 0.0f) p->gain_bf16 = 0;
    if (p->norm == CTXKV__K_ABSENT) p->eps = 0.0f, p->rsqrt = p->unrounded = 0;
    if (p->rope == CTXKV__ROPE_NONE) {
        p->times = 1;
        p->table = p->shift = p->other_order = p->rotary = 0;
        p->theta = 0.0f;
    }
    bool given = p->rope != CTXKV__ROPE_NONE && p->table == DG_TABLE_GIVEN;
    if (!given || call->context.table_lists < 2) p->table_layers = DG_OWN;
    io_dtype dtype = call->context.table_dtype;
    bool as_it_is = (p->table_round == DG_TO_BF16 && dtype == IO_BF16) ||
                    (p->table_round == DG_TO_FP16 && dtype == IO_F16);
    if (!given || as_it_is) p->table_round = DG_AS_IT_IS;
    if (p->rotary == call->dim || !p->rotary) p->last = 0;
    if (given || p->spread == p->rotary || !p->rotary) p->spread = 0;
    if (call->L == 1) p->layers = DG_OWN;
}

static void normalise_value(const dg_call *call, dg_params *all) {
    dg_value *p = &all->value;
    if (p->norm == DG_V_WEIGHTED && !call->draft.k_norm.tensor.data) p->norm = DG_V_NORMED;
    if (p->norm == DG_V_PLAIN) p->eps = 0.0f;
    if (p->scale == 0 || !p->times) p->scale = 0.0f, p->times = 1;
    if (p->source == DG_V_ROTATED_K && all->key.rope == CTXKV__ROPE_NONE) p->source = DG_V_NORMED_K;
    if (p->source == DG_V_NORMED_K && all->key.norm == CTXKV__K_ABSENT) p->source = DG_V_RAW_K;
}

static void normalise_store(const dg_call *call, dg_store *p) {
    bool fp8 = p->kind >= CTXKV_CACHE_FP8_E4M3;
    if (!fp8) p->unsaturated = 0;
    if (!fp8 || !call->context.k_scales) p->scales = p->scale_layers = 0;
    if (p->kind == CTXKV_CACHE_BF16) p->wide = 0;
    if (call->L == 1 || p->scales == DG_SCALES_NONE) p->scale_layers = 0;
}

void dg_normalise(const dg_call *call, dg_params *p) {
    normalise_norms(call, &p->norms);
    normalise_key(call, &p->key);
    normalise_value(call, p);
    normalise_project(call, p);
    normalise_store(call, &p->store);
    if (p->place.block_size == call->block_size) p->place.block_size = 0;
    if (!p->place.block_size) p->place.shape = 0;
    if (call->context.slot_lists == 1) p->place.first_slots = 0;
}

static int64_t rows_needed(const dg_call *call, const dg_project *p, int part) {
    int64_t width = call->H * call->dim;
    return p->rows[part] == DG_Q_ROWS ? width : p->rows[part] == DG_Q_ROWS_AFTER ? 2 * width : 0;
}

static bool testable_rows(const dg_call *call, const dg_params *p) {
    bool alone = call->draft.parts == 1;
    for (int part = 0; part < 2; ++part) {
        if (rows_needed(call, &p->project, part) > call->q_count) return false;
        if (alone && p->project.rows[part] == DG_V_ROWS) return false;
    }
    return !alone || p->value.source != DG_V_PROJECTED;
}

static bool testable_table(const dg_call *call, const dg_key *p) {
    if (p->rope == CTXKV__ROPE_NONE) return true;
    if (!call->context.positions || p->rotary < 2 || p->rotary > call->dim) return false;
    if (p->table != DG_TABLE_GIVEN) return true;
    return call->context.cos_sin && p->rotary == call->facts.rotary;
}

bool dg_testable(const dg_call *call, const dg_params *p) {
    const dg_params *base = &call->base;
    bool rms = base->norms.order >= DG_ORDER_RMS_1024;
    if (p->store.kind < 0) return false;
    bool wide = p->store.kind < CTXKV_CACHE_FP8_E4M3;
    if (rms != (p->norms.order >= DG_ORDER_RMS_1024)) return false;
    if (rms && (p->norms.hidden.rsqrt != DG_RSQRT_GPU || p->norms.layer.rsqrt != DG_RSQRT_GPU))
        return false;
    if (p->norms.layer.present && !base->norms.layer.present) return false;
    if (p->place.stale && !call->before && !call->fill_known) return false;
    if (wide != (base->store.kind < CTXKV_CACHE_FP8_E4M3)) return false;
    return testable_table(call, &p->key) && testable_rows(call, p);
}

bool dg_print_list(bool json) {
    io_json_begin();
    json_t *list = json_array();
    for (int i = 0; i < dg_hypothesis_count; ++i) {
        const dg_hypothesis *h = &dg_hypotheses[i];
        if (!json) puts(h->name);
        json_array_append_new(
            list, json_pack(
                      "{s:s, s:s, s:s}", "name", h->name, "changes", h->changes, "sentence",
                      h->sentence));
    }
    if (json) return dg_put_json(list, JSON_INDENT(2));
    json_decref(list);
    return true;
}
