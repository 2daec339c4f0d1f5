// SPDX-License-Identifier: Apache-2.0
// Splitting in place, and cells as numbers.
#include "csv.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t count_of(const char *text, size_t size, char wanted) {
    size_t count = 0;
    for (size_t i = 0; i < size; ++i) count += text[i] == wanted;
    return count;
}

// Splits one line at its commas; false when the count differs from csv->columns (0: unknown).
static bool split(io_csv *csv, char *line, size_t *used) {
    size_t columns = 0;
    for (char *cell = line; cell; ++columns) {
        char *comma = strchr(cell, ',');
        if (comma) *comma = 0;
        csv->cells[(*used)++] = cell;
        cell = comma ? comma + 1 : NULL;
    }
    if (!csv->columns) csv->columns = columns;
    return columns == csv->columns;
}

static bool split_lines(io_csv *csv, size_t size, io_error *error) {
    size_t used = 0, number = 0;
    for (char *line = csv->text; line && line < csv->text + size;) {
        char *next = strchr(line, '\n');
        if (next) *next++ = 0;
        char *end = line + strlen(line);
        if (end > line && end[-1] == '\r') end[-1] = 0;
        ++number;
        if (*line && !split(csv, line, &used)) {
            return io_fail(
                error, "%s: line %zu: must have %zu columns as the first line", csv->path, number,
                csv->columns);
        }
        line = next;
    }
    if (!csv->columns) return io_fail(error, "%s: is empty, must begin with a header", csv->path);
    csv->rows = used / csv->columns - 1;
    return true;
}

bool io_csv_parse(io_csv *csv, const char *data, size_t size, const char *path, io_error *error) {
    *csv = (io_csv){.path = strdup(path), .text = malloc(size + 1)};
    size_t cells = size ? count_of(data, size, ',') + count_of(data, size, '\n') + 1 : 1;
    csv->cells = calloc(cells, sizeof *csv->cells);
    bool ok = csv->path && csv->text && csv->cells;
    if (!ok) io_fail(error, "%s: out of memory", path);
    if (ok && size && memchr(data, 0, size)) {
        ok = io_fail(error, "%s: holds a zero byte, must be text", path);
    }
    if (ok) {
        if (size) memcpy(csv->text, data, size);
        csv->text[size] = 0;
        ok = split_lines(csv, size, error);
    }
    if (!ok) io_csv_free(csv);
    return ok;
}

void io_csv_free(io_csv *csv) {
    free(csv->path);
    free(csv->text);
    free(csv->cells);
    *csv = (io_csv){0};
}

bool io_csv_text(
    const io_csv *csv, size_t row, const char *column, const char **value, io_error *error) {
    *value = "";
    for (size_t i = 0; i < csv->columns; ++i) {
        if (!strcmp(csv->cells[i], column)) {
            *value = csv->cells[(row + 1) * csv->columns + i];
            return true;
        }
    }
    return io_fail(error, "%s: has no column '%s'", csv->path, column);
}

bool io_csv_integer(
    const io_csv *csv, size_t row, const char *column, int64_t low, int64_t high, int64_t *value,
    io_error *error) {
    const char *text;
    if (!io_csv_text(csv, row, column, &text, error)) return false;
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (errno || end == text || *end || number < low || number > high) {
        return io_fail(
            error, "%s: row %zu: %s '%s' must be an integer from %" PRId64 " to %" PRId64,
            csv->path, row + 1, column, text, low, high);
    }
    *value = number;
    return true;
}

bool io_csv_number(
    const io_csv *csv, size_t row, const char *column, float *value, io_error *error) {
    const char *text;
    if (!io_csv_text(csv, row, column, &text, error)) return false;
    char *end;
    *value = strtof(text, &end);
    if (end == text || *end || !isfinite(*value) || *value < 0) {
        return io_fail(
            error, "%s: row %zu: %s '%s' must be a finite number >= 0", csv->path, row + 1, column,
            text);
    }
    return true;
}

bool io_csv_words(
    const io_csv *csv, size_t row, const char *column, uint32_t *words, size_t count,
    io_error *error) {
    const char *text;
    if (!io_csv_text(csv, row, column, &text, error)) return false;
    const char *from = text;
    for (size_t i = 0; i < count; ++i) {
        char *end;
        if (i && *from == ' ') ++from;
        words[i] = (uint32_t)strtoul(from, &end, 16);
        if (end != from + 8) break;
        from = end;
        if (i + 1 == count && !*from) return true;
    }
    return io_fail(
        error, "%s: row %zu: %s must be %zu words of 8 hexadecimal digits", csv->path, row + 1,
        column, count);
}
