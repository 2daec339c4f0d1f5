// SPDX-License-Identifier: Apache-2.0
// Formatting of the io library's error sentence.
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

bool io_fail(io_error *error, const char *format, ...) {
    va_list list;
    va_start(list, format);
    if (error) vsnprintf(error->text, sizeof error->text, format, list);
    va_end(list);
    return false;
}
