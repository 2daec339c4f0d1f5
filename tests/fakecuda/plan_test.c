// SPDX-License-Identifier: Apache-2.0
// CUDA devices and plans against the fake driver: every failing call, captures, launches, leaks.
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ctxkv/ctxkv.h"
#include "cuda/decode_params.h"
#include "cuda/params.h"
#include "cuda/prefill_params.h"
#include "fake.h"

enum { D = 8192, LAYERS = 2, HEADS = 2, ROWS = 4, COLUMNS = 2 * HEADS * 64 };
// Rows that go by the decode kernels, by norms, projection and store, and by the prefill kernels.
enum { FEW_ROWS = 4, PART_ROWS = 100, MOST_ROWS = 4096 };

static uint16_t hidden[D], layers[LAYERS * D], table[16 * 64], k_weight[LAYERS * 128];
static uint16_t x[ROWS * D], out[LAYERS * ROWS * D], cache[LAYERS * 4 * HEADS * 16 * 128];
static uint16_t weights[LAYERS * COLUMNS * D];
static int64_t positions[ROWS], slots[ROWS];

struct box {
    DLTensor t;
    int64_t shape[4], stride[4];
};

static DLTensor *gpu_tensor(
    struct box *b, void *data, DLDataType type, int ndim, const int64_t *shape,
    const int64_t *stride) {
    memcpy(b->shape, shape, (size_t)ndim * sizeof *shape);
    if (stride) memcpy(b->stride, stride, (size_t)ndim * sizeof *stride);
    b->t = (DLTensor){data, {kDLCUDA, 0}, ndim, type, b->shape, stride ? b->stride : 0, 0};
    return &b->t;
}
static const DLDataType bf16 = {kDLBfloat, 16, 1}, i64 = {kDLInt, 64, 1};

static int setup(void **state) {
    (void)state;
    fake_reset();
    ctxkv__driver_use(&fake_driver);
    ctxkv__cublas_use(&fake_cublas);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    bool clean = fake_clean();
    ctxkv__driver_use(0);
    ctxkv__cublas_use(0);
    return clean ? 0 : 1;
}

struct parts {
    ctxkv_device *device;
    ctxkv_chain *chain;
};

static ctxkv_status make_chain(ctxkv_device *device, bool rms, ctxkv_chain **chain) {
    struct box b[6];
    ctxkv_norms_desc n;
    ctxkv_projection_desc p;
    ctxkv_store_desc s;
    ctxkv_chain_desc c;
    ctxkv_norms_desc_init(&n);
    ctxkv_projection_desc_init(&p);
    ctxkv_store_desc_init(&s);
    ctxkv_chain_desc_init(&c);
    n.num_layers = p.num_layers = s.num_layers = LAYERS;
    p.num_kv_heads = s.num_kv_heads = HEADS;
    n.hidden_weight = gpu_tensor(&b[0], hidden, bf16, 1, (int64_t[]){D}, 0);
    const DLTensor *lw = gpu_tensor(&b[1], layers, bf16, 2, (int64_t[]){LAYERS, D}, 0);
    n.layer_weights = &lw;
    n.layer_weight_count = 1;
    if (rms) {
        n.hidden.kind = CTXKV_NORM_RMS;
        n.layer.kind = CTXKV_NORM_ABSENT;
        n.layer_weight_count = 0;
        s.k_norm = CTXKV_K_NORM_RMS;
        s.k_norm_weight = gpu_tensor(&b[2], k_weight, bf16, 2, (int64_t[]){LAYERS, 64}, 0);
    }
    const DLTensor *w = gpu_tensor(&b[3], weights, bf16, 3, (int64_t[]){LAYERS, COLUMNS, D}, 0);
    p.weights = &w;
    p.weight_count = 1;
    s.rope = rms ? CTXKV_ROPE_NEOX : CTXKV_ROPE_GPTJ;
    s.cos_sin = gpu_tensor(&b[4], table, bf16, 2, (int64_t[]){16, 64}, 0);
    c.norms = &n;
    c.projection = &p;
    c.store = &s;
    c.max_rows = MOST_ROWS;
    return ctxkv_chain_create(device, &c, chain);
}

static ctxkv_status bind(ctxkv_chain *chain, int offset) {
    struct box k[LAYERS], v[LAYERS];
    const DLTensor *keys[LAYERS], *values[LAYERS];
    const int64_t shape[] = {4, 16, HEADS, 64}, stride[] = {HEADS * 16 * 128, 128, 16 * 128, 1};
    for (int l = 0; l < LAYERS; l++) {
        uint16_t *base = cache + l * 4 * HEADS * 16 * 128 + (l ? 0 : offset);
        keys[l] = gpu_tensor(&k[l], base, bf16, 4, shape, stride);
        values[l] = gpu_tensor(&v[l], base + 64, bf16, 4, shape, stride);
    }
    fake.launches = 0; // those of the plan's making
    return ctxkv_chain_bind_caches(chain, keys, values, LAYERS);
}

// The fake kernels touch nothing, so that more rows than there is memory for are no harm.
static ctxkv_status run_rows(ctxkv_chain *chain, int64_t rows, void *stream) {
    struct box b[3];
    const DLTensor *s = gpu_tensor(&b[2], slots, i64, 1, (int64_t[]){rows}, 0);
    return ctxkv_chain_run(
        chain, gpu_tensor(&b[0], x, bf16, 2, (int64_t[]){rows, D}, 0),
        gpu_tensor(&b[1], positions, i64, 1, (int64_t[]){rows}, 0), &s, 1, stream);
}
static ctxkv_status run(ctxkv_chain *chain, void *stream) {
    return run_rows(chain, PART_ROWS, stream);
}

// Device, chain, caches, run, faults; whatever fails, what was made is destroyed.
static ctxkv_status whole(bool rms) {
    struct parts p = {0, 0};
    ctxkv_faults faults;
    ctxkv_status status = ctxkv_device_open("cuda:0", 0, &p.device);
    if (!status) status = make_chain(p.device, rms, &p.chain);
    if (!status) status = bind(p.chain, 0);
    if (!status) status = run_rows(p.chain, FEW_ROWS, 0);
    if (!status) status = run(p.chain, (void *)(uintptr_t)0x77);
    if (!status) status = run_rows(p.chain, MOST_ROWS, (void *)(uintptr_t)0x77);
    if (!status) status = ctxkv_chain_faults(p.chain, &faults);
    // A driver that cannot even say which context is current is beyond cleaning up after.
    long reached = fake.calls;
    fake.fail_at = -1;
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
    fake.calls = reached;
    return status;
}

static void works(void **state) {
    (void)state;
    assert_int_equal(whole(false), CTXKV_OK);
    assert_true(fake_clean());
    assert_int_equal(whole(true), CTXKV_OK);
    assert_true(fake_clean());
    assert_null(fake.current);
}

// Call n of the driver fails, for every n; calls whose failure is harmless may be shrugged off.
static void every_call_fails(void **state) {
    (void)state;
    const CUresult errors[] = {CUDA_ERROR_UNKNOWN, CUDA_ERROR_OUT_OF_MEMORY};
    for (int e = 0; e < 2; e++)
        for (int rms = 0; rms < 2; rms++) {
            long refused = 0;
            for (long n = 0;; n++) {
                fake_reset();
                fake.fail_at = n;
                fake.fail_with = errors[e];
                ctxkv_status status = whole(rms);
                assert_true(fake_clean());
                assert_null(fake.current);
                if (fake.calls <= n) break;
                if (!status) continue;
                refused++;
                assert_true(strlen(ctxkv_last_error()) > 20);
                assert_non_null(strstr(ctxkv_last_error(), "CUDA_ERROR_"));
            }
            assert_true(refused > 60);
        }
}

static void captures_refuse_plans(void **state) {
    (void)state;
    ctxkv_device *device;
    ctxkv_chain *chain;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    for (int which = 0; which < 2; which++) {
        fake.legacy_capturing = which == 0;
        fake.thread_capturing = which == 1;
        long before = fake.slow_calls;
        assert_int_equal(make_chain(device, false, &chain), CTXKV_CAPTURING);
        assert_non_null(strstr(ctxkv_last_error(), "being captured"));
        assert_int_equal(fake.slow_calls, before);
        assert_null(chain);
    }
    fake.legacy_capturing = fake.thread_capturing = false;
    assert_int_equal(make_chain(device, false, &chain), CTXKV_OK);
    ctxkv_chain_destroy(chain);
    ctxkv_device_close(device);
}

// A capture that the driver does not tell of stays whole whatever plans are made and destroyed.
static void other_captures_stay_whole(void **state) {
    (void)state;
    struct parts p, q;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    fake.other_capturing = true;
    assert_int_equal(make_chain(p.device, false, &q.chain), CTXKV_OK);
    assert_int_equal(bind(q.chain, 0), CTXKV_OK);
    assert_int_equal(run(q.chain, 0), CTXKV_OK);
    ctxkv_chain_destroy(p.chain);
    ctxkv_chain_destroy(q.chain);
    assert_false(fake.capture_ended);
    assert_int_equal(fake.handles, 2); // kept for the plans to come
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(fake.handles, 2);
    assert_false(fake.capture_ended);
    fake.other_capturing = false;
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

static void runs_only_launch(void **state) {
    (void)state;
    struct parts p;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    fake.legacy_capturing = true; // a run may be captured
    long before = fake.slow_calls, memory = fake.allocations;
    void *stream = (void *)(uintptr_t)0x77;
    for (int i = 0; i < 3; i++) assert_int_equal(run(p.chain, stream), CTXKV_OK);
    assert_int_equal(fake.slow_calls, before);
    assert_int_equal(fake.allocations, memory);
    assert_int_equal(fake.launches, 6);
    assert_int_equal(fake.gemms, 3);
    assert_int_equal(fake.gemm_batch, LAYERS);
    assert_int_equal(fake.gemm_columns, COLUMNS);
    assert_int_equal(fake.gemm_rows, PART_ROWS);
    for (int i = 0; i < 6; i++) {
        assert_ptr_equal(fake.launch[i].stream, stream);
        assert_int_equal(fake.launch[i].programmatic, 1);
    }
    assert_int_equal(ctxkv_chain_workspace_size(p.chain) % 256, 0);
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

static void parameters_arrive(void **state) {
    (void)state;
    struct parts p;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    assert_int_equal(run(p.chain, 0), CTXKV_OK);
    const struct fake_launch *l = &fake.launch[0];
    ctxkv_norms_params n;
    memcpy(&n, l->params, sizeof n);
    assert_string_equal(l->kernel, "ctxkv_norms_row16_pair");
    assert_int_equal(l->grid[0], PART_ROWS);
    assert_int_equal(l->grid[1] * n.layers_per_block, LAYERS);
    assert_int_equal(l->shared, (LAYERS - 1) * D * 2);
    assert_int_equal(l->threads, 256);
    assert_ptr_equal(n.x, x);
    assert_int_equal(n.x_row, D);
    assert_int_equal(n.rows, PART_ROWS);
    assert_int_equal(n.tile_rows, 0);
    assert_int_equal(n.out_layer, PART_ROWS * D / 8);
    assert_int_equal(n.layers, LAYERS);
    l = &fake.launch[1];
    ctxkv_store_common c;
    ctxkv_store_fast_layer f;
    memcpy(&c, l->params, sizeof c);
    memcpy(&f, l->params + offsetof(ctxkv_store_fast, layer), sizeof f);
    assert_string_equal(l->kernel, "ctxkv_store_gptj");
    assert_int_equal(l->grid[0], (PART_ROWS * HEADS + 15) / 16);
    assert_int_equal(l->grid[1], LAYERS);
    assert_ptr_equal(c.positions, positions);
    assert_ptr_equal(c.cos_sin, table);
    assert_int_equal(c.max_position, 16);
    assert_int_equal(c.heads, HEADS);
    assert_ptr_equal(f.slots, slots);
    assert_ptr_equal(f.k, cache);
    assert_ptr_equal(f.v, cache + 64);
    assert_int_equal(f.slot_count, 64);
    assert_int_equal(f.block_shift, 4);
    assert_int_equal(f.k_block, HEADS * 16 * 128 / 8);
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

// Packed n goes from the norms to the decode kernel.
static void few_rows_take_the_decode_kernels(void **state) {
    (void)state;
    struct parts p;
    setenv("CTXKV_CHAIN_WAYS", "decode", 1);
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    unsetenv("CTXKV_CHAIN_WAYS");
    assert_string_equal(fake.launch[0].kernel, "ctxkv_decode_pack");
    ctxkv_decode_pack_params pack;
    memcpy(&pack, fake.launch[1].params, sizeof pack);
    assert_ptr_equal(pack.k, weights + COLUMNS * D);
    assert_ptr_equal(pack.v, weights + COLUMNS * D + COLUMNS / 2 * D);
    assert_int_equal(pack.half, COLUMNS / 2);
    assert_int_equal(bind(p.chain, 1), CTXKV_OK);
    long before = fake.slow_calls;
    const int64_t rows[] = {1, FEW_ROWS, 33, 64};
    for (int i = 0; i < 4; i++) {
        fake.launches = 0;
        assert_int_equal(run_rows(p.chain, rows[i], 0), CTXKV_OK);
        assert_int_equal(fake.launches, 2);
        ctxkv_norms_params n;
        ctxkv_decode_params d;
        const struct fake_launch *l = &fake.launch[1];
        memcpy(&n, fake.launch[0].params, sizeof n);
        memcpy(&d, l->params, sizeof d);
        assert_string_equal(
            fake.launch[0].kernel,
            rows[i] < 16 ? "ctxkv_norms_half16_pair" : "ctxkv_norms_row16_pair");
        assert_int_equal(fake.launch[0].grid[2], rows[i] < 16 ? 2 : 1);
        assert_true(n.flags & CTXKV_NORMS_NEXT_EARLY);
        assert_non_null(strstr(l->kernel, "ctxkv_decode_n"));
        assert_int_equal(l->programmatic, 1);
        assert_int_equal(l->grid[0], d.tiles);
        assert_int_equal(l->grid[1], d.batch_tiles);
        assert_int_equal(l->grid[2], LAYERS);
        assert_int_equal(
            l->cluster[0], d.cluster_tiles * d.cluster_batches > 1 ? d.cluster_tiles : 0);
        assert_ptr_equal(d.x, n.out);
        assert_int_equal(n.tile_rows, d.batch_rows);
        assert_int_equal(n.out_tile, (int64_t)d.chunks * d.batch_rows);
        assert_int_equal(n.out_layer, d.x_layer);
        assert_int_equal(d.rows, rows[i]);
        assert_true(d.batch_rows * d.batch_tiles >= rows[i]);
        assert_true(d.tiles * d.tile_rows >= COLUMNS);
        assert_null(d.kv);
        assert_true((size_t)LAYERS * (size_t)d.x_layer * 16 <= ctxkv_chain_workspace_size(p.chain));
        // A head's tiles lie in one cluster, and the room for its outputs in the launch's memory.
        assert_int_equal(64 % d.k_columns, 0);
        assert_int_equal(d.k_tiles * d.k_columns, COLUMNS / 2);
        assert_int_equal(d.cluster_tiles % (64 / d.k_columns), 0);
        assert_int_equal(d.tiles % d.cluster_tiles, 0);
        assert_true(d.k_room + d.batch_rows * d.k_columns * 2 <= (int)l->shared);
        assert_int_equal(d.flags, CTXKV_DECODE_CACHE_BY2);
        assert_ptr_equal(d.layer[0].k, cache + 1);
        assert_int_equal(d.layer[1].rows, rows[i]);
    }
    assert_int_equal(fake.slow_calls, before);
    assert_int_equal(fake.gemms, 0);
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

// The whole chain in one launch, while x may be read in sixteens of bytes.
static void fewest_rows_take_one_kernel(void **state) {
    (void)state;
    struct parts p;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    long before = fake.slow_calls;
    for (int64_t rows = 1; rows <= 20; rows++) {
        fake.launches = 0;
        assert_int_equal(run_rows(p.chain, rows, 0), CTXKV_OK);
        assert_int_equal(fake.launches, rows <= 16 ? 1 : 2);
        const struct fake_launch *l = &fake.launch[0];
        if (rows > 16) {
            assert_non_null(strstr(fake.launch[1].kernel, "ctxkv_decode_n"));
            continue;
        }
        assert_string_equal(
            l->kernel, rows <= 2   ? "ctxkv_decode_fused_r8_l1_s32"
                       : rows <= 8 ? "ctxkv_decode_fused_r8_l0_s32"
                                   : "ctxkv_decode_fused_r16_l0_s32");
        ctxkv_decode_params d;
        memcpy(&d, l->params, sizeof d);
        assert_int_equal(l->grid[0], 2 * CTXKV_DECODE_FUSED_CLUSTER);
        assert_int_equal(l->grid[1], 1);
        assert_int_equal(l->grid[2], LAYERS);
        assert_int_equal(l->cluster[0], 0); // compiled in
        assert_ptr_equal(d.x, x);
        assert_int_equal(d.x_row, rows > 1 ? D : 0);
        assert_int_equal(d.tiles * d.tile_rows, COLUMNS);
        assert_non_null(d.hidden_gain);
        assert_non_null(d.layer_gain);
        assert_int_equal(d.rows, rows);
        assert_int_equal(d.layer[1].rows, rows);
    }
    assert_int_equal(fake.slow_calls, before);
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

static void ways_can_be_named(void **state) {
    (void)state;
    const char *ways[] = {"none", "prefill", "decode"};
    for (int i = 0; i < 3; i++) {
        struct parts p;
        setenv("CTXKV_CHAIN_WAYS", ways[i], 1);
        assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
        assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
        assert_int_equal(bind(p.chain, 0), CTXKV_OK);
        assert_int_equal(run_rows(p.chain, FEW_ROWS, 0), CTXKV_OK);
        assert_int_equal(strstr(fake.launch[1].kernel, "decode") != 0, i == 2);
        assert_int_equal(run_rows(p.chain, MOST_ROWS, 0), CTXKV_OK);
        assert_int_equal(strstr(fake.launch[3].kernel, "prefill") != 0, i == 1);
        ctxkv_chain_destroy(p.chain);
        ctxkv_device_close(p.device);
    }
    unsetenv("CTXKV_CHAIN_WAYS");
}

// One normed input for all layers, finished by the kernels of SPEC 5's heads. cuBLAS is not known
// to have the exact bits at this shape.
static void the_family_takes_the_prefill_kernels(void **state) {
    (void)state;
    struct parts p;
    ctxkv_prefill_params f;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, true, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    assert_int_equal(run(p.chain, 0), CTXKV_OK);
    assert_int_equal(fake.launches, 2);
    assert_non_null(strstr(fake.launch[1].kernel, "ctxkv_prefill_"));
    fake.launches = 0;
    long before = fake.slow_calls;
    assert_int_equal(run_rows(p.chain, MOST_ROWS, 0), CTXKV_OK);
    assert_int_equal(fake.launches, 2);
    assert_int_equal(fake.gemms, 0);
    assert_int_equal(fake.slow_calls, before);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_norms_rms");
    assert_non_null(strstr(fake.launch[1].kernel, "ctxkv_prefill_"));
    assert_non_null(strstr(fake.launch[1].kernel, "_rms64"));
    memcpy(&f, fake.launch[1].params, offsetof(ctxkv_prefill_params, layer[LAYERS]));
    assert_int_equal(f.a_shared, 1);
    assert_non_null(f.k_gain);
    assert_ptr_equal(f.cos_sin, table);
    assert_int_equal(f.heads, HEADS);
    assert_int_equal(f.rows, MOST_ROWS);
    assert_int_equal(f.k_blocks, D / 64);
    assert_int_equal(f.w_rows, COLUMNS / 2);
    assert_ptr_equal(f.layer[1].k, cache + 4 * HEADS * 16 * 128);
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

// A GPU short of memory for the packed weights has the chain all the same.
static void no_room_for_packed_weights(void **state) {
    (void)state;
    struct parts p;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    fake.most_bytes = 20 << 20;
    fake.fail_with = CUDA_ERROR_OUT_OF_MEMORY;
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OUT_OF_MEMORY); // the workspace
    assert_non_null(strstr(ctxkv_last_error(), "workspace"));
    fake.most_bytes = 0;
    fake.fail_name = "cuMemAlloc";
    // Every allocation from number n on fails: the first n with which there is a chain.
    for (fake.fail_after = 0; make_chain(p.device, false, &p.chain); fake.fail_after++)
        fake.named_calls = 0;
    fake.fail_name = 0;
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    assert_int_equal(run_rows(p.chain, FEW_ROWS, 0), CTXKV_OK);
    assert_string_equal(fake.launch[1].kernel, "ctxkv_store_gptj");
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

static void many_rows_take_the_prefill_kernels(void **state) {
    (void)state;
    struct parts p;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 1), CTXKV_OK);
    long before = fake.slow_calls;
    assert_int_equal(run_rows(p.chain, MOST_ROWS, 0), CTXKV_OK);
    assert_int_equal(fake.slow_calls, before);
    assert_int_equal(fake.gemms, 0);
    assert_int_equal(fake.launches, 2);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_prenorm");
    ctxkv_prenorm_params n;
    memcpy(&n, fake.launch[0].params, sizeof n);
    assert_ptr_equal(n.x, x);
    assert_int_equal(fake.launch[0].grid[0], MOST_ROWS);
    const struct fake_launch *l = &fake.launch[1];
    ctxkv_prefill_params f;
    memcpy(&f, l->params, sizeof f);
    assert_non_null(strstr(l->kernel, "_gained"));
    assert_int_equal(l->programmatic, 1);
    assert_true(l->shared > 48 * 1024);
    assert_ptr_equal(f.row_scale, n.row_scale);
    assert_ptr_equal((const char *)n.h + MOST_ROWS * D * 2, n.row_scale);
    assert_int_equal(f.rows, MOST_ROWS);
    assert_int_equal(f.heads, HEADS);
    assert_int_equal(f.w_rows, COLUMNS / 2);
    assert_int_equal(f.max_position, 16);
    assert_ptr_equal(f.cos_sin, table);
    assert_int_equal(f.flags, CTXKV_PREFILL_BY2); // the first cache lies two bytes off
    assert_ptr_equal(f.layer[0].k, cache + 1);
    assert_int_equal(f.layer[1].slot_count, 64);
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

// A cache two bytes off is stored by the kernel that takes any address.
static void odd_caches_take_the_other_kernel(void **state) {
    (void)state;
    struct parts p;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 1), CTXKV_OK);
    assert_int_equal(run(p.chain, 0), CTXKV_OK);
    assert_string_equal(fake.launch[1].kernel, "ctxkv_store_any_64");
    ctxkv_store_layer any;
    memcpy(&any, fake.launch[1].params + offsetof(ctxkv_store_any, layer), sizeof any);
    assert_ptr_equal(any.k, cache + 1);
    assert_int_equal(any.by2, 1);
    assert_int_equal(any.block_size, 16);
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

static void programmatic_launch_can_be_off(void **state) {
    (void)state;
    for (int old = 0; old < 2; old++) {
        struct parts p;
        ctxkv_device_options options;
        ctxkv_device_options_init(&options);
        if (old)
            fake.major = 8;
        else
            options.programmatic_launch = 0;
        assert_int_equal(ctxkv_device_open("cuda:0", &options, &p.device), CTXKV_OK);
        assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
        assert_int_equal(bind(p.chain, 0), CTXKV_OK);
        assert_int_equal(run(p.chain, 0), CTXKV_OK);
        for (int i = 0; i < fake.launches; i++) assert_int_equal(fake.launch[i].programmatic, -1);
        // Only sm_90 is known to have cuBLAS equal to the exact chain.
        assert_int_equal(fake.launches, old ? 3 : 2);
        ctxkv_chain_destroy(p.chain);
        ctxkv_device_close(p.device);
    }
}

static void newer_gpus_sum_packed(void **state) {
    (void)state;
    struct parts p;
    fake.major = 10;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    assert_int_equal(run(p.chain, 0), CTXKV_OK);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_norms_row16_packed");
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

// A missing cuBLAS costs an AUTO plan speed, least where the prefill kernels are.
static void cublas_failures(void **state) {
    (void)state;
    struct parts p;
    fake.cublas_fail_with = 1;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &p.device), CTXKV_OK);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    assert_int_equal(run(p.chain, 0), CTXKV_OK);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_prenorm");
    assert_non_null(strstr(fake.launch[1].kernel, "ctxkv_prefill_"));
    ctxkv_chain_destroy(p.chain);
    setenv("CTXKV_CHAIN_WAYS", "none", 1);
    assert_int_equal(make_chain(p.device, false, &p.chain), CTXKV_OK);
    unsetenv("CTXKV_CHAIN_WAYS");
    assert_int_equal(bind(p.chain, 0), CTXKV_OK);
    assert_int_equal(run(p.chain, 0), CTXKV_OK);
    assert_string_equal(fake.launch[1].kernel, "ctxkv_projection_64");
    ctxkv_chain_destroy(p.chain);
    ctxkv_device_close(p.device);
}

// The caller's context of the same device is used as it is; one of another device is left alone.
static void contexts_are_respected(void **state) {
    (void)state;
    CUcontext mine = (CUcontext)(uintptr_t)0x9999;
    fake.current = mine;
    assert_int_equal(whole(false), CTXKV_OK);
    assert_ptr_equal(fake.current, mine);
    assert_int_equal(fake.retained, 0);
    fake.current_device = 1;
    assert_int_equal(whole(false), CTXKV_OK);
    assert_ptr_equal(fake.current, mine);
    fake.current = 0;
}

static void bad_operands_launch_nothing(void **state) {
    (void)state;
    struct box b[3];
    ctxkv_device *device;
    ctxkv_norms *norms;
    ctxkv_norms_desc n;
    ctxkv_norms_desc_init(&n);
    n.num_layers = LAYERS;
    assert_int_equal(ctxkv_device_open("cuda:0", 0, &device), CTXKV_OK);
    assert_int_equal(ctxkv_norms_create(device, &n, &norms), CTXKV_OK);
    const DLTensor *good = gpu_tensor(&b[0], x, bf16, 2, (int64_t[]){ROWS, D}, 0);
    const DLTensor *odd = gpu_tensor(
        &b[1], out + 1, bf16, 3, (int64_t[]){LAYERS, ROWS - 1, D}, (int64_t[]){ROWS * D, D, 1});
    b[0].shape[0] = ROWS - 1;
    assert_int_equal(ctxkv_norms_run(norms, good, odd, 0), CTXKV_INVALID_ARGUMENT);
    assert_non_null(strstr(ctxkv_last_error(), "out"));
    assert_non_null(strstr(ctxkv_last_error(), "16 bytes"));
    b[0].t.device.device_type = kDLCPU;
    assert_int_equal(ctxkv_norms_run(norms, good, odd, 0), CTXKV_INVALID_ARGUMENT);
    assert_int_equal(fake.launches, 0);
    // x at two bytes is read by the kernel that can.
    b[0].t.device.device_type = kDLCUDA;
    b[0].t.data = x + 1;
    b[1].t.data = out;
    assert_int_equal(ctxkv_norms_run(norms, good, odd, 0), CTXKV_OK);
    assert_string_equal(fake.launch[0].kernel, "ctxkv_norms_any_pair");
    ctxkv_norms_destroy(norms);
    ctxkv_device_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(works, setup, teardown),
        cmocka_unit_test_setup_teardown(every_call_fails, setup, teardown),
        cmocka_unit_test_setup_teardown(captures_refuse_plans, setup, teardown),
        cmocka_unit_test_setup_teardown(other_captures_stay_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(runs_only_launch, setup, teardown),
        cmocka_unit_test_setup_teardown(parameters_arrive, setup, teardown),
        cmocka_unit_test_setup_teardown(few_rows_take_the_decode_kernels, setup, teardown),
        cmocka_unit_test_setup_teardown(fewest_rows_take_one_kernel, setup, teardown),
        cmocka_unit_test_setup_teardown(ways_can_be_named, setup, teardown),
        cmocka_unit_test_setup_teardown(the_family_takes_the_prefill_kernels, setup, teardown),
        cmocka_unit_test_setup_teardown(no_room_for_packed_weights, setup, teardown),
        cmocka_unit_test_setup_teardown(many_rows_take_the_prefill_kernels, setup, teardown),
        cmocka_unit_test_setup_teardown(odd_caches_take_the_other_kernel, setup, teardown),
        cmocka_unit_test_setup_teardown(programmatic_launch_can_be_off, setup, teardown),
        cmocka_unit_test_setup_teardown(newer_gpus_sum_packed, setup, teardown),
        cmocka_unit_test_setup_teardown(cublas_failures, setup, teardown),
        cmocka_unit_test_setup_teardown(contexts_are_respected, setup, teardown),
        cmocka_unit_test_setup_teardown(bad_operands_launch_nothing, setup, teardown),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
