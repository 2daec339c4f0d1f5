// SPDX-License-Identifier: Apache-2.0
// Devices: names, options and their versions, tiers, references, a machine without CUDA.
#define _GNU_SOURCE
#include <stdio.h>

#include "checks.h"

static const ctxkv_status bad = CTXKV_INVALID_ARGUMENT;

static void names(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "",
        "CPU",
        "cpu ",
        "cpu:0",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:1x",
        "cuda0",
        "cuda:1024",
        "cuda:99999999999999999999",
        "hip:0"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ctxkv_device *device = (ctxkv_device *)&device;
        char text[80];
        snprintf(text, sizeof text, "device name is \"%.40s\", must be \"cpu\"", wrong[i]);
        assert_refused(ctxkv_device_open(wrong[i], 0, &device), bad, text);
        assert_null(device);
    }
    ctxkv_device *device;
    assert_refused(ctxkv_device_open(0, 0, &device), bad, "name is NULL");
    assert_refused(ctxkv_device_open("cpu", 0, 0), bad, "device is NULL");
    assert_ok(ctxkv_device_open("cpu", 0, &device));
    ctxkv_device_close(device);
}

static ctxkv_status open_with(ctxkv_device_options *options) {
    ctxkv_device *device = 0;
    ctxkv_status status = ctxkv_device_open("cpu", options, &device);
    assert_true((device == 0) == (status != CTXKV_OK));
    ctxkv_device_close(device);
    return status;
}

static void options(void **state) {
    (void)state;
    ctxkv_device_options o;
    ctxkv_device_options_init(&o);
    assert_int_equal(o.size, sizeof o);
    assert_int_equal(o.programmatic_launch, 1);
    o.threads = -1;
    assert_refused(open_with(&o), bad, "threads is -1, must be in 0..1024");
    o.threads = 1025;
    assert_refused(open_with(&o), bad, "threads is 1025, must be in 0..1024");
    o.threads = 2;
    o.cpu_mask = 8;
    assert_refused(open_with(&o), bad, "cpu_mask is 0x8, must be made of CTXKV_CPU_* (0x7)");
    o.cpu_mask = 0;
    o.size = 8;
    assert_refused(open_with(&o), bad, "options->size is 8, must be at least");
    o.size = 0;
    assert_refused(open_with(&o), bad, "options->size is 0, must be at least");
    o.size = sizeof o;
    assert_ok(open_with(&o));
    // A caller built against a later header: unknown fields must be zero.
    struct {
        ctxkv_device_options old;
        int64_t later;
    } next = {.later = 0};
    ctxkv_device_options_init(&next.old);
    next.old.size = sizeof next;
    assert_ok(open_with(&next.old));
    next.later = 1;
    assert_refused(open_with(&next.old), CTXKV_UNSUPPORTED, "options has a field at byte");
}

static unsigned tier(uint32_t mask, const char *environment) {
    ctxkv_device_options o;
    ctxkv_device_options_init(&o);
    o.cpu_mask = mask;
    o.threads = 1;
    if (environment)
        setenv("CTXKV_CPU_MASK", environment, 1);
    else
        unsetenv("CTXKV_CPU_MASK");
    ctxkv_device *device;
    assert_ok(ctxkv_device_open("cpu", &o, &device));
    ctxkv_device_info info = {.size = sizeof info};
    assert_ok(ctxkv_device_get_info(device, &info));
    assert_int_equal(info.threads, 1);
    assert_int_equal(info.bits_verified, 1);
    assert_int_equal(info.cuda_arch, 0);
    assert_true(info.cpu_found & info.cpu_used);
    assert_true(info.cpu_found & CTXKV_CPU_SCALAR);
    assert_memory_equal(info.name, "cpu ", 4);
    unsetenv("CTXKV_CPU_MASK");
    ctxkv_device_close(device);
    return info.cpu_used;
}

static void tiers(void **state) {
    (void)state;
    assert_int_equal(tier(CTXKV_CPU_SCALAR, 0), CTXKV_CPU_SCALAR);
    assert_int_equal(tier(0, "scalar"), CTXKV_CPU_SCALAR);
    assert_int_equal(tier(CTXKV_CPU_SCALAR, "avx512"), CTXKV_CPU_SCALAR); // the option wins
    assert_true(tier(0, "avx2") <= CTXKV_CPU_AVX2);
    assert_int_equal(tier(0, "avx2"), tier(CTXKV_CPU_SCALAR | CTXKV_CPU_AVX2, 0));
    assert_int_equal(tier(0, "avx512"), tier(0, 0));
    assert_int_equal(tier(0, ""), tier(0, 0));
    setenv("CTXKV_CPU_MASK", "sse2", 1);
    ctxkv_device *device;
    assert_refused(
        ctxkv_device_open("cpu", 0, &device), bad,
        "CTXKV_CPU_MASK is \"sse2\", must be scalar, avx2 or avx512");
    unsetenv("CTXKV_CPU_MASK");
    assert_ok(ctxkv_device_open("cpu", 0, &device));
    ctxkv_device_close(device);
}

static void info(void **state) {
    (void)state;
    ctxkv_device *device;
    assert_ok(ctxkv_device_open("cpu", 0, &device));
    ctxkv_device_info small = {.size = sizeof small - 1, .threads = 77};
    assert_refused(ctxkv_device_get_info(device, 0), bad, "info is NULL");
    assert_refused(ctxkv_device_get_info(device, &small), bad, "info->size is ");
    assert_int_equal(small.threads, 77);
    small.size = sizeof small;
    assert_ok(ctxkv_device_get_info(device, &small));
    assert_int_equal(small.size, sizeof small);
    assert_true(small.threads >= 1);
    ctxkv_device_close(device);
}

// A plan keeps its device alive, so the order of the two last calls does not matter.
static void closed_before_its_plan(void **state) {
    (void)state;
    ctxkv_device *device;
    assert_ok(ctxkv_device_open("cpu", 0, &device));
    ctxkv_store_desc d;
    ctxkv_store_desc_init(&d);
    d.num_layers = d.num_kv_heads = 1;
    ctxkv_store *store;
    assert_ok(ctxkv_store_create(device, &d, &store));
    ctxkv_device_close(device);
    ctxkv_faults faults;
    assert_ok(ctxkv_store_faults(store, &faults));
    ctxkv_store_destroy(store);
}

static void no_such_cuda_device(void **state) {
    (void)state;
    ctxkv_device *device = (ctxkv_device *)&device;
    assert_true(ctxkv_cuda_device_count() >= 0);
    ctxkv_status status = ctxkv_device_open("cuda:1000", 0, &device);
    assert_true(status == CTXKV_NO_DEVICE || status == CTXKV_NO_KERNEL || status == CTXKV_DRIVER);
    assert_null(device);
    assert_true(strlen(ctxkv_last_error()) > 10);
    assert_ok(ctxkv_device_open("cpu", 0, &device)); // the CPU path goes on
    ctxkv_device_close(device);
}

int main(void) {
    unsetenv("CTXKV_CPU_MASK");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(options),
        cmocka_unit_test(tiers),
        cmocka_unit_test(info),
        cmocka_unit_test(closed_before_its_plan),
        cmocka_unit_test(no_such_cuda_device),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
