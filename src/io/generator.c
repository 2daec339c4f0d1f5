// SPDX-License-Identifier: Apache-2.0
// splitmix64 and what is made of it.
#include "generator.h"

#include <stdlib.h>
#include <string.h>

uint64_t io_mix(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

float io_value(uint64_t seed, uint64_t index, float scale) {
    uint64_t z = io_mix(seed, index);
    float unit = (float)(int32_t)(z >> 40) * 0x1p-23f - 1.0f;
    uint32_t bits = (uint32_t)(127 - (z & 7)) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return unit * power * scale;
}

float io_gain(uint64_t seed, uint64_t index, float centre) {
    return (centre != 0 ? 0.0f : 1.0f) + io_value(seed, index, 0.5f);
}

uint16_t io_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

void io_fill_bf16(uint16_t *to, size_t count, uint64_t seed, uint64_t first, float scale) {
    for (size_t i = 0; i < count; ++i) to[i] = io_bf16(io_value(seed, first + i, scale));
}

void io_fill_gain_bf16(uint16_t *to, size_t count, uint64_t seed, float centre) {
    for (size_t i = 0; i < count; ++i) to[i] = io_bf16(io_gain(seed, i, centre));
}

void io_fill_gain_f32(float *to, size_t count, uint64_t seed, float centre) {
    for (size_t i = 0; i < count; ++i) to[i] = io_gain(seed, i, centre);
}

void io_fill_positions(int64_t *to, size_t count, uint64_t seed, int64_t max_position) {
    for (size_t i = 0; i < count; ++i) {
        to[i] = (int64_t)(io_mix(seed, i) % (uint64_t)max_position);
    }
}

typedef struct keyed {
    uint64_t key, index;
} keyed;

static int by_key(const void *left, const void *right) {
    const keyed *a = left, *b = right;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

int io_fill_slots(int64_t *to, size_t count, uint64_t seed, size_t places, int holes) {
    keyed *keys = malloc((places + 1) * sizeof *keys);
    if (!keys) return 0;
    for (size_t j = 0; j < places; ++j) keys[j] = (keyed){io_mix(seed, j), j};
    qsort(keys, places, sizeof *keys, by_key);
    for (size_t i = 0; i < count; ++i) {
        to[i] = i >= places || (holes && i % 5 == 0) ? -1 : (int64_t)keys[i].index;
    }
    free(keys);
    return 1;
}
