// SPDX-License-Identifier: Apache-2.0
// K norm, RoPE and cache insert of complete heads of a batch tile (SPEC 3.4, 4.2, 5).
//
// A head of a row belongs to LANES = min(head_dim/8, 32) lanes, each with 8 neighbouring elements
// (head_dim 512: two such vectors), so that accesses are of 16 bytes.
#ifndef CTXKV_CUDA_DECODE_HEAD_CUH
#define CTXKV_CUDA_DECODE_HEAD_CUH

#include "decode_async.cuh"
#include "decode_params.h"
#include "faults.cuh"
#include "head_sums.cuh"
#include "prim.cuh"

// Where a row goes; position < 0 means that it is not stored.
struct row_place {
    i64 k, v; // element offsets of its block and page
    i64 position;
};

// Decides row t's fate. `report` is set in one CTA per layer and batch tile, so that a fault counts
// once per row. A position is only read for a row with a good slot.
static __device__ __forceinline__ row_place place_row(
    const ctxkv_decode_params &p, const ctxkv_decode_layer &l, int layer, i64 t, bool report) {
    row_place place = {0, 0, -1};
    if (t >= p.rows || t >= l.rows) return place;
    const i64 slot = *(const volatile i64 *)(l.slots + t);
    if (slot < 0) return place;
    const bool rope = p.rope != CTXKV_DECODE_ROPE_NONE;
    i64 position = 0;
    if (rope && slot < l.slot_count) position = *(const volatile i64 *)(p.positions + t);
    const unsigned fault = fault_kind(slot, l.slot_count, position, rope ? p.max_position : -1);
    if (fault != CTXKV_FAULT_KIND_NONE) {
        if (report)
            fault_report(
                p.faults, p.first_layer + layer, t, fault,
                fault == CTXKV_FAULT_KIND_SLOT ? slot : position);
        return place;
    }
    const i64 block = slot / l.block_size, page = slot - block * l.block_size;
    place.k = block * l.k_block + page * l.k_page;
    place.v = block * l.v_block + page * l.v_page;
    place.position = position;
    return place;
}

template <int HD>
static __device__ __forceinline__ void norm_head(
    const ctxkv_decode_params &p, const float *weight, int lane, float (*k)[8]) {
    constexpr int LANES = HD / 8 < 32 ? HD / 8 : 32, VECS = HD / 8 / LANES;
    if (p.norm == CTXKV_DECODE_NORM_ABSENT) return;
    if (HD == 64 && p.norm == CTXKV_DECODE_NORM_PLAIN) {
        const float r = rsqrt_any(fma_rn(head_sum_folded64(k[0], lane), 1.0f / 64, p.eps));
#pragma unroll
        for (int e = 0; e < 8; e++) k[0][e] = mul_rn(k[0][e], r);
    } else {
        const float r = rsqrt_any(add_rn(__fdiv_rn(head_sum_rms<HD>(k), (float)HD), p.eps));
#pragma unroll
        for (int v = 0; v < VECS; v++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                k[v][e] = mul_rn(mul_rn(k[v][e], r), __ldg(weight + (v * LANES + lane) * 8 + e));
    }
#pragma unroll
    for (int v = 0; v < VECS; v++) bf16_unpack8(bf16_pack8(k[v]), k[v]);
}

static __device__ __forceinline__ void rotate(float &x, float &y, float c, float s) {
    const float a = fma_rn(x, c, -mul_rn(y, s)), b = fma_rn(y, c, mul_rn(x, s));
    x = a, y = b;
}

// A lane's cosines in t[0..], sines after them: 4 and 4 per vector for GPT-J (its pairs are
// neighbours), 8 in t[0] and 8 in t[1] for NeoX (element j pairs with j + HD/2).
template <int HD>
static __device__ __forceinline__ void load_angles(
    const ctxkv_decode_params &p, i64 position, int lane, uint4 *t) {
    constexpr int LANES = HD / 8 < 32 ? HD / 8 : 32, VECS = HD / 8 / LANES;
    const u16 *row = (const u16 *)p.cos_sin + position * HD;
    const bool by2 = p.flags & CTXKV_DECODE_TABLE_BY2;
    if (p.rope == CTXKV_DECODE_ROPE_NEOX) {
        const u16 *a = row + (VECS == 2 ? lane : lane & (HD / 16 - 1)) * 8;
        t[0] = by2 ? load16_by2(a) : load16(a);
        t[1] = by2 ? load16_by2(a + HD / 2) : load16(a + HD / 2);
        return;
    }
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        const u16 *a = row + (v * LANES + lane) * 4, *b = a + HD / 2;
        uint2 c, s;
        if (by2) {
            c = make_uint2(a[0] | (u32)a[1] << 16, a[2] | (u32)a[3] << 16);
            s = make_uint2(b[0] | (u32)b[1] << 16, b[2] | (u32)b[3] << 16);
        } else {
            c = load8(a), s = load8(b);
        }
        t[v] = make_uint4(c.x, c.y, s.x, s.y);
    }
}

template <int HD>
static __device__ __forceinline__ void rotate_head(
    const ctxkv_decode_params &p, const uint4 *t, int lane, float (*k)[8]) {
    constexpr int LANES = HD / 8 < 32 ? HD / 8 : 32, VECS = HD / 8 / LANES;
    if (p.rope == CTXKV_DECODE_ROPE_GPTJ) {
#pragma unroll
        for (int v = 0; v < VECS; v++) {
            float cs[8];
            bf16_unpack8(t[v], cs);
#pragma unroll
            for (int j = 0; j < 4; j++) rotate(k[v][2 * j], k[v][2 * j + 1], cs[j], cs[4 + j]);
        }
    } else if (p.rope == CTXKV_DECODE_ROPE_NEOX) {
        float c[8], s[8];
        bf16_unpack8(t[0], c), bf16_unpack8(t[1], s);
        const bool upper = lane & (HD / 16);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (VECS == 2) {
                rotate(k[0][e], k[VECS - 1][e], c[e], s[e]);
                continue;
            }
            const float other = lane_xor(k[0][e], HD / 16);
            float x = upper ? other : k[0][e], y = upper ? k[0][e] : other;
            rotate(x, y, c[e], s[e]);
            k[0][e] = upper ? y : x;
        }
    }
}

// A head's outputs in shared memory, of the rows that are this CTA's: row r of them is row
// first + r*step of the batch tile. Vectors change places by the row, as in packed n.
struct head_room {
    uint4 *at;
    u32 full; // the barrier that says so
    int first, step, rows;
};
static __device__ __forceinline__ int head_vector(int r, int vector, int head_dim) {
    return r * (head_dim / 8) + (vector ^ (r & 7));
}

// The threads from HEAD_THREADS on. Rows are under way at once as many as a thread has registers
// for, for the latency of their loads; the angles come before the outputs.
#define HEAD_THREADS 128
template <int HD>
static __device__ __forceinline__ void finish_head(
    const ctxkv_decode_params &p, const ctxkv_decode_layer &l, const head_room &room, int head,
    const row_place *places) {
    constexpr int LANES = HD / 8 < 32 ? HD / 8 : 32, VECS = HD / 8 / LANES;
    constexpr int GROUPS = HEAD_THREADS / LANES, TURNS = 4, AT_ONCE = 2;
    const int t = threadIdx.x - HEAD_THREADS, lane = t % LANES, group = t / LANES;
    for (int begin = 0; begin < room.rows; begin += GROUPS * TURNS) {
        if (begin + t / 32 * 32 / LANES >= room.rows) return; // the whole warp
        uint4 angles[TURNS][2];
        const row_place *place[TURNS];
#pragma unroll
        for (int n = 0; n < TURNS; n++) {
            const int r = begin + n * GROUPS + group;
            place[n] = r < room.rows ? places + room.first + r * room.step : 0;
            if (place[n] && place[n]->position < 0) place[n] = 0;
            angles[n][0] = angles[n][1] = make_uint4(0, 0, 0, 0);
            if (place[n] && p.rope != CTXKV_DECODE_ROPE_NONE)
                load_angles<HD>(p, place[n]->position, lane, angles[n]);
        }
        bar_wait_cluster(room.full, 0);
#pragma unroll
        for (int turn = 0; turn < TURNS; turn += AT_ONCE) {
            if (begin + turn * GROUPS >= room.rows) return;
#pragma unroll
            for (int n = turn; n < turn + AT_ONCE; n++) {
                const int r = begin + n * GROUPS + group;
                float k[VECS][8];
#pragma unroll
                for (int v = 0; v < VECS; v++)
                    bf16_unpack8(
                        place[n] ? room.at[head_vector(r, v * LANES + lane, HD)]
                                 : make_uint4(0, 0, 0, 0),
                        k[v]);
                norm_head<HD>(p, l.k_weight, lane, k);
                rotate_head<HD>(p, angles[n], lane, k);
                if (!place[n]) continue;
                u16 *out = (u16 *)l.k + place[n]->k + head * l.k_head + lane * 8;
#pragma unroll
                for (int v = 0; v < VECS; v++) {
                    if (p.flags & CTXKV_DECODE_CACHE_BY2)
                        store16_by2(out + v * LANES * 8, bf16_pack8(k[v]));
                    else
                        store16(out + v * LANES * 8, bf16_pack8(k[v]));
                }
            }
        }
    }
}

#endif
