// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors file: every tensor of an accepted one lies inside it.
#include <stdint.h>
#include <stdlib.h>

#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    io_safetensors file;
    io_error error;
    if (!io_safetensors_parse(&file, data, size, "fuzz", &error)) return 0;
    uint64_t sum = 0, bytes = 0;
    for (size_t i = 0; i < file.count; ++i) {
        const io_tensor *tensor = &file.tensors[i];
        if (tensor->data < data || tensor->bytes > (uint64_t)(data + size - tensor->data)) abort();
        for (uint64_t k = 0; k < tensor->bytes; ++k) sum += tensor->data[k];
        if (io_safetensors_find(&file, tensor->name) != tensor) abort();
        (void)io_shape(tensor->shape, tensor->rank);
        bytes += tensor->bytes;
    }
    if (bytes > size || sum > bytes * 255) abort();
    io_safetensors_close(&file);
    return 0;
}
