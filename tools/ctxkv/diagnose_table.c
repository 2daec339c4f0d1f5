// SPDX-License-Identifier: Apache-2.0
// The table of hypotheses, and what a call must have for one to be tried.
#include "diagnose.h"

#include <stdio.h>
#include <string.h>

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

void dg_normalise(const dg_call *call, dg_params *p) {
    const dg_params *base = &call->base;
    normalise_norm(&p->norms.hidden);
    normalise_norm(&p->norms.layer);
    if (base->norms.hidden.gain == DG_GAIN_NONE) p->norms.layer.gain = DG_GAIN_NONE;
    if (!p->norms.layer.present) p->norms.unrounded = 0;
    if (p->norms.layer.gain != DG_GAIN_OWN) p->norms.layers = DG_OWN;
    if (p->norms.hidden.centre == 0.0f && p->norms.layer.centre == 0.0f) p->norms.gain_bf16 = 0;
    if (p->project.mode == DG_SPLIT && p->project.steps >= call->facts.steps) {
        p->project.mode = DG_EXACT;
        p->project.steps = 0;
    }
    if (p->key.norm != CTXKV__K_RMS) p->key.gain = p->key.layers = 0;
    if (p->key.norm == CTXKV__K_ABSENT) p->key.eps = 0.0f, p->key.rsqrt = p->key.unrounded = 0;
    if (p->key.rope == CTXKV__ROPE_NONE) {
        p->key.times = 1;
        p->key.table = p->key.shift = p->key.other_order = 0;
        p->key.theta = 0.0f;
    }
    if (p->place.block_size == call->block_size) p->place.block_size = 0;
    if (!p->place.block_size) p->place.shape = 0;
    if (call->context.slot_lists == 1) p->place.first_slots = 0;
    if (call->L == 1) p->norms.layers = p->project.layers = p->key.layers = DG_OWN;
}

static bool testable_rows(const dg_call *call, const dg_project *p) {
    int64_t width = call->H * call->dim;
    for (int part = 0; part < 2; ++part) {
        int64_t needed = p->rows[part] == DG_Q_ROWS         ? width
                         : p->rows[part] == DG_Q_ROWS_AFTER ? 2 * width
                                                            : 0;
        if (needed > call->q_count) return false;
    }
    return true;
}

bool dg_testable(const dg_call *call, const dg_params *p) {
    const dg_params *base = &call->base;
    bool rms = base->norms.order >= DG_ORDER_RMS_1024;
    if (rms != (p->norms.order >= DG_ORDER_RMS_1024)) return false;
    if (rms && p->norms.hidden.rsqrt != DG_RSQRT_GPU) return false;
    if (p->norms.layer.present && !call->base.norms.layer.present) return false;
    if (p->key.rope != CTXKV__ROPE_NONE && !call->context.positions) return false;
    if (p->key.rope != CTXKV__ROPE_NONE && p->key.table == DG_TABLE_GIVEN &&
        !call->context.cos_sin) {
        return false;
    }
    if (p->place.stale && !call->before && !call->fill_known) return false;
    return testable_rows(call, &p->project);
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
