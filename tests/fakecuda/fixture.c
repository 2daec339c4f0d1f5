// SPDX-License-Identifier: Apache-2.0
#include "fixture.h"

static const ctxkv_memory_ops no_memory;
const struct place gpu = {.memory = &no_memory};

int fake_set_up(void **state) {
    (void)state;
    fake_reset();
    ctxkv__driver_use(&fake_driver);
    ctxkv__cublas_use(&fake_cublas);
    return 0;
}
int fake_tear_down(void **state) {
    (void)state;
    bool clean = fake_clean();
    ctxkv__driver_use(0);
    ctxkv__cublas_use(0);
    return clean ? 0 : 1;
}

int open_set_up(void **state) {
    ctxkv_device *device;
    fake_set_up(state);
    assert_ok(ctxkv_device_open("cuda:0", 0, &device));
    *state = device;
    return 0;
}
int open_tear_down(void **state) {
    ctxkv_device_close(*state);
    return fake_tear_down(state);
}
