// SPDX-License-Identifier: Apache-2.0
// Named device primitives: every floating-point operation with its rounding, memory, launch order.
#ifndef CTXKV_CUDA_PRIM_CUH
#define CTXKV_CUDA_PRIM_CUH

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

// Arithmetic. The intrinsics never contract, so a fused multiply-add is only where it is written.
static __device__ __forceinline__ float add_rn(float a, float b) {
    return __fadd_rn(a, b);
}
static __device__ __forceinline__ float mul_rn(float a, float b) {
    return __fmul_rn(a, b);
}
static __device__ __forceinline__ float fma_rn(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}

// The hardware's approximate reciprocal square root; the ftz form takes a subnormal as zero.
static __device__ __forceinline__ float rsqrt_ftz(float a) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
static __device__ __forceinline__ float rsqrt_any(float a) {
    float r;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

// BF16: element 0 of a pair is in the low half. NaN rounds to 0x7FFF.
static __device__ __forceinline__ float bf16_low(u32 w) {
    return __uint_as_float(w << 16);
}
static __device__ __forceinline__ float bf16_high(u32 w) {
    return __uint_as_float(w & 0xffff0000u);
}
static __device__ __forceinline__ u32 bf16_pack(float low, float high) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
}
static __device__ __forceinline__ void bf16_unpack8(uint4 w, float *v) {
    v[0] = bf16_low(w.x), v[1] = bf16_high(w.x), v[2] = bf16_low(w.y), v[3] = bf16_high(w.y);
    v[4] = bf16_low(w.z), v[5] = bf16_high(w.z), v[6] = bf16_low(w.w), v[7] = bf16_high(w.w);
}
static __device__ __forceinline__ uint4 bf16_pack8(const float *v) {
    return make_uint4(
        bf16_pack(v[0], v[1]), bf16_pack(v[2], v[3]), bf16_pack(v[4], v[5]), bf16_pack(v[6], v[7]));
}

// Memory. `stream` loads are read once and must not push weights out of the first-level cache.
static __device__ __forceinline__ uint4 load16(const void *p) {
    uint4 w;
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p)
                 : "memory");
    return w;
}
static __device__ __forceinline__ uint4 load16_stream(const void *p) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p)
                 : "memory");
    return w;
}
static __device__ __forceinline__ i64 load_i64(const i64 *p) {
    i64 v;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ uint2 load8(const void *p) {
    uint2 w;
    asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(p) : "memory");
    return w;
}
// For memory nothing writes while the kernel may run: weights and tables bound at plan creation.
static __device__ __forceinline__ uint4 load16_const(const void *p) {
    return __ldg((const uint4 *)p);
}
// Into the second-level cache, where every write of the device meets: nothing is read, so that it
// may come before the launch wait.
static __device__ __forceinline__ void prefetch(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}
static __device__ __forceinline__ void store16(void *p, uint4 w) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w)
                 : "memory");
}
static __device__ __forceinline__ void load8_const(const float *p, float *v) {
    const float4 a = __ldg((const float4 *)p), b = __ldg((const float4 *)p + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
// For more than the second-level cache holds: these lines leave it first.
static __device__ __forceinline__ void store16_past(void *p, uint4 w) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w)
                 : "memory");
}
// Global to shared memory past the registers; copy_wait waits for the thread's own copies.
static __device__ __forceinline__ void copy16_async(void *shared, const void *global) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)),
        "l"(global)
        : "memory");
}
static __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
// Eight BF16 of any alignment an element can have.
static __device__ __forceinline__ uint4 load16_by2(const void *p) {
    const volatile u16 *h = (const volatile u16 *)p;
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = (u32)h[2 * i] | (u32)h[2 * i + 1] << 16;
    return make_uint4(w[0], w[1], w[2], w[3]);
}
static __device__ __forceinline__ void store16_by2(void *p, uint4 w) {
    u16 *h = (u16 *)p;
    const u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) h[2 * i] = (u16)v[i], h[2 * i + 1] = (u16)(v[i] >> 16);
}

// A barrier of `threads` threads (whole warps); number 0 is __syncthreads.
static __device__ __forceinline__ void barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// Counts in there without waiting.
static __device__ __forceinline__ void barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// Exchange within a warp; every lane takes part.
static __device__ __forceinline__ float lane_xor(float v, int mask) {
    return __shfl_xor_sync(0xffffffffu, v, mask);
}
static __device__ __forceinline__ u32 lane_xor(u32 v, int mask) {
    return __shfl_xor_sync(0xffffffffu, v, mask);
}

// Programmatic dependent launch: wait until everything earlier in the stream has finished and is
// visible; let the next kernel of the stream begin its prologue. Nothing before sm_90 has them.
static __device__ __forceinline__ void launch_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The same, but not before `ready` (never 0) is computed: left alone, the assembler puts the
// address arithmetic behind the wait, where it costs time.
static __device__ __forceinline__ void launch_wait_after(u64 ready) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; setp.ne.u64 p, %0, 0; @p griddepcontrol.wait; }" ::"l"(ready)
                 : "memory");
#endif
}
static __device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
