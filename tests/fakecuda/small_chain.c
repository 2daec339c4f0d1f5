// SPDX-License-Identifier: Apache-2.0
#define _POSIX_C_SOURCE 200809L
#include "small_chain.h"

#include <stdlib.h>

static uint16_t hidden[D], layers[LAYERS * D], k_weight[LAYERS * 64];
uint16_t x[FEW_ROWS * D], weights[LAYERS * COLUMNS * D], table[POSITIONS * 64];
uint16_t cache[LAYERS * CACHE];
int64_t positions[FEW_ROWS], slots[FEW_ROWS];

ctxkv_status chain_new(ctxkv_device *device, bool family, ctxkv_chain **chain) {
    struct tensor b[6];
    struct chain_descs d;
    chain_descs_init(&d, D, LAYERS, HEADS, MOST_ROWS);
    d.norms.hidden_weight = tensor_on(&b[0], &gpu, hidden, BF16, 1, DIMS(D), 0);
    const DLTensor *lw = tensor_on(&b[1], &gpu, layers, BF16, 2, DIMS(LAYERS, D), 0);
    d.norms.layer_weights = &lw;
    d.norms.layer_weight_count = 1;
    if (family) {
        d.norms.hidden.kind = CTXKV_NORM_RMS;
        d.norms.layer.kind = CTXKV_NORM_ABSENT;
        d.norms.layer_weight_count = 0;
        d.store.k_norm = CTXKV_K_NORM_RMS;
        d.store.k_norm_weight = tensor_on(&b[2], &gpu, k_weight, BF16, 2, DIMS(LAYERS, 64), 0);
    }
    const DLTensor *w = tensor_on(&b[3], &gpu, weights, BF16, 3, DIMS(LAYERS, COLUMNS, D), 0);
    d.projection.weights = &w;
    d.projection.weight_count = 1;
    d.store.rope = family ? CTXKV_ROPE_NEOX : CTXKV_ROPE_GPTJ;
    d.store.cos_sin = tensor_on(&b[4], &gpu, table, BF16, 2, DIMS(POSITIONS, 64), 0);
    return ctxkv_chain_create(device, &d.chain, chain);
}

ctxkv_status chain_bind(ctxkv_chain *chain, int offset) {
    struct tensor k[LAYERS], v[LAYERS];
    const DLTensor *keys[LAYERS], *values[LAYERS];
    const int64_t shape[] = {BLOCKS, PAGE, HEADS, 64}, stride[] = {BLOCK, 128, PAGE * 128, 1};
    for (int l = 0; l < LAYERS; l++) {
        uint16_t *base = cache + l * CACHE + (l ? 0 : offset);
        keys[l] = tensor_on(&k[l], &gpu, base, BF16, 4, shape, stride);
        values[l] = tensor_on(&v[l], &gpu, base + 64, BF16, 4, shape, stride);
    }
    fake.launches = 0; // those of the plan's making
    return ctxkv_chain_bind_caches(chain, keys, values, LAYERS);
}

ctxkv_status chain_run(ctxkv_chain *chain, int64_t rows, void *stream) {
    struct tensor b[3];
    const DLTensor *s = tensor_on(&b[2], &gpu, slots, I64, 1, DIMS(rows), 0);
    return ctxkv_chain_run(
        chain, tensor_on(&b[0], &gpu, x, BF16, 2, DIMS(rows, D), 0),
        tensor_on(&b[1], &gpu, positions, I64, 1, DIMS(rows), 0), &s, 1, stream);
}

struct parts parts_open(bool family, int offset, const char *ways) {
    struct parts p;
    if (ways) setenv("CTXKV_CHAIN_WAYS", ways, 1);
    assert_ok(ctxkv_device_open("cuda:0", 0, &p.device));
    assert_ok(chain_new(p.device, family, &p.chain));
    if (ways) unsetenv("CTXKV_CHAIN_WAYS");
    assert_ok(chain_bind(p.chain, offset));
    return p;
}
void parts_close(struct parts *parts) {
    ctxkv_chain_destroy(parts->chain);
    ctxkv_device_close(parts->device);
}
