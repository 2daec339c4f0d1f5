// SPDX-License-Identifier: Apache-2.0
// The one-sentence error of the io library: what, what it was, what it must be.
#ifndef CTXKV_IO_ERROR_H
#define CTXKV_IO_ERROR_H

#include <stdbool.h>

typedef struct io_error {
    char text[1024];
} io_error;

// Writes the sentence (cut to fit) and returns false, so that a caller can return it.
bool io_fail(io_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
