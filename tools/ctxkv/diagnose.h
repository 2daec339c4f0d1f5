// SPDX-License-Identifier: Apache-2.0
// ctxkv diagnose: the chain as stages with parameters, faults as changes of these, and their proof.
#ifndef CTXKV_CLI_DIAGNOSE_H
#define CTXKV_CLI_DIAGNOSE_H

#include <jansson.h>
#include "../../src/cpu/cpu.h"
#include "context.h"
#include "ctxkv/ctxkv.h"
#include "draft.h"

// ---- parameters: what a hypothesis may change. Compared and hashed as bytes: 4-byte members only.
enum dg_layers { DG_OWN, DG_FIRST, DG_NEXT, DG_PREVIOUS };
enum dg_order {
    DG_ORDER_PAIR,
    DG_ORDER_PACKED,
    DG_ORDER_THREAD_FMA, // each thread's values one after the other
    DG_ORDER_THREAD,
    DG_ORDER_ROW_FMA, // all values of a row one after the other
    DG_ORDER_ROW,
    DG_ORDER_RMS_1024,
    DG_ORDER_RMS_256
};
enum dg_rsqrt { DG_RSQRT_GPU, DG_RSQRT_FTZ, DG_RSQRT_NEAREST, DG_RSQRT_DIVIDE };
enum dg_gain { DG_GAIN_NONE, DG_GAIN_OWN, DG_GAIN_HIDDEN };

typedef struct dg_norm {
    int32_t present, gain, input_scale, rsqrt;
    float centre, eps;
} dg_norm;

typedef struct dg_norms {
    dg_norm hidden, layer;
    int32_t order, gain_bf16, unrounded, layers;
} dg_norms;

enum dg_rows { DG_K_ROWS, DG_V_ROWS, DG_Q_ROWS, DG_Q_ROWS_AFTER };
enum dg_mode {
    DG_EXACT,      // one tensor-core chain
    DG_SPLIT,      // parts of `steps` k16 steps, added in FP32
    DG_SPLIT_BF16, // parts rounded to BF16 first
    DG_BF16_STEPS, // the accumulator rounded to BF16 after every k16 step
    DG_BF16_TERMS, // ... after every product
    DG_FP32,       // one product after the other in FP32
    DG_FP64        // summed in double
};

enum dg_bias { DG_BIAS_NONE, DG_BIAS_BEFORE, DG_BIAS_AFTER }; // the rounding to BF16
enum dg_bias_parts { DG_BIAS_BOTH, DG_BIAS_K_ONLY, DG_BIAS_V_ONLY, DG_BIAS_SWAPPED };

typedef struct dg_project {
    int32_t rows[2]; // dg_rows that give K and V
    int32_t layers, transposed, rank, mode, steps;
    int32_t bias, bias_layers, bias_parts;
} dg_project;

enum dg_table { DG_TABLE_GIVEN, DG_TABLE_GPU, DG_TABLE_GPU_FP32, DG_TABLE_CPU, DG_TABLE_FP64 };
enum dg_round { DG_AS_IT_IS, DG_TO_BF16, DG_TO_FP16 }; // of a given table

typedef struct dg_key {
    int32_t norm, rsqrt, unrounded, gain, layers, gain_bf16; // norm: ctxkv__k_norm_kind
    int32_t rope, times, table, table_layers, table_round;   // rope: ctxkv__rope_kind
    int32_t rotary, spread, last; // columns that rotate; that the angles run over; the last ones
    int32_t shift, other_order;   // of the positions
    float eps, theta, centre;
} dg_key;

enum dg_source { DG_V_PROJECTED, DG_V_RAW_K, DG_V_NORMED_K, DG_V_ROTATED_K };
enum dg_v_norm { DG_V_PLAIN, DG_V_NORMED, DG_V_WEIGHTED }; // weighted: by the K norm's weight

typedef struct dg_value {
    int32_t source, norm, times; // times that the scale is applied
    float eps, scale;            // scale 0: none
} dg_value;

enum dg_scales {
    DG_SCALES_OWN,
    DG_SCALES_NONE,
    DG_SCALES_TIMES,      // multiplied, not divided
    DG_SCALES_RECIPROCAL, // multiplied by 1/scale
    DG_SCALES_SWAPPED,    // K's for V and V's for K
    DG_SCALES_OF_K        // K's for both
};

typedef struct dg_store {
    int32_t kind; // ctxkv_cache_type of the bits
    int32_t scales, scale_layers;
    int32_t wide, unsaturated; // wide: converted from FP32, not from BF16
    int32_t swapped;
} dg_store;

typedef struct dg_place {
    int32_t shift, shift_padding, wrap_padding, first_slots;
    int32_t block_size, shape; // shape: strides of that block size, too
    int32_t row_major, neighbour, stale;
} dg_place;

typedef struct dg_params {
    dg_norms norms;
    dg_project project;
    dg_key key;
    dg_value value;
    dg_store store;
    dg_place place;
} dg_params;

// ---- hypotheses ------------------------------------------------------------------------------
typedef struct dg_facts { // what an entry may want to know
    int32_t steps;        // k16 steps of a row
    int32_t block_size, tp_size, tp_rank, dim, rotary;
    float eps;
} dg_facts;

typedef struct dg_hypothesis {
    const char *name, *changes, *sentence;
    void (*apply)(dg_params *p, const dg_facts *facts, int32_t value);
    int32_t first, count; // values tried: first .. first + count - 1; count 0: every rank
} dg_hypothesis;

extern const dg_hypothesis dg_hypotheses[];
extern const int dg_hypothesis_count;

// ---- the call --------------------------------------------------------------------------------
typedef struct dg_call {
    const char *model, *cache_path;
    io_draft draft;
    io_draft *ranks; // [tp_size], opened when a hypothesis needs them
    io_context context;
    io_safetensors cache, before_file;
    int64_t L, T, H, D, dim;
    int64_t blocks, block_size, cells; // cells of a layer: blocks * H * block_size, each 2*dim wide
    ctxkv_cache_type kind;
    // [L] of 16-bit words, an FP8 byte in each; before NULL without --before.
    const uint8_t **recorded, **before;
    uint16_t **widened; // [2*L] what these are of FP8 caches
    bool fill_known;    // else what unaddressed places held is unknown
    uint16_t fill;
    const uint8_t **q_rows; // [L] of this rank, NULL entries: none
    int64_t q_count;
    float *gains; // FP32 norm weights [1 + L][D]
    int64_t table_rows;
    dg_facts facts;
    dg_params base;
    struct ctxkv__kernels kernels;
    int threads, numerics; // ctxkv_numerics of the chain without a fault
    int cache_type;        // asked for; -1: the file's
} dg_call;

bool dg_open(
    dg_call *call, const char *model, const char *context, const char *cache, const char *before,
    int64_t tp_size, int64_t tp_rank);
void dg_close(dg_call *call);
const uint8_t *dg_recorded(const dg_call *call, int64_t layer, int64_t cell);
// Whether the cell holds what it held before the call; false when that is unknown.
bool dg_untouched(const dg_call *call, int64_t layer, int64_t cell);
// Clears what has no effect under the other parameters, so that equal chains are equal bytes.
void dg_normalise(const dg_call *call, dg_params *p);
// Whether the call has what these parameters need.
bool dg_testable(const dg_call *call, const dg_params *p);

// ---- stages ----------------------------------------------------------------------------------
typedef struct dg_worker dg_worker; // scratch and memo of one thread
dg_worker *dg_worker_make(const dg_call *call);
void dg_worker_free(dg_worker *worker);

// The normed row of a layer, BF16 [D], as the projection reads it.
void dg_normed(dg_worker *w, const dg_norms *p, int64_t layer, int64_t row, uint16_t *out);
// Columns [first, first + count) of head h, K (part 0) or V (part 1), for rows of x.
void dg_project_rows(
    dg_worker *w, const dg_project *p, int64_t layer, int part, int64_t h, int64_t first,
    int64_t count, const uint16_t *x, int64_t rows, uint16_t *out, int64_t out_stride);
// One head's K and V as the cache holds them, a word an element, from the projection's output (of K
// for a V that is made of it). False when the position has no table row.
bool dg_finish_key(
    dg_worker *w, const dg_params *p, int64_t layer, int64_t position, const uint16_t *in,
    uint16_t *out);
bool dg_finish_value(
    dg_worker *w, const dg_params *p, int64_t layer, int64_t position, const uint16_t *in,
    uint16_t *out);
// Whether each element of V depends on its own alone.
bool dg_value_alone(const dg_value *p);
// For those: some columns of a head.
void dg_finish_columns(
    const dg_call *call, const dg_params *p, int64_t layer, const uint16_t *in, int64_t count,
    uint16_t *out);
// The stages of K up to a dg_source, unrounded at the last.
bool dg_key_stages(
    dg_worker *w, const dg_key *p, int64_t layer, int64_t position, int source, const uint16_t *in,
    float *k);
// To the cache's words. raw: the BF16 bits where nothing was computed, else NULL.
void dg_put(
    const dg_call *call, const dg_store *p, int64_t layer, int part, const float *x,
    const uint16_t *raw, int64_t count, uint16_t *out);
int64_t dg_position(const dg_call *call, const dg_key *p, int64_t row);
// The cell that row t's head h goes to; -1: not written.
int64_t dg_cell(const dg_call *call, const dg_place *p, int64_t layer, int64_t row, int64_t h);
// The same for the i-th place where a misplaced row is looked for; DG_NEIGHBOURS of them.
#define DG_NEIGHBOURS 4
int64_t dg_neighbour(
    const dg_call *call, const dg_place *p, int64_t layer, int64_t row, int64_t h, int i);
// Rows whose neighbour the place of `row` is, i < DG_NEIGHBOURS; -1: none.
int64_t dg_intruder(const dg_call *call, int64_t layer, int64_t row, int i);

// Scratch of a worker for its stages, and for those that call them.
typedef struct dg_scratch {
    float *hidden, *values; // [D]
    uint16_t *weights;      // [DG_COLUMNS][D] gathered
    void *tier;             // CTXKV__PROJECTION_SCRATCH
} dg_scratch;
#define DG_COLUMNS 512 // most columns of one dg_project_rows
dg_scratch *dg_worker_scratch(dg_worker *w);
// Where the cosines and sines [dim] of a position lie; *filled: they are there already.
float *dg_worker_table(
    dg_worker *w, const dg_key *p, int64_t layer, int64_t position, bool *filled);
static inline int64_t dg_source_layer(const dg_call *call, int layers, int64_t l) {
    return layers == DG_FIRST      ? 0
           : layers == DG_NEXT     ? (l + 1) % call->L
           : layers == DG_PREVIOUS ? (l + call->L - 1) % call->L
                                   : l;
}
const dg_call *dg_worker_call(const dg_worker *w);

// Runs work(worker, user, index) for index < count, each thread with a worker of its own.
typedef void (*dg_work)(dg_worker *w, void *user, int64_t index);
void dg_each(const dg_call *call, dg_worker **workers, int64_t count, dg_work work, void *user);

// What comes before, through the worker's memo: a normed row [D], DG_UNIT columns of one head.
#define DG_UNIT 8
const uint16_t *dg_memo_normed(dg_worker *w, const dg_norms *p, int64_t layer, int64_t row);
const uint16_t *dg_memo_unit(
    dg_worker *w, const dg_params *p, int64_t layer, int64_t row, int part, int64_t h,
    int64_t first);

// ---- whole contents and single cells -----------------------------------------------------------
typedef struct dg_content {
    uint16_t *projected; // [L][T][H][2][dim]; owned unless shared
    uint16_t *cells;     // [L][T][H][2*dim]
    uint8_t *computed;   // [L][T]
    bool shared;
    int64_t *positions; // [T] used, with other_order; else NULL
} dg_content;

// All rows. base: the content of the parameters without a fault, whose projection is used again
// where it is the same; NULL to make that. False after cli_fail.
bool dg_content_make(
    const dg_call *call, dg_worker **workers, const dg_params *p, const dg_content *base,
    dg_content *content);
void dg_content_free(dg_content *content);
const uint16_t *dg_content_cell(
    const dg_call *call, const dg_content *content, int64_t layer, int64_t row, int64_t h);

// Cells that no slot names, yet changed: some of them.
#define DG_STRAYS 8
typedef struct dg_strays {
    int count;
    int64_t layer[DG_STRAYS], cell[DG_STRAYS];
} dg_strays;

// One cell, computed as far as needed: whether its part could lie at (layer, cell).
typedef struct dg_probe {
    int64_t layer, row, head;
    int part;
} dg_probe;
// False when the parameters cannot have given the recorded bytes of this row and head.
bool dg_probe_holds(dg_worker *w, const dg_params *p, const dg_probe *probe);

// False when a place that no slot names was changed and these parameters write nothing there.
bool dg_strays_explained(const dg_call *call, const dg_params *p, const dg_strays *strays);

// ---- comparison ------------------------------------------------------------------------------
typedef struct dg_spot {
    int64_t layer, cell, row, column; // column of 2*dim; row -1: a place that no row goes to
    uint16_t recorded, expected;
} dg_spot;

typedef struct dg_match {
    int64_t places, matched; // (layer, block, offset), all heads
    bool differs;
    dg_spot first;
    int64_t elements; // that differ
} dg_match;

bool dg_compare(
    const dg_call *call, const dg_params *p, const dg_content *content, dg_match *match);

// ---- the search --------------------------------------------------------------------------------
typedef struct dg_instance {
    int hypothesis; // index in the table
    int32_t value;
    dg_params params; // of the hypothesis alone
} dg_instance;

typedef struct dg_set {
    int count, member[2]; // instances
    dg_params params;
    dg_match match;
    int64_t *positions; // [T] used, with positions_other_order; else NULL
} dg_set;

#define DG_LISTED 8

typedef struct dg_result {
    dg_instance *instances;
    int instance_count, tried_pairs;
    dg_content base;
    dg_match clean;
    dg_set exact[DG_LISTED], closest[3];
    int exact_count, closest_count;
    double seconds;
} dg_result;

bool dg_search(const dg_call *call, dg_result *result);
void dg_result_free(dg_result *result);
// Which rank, and the like; "" when the name says all.
void dg_detail(
    const dg_call *call, const dg_result *result, const dg_set *set, int member, char *to,
    size_t size);

// ---- the report --------------------------------------------------------------------------------
typedef struct dg_part { // V or K of one layer against the chain without a fault
    int64_t rows, heads, columns, elements;
    int64_t max_ulp;
    dg_spot first;
} dg_part;

typedef struct dg_layer {
    int64_t stored;
    dg_part part[2];            // K, V
    int64_t missing, elsewhere; // rows whose own place is untouched; rows found in another
    int64_t unnamed;            // places that no slot names, yet changed
    dg_spot unnamed_first;
    int64_t elsewhere_row, elsewhere_place, missing_row;
} dg_layer;

typedef struct dg_report {
    dg_layer *layers; // [L]
    int32_t *grid[2]; // K, V: [L][H][T] elements that differ; -1: not stored
    char starts[512]; // where in the chain the difference starts
} dg_report;

bool dg_report_make(const dg_call *call, const dg_result *result, dg_report *report);
void dg_report_free(dg_report *report);
double dg_explained(const dg_result *result);
// The verdict as sentences; "equal" and "no known fault" are such, too.
void dg_verdict(const dg_call *call, const dg_result *result, char *to, size_t size);
// Hexadecimal digits of an element.
static inline int dg_digits(const dg_call *call) {
    return call->kind >= CTXKV_CACHE_FP8_E4M3 ? 2 : 4;
}
void dg_spot_text(const dg_call *call, const dg_spot *spot, char *to, size_t size);
void dg_print(const dg_call *call, const dg_result *result, const dg_report *report);
bool dg_print_json(const dg_call *call, const dg_result *result, const dg_report *report);
bool dg_print_list(bool json);
// Prints a value made since io_json_begin; takes the reference. False after cli_fail.
bool dg_put_json(json_t *root, size_t flags);

#endif
