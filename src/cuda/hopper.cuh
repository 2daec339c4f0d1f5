// SPDX-License-Identifier: Apache-2.0
// sm_90a's asynchronous machinery behind names: transaction barriers, tensor copies, clusters.
#ifndef CTXKV_CUDA_HOPPER_CUH
#define CTXKV_CUDA_HOPPER_CUH

#include "prim.cuh"

static __device__ __forceinline__ u32 smem_addr(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Transaction barriers. Addresses are those of shared memory; parity is that of the phase waited
// for. A build with CTXKV_WATCHDOG traps a wait that does not end, so that a hang becomes an error.
static __device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void barrier_init_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ bool barrier_test(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}
static __device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
#ifdef CTXKV_WATCHDOG
    for (u32 spins = 0; !barrier_test(bar, parity); spins++)
        if (spins > 1u << 22) __trap();
#else
    while (!barrier_test(bar, parity)) {
    }
#endif
}
static __device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
// Arrives at the barrier of the same address in another CTA of the cluster.
static __device__ __forceinline__ void barrier_arrive_at(u32 bar, u32 cta) {
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
                 "r"(cta)
                 : "memory");
}
static __device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Tensor copies into shared memory; they complete on the barrier. With `multicast` the box lands at
// the same address, and completes on the same barrier, in every CTA of `mask`.
template <bool multicast>
static __device__ __forceinline__ void copy_box2(
    u32 dst, const void *map, int c0, int c1, u32 bar, u16 mask) {
    if (multicast)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
                     "l"(map), "r"(c0), "r"(c1), "r"(bar), "h"(mask)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
                     "l"(map), "r"(c0), "r"(c1), "r"(bar)
                     : "memory");
}
template <bool multicast>
static __device__ __forceinline__ void copy_box3(
    u32 dst, const void *map, int c0, int c1, int c2, u32 bar, u16 mask) {
    if (multicast)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst),
                     "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(bar), "h"(mask)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
                     "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(bar)
                     : "memory");
}
static __device__ __forceinline__ void copy_bytes(u32 dst, const void *src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
static __device__ __forceinline__ void prefetch_map(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Clusters.
static __device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Moves registers from one warpgroup of the CTA to another; all warps of the warpgroup call it.
template <int COUNT> static __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Four 8x8 BF16 matrices: the A fragment of mma.m16n8k16 when lane i names row i%16, half i/16.
static __device__ __forceinline__ void load_matrix4(u32 *v, u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(addr)
                 : "memory");
}
static __device__ __forceinline__ float4 load_smem16(u32 addr) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(addr)
                 : "memory");
    return v;
}

#endif
