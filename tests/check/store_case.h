// SPDX-License-Identifier: Apache-2.0
// One case of the store: its operands twice, for the truth and for what is under test.
#ifndef CTXKV_CHECK_STORE_CASE_H
#define CTXKV_CHECK_STORE_CASE_H

#include "check.h"

#define MAX_LAYERS 3

struct made {
    struct ctxkv__store_args args;
    struct ctxkv__cache truth[MAX_LAYERS], got[MAX_LAYERS];
    struct area truth_areas[MAX_LAYERS], got_areas[MAX_LAYERS];
    struct ctxkv__slots slots[MAX_LAYERS];
    struct ctxkv__table tables[MAX_LAYERS];
    struct ctxkv__scales scales[MAX_LAYERS];
    struct area k, v, gain, positions, scale, slot_areas[MAX_LAYERS], table_areas[MAX_LAYERS];
    int64_t rows, positions_below;
    // For a plan:
    struct area weight; // from which gain is made, with the centre
    bool fp32_weight, shared_table;
    float centre;
    bool aligned; // every operand on 16 bytes in every row
};

// Limits the case to what a plan of the device can be asked for.
void store_as_a_plan(struct check *c, struct made *m);
// Makes the gain from a weight, as a plan does.
void store_as_weight(struct check *c, struct made *m);
void store_run_plan(struct check *c, struct made *m, struct ctxkv__fault_record *faults);

#endif
