// SPDX-License-Identifier: Apache-2.0
// The exact projection for any shape (SPEC 3.3): one chain of mma.m16n8k16 steps per output.
//
// A block computes ROWS = 16*WARPS_M rows by 64 columns of one weight block; its 4 warps stand
// WARPS_M high, and share the columns when there are fewer rows. K goes by in slices of 32 through
// a ring of STAGES slices in shared memory; each output is one accumulator from k = 0 to the end,
// so its bits do not depend on the tile or on the number of rows.
#include "params.h"
#include "prim.cuh"

#define COLUMNS 64
#define SLICE 32
#define STAGES 4
#define PITCH 40 // elements of a slice row: 80 bytes, so that eight rows touch all banks once
#define THREADS 128

static __device__ __forceinline__ void matrices4(const u16 *shared, u32 *r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(shared)));
}
static __device__ __forceinline__ void mma16(float *d, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Sixteen bytes, or zeros when there is nothing to read.
static __device__ __forceinline__ void copy16_or_zero(
    void *shared, const void *global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (u32)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(there ? 16 : 0)
                 : "memory");
}

// One slice of `count` rows of a K-major matrix into shared memory.
static __device__ __forceinline__ void load_slice(
    u16 *shared, const u16 *from, i64 stride, i64 rows_left, int count, int k_left, bool by2) {
    for (int i = threadIdx.x; i < count * (SLICE / 8); i += THREADS) {
        const int row = i / (SLICE / 8), k = i % (SLICE / 8) * 8;
        const bool there = row < rows_left && k < k_left;
        const u16 *p = from + (there ? row * stride + k : 0);
        u16 *to = shared + row * PITCH + k;
        if (!by2)
            copy16_or_zero(to, p, there);
        else
            *(uint4 *)to = there ? load16_by2(p) : make_uint4(0, 0, 0, 0);
    }
}

template <int WARPS_M>
static __device__ __forceinline__ void project(const ctxkv_projection_params &p) {
    constexpr int ROWS = 16 * WARPS_M, WARPS_N = 4 / WARPS_M, TILES = COLUMNS / WARPS_N / 8;
    __shared__ __align__(16) u16 xs[STAGES][ROWS * PITCH], ws[STAGES][COLUMNS * PITCH];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    const int tiles = p.parts * p.block_columns / COLUMNS, column = blockIdx.x % tiles * COLUMNS;
    const int layer = blockIdx.y, half = column >= p.block_columns;
    const i64 first = (i64)(blockIdx.x / tiles) * ROWS;
    const ctxkv_projection_block block = p.blocks[p.parts * layer + half];
    const u16 *w = (const u16 *)block.data + (column - half * p.block_columns) * block.row;
    const u16 *x = (const u16 *)p.x + layer * p.x_layer + first * p.x_row;
    const bool by2 = p.flags & CTXKV_PROJECTION_BY2;
    const int slices = (p.k + SLICE - 1) / SLICE;
    launch_next();
    launch_wait();
    auto load = [&](int s) {
        if (s < slices) {
            const int k = s * SLICE;
            load_slice(xs[s % STAGES], x + k, p.x_row, p.rows - first, ROWS, p.k - k, by2);
            load_slice(ws[s % STAGES], w + k, block.row, COLUMNS, COLUMNS, p.k - k, by2);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float acc[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(s);
    for (int s = 0; s < slices; s++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load(s + STAGES - 1);
#pragma unroll
        for (int k = 0; k < SLICE; k += 16) {
            // A last half slice that is not there takes no step: its chain has ended.
            if (s * SLICE + k >= p.k) break;
            u32 a[4];
            matrices4(xs[s % STAGES] + (warp_m * 16 + lane % 16) * PITCH + k + lane / 16 * 8, a);
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                u32 b[4];
                const int row = (warp_n * TILES + n) * 8 + lane % 8 + lane / 16 * 8;
                matrices4(ws[s % STAGES] + row * PITCH + k + lane / 8 % 2 * 8, b);
                mma16(acc[n], a, b[0], b[1]);
                mma16(acc[n + 1], a, b[2], b[3]);
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const i64 row = first + warp_m * 16 + lane / 4 + i * 8;
            const int c = column + (warp_n * TILES + n) * 8 + lane % 4 * 2;
            float low = acc[n][2 * i], high = acc[n][2 * i + 1];
            if (row >= p.rows) continue;
            if (p.bias) {
                const float *b = p.bias + (i64)layer * p.parts * p.block_columns + c;
                if (p.flags & CTXKV_PROJECTION_ROUND_FIRST) {
                    const u32 rounded = bf16_pack(low, high);
                    low = bf16_low(rounded), high = bf16_high(rounded);
                }
                low = add_rn(low, b[0]), high = add_rn(high, b[1]);
            }
            u16 *to = (u16 *)p.kv + layer * p.kv_layer + row * p.kv_row + c;
            const u32 pair = bf16_pack(low, high);
            if (p.flags & CTXKV_PROJECTION_KV_BY2)
                to[0] = (u16)pair, to[1] = (u16)(pair >> 16);
            else
                *(u32 *)to = pair;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ctxkv_projection_16(const __grid_constant__ ctxkv_projection_params p) {
    project<1>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    ctxkv_projection_64(const __grid_constant__ ctxkv_projection_params p) {
    project<4>(p);
}
