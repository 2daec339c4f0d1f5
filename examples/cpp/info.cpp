// SPDX-License-Identifier: Apache-2.0
// The library from C++: which CPU tier would run here, and one value of the GPU's rsqrt.
#include <ctxkv/ctxkv.h>

#include <cstdio>
#include <memory>

int main() {
    ctxkv_device *opened = nullptr;
    if (ctxkv_device_open("cpu", nullptr, &opened)) {
        std::fprintf(stderr, "%s\n", ctxkv_last_error());
        return 1;
    }
    std::unique_ptr<ctxkv_device, decltype(&ctxkv_device_close)> device(opened, ctxkv_device_close);
    ctxkv_device_info info{};
    info.size = sizeof info;
    if (ctxkv_device_get_info(device.get(), &info)) return 1;
    std::printf("ctxkv %s, %s, %d threads, rsqrt(2) = %a\n", ctxkv_version(), info.name,
                info.threads, static_cast<double>(ctxkv_rsqrt(2.0f, 1)));
}
