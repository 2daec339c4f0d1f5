// SPDX-License-Identifier: Apache-2.0
// The prefill kernels: one entry per tile shape and kind of input; prefill_plan.c chooses.
// archs: 90a
#include "prefill_tile.cuh"

#define PREFILL(name, groups, n, rows, cols, stages, ...)                                          \
    extern "C" __global__ void __cluster_dims__(rows *cols, 1, 1)                                  \
        __launch_bounds__((prefill_shape<groups, n, rows, cols, stages, __VA_ARGS__>::THREADS), 1) \
            name(const __grid_constant__ ctxkv_prefill_params p) {                                 \
        prefill<prefill_shape<groups, n, rows, cols, stages, __VA_ARGS__>>(p);                     \
    }

// Every shape exists for n as it lies, for weightless layer norms, and with gains; and, for n as it
// lies, for the heads of SPEC 5 that fit its columns.
#define SHAPE(id, groups, n, rows, cols, stages)                                                   \
    PREFILL(ctxkv_prefill_##id##_ready, groups, n, rows, cols, stages, INPUT_READY)                \
    PREFILL(ctxkv_prefill_##id##_scaled, groups, n, rows, cols, stages, INPUT_SCALED)              \
    PREFILL(ctxkv_prefill_##id##_gained, groups, n, rows, cols, stages, INPUT_GAINED)              \
    PREFILL(ctxkv_prefill_##id##_rms64, groups, n, rows, cols, stages, INPUT_READY, FAMILY_RMS_64)
#include "prefill_shapes.inc"
#undef SHAPE

#define SHAPE(id, groups, n, rows, cols, stages)                                                   \
    PREFILL(ctxkv_prefill_##id##_rms128, groups, n, rows, cols, stages, INPUT_READY, FAMILY_RMS_128)
#define CTXKV_PREFILL_WIDE_SHAPES
#include "prefill_shapes.inc"
