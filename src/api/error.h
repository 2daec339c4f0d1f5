// SPDX-License-Identifier: Apache-2.0
// The calling thread's last error message.
#ifndef CTXKV_API_ERROR_H
#define CTXKV_API_ERROR_H

#include "../../include/ctxkv/ctxkv.h"

// Keeps the formatted sentence for ctxkv_last_error() and returns status.
__attribute__((format(printf, 2, 3))) ctxkv_status ctxkv__fail(
    ctxkv_status status, const char *format, ...);

#endif
