// SPDX-License-Identifier: Apache-2.0
// The rival on a CPU: oneDNN's BF16 batched matmul of the same shape, FP32 accumulation.
// Build: cc -O2 onednn_peer.c -ldnnl -lm; usage: onednn_peer HEADS ROWS REPEATS
// Prints one JSON object; weights rotate past the last-level cache. Its bits change with T.
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { D = 8192, LAYERS = 5 };

static void check(dnnl_status_t status, const char *what) {
    if (status == dnnl_success) return;
    fprintf(stderr, "%s: oneDNN status %d\n", what, (int)status);
    exit(2);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static uint16_t *random_bf16(size_t n) {
    uint16_t *p = aligned_alloc(64, (n * 2 + 63) / 64 * 64);
    if (!p) exit(2);
    uint32_t s = 1;
    for (size_t i = 0; i < n; i++) {
        s = s * 1664525u + 1013904223u;
        p[i] = (uint16_t)(0x3C00 | (s >> 25) | (s & 0x8000)); // about +-0.01
    }
    return p;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: onednn_peer HEADS ROWS REPEATS\n");
        return 2;
    }
    int64_t n = 128 * atoi(argv[1]), rows = atoi(argv[2]);
    int repeats = atoi(argv[3]);
    size_t weights = (size_t)LAYERS * (size_t)n * D;
    int sets = (int)(200u * 1024 * 1024 / (weights * 2)) + 1;

    dnnl_engine_t engine;
    dnnl_stream_t stream;
    check(dnnl_engine_create(&engine, dnnl_cpu, 0), "engine");
    check(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags), "stream");
    dnnl_memory_desc_t x_desc, w_desc, y_desc;
    dnnl_dims_t x_dims = {LAYERS, rows, D}, w_dims = {LAYERS, D, n}, y_dims = {LAYERS, rows, n};
    dnnl_dims_t w_strides = {n * D, 1, D}; // row-major [n, D], read transposed
    check(dnnl_memory_desc_init_by_tag(&x_desc, 3, x_dims, dnnl_bf16, dnnl_abc), "x");
    check(dnnl_memory_desc_init_by_strides(&w_desc, 3, w_dims, dnnl_bf16, w_strides), "w");
    check(dnnl_memory_desc_init_by_tag(&y_desc, 3, y_dims, dnnl_bf16, dnnl_abc), "y");
    dnnl_matmul_desc_t matmul;
    check(dnnl_matmul_desc_init(&matmul, &x_desc, &w_desc, NULL, &y_desc), "matmul");
    dnnl_primitive_desc_t primitive_desc;
    check(dnnl_primitive_desc_create(&primitive_desc, &matmul, NULL, engine, NULL), "primitive");
    dnnl_primitive_t primitive;
    check(dnnl_primitive_create(&primitive, primitive_desc), "primitive");

    dnnl_memory_t x, y, *w = calloc((size_t)sets, sizeof *w);
    check(dnnl_memory_create(&x, &x_desc, engine, random_bf16((size_t)(LAYERS * rows * D))), "x");
    check(dnnl_memory_create(&y, &y_desc, engine, random_bf16((size_t)(LAYERS * rows * n))), "y");
    for (int i = 0; i < sets; i++)
        check(dnnl_memory_create(&w[i], &w_desc, engine, random_bf16(weights)), "w");
    double *times = calloc((size_t)repeats, sizeof *times);
    for (int i = -2; i < repeats; i++) {
        dnnl_exec_arg_t args[] = {
            {DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w[(i + 2) % sets]}, {DNNL_ARG_DST, y}};
        double start = now();
        check(dnnl_primitive_execute(primitive, stream, 3, args), "execute");
        check(dnnl_stream_wait(stream), "wait");
        if (i >= 0) times[i] = now() - start;
    }
    qsort(times, (size_t)repeats, sizeof *times, ascending);
    const dnnl_version_t *v = dnnl_version();
    printf(
        "{\"peer\": \"oneDNN %d.%d.%d\", \"heads\": %d, \"rows\": %d, \"us\": %.1f, \"p10\": %.1f, "
        "\"p90\": %.1f}\n",
        v->major, v->minor, v->patch, atoi(argv[1]), (int)rows, times[repeats / 2],
        times[repeats / 10], times[repeats * 9 / 10]);
    return 0;
}
