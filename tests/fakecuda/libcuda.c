// SPDX-License-Identifier: Apache-2.0
// The fake driver as a libcuda.so.1 for the real loader; FAKECUDA says what is wrong with it.
#include <stdlib.h>
#include <string.h>

#include "fake.h"

__attribute__((visibility("default"))) CUresult FAKE_GET_PROC(
    const char *symbol, void **address, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *found) {
    (void)version, (void)flags;
    const char *mode = getenv("FAKECUDA");
    static bool ready;
    if (!ready) fake_reset();
    ready = true;
    fake.many_launches = true;
    if (mode && !strncmp(mode, "version=", 8)) fake.version = atoi(mode + 8);
    if (mode && !strncmp(mode, "init=", 5)) fake.init = (CUresult)atoi(mode + 5);
    if (mode && !strncmp(mode, "devices=", 8)) fake.devices = atoi(mode + 8);
    if (mode && !strncmp(mode, "arch=", 5)) {
        fake.major = atoi(mode + 5) / 10;
        fake.minor = atoi(mode + 5) % 10;
        fake.no_code = fake.major < 8;
    }
    *found = CU_GET_PROC_ADDRESS_SUCCESS;
    *address = 0;
    if (mode && !strncmp(mode, "without=", 8) && !strcmp(mode + 8, symbol))
        return CUDA_ERROR_NOT_FOUND;
    *address = fake_symbol(symbol);
    return *address ? 0 : CUDA_ERROR_NOT_FOUND;
}
