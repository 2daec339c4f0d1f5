// SPDX-License-Identifier: Apache-2.0
// cmocka, and what a call of the library must return.
#ifndef CTXKV_TESTS_CHECKS_H
#define CTXKV_TESTS_CHECKS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support.h"

#define assert_ok(call)                                                                            \
    do {                                                                                           \
        ctxkv_status status_ = (call);                                                             \
        if (status_)                                                                               \
            fail_msg("%s: %s: %s", #call, ctxkv_status_name(status_), ctxkv_last_error());         \
    } while (0)
// The call is refused with that status, and the message holds the text.
#define assert_refused(call, status, text) assert_refusal((call), status, text, #call)

static inline void assert_refusal(
    ctxkv_status got, ctxkv_status want, const char *text, const char *call) {
    if (got != want)
        fail_msg("%s gave %s, not %s", call, ctxkv_status_name(got), ctxkv_status_name(want));
    if (!strstr(ctxkv_last_error(), text))
        fail_msg("%s says \"%s\", not \"%s\"", call, ctxkv_last_error(), text);
}

#endif
