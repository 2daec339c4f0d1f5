// SPDX-License-Identifier: Apache-2.0
// The report as JSON, for plots and programs: see docs/diagnose.md.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "diagnose.h"
#include "json.h"
#include "place.h"

bool dg_put_json(json_t *root, size_t flags) {
    char *text = io_json_text(root, flags);
    if (text) puts(text);
    if (!text && io_json_complete()) cli_fail("the report is no valid JSON: a name is not UTF-8");
    if (!io_json_complete()) cli_fail("out of memory for the JSON report");
    free(text);
    return text != NULL;
}

static json_t *spot_json(const dg_call *call, const dg_spot *spot) {
    int64_t per_block = call->H * call->block_size, rest = spot->cell % per_block;
    char recorded[8], expected[8];
    snprintf(recorded, sizeof recorded, "0x%0*x", dg_digits(call), spot->recorded);
    snprintf(expected, sizeof expected, "0x%0*x", dg_digits(call), spot->expected);
    return json_pack(
        "{s:I, s:o, s:I, s:I, s:I, s:s, s:I, s:s, s:s}", "layer", (json_int_t)spot->layer, "row",
        spot->row < 0 ? json_null() : json_integer(spot->row), "block",
        (json_int_t)(spot->cell / per_block), "offset", (json_int_t)(rest % call->block_size),
        "head", (json_int_t)(rest / call->block_size), "part", spot->column < call->dim ? "K" : "V",
        "column", (json_int_t)(spot->column % call->dim), "recorded", recorded, "expected",
        expected);
}

static json_t *part_json(const dg_call *call, const dg_part *part) {
    return json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:o}", "rows", (json_int_t)part->rows, "heads",
        (json_int_t)part->heads, "columns", (json_int_t)part->columns, "elements",
        (json_int_t)part->elements, "max_ulp", (json_int_t)part->max_ulp, "first",
        part->elements ? spot_json(call, &part->first) : json_null());
}

static json_t *layer_json(const dg_call *call, const dg_layer *layer, int64_t l) {
    json_t *placement = json_pack(
        "{s:I, s:I, s:I, s:o, s:o, s:o}", "missing", (json_int_t)layer->missing, "elsewhere",
        (json_int_t)layer->elsewhere, "unnamed", (json_int_t)layer->unnamed, "first_missing_row",
        layer->missing ? json_integer(layer->missing_row) : json_null(), "first_elsewhere",
        layer->elsewhere ? json_pack(
                               "{s:I, s:I, s:I}", "row", (json_int_t)layer->elsewhere_row, "block",
                               (json_int_t)(layer->elsewhere_place / call->block_size), "offset",
                               (json_int_t)(layer->elsewhere_place % call->block_size))
                         : json_null(),
        "first_unnamed", layer->unnamed ? spot_json(call, &layer->unnamed_first) : json_null());
    return json_pack(
        "{s:I, s:I, s:o, s:o, s:o}", "layer", (json_int_t)l, "rows", (json_int_t)layer->stored, "v",
        part_json(call, &layer->part[1]), "k", part_json(call, &layer->part[0]), "placement",
        placement);
}

static json_t *names_json(const dg_result *result, const dg_set *set) {
    json_t *names = json_array();
    for (int i = 0; i < set->count; ++i) {
        const dg_hypothesis *h = &dg_hypotheses[result->instances[set->member[i]].hypothesis];
        json_array_append_new(names, json_string(h->name));
    }
    return names;
}

static json_t *hypotheses_json(const dg_call *call, const dg_result *result, const dg_set *set) {
    json_t *list = json_array();
    for (int i = 0; i < set->count; ++i) {
        const dg_hypothesis *h = &dg_hypotheses[result->instances[set->member[i]].hypothesis];
        char detail[160];
        dg_detail(call, result, set, i, detail, sizeof detail);
        json_array_append_new(
            list, json_pack(
                      "{s:s, s:s, s:s, s:s}", "name", h->name, "changes", h->changes, "sentence",
                      h->sentence, "detail", detail));
    }
    return list;
}

static json_t *closest_json(const dg_call *call, const dg_result *result) {
    json_t *list = json_array();
    for (int i = 0; i < result->closest_count; ++i) {
        const dg_set *set = &result->closest[i];
        json_array_append_new(
            list,
            json_pack(
                "{s:o, s:I, s:I, s:I, s:o}", "names", names_json(result, set), "matched",
                (json_int_t)set->match.matched, "rows", (json_int_t)set->match.places, "elements",
                (json_int_t)set->match.elements, "first", spot_json(call, &set->match.first)));
    }
    return list;
}

// [L][H][T] of the sum of one or two grids; -1 stays -1.
static json_t *grid_json(const dg_call *call, const int32_t *one, const int32_t *two) {
    json_t *layers = json_array();
    for (int64_t l = 0; l < call->L; ++l) {
        json_t *heads = json_array();
        for (int64_t h = 0; h < call->H; ++h) {
            json_t *rows = json_array();
            for (int64_t t = 0; t < call->T; ++t) {
                int64_t i = (l * call->H + h) * call->T + t;
                int64_t count = one[i] < 0 || !two ? one[i] : one[i] + two[i];
                json_array_append_new(rows, json_integer(count));
            }
            json_array_append_new(heads, rows);
        }
        json_array_append_new(layers, heads);
    }
    return layers;
}

static void add_verdict(json_t *root, const dg_call *call, const dg_result *result) {
    char text[2048];
    bool exact = result->exact_count > 0;
    json_t *also = json_array();
    for (int i = 1; i < result->exact_count; ++i)
        json_array_append_new(also, names_json(result, &result->exact[i]));
    dg_verdict(call, result, text, sizeof text);
    json_object_set_new(root, "equal", json_boolean(!result->clean.differs));
    json_object_set_new(root, "explained", json_real(dg_explained(result)));
    json_object_set_new(
        root, "verdict", exact ? names_json(result, &result->exact[0]) : json_array());
    json_object_set_new(root, "sentence", json_string(text));
    json_object_set_new(
        root, "hypotheses",
        exact ? hypotheses_json(call, result, &result->exact[0]) : json_array());
    json_object_set_new(root, "same_bytes", also);
    json_object_set_new(root, "closest", closest_json(call, result));
}

bool dg_print_json(const dg_call *call, const dg_result *result, const dg_report *report) {
    const dg_match *clean = &result->clean;
    io_json_begin();
    json_t *root = json_object(), *layers = json_array();
    add_verdict(root, call, result);
    json_object_set_new(
        root, "starts", *report->starts ? json_string(report->starts) : json_null());
    json_object_set_new(
        root, "clean",
        json_pack(
            "{s:I, s:I, s:I, s:o}", "matched", (json_int_t)clean->matched, "rows",
            (json_int_t)clean->places, "elements", (json_int_t)clean->elements, "first",
            clean->differs ? spot_json(call, &clean->first) : json_null()));
    json_object_set_new(
        root, "shape",
        json_pack(
            "{s:I, s:I, s:I, s:I, s:I, s:I, s:s}", "layers", (json_int_t)call->L, "rows",
            (json_int_t)call->T, "heads", (json_int_t)call->H, "head_dim", (json_int_t)call->dim,
            "num_blocks", (json_int_t)call->blocks, "block_size", (json_int_t)call->block_size,
            "cache_type", cli_cache_names[call->kind]));
    json_object_set_new(root, "model", json_string(call->model));
    json_object_set_new(root, "cache", json_string(call->cache_path));
    json_object_set_new(root, "tried_hypotheses", json_integer(result->instance_count));
    json_object_set_new(root, "tried_pairs", json_integer(result->tried_pairs));
    json_object_set_new(root, "seconds", json_real(result->seconds));
    for (int64_t l = 0; l < call->L; ++l)
        json_array_append_new(layers, layer_json(call, &report->layers[l], l));
    json_object_set_new(root, "layers", layers);
    const int32_t *k = report->grid[0], *v = report->grid[1];
    json_object_set_new(root, "grid", grid_json(call, k, v));
    json_object_set_new(root, "grid_k", grid_json(call, k, NULL));
    json_object_set_new(root, "grid_v", grid_json(call, v, NULL));
    return dg_put_json(root, JSON_COMPACT | JSON_REAL_PRECISION(9));
}
