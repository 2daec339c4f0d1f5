// SPDX-License-Identifier: Apache-2.0
// The cos/sin table as vLLM builds it on a GPU: CUDA's powf, cosf and sinf, exactly (SPEC 3.5).
#ifndef CTXKV_OPS_ROPE_H
#define CTXKV_OPS_ROPE_H

#include <stdint.h>

// theta > 1, 0 <= y < 1.
float ctxkv__cuda_powf(float x, float y);
// |x| finite.
float ctxkv__cuda_cosf(float x);
float ctxkv__cuda_sinf(float x);
// inv_freq[j] = 1/powf(theta, 2j/rotary_dim), j < rotary_dim/2.
void ctxkv__rope_inv_freq(float theta, int64_t rotary_dim, float *inv_freq);
// cos and sin of position*inv_freq[j] for count frequencies.
void ctxkv__rope_row(
    const float *inv_freq, int64_t count, int64_t position, float *cosine, float *sine);

#endif
