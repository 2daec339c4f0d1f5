// SPDX-License-Identifier: Apache-2.0
// What the tests of one kind of plan share: a CPU device, creating it, and refusals of its
// descriptor.
#ifndef CTXKV_TESTS_PLAN_CHECKS_H
#define CTXKV_TESTS_PLAN_CHECKS_H

#include "checks.h"

static struct place place;
static const ctxkv_status bad = CTXKV_INVALID_ARGUMENT;

static int tear_down(void **state) {
    (void)state;
    place_close(&place);
    return 0;
}

// create(d): makes the plan and destroys it; where it is refused NULL must be left.
#define CREATE_OF(kind)                                                                            \
    static ctxkv_status create(const ctxkv_##kind##_desc *d) {                                     \
        ctxkv_##kind *plan = (ctxkv_##kind *)&plan;                                                \
        ctxkv_status status = ctxkv_##kind##_create(place.device, d, &plan);                       \
        assert_true((plan == 0) == (status != CTXKV_OK));                                          \
        ctxkv_##kind##_destroy(plan);                                                              \
        return status;                                                                             \
    }

// good() but for one assignment to d is refused, and good() is not.
#define REFUSE_OF(kind, assignment, status, text)                                                  \
    do {                                                                                           \
        ctxkv_##kind##_desc d = good();                                                            \
        assignment;                                                                                \
        assert_refused(create(&d), status, text);                                                  \
        d = good();                                                                                \
        assert_ok(create(&d));                                                                     \
    } while (0)

#endif
