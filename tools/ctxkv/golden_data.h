// SPDX-License-Identifier: Apache-2.0
// The golden csv files built into the command line; ends with a NULL name.
#ifndef CTXKV_GOLDEN_DATA_H
#define CTXKV_GOLDEN_DATA_H

#include <stddef.h>

typedef struct golden_file {
    const char *name;
    const unsigned char *data;
    size_t size;
} golden_file;

extern const golden_file golden_files[];

#endif
