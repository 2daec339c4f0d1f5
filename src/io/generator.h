// SPDX-License-Identifier: Apache-2.0
// The generator behind the golden cases and ctxkv synth: every value a function of (seed, index).
#ifndef CTXKV_IO_GENERATOR_H
#define CTXKV_IO_GENERATOR_H

#include <stddef.h>
#include <stdint.h>

uint64_t io_mix(uint64_t seed, uint64_t index);
// In (-1, 1) times scale, exact in FP32 when scale is a power of two.
float io_value(uint64_t seed, uint64_t index, float scale);
float io_gain(uint64_t seed, uint64_t index, float centre);
// FP32 to BF16, nearest even, NaN to 0x7FFF.
uint16_t io_bf16(float value);

void io_fill_bf16(uint16_t *to, size_t count, uint64_t seed, uint64_t first, float scale);
void io_fill_gain_bf16(uint16_t *to, size_t count, uint64_t seed, float centre);
void io_fill_gain_f32(float *to, size_t count, uint64_t seed, float centre);
// positions[t] = mix(seed, t) mod max_position.
void io_fill_positions(int64_t *to, size_t count, uint64_t seed, int64_t max_position);
// The first count entries of the stable argsort of mix(seed, j), j < places; -1 for every fifth
// entry if holes. False when memory is out.
int io_fill_slots(int64_t *to, size_t count, uint64_t seed, size_t places, int holes);

#endif
