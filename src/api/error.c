// SPDX-License-Identifier: Apache-2.0
// Status names, texts and the thread's last message.
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

ctxkv_status ctxkv__fail(ctxkv_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *ctxkv_last_error(void) {
    return last_error;
}

const char *ctxkv_version(void) {
    return CTXKV_VERSION_STRING;
}

const char *ctxkv_status_name(ctxkv_status status) {
    switch ((int)status) {
#define CTXKV_ERROR(name, value, text)                                                             \
    case value:                                                                                    \
        return #name;
#include "../../include/ctxkv/errors.inc"
#undef CTXKV_ERROR
    default:
        return "?";
    }
}

const char *ctxkv_status_text(ctxkv_status status) {
    switch ((int)status) {
#define CTXKV_ERROR(name, value, text)                                                             \
    case value:                                                                                    \
        return text;
#include "../../include/ctxkv/errors.inc"
#undef CTXKV_ERROR
    default:
        return "not a status";
    }
}
