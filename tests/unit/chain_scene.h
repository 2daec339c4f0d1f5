// SPDX-License-Identifier: Apache-2.0
// A small chain and everything it runs on, for the tests of ctxkv_chain.
#ifndef CTXKV_TESTS_CHAIN_SCENE_H
#define CTXKV_TESTS_CHAIN_SCENE_H

#include "checks.h"

#define D 64
#define L 3
#define H 2
#define N 64
#define C (2 * H * N)
#define MOST 300
#define PAGE 16
#define BLOCKS 20
#define STORAGE (BLOCKS * H * PAGE * 2 * N)

extern uint16_t x_values[MOST * D];
extern int64_t position_values[MOST], slot_values[L][MOST];

// Everything that a chain is made of and runs on.
struct scene {
    struct place place;
    struct tensor w, hidden, layer, bias, table, k_gain, x, positions, slots[L], keys[L], values[L];
    const DLTensor *w_list[1], *layer_list[1], *slot_list[L], *key_list[L], *value_list[L];
    struct chain_descs d;
    uint16_t *storage; // [L, STORAGE]
};

void fill_inputs(void);
void scene_new(struct scene *scene, int threads, int64_t max_rows);
void scene_free(struct scene *scene);
// Operands of rows first .. first + rows; layer 1 has five slots fewer.
void operands(struct scene *scene, int64_t first, int64_t rows);
ctxkv_chain *chain_new(struct scene *scene);
ctxkv_status run(struct scene *scene, ctxkv_chain *chain, int64_t first, int64_t rows);

#endif
