// SPDX-License-Identifier: Apache-2.0
// Opens a CUDA device through the public API and says what came of it; ctest checks the sentence.
#include <stdio.h>

#include "ctxkv/ctxkv.h"

int main(int argc, char **argv) {
    ctxkv_device *device;
    ctxkv_status status = ctxkv_device_open(argc > 1 ? argv[1] : "cuda:0", NULL, &device);
    if (status) {
        printf("%s: %s\n", ctxkv_status_name(status), ctxkv_last_error());
        // A second try says the same, and the CPU still works.
        char first[512];
        snprintf(first, sizeof first, "%s", ctxkv_last_error());
        ctxkv_device_open(argc > 1 ? argv[1] : "cuda:0", NULL, &device);
        for (int i = 0; first[i] || ctxkv_last_error()[i]; i++)
            if (first[i] != ctxkv_last_error()[i]) return puts("the second try differs"), 1;
        if (ctxkv_device_open("cpu", NULL, &device)) return puts("and no CPU"), 1;
        ctxkv_device_close(device);
        return 0;
    }
    ctxkv_device_info info = {.size = sizeof info};
    ctxkv_device_get_info(device, &info);
    printf(
        "opened %s, sm_%d, driver %d, %d devices\n", info.name, info.cuda_arch, info.driver,
        ctxkv_cuda_device_count());
    ctxkv_device_close(device);
    return 0;
}
