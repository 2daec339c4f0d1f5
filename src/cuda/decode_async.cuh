// SPDX-License-Identifier: Apache-2.0
// Transaction barriers, bulk copies and clusters of sm_90a, behind names.
#ifndef CTXKV_CUDA_DECODE_ASYNC_CUH
#define CTXKV_CUDA_DECODE_ASYNC_CUH

#include "prim.cuh"

static __device__ __forceinline__ u32 smem_address(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void bar_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void bar_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// A look, and a wait of the hardware's own length, which is some microseconds.
static __device__ __forceinline__ bool bar_test(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}
static __device__ __forceinline__ bool bar_try(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}
// With CTXKV_WATCHDOG a wait that does not end becomes an error instead of a hang.
static __device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
#ifdef CTXKV_WATCHDOG
    for (u32 spins = 0; !bar_try(bar, parity); spins++)
        if (spins > 1u << 20) __trap();
#else
    while (!bar_try(bar, parity)) {
    }
#endif
}
static __device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
// The barrier of the same address in CTA `rank` of the cluster, and an arrival there.
static __device__ __forceinline__ u32 bar_in(u32 bar, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(bar), "r"(rank));
    return remote;
}
static __device__ __forceinline__ void bar_arrive_if(u32 remote, bool condition) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(remote),
                 "r"((u32)condition)
                 : "memory");
}

static __device__ __forceinline__ void bar_arrive_here_if(u32 bar, bool condition) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(bar),
                 "r"((u32)condition)
                 : "memory");
}
// With the cluster's memory order: what was written before is seen behind a wait for it.
static __device__ __forceinline__ void bar_arrive_cluster(u32 remote) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
                 : "memory");
}
static __device__ __forceinline__ void bar_wait_cluster(u32 bar, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
}

// One contiguous copy into shared memory, completing on the barrier; with more than one CTA in
// `mask` it lands at the same address, and completes on the same barrier, in each of them.
static __device__ __forceinline__ void copy_bulk(u32 dst, const void *src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
static __device__ __forceinline__ void copy_bulk_to(
    u32 dst, const void *src, u32 bytes, u32 bar, u32 mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar), "h"((u16)mask)
                 : "memory");
}

// A store into the shared memory of a CTA of the cluster, counted by a barrier there.
static __device__ __forceinline__ void store8_to(u32 address, uint2 w, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32"
                 " [%0], {%1, %2}, [%3];" ::"r"(address),
                 "r"(w.x), "r"(w.y), "r"(bar)
                 : "memory");
}

// After bar_init_done: every CTA of the cluster has its barriers.
static __device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

#endif
