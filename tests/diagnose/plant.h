// SPDX-License-Identifier: Apache-2.0
// What the two halves of plant share.
#ifndef CTXKV_TESTS_PLANT_H
#define CTXKV_TESTS_PLANT_H

#include "context.h"
#include "ctxkv/ctxkv.h"
#include "draft.h"

#define MAX_DIM 512

extern io_draft draft;
extern io_context ctx;
extern int64_t L, T, H, D, dim;
extern int muse, kind; // kind: bf16, fp16, e4m3, e5m2

int on(const char *name); // whether a fault is planted
void die(const char *text);
float wide(uint16_t h);
float round16(float x);
float at(const io_view *view, int64_t i);
int64_t layer_of(int64_t l, const char *first, const char *forward, const char *back);
float tree(float *s, int n);
float rms_sum(const float *v, int64_t n, int64_t most);
float eps_of(const char *suffix);

// One head: kv is K's and V's projection, cell K's and V's words.
void finish(int64_t l, int64_t t, const float *kv, uint16_t *cell);

#endif
