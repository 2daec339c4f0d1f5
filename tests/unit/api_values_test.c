// SPDX-License-Identifier: Apache-2.0
// Status list, constants, version, the last error of each thread, single values and the table.
#include <math.h>
#include <pthread.h>

#include "checks.h"

static void status_list(void **state) {
    (void)state;
    int count = 0;
#define CTXKV_ERROR(name, value, text)                                                             \
    assert_int_equal(CTXKV_##name, value);                                                         \
    assert_string_equal(ctxkv_status_name((ctxkv_status)value), #name);                            \
    assert_string_equal(ctxkv_status_text((ctxkv_status)value), text);                             \
    assert_int_equal(ctxkv_constant("CTXKV_" #name), value);                                       \
    assert_int_equal(value, count);                                                                \
    count++;
#include "ctxkv/errors.inc"
#undef CTXKV_ERROR
    assert_string_equal(ctxkv_status_name((ctxkv_status)count), "?");
    assert_string_equal(ctxkv_status_name((ctxkv_status)-1), "?");
    assert_string_equal(ctxkv_status_text((ctxkv_status)count), "not a status");
}

#define SAME(name) assert_int_equal(ctxkv_constant(#name), name)

static void constants(void **state) {
    (void)state;
    SAME(CTXKV_CPU_SCALAR), SAME(CTXKV_CPU_AVX2), SAME(CTXKV_CPU_AVX512);
    SAME(CTXKV_NORM_ROW), SAME(CTXKV_NORM_RMS), SAME(CTXKV_NORM_ABSENT);
    SAME(CTXKV_NUMERICS_STOCK), SAME(CTXKV_NUMERICS_PAIR), SAME(CTXKV_NUMERICS_PACKED);
    SAME(CTXKV_NUMERICS_INVARIANT), SAME(CTXKV_PROJECTION_AUTO), SAME(CTXKV_PROJECTION_EXACT);
    SAME(CTXKV_PROJECTION_CUBLAS), SAME(CTXKV_K_NORM_PLAIN), SAME(CTXKV_K_NORM_RMS);
    SAME(CTXKV_K_NORM_ABSENT), SAME(CTXKV_ROPE_NONE), SAME(CTXKV_ROPE_GPTJ), SAME(CTXKV_ROPE_NEOX);
    SAME(CTXKV_FAULT_NONE), SAME(CTXKV_FAULT_SLOT), SAME(CTXKV_FAULT_POSITION);
    SAME(CTXKV_VERSION_MAJOR), SAME(CTXKV_VERSION_MINOR), SAME(CTXKV_VERSION_PATCH);
    assert_int_equal(ctxkv_constant("CTXKV_NO_SUCH"), -1);
    assert_int_equal(ctxkv_constant("NORM_ROW"), -1);
    assert_int_equal(ctxkv_constant(""), -1);
    assert_int_equal(ctxkv_constant(0), -1);
    assert_string_equal(ctxkv_version(), CTXKV_VERSION_STRING);
}

static void *other_thread(void *argument) {
    (void)argument;
    if (*ctxkv_last_error()) return (void *)1; // a new thread has no failure yet
    if (ctxkv_rope_inv_freq(0.5f, 64, 0) != CTXKV_INVALID_ARGUMENT) return (void *)2;
    if (!strstr(ctxkv_last_error(), "theta is 0.5")) return (void *)3;
    return 0;
}

static void last_error_per_thread(void **state) {
    (void)state;
    ctxkv_device *device;
    assert_refused(ctxkv_device_open("tpu", 0, &device), CTXKV_INVALID_ARGUMENT, "\"tpu\"");
    pthread_t thread;
    void *result;
    assert_int_equal(pthread_create(&thread, 0, other_thread, 0), 0);
    pthread_join(thread, &result);
    assert_null(result);
    assert_non_null(strstr(ctxkv_last_error(), "\"tpu\""));
}

// A caller compiled with a shorter or a longer struct than the library's.
static void other_sizes_of_descriptors(void **state) {
    (void)state;
    union {
        ctxkv_store_desc desc;
        unsigned char bytes[2 * sizeof(ctxkv_store_desc)];
    } box;
    ctxkv_store_desc whole;
    ctxkv_store_desc_init(&whole);
    assert_int_equal(whole.size, sizeof whole);
    for (size_t size = 0; size <= sizeof box - 8; size++) {
        memset(&box, 0x5A, sizeof box);
        ctxkv_store_desc_init_sized(&box.desc, size);
        for (size_t i = size < sizeof size ? 0 : size; i < sizeof box; i++)
            assert_int_equal(box.bytes[i], 0x5A);
        if (size < sizeof size) continue;
        assert_int_equal(box.desc.size, size);
        for (size_t i = sizeof size; i < size; i++)
            assert_int_equal(box.bytes[i], i < sizeof whole ? ((unsigned char *)&whole)[i] : 0);
    }
    ctxkv_device *device;
    ctxkv_store *store;
    assert_int_equal(ctxkv_device_open("cpu", 0, &device), CTXKV_OK);
    for (int longer = 0; longer < 2; longer++) {
        size_t size = longer ? sizeof whole + 16 : offsetof(ctxkv_store_desc, k_scales);
        memset(&box, 0x5A, sizeof box);
        ctxkv_store_desc_init_sized(&box.desc, size);
        box.desc.num_layers = box.desc.num_kv_heads = 1;
        assert_int_equal(ctxkv_store_create(device, &box.desc, &store), CTXKV_OK);
        ctxkv_store_destroy(store);
    }
    box.bytes[sizeof whole + 8] = 1;
    assert_refused(
        ctxkv_store_create(device, &box.desc, &store), CTXKV_UNSUPPORTED, "does not know");
    ctxkv_device_close(device);
}

static void null_everything(void **state) {
    (void)state;
    ctxkv_device_options_init(0);
    ctxkv_norms_desc_init(0);
    ctxkv_projection_desc_init(0);
    ctxkv_store_desc_init(0);
    ctxkv_chain_desc_init(0);
    ctxkv_chain_call_init(0);
    ctxkv_device_close(0);
    ctxkv_norms_destroy(0);
    ctxkv_projection_destroy(0);
    ctxkv_store_destroy(0);
    ctxkv_chain_destroy(0);
    assert_int_equal(ctxkv_chain_workspace_size(0), 0);
    assert_int_equal(ctxkv_chain_memory(0), 0);
    assert_true(isnan(ctxkv_mma16(0, 0, 0)));
    const ctxkv_status bad = CTXKV_INVALID_ARGUMENT;
    assert_refused(ctxkv_device_open(0, 0, 0), bad, "device is NULL, must be an address");
    assert_refused(ctxkv_device_get_info(0, 0), bad, "device is NULL");
    assert_refused(ctxkv_norms_create(0, 0, 0), bad, "norms is NULL");
    assert_refused(ctxkv_norms_run(0, 0, 0, 0), bad, "norms is NULL");
    assert_refused(ctxkv_projection_create(0, 0, 0), bad, "projection is NULL");
    assert_refused(ctxkv_projection_run(0, 0, 0, 0), bad, "projection is NULL");
    assert_refused(ctxkv_store_create(0, 0, 0), bad, "store is NULL");
    assert_refused(ctxkv_store_bind_caches(0, 0, 0, 0), bad, "store is NULL");
    assert_refused(ctxkv_store_run(0, 0, 0, 0, 0, 0, 0), bad, "store is NULL");
    assert_refused(ctxkv_store_faults(0, 0), bad, "store is NULL");
    assert_refused(ctxkv_chain_create(0, 0, 0), bad, "chain is NULL");
    assert_refused(ctxkv_chain_bind_caches(0, 0, 0, 0), bad, "chain is NULL");
    assert_refused(ctxkv_chain_run(0, 0, 0, 0, 0, 0), bad, "chain is NULL");
    assert_refused(ctxkv_chain_run_call(0, 0), bad, "chain is NULL");
    assert_refused(ctxkv_chain_faults(0, 0), bad, "chain is NULL");
    assert_refused(ctxkv_rope_table(2, 64, 1, 0), bad, "table is NULL, must be a tensor");
    assert_refused(ctxkv_rope_inv_freq(2, 64, 0), bad, "inv_freq is NULL");
    assert_refused(ctxkv_rope_row(0, 1, 0, 0, 0), bad, "inv_freq is NULL");
}

static void rope_refusals(void **state) {
    (void)state;
    const ctxkv_status bad = CTXKV_INVALID_ARGUMENT;
    float f[32], c[32], s[32];
    assert_refused(ctxkv_rope_inv_freq(1.0f, 64, f), bad, "theta is 1, must be finite and > 1");
    assert_refused(ctxkv_rope_inv_freq(INFINITY, 64, f), bad, "theta is inf");
    assert_refused(ctxkv_rope_inv_freq(NAN, 64, f), bad, "must be finite and > 1");
    assert_refused(ctxkv_rope_inv_freq(10000, 63, f), bad, "rotary_dim is 63, must be even");
    assert_refused(ctxkv_rope_inv_freq(10000, 0, f), bad, "rotary_dim is 0");
    assert_refused(ctxkv_rope_inv_freq(10000, -2, f), bad, "rotary_dim is -2");
    assert_refused(ctxkv_rope_inv_freq(10000, 65538, f), bad, "rotary_dim is 65538");
    assert_ok(ctxkv_rope_inv_freq(10000, 64, f));
    assert_refused(ctxkv_rope_row(f, -1, 0, c, s), bad, "count is -1, must be in 0..32768");
    assert_refused(ctxkv_rope_row(f, 32, -1, c, s), bad, "position is -1, must be in 0..");
    assert_refused(ctxkv_rope_row(f, 32, INT64_MAX, c, s), bad, "position is 9223372036854775807");
    assert_refused(ctxkv_rope_row(f, 32, 0, 0, s), bad, "cosine is NULL");
    assert_refused(ctxkv_rope_row(f, 32, 0, c, 0), bad, "sine is NULL");
    assert_ok(ctxkv_rope_row(f, 32, 0, c, s));
    assert_true(c[31] == 1.0f && s[31] == 0.0f);

    uint16_t values[3 * 64 + 2];
    memset(values, POISON, sizeof values);
    struct place cpu = {0};
    struct tensor t;
    tensor_on(&t, &cpu, values, BF16, 2, DIMS(3, 64), 0);
    assert_refused(ctxkv_rope_table(2, 64, -1, &t.t), bad, "positions is -1, must be in 0..");
    assert_refused(ctxkv_rope_table(2, 64, 4, &t.t), bad, "table has shape [3, 64]");
    assert_refused(ctxkv_rope_table(2, 32, 3, &t.t), bad, "must be [3, 32]");
    assert_int_equal(values[0], 0x5A5A);
    assert_ok(ctxkv_rope_table(10000, 64, 3, &t.t));
    assert_int_equal(values[3 * 64], 0x5A5A);
    assert_int_equal(values[0], 0x3F80);
    // Rows apart, backwards, at an odd address: the same values.
    unsigned char room[3 * 70 * 2 + 1];
    memset(room, POISON, sizeof room);
    struct tensor u;
    tensor_on(&u, &cpu, room + 1 + 2 * 70 * 2, BF16, 2, DIMS(3, 64), DIMS(-70, 1));
    assert_ok(ctxkv_rope_table(10000, 64, 3, &u.t));
    for (int p = 0; p < 3; p++)
        assert_memory_equal(room + 1 + (2 - p) * 70 * 2, values + p * 64, 128);
    assert_int_equal(room[0], POISON);
    assert_int_equal(room[1 + 64 * 2], POISON);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_list),
        cmocka_unit_test(constants),
        cmocka_unit_test(last_error_per_thread),
        cmocka_unit_test(null_everything),
        cmocka_unit_test(other_sizes_of_descriptors),
        cmocka_unit_test(rope_refusals),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
