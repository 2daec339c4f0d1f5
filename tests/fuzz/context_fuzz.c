// SPDX-License-Identifier: Apache-2.0
// Any bytes as a context file of a narrow draft: all that the run would read lies in memory.
#include <stdint.h>
#include <stdlib.h>

#include "context.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const io_config config = {
        .hidden_size = 4, .layers = 2, .kv_heads = 1, .head_dim = 4, .rotary_dim = 2, .rope = true};
    io_context context;
    io_error error;
    if (!io_context_parse(&context, data, size, "fuzz", &config, &error)) return 0;
    int64_t sum = 0;
    if (context.slot_rows > context.rows) abort();
    if (context.slot_lists != 1 && context.slot_lists != config.layers) abort();
    for (int64_t i = 0; i < context.rows * config.hidden_size; ++i) sum += context.hidden[i];
    for (int64_t i = 0; i < context.rows; ++i) sum += context.positions[i] & 1;
    for (int64_t i = 0; i < context.slot_lists * context.slot_rows; ++i)
        sum += context.slots[i] & 1;
    int64_t values = context.table_lists * context.table_rows * config.rotary_dim;
    int64_t bytes = context.cos_sin ? values * io_dtype_bits(context.table_dtype) / 8 : 0;
    for (int64_t i = 0; i < bytes; ++i) sum += ((const uint8_t *)context.cos_sin)[i];
    if (!context.k_scales != !context.v_scales) abort();
    for (int64_t l = 0; context.k_scales && l < config.layers; ++l)
        sum += (context.k_scales[l] > 0) + (context.v_scales[l] > 0);
    if (sum < 0) abort();
    io_context_close(&context);
    return 0;
}
