// SPDX-License-Identifier: Apache-2.0
// CUDA graphs of ctxkv bench against the fake driver: what is recorded, every failing call, leaks.
#include "cuda/params.h"
#include "device/replay.h"
#include "fixture.h"

static uint8_t from[4096], to[4096];

// Three launches, recorded and replayed twice.
static ctxkv_status whole(double *seconds) {
    ctxkv_device *device = 0;
    ctxkv_replay *replay = 0;
    const ctxkv_replay_ops *ops = 0;
    void *stream = 0;
    ctxkv_status status = ctxkv_device_open("cuda:0", 0, &device);
    if (!status) {
        ops = ctxkv_device_replay(device);
        status = ops->load_floors(device);
    }
    if (!status) status = ops->begin(device, &replay, &stream);
    for (int kind = 0; kind < 3 && !status; kind++)
        status = ops->floor(device, (ctxkv_floor)kind, to, from, sizeof from, stream);
    if (!status) status = ops->end(replay);
    for (int i = 0; i < 2 && !status; i++) status = ops->run(replay, seconds);
    long reached = fake.calls;
    fake.fail_at = -1;
    if (ops) ops->free(replay);
    ctxkv_device_close(device);
    fake.calls = reached;
    return status;
}

static void records_and_replays(void **state) {
    (void)state;
    double seconds = 0;
    assert_ok(whole(&seconds));
    assert_int_equal(fake.launches, 3);
    assert_true(seconds > 2.99e-3 && seconds < 3.01e-3);
    static const char *const names[] = {
        "ctxkv_floor_read", "ctxkv_floor_copy", "ctxkv_floor_products"};
    for (int i = 0; i < 3; i++) {
        ctxkv_floor_params p;
        memcpy(&p, fake.launch[i].params, sizeof p);
        assert_string_equal(fake.launch[i].kernel, names[i]);
        assert_non_null(fake.launch[i].stream);
        assert_ptr_equal(p.from, from);
        assert_ptr_equal(p.to, to);
        assert_int_equal(p.vectors, i == 2 ? 0 : sizeof from / 16);
        assert_int_equal(p.steps, i == 2 ? sizeof from : 0);
    }
}

static void every_call_fails(void **state) {
    (void)state;
    long refused = 0;
    for (long n = 0;; n++) {
        double seconds;
        fake_reset();
        fake.fail_at = n;
        fake.fail_with = CUDA_ERROR_UNKNOWN;
        ctxkv_status status = whole(&seconds);
        assert_true(fake_clean());
        assert_null(fake.current);
        if (fake.calls <= n) break;
        if (!status) continue;
        refused++;
        assert_non_null(strstr(ctxkv_last_error(), "CUDA_ERROR_"));
    }
    assert_true(refused > 40);
}

// A recording that is given up in the middle, and a driver that cannot record.
static void given_up(void **state) {
    (void)state;
    ctxkv_device *device;
    ctxkv_replay *replay;
    void *stream;
    assert_ok(ctxkv_device_open("cuda:0", 0, &device));
    const ctxkv_replay_ops *ops = ctxkv_device_replay(device);
    assert_ok(ops->begin(device, &replay, &stream));
    assert_non_null(fake.recording);
    ops->free(replay);
    assert_null(fake.recording);
    ops->free(0);
    ctxkv_device_close(device);

    struct ctxkv__driver old = fake_driver;
    old.cuGraphLaunch = 0;
    ctxkv__driver_use(&old);
    assert_ok(ctxkv_device_open("cuda:0", 0, &device));
    assert_int_equal(
        ctxkv_device_replay(device)->begin(device, &replay, &stream), CTXKV_UNSUPPORTED);
    assert_non_null(strstr(ctxkv_last_error(), "cannot record"));
    assert_null(replay);
    ctxkv_device_close(device);
    assert_ok(ctxkv_device_open("cpu", 0, &device));
    assert_null(ctxkv_device_replay(device));
    ctxkv_device_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        FAKE_TEST(records_and_replays),
        FAKE_TEST(every_call_fails),
        FAKE_TEST(given_up),
    };
    return cmocka_run_group_tests(tests, 0, 0);
}
