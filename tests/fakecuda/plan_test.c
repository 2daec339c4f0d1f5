// SPDX-License-Identifier: Apache-2.0
// CUDA devices and plans against the fake driver: every failing call, captures, contexts, leaks.
#include "small_chain.h"

// Device, chain, caches, run, faults; whatever fails, what was made is destroyed.
static ctxkv_status whole(bool rms) {
    struct parts p = {0, 0};
    ctxkv_faults faults;
    ctxkv_status status = ctxkv_device_open("cuda:0", 0, &p.device);
    if (!status) status = chain_new(p.device, rms, &p.chain);
    if (!status) status = chain_bind(p.chain, 0);
    if (!status) status = chain_run(p.chain, FEW_ROWS, 0);
    if (!status) status = chain_run(p.chain, PART_ROWS, (void *)(uintptr_t)0x77);
    if (!status) status = chain_run(p.chain, MOST_ROWS, (void *)(uintptr_t)0x77);
    if (!status) status = ctxkv_chain_faults(p.chain, &faults);
    // A driver that cannot even say which context is current is beyond cleaning up after.
    long reached = fake.calls;
    fake.fail_at = -1;
    parts_close(&p);
    fake.calls = reached;
    return status;
}

static void works(void **state) {
    (void)state;
    assert_ok(whole(false));
    assert_true(fake_clean());
    assert_ok(whole(true));
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
    assert_ok(ctxkv_device_open("cuda:0", 0, &device));
    for (int which = 0; which < 2; which++) {
        fake.legacy_capturing = which == 0;
        fake.thread_capturing = which == 1;
        long before = fake.slow_calls;
        assert_int_equal(chain_new(device, false, &chain), CTXKV_CAPTURING);
        assert_non_null(strstr(ctxkv_last_error(), "being captured"));
        assert_int_equal(fake.slow_calls, before);
        assert_null(chain);
    }
    fake.legacy_capturing = fake.thread_capturing = false;
    assert_ok(chain_new(device, false, &chain));
    ctxkv_chain_destroy(chain);
    ctxkv_device_close(device);
}

// A capture that the driver does not tell of stays whole whatever plans are made and destroyed.
static void other_captures_stay_whole(void **state) {
    (void)state;
    struct parts p, q;
    assert_ok(ctxkv_device_open("cuda:0", 0, &p.device));
    assert_ok(chain_new(p.device, false, &p.chain));
    fake.other_capturing = true;
    assert_ok(chain_new(p.device, false, &q.chain));
    assert_ok(chain_bind(q.chain, 0));
    assert_ok(chain_run(q.chain, PART_ROWS, 0));
    ctxkv_chain_destroy(p.chain);
    ctxkv_chain_destroy(q.chain);
    assert_false(fake.capture_ended);
    assert_int_equal(fake.handles, 2); // kept for the plans to come
    assert_ok(chain_new(p.device, false, &p.chain));
    assert_int_equal(fake.handles, 2);
    assert_false(fake.capture_ended);
    fake.other_capturing = false;
    parts_close(&p);
}

static void runs_only_launch(void **state) {
    (void)state;
    struct parts p = parts_open(false, 0, 0);
    fake.legacy_capturing = true; // a run may be captured
    long before = fake.slow_calls, memory = fake.allocations;
    void *stream = (void *)(uintptr_t)0x77;
    for (int i = 0; i < 3; i++) assert_ok(chain_run(p.chain, PART_ROWS, stream));
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
    parts_close(&p);
}

// A GPU short of memory for the packed weights has the chain all the same.
static void no_room_for_packed_weights(void **state) {
    (void)state;
    struct parts p;
    assert_ok(ctxkv_device_open("cuda:0", 0, &p.device));
    fake.most_bytes = 20 << 20;
    fake.fail_with = CUDA_ERROR_OUT_OF_MEMORY;
    assert_int_equal(chain_new(p.device, false, &p.chain), CTXKV_OUT_OF_MEMORY); // the workspace
    assert_non_null(strstr(ctxkv_last_error(), "workspace"));
    fake.most_bytes = 0;
    fake.fail_name = "cuMemAlloc";
    // Every allocation from number n on fails: the first n with which there is a chain.
    for (fake.fail_after = 0; chain_new(p.device, false, &p.chain); fake.fail_after++)
        fake.named_calls = 0;
    fake.fail_name = 0;
    assert_ok(chain_bind(p.chain, 0));
    assert_ok(chain_run(p.chain, FEW_ROWS, 0));
    assert_string_equal(fake.launch[1].kernel, "ctxkv_store_gptj");
    parts_close(&p);
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
        assert_ok(ctxkv_device_open("cuda:0", &options, &p.device));
        assert_ok(chain_new(p.device, false, &p.chain));
        assert_ok(chain_bind(p.chain, 0));
        assert_ok(chain_run(p.chain, PART_ROWS, 0));
        for (int i = 0; i < fake.launches; i++) assert_int_equal(fake.launch[i].programmatic, -1);
        // Only sm_90 is known to have cuBLAS equal to the exact chain.
        assert_int_equal(fake.launches, old ? 3 : 2);
        parts_close(&p);
    }
}

// The caller's context of the same device is used as it is; one of another device is left alone.
static void contexts_are_respected(void **state) {
    (void)state;
    CUcontext mine = (CUcontext)(uintptr_t)0x9999;
    fake.current = mine;
    assert_ok(whole(false));
    assert_ptr_equal(fake.current, mine);
    assert_int_equal(fake.retained, 0);
    fake.current_device = 1;
    assert_ok(whole(false));
    assert_ptr_equal(fake.current, mine);
    fake.current = 0;
}

static void bad_operands_launch_nothing(void **state) {
    (void)state;
    static uint16_t out[LAYERS * FEW_ROWS * D];
    struct tensor b[2];
    ctxkv_device *device;
    ctxkv_norms *norms;
    ctxkv_norms_desc n;
    ctxkv_norms_desc_init(&n);
    n.num_layers = LAYERS;
    assert_ok(ctxkv_device_open("cuda:0", 0, &device));
    assert_ok(ctxkv_norms_create(device, &n, &norms));
    const DLTensor *good = tensor_on(&b[0], &gpu, x, BF16, 2, DIMS(FEW_ROWS, D), 0);
    const DLTensor *odd = tensor_on(
        &b[1], &gpu, out + 1, BF16, 3, DIMS(LAYERS, FEW_ROWS - 1, D), DIMS(FEW_ROWS * D, D, 1));
    b[0].shape[0] = FEW_ROWS - 1;
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
    assert_ok(ctxkv_norms_run(norms, good, odd, 0));
    assert_string_equal(fake.launch[0].kernel, "ctxkv_norms_any_pair");
    ctxkv_norms_destroy(norms);
    ctxkv_device_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        FAKE_TEST(works),
        FAKE_TEST(every_call_fails),
        FAKE_TEST(captures_refuse_plans),
        FAKE_TEST(other_captures_stay_whole),
        FAKE_TEST(runs_only_launch),
        FAKE_TEST(no_room_for_packed_weights),
        FAKE_TEST(programmatic_launch_can_be_off),
        FAKE_TEST(contexts_are_respected),
        FAKE_TEST(bad_operands_launch_nothing),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
