// SPDX-License-Identifier: Apache-2.0
// Any bytes as a golden csv: every cell can be read in every way.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "csv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    io_csv csv;
    io_error error;
    if (!io_csv_parse(&csv, (const char *)data, size, "fuzz", &error)) return 0;
    for (size_t row = 0; row < csv.rows; ++row) {
        for (size_t i = 0; i < csv.columns; ++i) {
            const char *column = csv.cells[i], *text;
            int64_t number;
            float real;
            uint32_t words[8];
            if (!io_csv_text(&csv, row, column, &text, &error) || strlen(text) > size) abort();
            if (io_csv_integer(&csv, row, column, -5, 5, &number, &error) &&
                (number < -5 || number > 5)) {
                abort();
            }
            if (io_csv_number(&csv, row, column, &real, &error) && !(real >= 0)) abort();
            for (size_t count = 1; count <= 8; ++count) {
                (void)io_csv_words(&csv, row, column, words, count, &error);
            }
        }
    }
    io_csv_free(&csv);
    return 0;
}
