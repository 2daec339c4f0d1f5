// SPDX-License-Identifier: Apache-2.0
// Arithmetic in the default mode (round to nearest, subnormals kept) whatever the caller's mode is.
#ifndef CTXKV_OPS_FLOAT_MODE_H
#define CTXKV_OPS_FLOAT_MODE_H

#include <fenv.h>

static inline void ctxkv__float_mode_enter(fenv_t *callers) {
    fegetenv(callers);
    fesetenv(FE_DFL_ENV);
}

static inline void ctxkv__float_mode_leave(const fenv_t *callers) {
    fesetenv(callers);
}

#endif
