// SPDX-License-Identifier: Apache-2.0
#include "chain_scene.h"

uint16_t x_values[MOST * D];
int64_t position_values[MOST], slot_values[L][MOST];
static uint16_t w_values[L * C * D], gain_values[(L + 1) * D], b_values[L * C];
static uint16_t table_values[64 * N], k_gains[L * 128];

void fill_inputs(void) {
    fill_bf16(x_values, MOST * D, 21, 1.0f);
    fill_bf16(w_values, L * C * D, 22, 1.0f);
    fill_bf16(gain_values, (L + 1) * D, 23, 0.5f);
    fill_bf16(b_values, L * C, 24, 0.5f);
    fill_bf16(table_values, 64 * N, 25, 1.0f);
    fill_bf16(k_gains, L * 128, 26, 1.0f);
    // Subnormal and tiny operands, which a flushing mode would lose.
    for (int i = 0; i < D; i++) x_values[2 * D + i] = (uint16_t)(0x0001 + i);
    for (int i = 0; i < D; i += 3) gain_values[i] = 0x0040, b_values[i] = 0x0013;
    for (int t = 0; t < MOST; t++) {
        position_values[t] = t % 67; // now and then past the table
        for (int l = 0; l < L; l++)
            slot_values[l][t] = t % 11 == l ? -1 : (t * 7 + l) % (BLOCKS * PAGE + 1);
    }
}

void scene_new(struct scene *s, int threads, int64_t max_rows) {
    memset(s, 0, sizeof *s);
    s->place = place_open(threads);
    const struct place *at = &s->place;
    s->storage = poison_image(sizeof(uint16_t) * L * STORAGE);
    s->w_list[0] = tensor_on(&s->w, at, w_values, BF16, 3, DIMS(L, C, D), 0);
    s->layer_list[0] = tensor_on(&s->layer, at, gain_values + D, BF16, 2, DIMS(L, D), 0);
    chain_descs_init(&s->d, D, L, H, max_rows);
    s->d.norms.hidden.kind = s->d.norms.layer.kind = CTXKV_NORM_RMS;
    s->d.norms.layer.gain_centre = 0.1f; // not exact in BF16: the sum depends on the rounding mode
    s->d.norms.hidden_weight = tensor_on(&s->hidden, at, gain_values, BF16, 1, DIMS(D), 0);
    s->d.norms.layer_weights = s->layer_list;
    s->d.norms.layer_weight_count = 1;
    s->d.projection.weights = s->w_list;
    s->d.projection.weight_count = 1;
    s->d.projection.bias = tensor_on(&s->bias, at, b_values, BF16, 2, DIMS(L, C), 0);
    s->d.store.k_norm = CTXKV_K_NORM_RMS;
    s->d.store.k_norm_weight = tensor_on(&s->k_gain, at, k_gains, BF16, 2, DIMS(L, N), 0);
    s->d.store.rope = CTXKV_ROPE_NEOX;
    s->d.store.cos_sin = tensor_on(&s->table, at, table_values, BF16, 2, DIMS(64, N), 0);
    for (int l = 0; l < L; l++) {
        uint16_t *data = s->storage + l * STORAGE;
        s->key_list[l] = cache_half(&s->keys[l], at, data, 0, BLOCKS, PAGE, H, N, H * PAGE * 2 * N);
        s->value_list[l] =
            cache_half(&s->values[l], at, data, 1, BLOCKS, PAGE, H, N, H * PAGE * 2 * N);
    }
}

void operands(struct scene *s, int64_t first, int64_t rows) {
    tensor_on(&s->x, &s->place, x_values + first * D, BF16, 2, DIMS(rows, D), 0);
    tensor_on(&s->positions, &s->place, position_values + first, I64, 1, DIMS(rows), 0);
    for (int l = 0; l < L; l++) {
        int64_t count = l == 1 && rows > 5 ? rows - 5 : rows;
        s->slot_list[l] =
            tensor_on(&s->slots[l], &s->place, slot_values[l] + first, I64, 1, DIMS(count), 0);
    }
}

void scene_free(struct scene *s) {
    free(s->storage);
    place_close(&s->place);
}

ctxkv_chain *chain_new(struct scene *s) {
    ctxkv_chain *chain;
    assert_ok(ctxkv_chain_create(s->place.device, &s->d.chain, &chain));
    assert_ok(ctxkv_chain_bind_caches(chain, s->key_list, s->value_list, L));
    return chain;
}

ctxkv_status run(struct scene *s, ctxkv_chain *chain, int64_t first, int64_t rows) {
    operands(s, first, rows);
    return ctxkv_chain_run(chain, &s->x.t, &s->positions.t, s->slot_list, L, 0);
}
