// SPDX-License-Identifier: Apache-2.0
// Small CSV tables with a header line and no quoting: the golden cases.
#ifndef CTXKV_IO_CSV_H
#define CTXKV_IO_CSV_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

typedef struct io_csv {
    char *path, *text;
    const char **cells; // header, then the rows
    size_t columns, rows;
} io_csv;

// Every row must have the header's columns; empty lines are skipped.
bool io_csv_parse(io_csv *csv, const char *data, size_t size, const char *path, io_error *error);
void io_csv_free(io_csv *csv);
// The cell as text, an integer in [low, high], a finite number >= 0, or 8-digit hexadecimal words.
bool io_csv_text(
    const io_csv *csv, size_t row, const char *column, const char **value, io_error *error);
bool io_csv_integer(
    const io_csv *csv, size_t row, const char *column, int64_t low, int64_t high, int64_t *value,
    io_error *error);
bool io_csv_number(
    const io_csv *csv, size_t row, const char *column, float *value, io_error *error);
bool io_csv_words(
    const io_csv *csv, size_t row, const char *column, uint32_t *words, size_t count,
    io_error *error);

#endif
