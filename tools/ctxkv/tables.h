// SPDX-License-Identifier: Apache-2.0
// A run's cos/sin tables and FP8 scales, where the device reads them.
#ifndef CTXKV_CLI_TABLES_H
#define CTXKV_CLI_TABLES_H

#include "context.h"
#include "place.h"

typedef struct cli_tables {
    void *made;   // from theta, in host memory
    int64_t rows; // of a table; 0 without RoPE
    int64_t count;
    cli_tensor *tensors;     // count tables, then L scales of K and L of V
    const DLTensor **tables; // NULL without RoPE
    const DLTensor **scales; // [2*L]; NULL: all 1
} cli_tables;

// model, context: the files' names, for messages.
bool cli_tables_make(
    cli_tables *to, cli_place *place, const io_config *config, const io_context *context,
    const char *model, const char *name);
void cli_tables_free(cli_tables *tables);

#endif
