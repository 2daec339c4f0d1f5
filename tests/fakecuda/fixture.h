// SPDX-License-Identifier: Apache-2.0
// What the tests against the fake driver share: the driver in the real one's place, and its GPU.
#ifndef CTXKV_TESTS_FAKECUDA_FIXTURE_H
#define CTXKV_TESTS_FAKECUDA_FIXTURE_H

#include "checks.h"
#include "fake.h"

// Where tensors of the fake GPU lie, for tensor_on; their memory is the host's.
extern const struct place gpu;

// The fake driver and cuBLAS are used; the teardown fails where something taken was not given back.
int fake_set_up(void **state);
int fake_tear_down(void **state);
#define FAKE_TEST(f) cmocka_unit_test_setup_teardown(f, fake_set_up, fake_tear_down)
// The same with cuda:0 open; it is the test's state.
int open_set_up(void **state);
int open_tear_down(void **state);
#define OPEN_TEST(f) cmocka_unit_test_setup_teardown(f, open_set_up, open_tear_down)

#endif
