// SPDX-License-Identifier: Apache-2.0
// The verdict in words, and the report as text.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "diagnose.h"

void dg_spot_text(const dg_call *call, const dg_spot *spot, char *to, size_t size) {
    int64_t per_block = call->H * call->block_size, rest = spot->cell % per_block;
    char row[64] = "";
    if (spot->row >= 0) snprintf(row, sizeof row, ", row %" PRId64, spot->row);
    snprintf(
        to, size,
        "layer %" PRId64 "%s, block %" PRId64 ", offset %" PRId64 ", head %" PRId64
        ", %s, column %" PRId64 ": recorded 0x%0*x, must be 0x%0*x%s",
        spot->layer, row, spot->cell / per_block, rest % call->block_size, rest / call->block_size,
        spot->column < call->dim ? "K" : "V", spot->column % call->dim, dg_digits(call),
        spot->recorded, dg_digits(call), spot->expected,
        spot->row < 0 ? " (no slot names this place)" : "");
}

double dg_explained(const dg_result *result) {
    const dg_match *match = &result->clean;
    if (!match->differs || result->exact_count) return 1.0;
    double best = match->places ? (double)match->matched / (double)match->places : 0.0;
    if (result->closest_count) {
        match = &result->closest[0].match;
        double other = match->places ? (double)match->matched / (double)match->places : 0.0;
        if (other > best) best = other;
    }
    return best;
}

// ---- details of a hypothesis -------------------------------------------------------------------
static bool follows(const dg_call *call, const dg_set *set, int64_t step, bool reversed) {
    for (int64_t t = 0; t < call->T; ++t) {
        int64_t from = reversed ? call->T - 1 - t : ((t + step) % call->T + call->T) % call->T;
        if (set->positions[t] != dg_position(call, &set->params.key, from)) return false;
    }
    return true;
}

static void order_detail(const dg_call *call, const dg_set *set, char *to, size_t size) {
    if (follows(call, set, 0, true)) {
        snprintf(to, size, "reversed");
    } else if (follows(call, set, 1, false)) {
        snprintf(to, size, "every row had that of the next row");
    } else if (follows(call, set, -1, false)) {
        snprintf(to, size, "every row had that of the row before");
    } else {
        for (int64_t t = 0; t < call->T; ++t) {
            int64_t own = dg_position(call, &set->params.key, t);
            if (set->positions[t] == own) continue;
            snprintf(
                to, size, "first: row %" PRId64 " had position %" PRId64 ", not %" PRId64, t,
                set->positions[t], own);
            return;
        }
    }
}

static void stale_detail(const dg_call *call, const dg_set *set, char *to, size_t size) {
    int64_t count = 0, layer = -1, row = -1;
    for (int64_t i = 0; i < call->L * call->T; ++i) {
        bool stale = true;
        for (int64_t h = 0; h < call->H && stale; ++h) {
            int64_t cell = dg_cell(call, &set->params.place, i / call->T, i % call->T, h);
            stale = cell >= 0 && dg_untouched(call, i / call->T, cell);
        }
        if (stale && !count++) layer = i / call->T, row = i % call->T;
    }
    snprintf(
        to, size, "%" PRId64 " rows of all layers; first: layer %" PRId64 ", row %" PRId64, count,
        layer, row);
}

void dg_detail(
    const dg_call *call, const dg_result *result, const dg_set *set, int member, char *to,
    size_t size) {
    const dg_instance *instance = &result->instances[set->member[member]];
    const char *name = dg_hypotheses[instance->hypothesis].name;
    *to = 0;
    if (!strcmp(name, "other_tp_rank")) {
        snprintf(to, size, "rank %d", instance->value);
    } else if (!strncmp(name, "block_size_", 11) && instance->value) {
        snprintf(to, size, "and the strides were of that size");
    } else if (!strncmp(name, "split_k_", 8)) {
        snprintf(to, size, "%d columns a part", set->params.project.steps * 16);
    } else if (!strcmp(name, "projection_bf16_parts")) {
        snprintf(to, size, "%d parts", instance->value);
    } else if (!strcmp(name, "positions_other_order") && set->positions) {
        order_detail(call, set, to, size);
    } else if (!strcmp(name, "stale_rows")) {
        stale_detail(call, set, to, size);
    }
}

// ---- the verdict -------------------------------------------------------------------------------
static void append(char *to, size_t size, const char *text) {
    size_t used = strlen(to);
    snprintf(to + used, size - used, "%s", text);
}

static void set_sentences(
    const dg_call *call, const dg_result *result, const dg_set *set, char *to, size_t size) {
    for (int i = 0; i < set->count; ++i) {
        char detail[160];
        const dg_hypothesis *h = &dg_hypotheses[result->instances[set->member[i]].hypothesis];
        dg_detail(call, result, set, i, detail, sizeof detail);
        append(to, size, i ? " " : "");
        append(to, size, h->sentence);
        if (!*detail) continue;
        append(to, size, " (");
        append(to, size, detail);
        append(to, size, ")");
    }
}

void dg_verdict(const dg_call *call, const dg_result *result, char *to, size_t size) {
    *to = 0;
    if (!result->clean.differs) {
        snprintf(to, size, "Every row is what the chain gives, bit for bit.");
    } else if (result->exact_count) {
        set_sentences(call, result, &result->exact[0], to, size);
    } else {
        char spot[256];
        const dg_match *match = &result->clean;
        dg_spot_text(call, &match->first, spot, sizeof spot);
        snprintf(
            to, size, "no known fault: %" PRId64 " element%s differ%s, the first at %s.",
            match->elements, match->elements == 1 ? "" : "s", match->elements == 1 ? "s" : "",
            spot);
        if (match->elements == 1) {
            char bits[64];
            int flipped = __builtin_popcount(match->first.recorded ^ match->first.expected);
            snprintf(
                bits, sizeof bits, " %d bit%s.", flipped, flipped == 1 ? " differs" : "s differ");
            append(to, size, bits);
        }
    }
}

// ---- text --------------------------------------------------------------------------------------
static void print_part(const dg_call *call, const dg_part *part, int64_t stored, const char *what) {
    char spot[256];
    if (!part->elements) return;
    dg_spot_text(call, &part->first, spot, sizeof spot);
    printf(
        "  %s: %" PRId64 " of %" PRId64 " rows, %" PRId64 " of %" PRId64 " heads, %" PRId64
        " of %" PRId64 " columns differ, %" PRId64 " elements, by up to %" PRId64 " ULP\n"
        "      first: %s\n",
        what, part->rows, stored, part->heads, call->H, part->columns, call->dim, part->elements,
        part->max_ulp, spot);
}

static void print_placement(const dg_call *call, const dg_layer *layer) {
    int64_t size = call->block_size;
    if (layer->missing) {
        printf(
            "  placement: %" PRId64 " of %" PRId64
            " rows were not written where they belong, the first is row %" PRId64 "\n",
            layer->missing, layer->stored, layer->missing_row);
    }
    if (layer->elsewhere) {
        printf(
            "  placement: %" PRId64 " rows lie in another place, the first is row %" PRId64
            " in block %" PRId64 ", offset %" PRId64 "\n",
            layer->elsewhere, layer->elsewhere_row, layer->elsewhere_place / size,
            layer->elsewhere_place % size);
    }
    if (layer->unnamed) {
        char spot[256];
        dg_spot_text(call, &layer->unnamed_first, spot, sizeof spot);
        printf(
            "  placement: %" PRId64 " places were written that no slot names\n      first: %s\n",
            layer->unnamed, spot);
    }
}

static void print_sets(
    const dg_call *call, const dg_result *result, const dg_set *sets, int from, int count,
    const char *title, bool shares) {
    for (int i = from; i < count; ++i) {
        char text[1024] = "";
        const dg_set *set = &sets[i];
        set_sentences(call, result, set, text, sizeof text);
        printf("%s ", title);
        for (int k = 0; k < set->count; ++k)
            printf(
                "%s%s", k ? " + " : "",
                dg_hypotheses[result->instances[set->member[k]].hypothesis].name);
        if (shares) {
            char spot[256];
            printf(" (%" PRId64 " of %" PRId64 " rows)", set->match.matched, set->match.places);
            dg_spot_text(call, &set->match.first, spot, sizeof spot);
            printf(
                ": %s\n    left: %" PRId64 " elements, the first at %s\n", text,
                set->match.elements, spot);
        } else {
            printf(": %s\n", text);
        }
    }
}

// "V (projection, V norm)": the stages that the part takes.
static const char *stages(const dg_call *call, int part, char *to, size_t size) {
    const dg_params *p = &call->base;
    snprintf(to, size, "%s (projection", part ? "V" : "K");
    if (!part && p->key.norm != CTXKV__K_ABSENT) append(to, size, ", K norm");
    if (!part && p->key.rope != CTXKV__ROPE_NONE) append(to, size, ", RoPE");
    if (part && p->value.source == DG_V_RAW_K) append(to, size, " of K");
    if (part && p->value.norm != DG_V_PLAIN) append(to, size, ", V norm");
    if (part && p->value.scale != 0) append(to, size, ", V scale");
    if (p->store.kind == CTXKV_CACHE_FP16) append(to, size, ", FP16");
    if (p->store.kind >= CTXKV_CACHE_FP8_E4M3) append(to, size, ", FP8");
    append(to, size, ")");
    return to;
}

void dg_print(const dg_call *call, const dg_result *result, const dg_report *report) {
    char text[2048];
    printf(
        "%s: %" PRId64 " layers, %" PRId64 " rows, %" PRId64 " heads of %" PRId64 "\n",
        call->cache_path, call->L, call->T, call->H, call->dim);
    for (int64_t l = 0; l < call->L; ++l) {
        const dg_layer *layer = &report->layers[l];
        bool equal = !layer->part[0].elements && !layer->part[1].elements && !layer->missing &&
                     !layer->elsewhere && !layer->unnamed;
        printf("layer %" PRId64 ": %s\n", l, equal ? "equal" : "differs");
        for (int part = 1; part >= 0; --part)
            print_part(
                call, &layer->part[part], layer->stored, stages(call, part, text, sizeof text));
        print_placement(call, layer);
    }
    if (*report->starts) printf("starts: %s\n", report->starts);
    dg_verdict(call, result, text, sizeof text);
    if (!result->clean.differs) {
        printf("verdict: equal: %s\n", text);
    } else if (!result->exact_count) {
        printf("verdict: %s\n", text);
    } else {
        print_sets(call, result, result->exact, 0, 1, "verdict:", false);
    }
    print_sets(
        call, result, result->exact, 1, result->exact_count, "  gives the same bytes:", false);
    print_sets(call, result, result->closest, 0, result->closest_count, "  close:", true);
    if (result->clean.differs && !result->exact_count) {
        printf(
            "  tried: %d hypotheses, %d pairs; the chain without a fault gives %" PRId64
            " of %" PRId64 " rows\n",
            result->instance_count, result->tried_pairs, result->clean.matched,
            result->clean.places);
    }
    printf("explained: %.4f of the rows, in %.1f s\n", dg_explained(result), result->seconds);
    if (!call->before && !call->fill_known) {
        puts("note: what the places held before is unknown, so places that no slot names were "
             "not compared; --before tells it");
    }
}
