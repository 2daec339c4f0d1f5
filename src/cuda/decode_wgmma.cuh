// SPDX-License-Identifier: Apache-2.0
// wgmma m64nNk16, BF16 in, FP32 accumulators, both operands in shared memory.
//
// The weights lie in chunks: 16-byte vector (row r, chunk c of 8 columns) at c*pitch + r. The pitch
// is any number: with fewer than N rows a chunk's missing rows are read from what follows, and end
// in outputs nobody looks at. x lies in lines, in wgmma's 128-byte swizzle: vector (r, c) at
// (c/8*pitch + r)*8 + (c%8 ^ r%8), aligned to 1024 bytes, the pitch a multiple of 8; rows past it
// are noise likewise.
#ifndef CTXKV_CUDA_DECODE_WGMMA_CUH
#define CTXKV_CUDA_DECODE_WGMMA_CUH

#include "prim.cuh"

// A descriptor's words. Low: start and leading offset (from a chunk to the next). High: stride
// offset (from eight rows to the next eight) and mode. Everything is in units of 16 bytes.
static __device__ __forceinline__ u32 chunks_start(u32 address, u32 pitch) {
    return (address >> 4 & 0x3fff) | pitch << 16;
}
static __device__ __forceinline__ u64 chunks_operand(u32 low) {
    return (u64)(128 >> 4) << 32 | low;
}
static __device__ __forceinline__ u32 lines_start(u32 address) {
    return (address >> 4 & 0x3fff) | 1u << 16;
}
static __device__ __forceinline__ u64 lines_operand(u32 low) {
    return (u64)(1u << 30 | 1024 >> 4) << 32 | low;
}
static __device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Ties the accumulators to this place of the program.
template <int N> static __device__ __forceinline__ void wgmma_fix(float (&d)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define CTXKV_R0 "%0, %1, %2, %3"
#define CTXKV_R1 ", %4, %5, %6, %7"
#define CTXKV_R2 ", %8, %9, %10, %11"
#define CTXKV_R3 ", %12, %13, %14, %15"
#define CTXKV_R4 ", %16, %17, %18, %19"
#define CTXKV_R5 ", %20, %21, %22, %23"
#define CTXKV_R6 ", %24, %25, %26, %27"
#define CTXKV_R7 ", %28, %29, %30, %31"
#define CTXKV_R8 ", %32, %33, %34, %35"
#define CTXKV_R9 ", %36, %37, %38, %39"
#define CTXKV_R10 ", %40, %41, %42, %43"
#define CTXKV_R11 ", %44, %45, %46, %47"
#define CTXKV_R12 ", %48, %49, %50, %51"
#define CTXKV_R13 ", %52, %53, %54, %55"
#define CTXKV_R14 ", %56, %57, %58, %59"
#define CTXKV_R15 ", %60, %61, %62, %63"
#define CTXKV_D(i) "+f"(d[4 * i]), "+f"(d[4 * i + 1]), "+f"(d[4 * i + 2]), "+f"(d[4 * i + 3])
#define CTXKV_WGMMA(n, regs, a, b, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, " \
                 "%" #a ", %" #b ", 1, 1, 1, 0, 0;" : __VA_ARGS__ : "l"(x), "l"(w))

// d += x(64 rows) * w(N rows)^T over 16 columns.
template <int N> static __device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 x, u64 w);
template <> __device__ __forceinline__ void wgmma<8>(float (&d)[4], u64 x, u64 w) {
    CTXKV_WGMMA(8, CTXKV_R0, 4, 5, CTXKV_D(0));
}
template <> __device__ __forceinline__ void wgmma<16>(float (&d)[8], u64 x, u64 w) {
    CTXKV_WGMMA(16, CTXKV_R0 CTXKV_R1, 8, 9, CTXKV_D(0), CTXKV_D(1));
}
template <> __device__ __forceinline__ void wgmma<24>(float (&d)[12], u64 x, u64 w) {
    CTXKV_WGMMA(24, CTXKV_R0 CTXKV_R1 CTXKV_R2, 12, 13, CTXKV_D(0), CTXKV_D(1), CTXKV_D(2));
}
template <> __device__ __forceinline__ void wgmma<32>(float (&d)[16], u64 x, u64 w) {
    CTXKV_WGMMA(32, CTXKV_R0 CTXKV_R1 CTXKV_R2 CTXKV_R3, 16, 17, CTXKV_D(0), CTXKV_D(1),
        CTXKV_D(2), CTXKV_D(3));
}
template <> __device__ __forceinline__ void wgmma<48>(float (&d)[24], u64 x, u64 w) {
    CTXKV_WGMMA(48, CTXKV_R0 CTXKV_R1 CTXKV_R2 CTXKV_R3 CTXKV_R4 CTXKV_R5, 24, 25, CTXKV_D(0), CTXKV_D(1), CTXKV_D(2), CTXKV_D(3), CTXKV_D(4), CTXKV_D(5));
}
template <> __device__ __forceinline__ void wgmma<64>(float (&d)[32], u64 x, u64 w) {
    CTXKV_WGMMA(64, CTXKV_R0 CTXKV_R1 CTXKV_R2 CTXKV_R3 CTXKV_R4 CTXKV_R5 CTXKV_R6 CTXKV_R7,
        32, 33, CTXKV_D(0), CTXKV_D(1), CTXKV_D(2), CTXKV_D(3), CTXKV_D(4), CTXKV_D(5),
        CTXKV_D(6), CTXKV_D(7));
}
template <> __device__ __forceinline__ void wgmma<96>(float (&d)[48], u64 x, u64 w) {
    CTXKV_WGMMA(96, CTXKV_R0 CTXKV_R1 CTXKV_R2 CTXKV_R3 CTXKV_R4 CTXKV_R5 CTXKV_R6 CTXKV_R7
        CTXKV_R8 CTXKV_R9 CTXKV_R10 CTXKV_R11, 48, 49, CTXKV_D(0), CTXKV_D(1), CTXKV_D(2),
        CTXKV_D(3), CTXKV_D(4), CTXKV_D(5), CTXKV_D(6), CTXKV_D(7), CTXKV_D(8), CTXKV_D(9),
        CTXKV_D(10), CTXKV_D(11));
}
template <> __device__ __forceinline__ void wgmma<128>(float (&d)[64], u64 x, u64 w) {
    CTXKV_WGMMA(128, CTXKV_R0 CTXKV_R1 CTXKV_R2 CTXKV_R3 CTXKV_R4 CTXKV_R5 CTXKV_R6 CTXKV_R7
        CTXKV_R8 CTXKV_R9 CTXKV_R10 CTXKV_R11 CTXKV_R12 CTXKV_R13 CTXKV_R14 CTXKV_R15, 64, 65, CTXKV_D(0), CTXKV_D(1), CTXKV_D(2), CTXKV_D(3), CTXKV_D(4), CTXKV_D(5),
        CTXKV_D(6), CTXKV_D(7), CTXKV_D(8), CTXKV_D(9), CTXKV_D(10), CTXKV_D(11),
        CTXKV_D(12), CTXKV_D(13), CTXKV_D(14), CTXKV_D(15));
}
#undef CTXKV_R0
#undef CTXKV_R1
#undef CTXKV_R2
#undef CTXKV_R3
#undef CTXKV_R4
#undef CTXKV_R5
#undef CTXKV_R6
#undef CTXKV_R7
#undef CTXKV_R8
#undef CTXKV_R9
#undef CTXKV_R10
#undef CTXKV_R11
#undef CTXKV_R12
#undef CTXKV_R13
#undef CTXKV_R14
#undef CTXKV_R15
#undef CTXKV_D
#undef CTXKV_WGMMA
// clang-format on

#endif
