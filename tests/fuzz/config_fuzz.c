// SPDX-License-Identifier: Apache-2.0
// Any bytes as config.json and as a shard index: what is accepted keeps its promises.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    io_config config;
    io_error error;
    io_checkpoint index;
    if (io_config_parse(&config, (const char *)data, size, "fuzz", &error)) {
        if (config.layers < 1 || config.kv_heads < 1 || config.hidden_size < 16) abort();
        if (config.rotary_dim < 2 || config.rotary_dim % 2) abort();
        if (config.rotary_dim > config.head_dim || config.v_scale != config.v_scale) abort();
        if (config.head_dim < 64 || !(config.eps >= 0) || !(config.theta > 1)) abort();
    }
    if (io_index_parse(&index, (const char *)data, size, "fuzz", &error)) {
        for (size_t i = 0; i < index.count; ++i) {
            if (!index.shard_names[i][0] || strchr(index.shard_names[i], '/')) abort();
        }
        io_checkpoint_close(&index);
    }
    return 0;
}
