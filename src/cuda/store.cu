// SPDX-License-Identifier: Apache-2.0
// K norm, RoPE and cache insert of all layers in one launch (SPEC 3.4 and 5).
//
// A head belongs to LANES = min(head_dim/8, 32) lanes of a warp, each with 8 neighbouring elements
// (for head_dim 512 with two such vectors), so that every access is 16 bytes; grid.y is the layer.
// Slot, K and V are asked for at once; the position only when the slot says that the row is stored,
// and its table row while the K norm is under way.
#include "faults.cuh"
#include "head_sums.cuh"
#include "params.h"
#include "prim.cuh"

// What a kernel knows when it is compiled: the K norm, the rotation, and that every operand is
// 16-byte aligned in every row (VEC). RUNTIME: read from the parameters.
#define RUNTIME 99u
template <int HD, unsigned NORM_, unsigned ROPE_, bool VEC_> struct shape {
    static constexpr int HEAD = HD, LANES = HD / 8 < 32 ? HD / 8 : 32, VECS = HD / 8 / LANES;
    static __device__ __forceinline__ unsigned norm(const ctxkv_store_common &c) {
        return NORM_ == RUNTIME ? c.norm : NORM_;
    }
    static __device__ __forceinline__ unsigned rope(const ctxkv_store_common &c) {
        return ROPE_ == RUNTIME ? c.rope : ROPE_;
    }
    static __device__ __forceinline__ uint4 load(const void *p, bool by2) {
        return !VEC_ && by2 ? load16_by2(p) : load16_stream(p);
    }
    static __device__ __forceinline__ void store(void *p, uint4 w, bool by2, bool past) {
        if (!VEC_ && by2)
            store16_by2(p, w);
        else if (past)
            store16_past(p, w);
        else
            store16(p, w);
    }
    static __device__ __forceinline__ uint2 load_half(const u16 *p, bool by2) {
        if (VEC_ || !by2) return load8(p);
        const volatile u16 *h = p;
        return make_uint2(h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16);
    }
};

// a*stride + more, for a stride below 2^32.
static __device__ __forceinline__ u64 wide(u32 a, i64 stride, u64 more) {
    return (u64)a * (u32)stride + more;
}

template <class S>
static __device__ __forceinline__ void k_norm(
    const ctxkv_store_common &c, const float *weight, int lane, float (*k)[8]) {
    if (S::norm(c) == CTXKV_STORE_NORM_ABSENT) return;
    if (S::HEAD == 64 && S::norm(c) == CTXKV_STORE_NORM_PLAIN) {
        const float r =
            rsqrt_any(fma_rn(head_sum_folded64(k[0], (int)threadIdx.x), 1.0f / 64, c.eps));
#pragma unroll
        for (int e = 0; e < 8; e++) k[0][e] = mul_rn(k[0][e], r);
    } else {
        const float r =
            rsqrt_any(add_rn(__fdiv_rn(head_sum_rms<S::HEAD>(k), (float)S::HEAD), c.eps));
#pragma unroll
        for (int v = 0; v < S::VECS; v++) {
            float g[8];
            load8_const(weight + (v * 32 + lane) * 8, g);
#pragma unroll
            for (int e = 0; e < 8; e++) k[v][e] = mul_rn(mul_rn(k[v][e], r), g[e]);
        }
    }
#pragma unroll
    for (int v = 0; v < S::VECS; v++) bf16_unpack8(bf16_pack8(k[v]), k[v]);
}

static __device__ __forceinline__ void rotate(float &x, float &y, float c, float s) {
    const float a = fma_rn(x, c, -mul_rn(y, s)), b = fma_rn(y, c, mul_rn(x, s));
    x = a, y = b;
}

// GPT-J: the pairs are neighbours in a lane. t[v] holds 4 cosines, then 4 sines.
template <class S> static __device__ __forceinline__ void rope_gptj(const uint4 *t, float (*k)[8]) {
#pragma unroll
    for (int v = 0; v < S::VECS; v++) {
        float cs[8];
        bf16_unpack8(t[v], cs);
#pragma unroll
        for (int j = 0; j < 4; j++) rotate(k[v][2 * j], k[v][2 * j + 1], cs[j], cs[4 + j]);
    }
}

// NeoX: element j of the first half pairs with j + HEAD/2, which is in another lane or vector.
// t[0] holds 8 cosines, t[1] 8 sines.
template <class S>
static __device__ __forceinline__ void rope_neox(const uint4 *t, int lane, float (*k)[8]) {
    float c[8], s[8];
    bf16_unpack8(t[0], c), bf16_unpack8(t[1], s);
    if (S::VECS == 2) {
#pragma unroll
        for (int e = 0; e < 8; e++) rotate(k[0][e], k[S::VECS - 1][e], c[e], s[e]);
        return;
    }
    const bool upper = lane & (S::HEAD / 16);
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float other = lane_xor(k[0][e], S::HEAD / 16);
        float x = upper ? other : k[0][e], y = upper ? k[0][e] : other;
        rotate(x, y, c[e], s[e]);
        k[0][e] = upper ? y : x;
    }
}

// The lane's part of a cos/sin row, as the rotation takes it.
template <class S>
static __device__ __forceinline__ void load_angles(
    const ctxkv_store_common &c, i64 position, int lane, uint4 *t) {
    const u16 *row = (const u16 *)c.cos_sin + position * S::HEAD;
    const bool by2 = c.flags & CTXKV_STORE_TABLE_BY2;
    if (S::rope(c) == CTXKV_STORE_ROPE_GPTJ) {
#pragma unroll
        for (int v = 0; v < S::VECS; v++) {
            const u16 *a = row + (v * 32 + lane) * 4;
            const uint2 cosines = S::load_half(a, by2), sines = S::load_half(a + S::HEAD / 2, by2);
            t[v] = make_uint4(cosines.x, cosines.y, sines.x, sines.y);
        }
    } else {
        const u16 *a = row + (S::VECS == 2 ? lane : lane & (S::HEAD / 16 - 1)) * 8;
        t[0] = S::load(a, by2);
        t[1] = S::load(a + S::HEAD / 2, by2);
    }
}

// What a group of lanes holds of one head of one row.
template <class S> struct unit {
    const u16 *k_src, *v_src;
    u16 *k, *v;
    i64 row, slot, position;
    bool first_head;
    unsigned fault;
    uint4 k_words[S::VECS], v_words[S::VECS], angles[2];
};

// Where a unit's operands lie: everything that needs no memory, done before the launch wait.
template <class S>
static __device__ __forceinline__ void place_unit(
    const ctxkv_store_common &c, const ctxkv_store_fast_layer &l, int lane, u32 i, unit<S> &u) {
    const u32 row = i / (u32)c.heads, head = i - row * (u32)c.heads;
    u.row = row;
    u.first_head = head == 0;
    u.k_src = (const u16 *)l.k_src + wide(row, c.k_row, wide(head, c.k_head, lane)) * 8;
    u.v_src = (const u16 *)l.v_src + wide(row, c.v_row, wide(head, c.v_head, lane)) * 8;
    u.k = (u16 *)l.k + wide(head, l.k_head, lane) * 8;
    u.v = (u16 *)l.v + wide(head, l.v_head, lane) * 8;
}
template <class S>
static __device__ __forceinline__ void place_unit(
    const ctxkv_store_common &c, const ctxkv_store_layer &l, int lane, u64 i, unit<S> &u) {
    const i64 head = i % (u64)c.heads;
    u.row = i / (u64)c.heads;
    u.first_head = head == 0;
    u.k_src = (const u16 *)l.k_src + u.row * c.k_row + head * c.k_head + lane * 8;
    u.v_src = (const u16 *)l.v_src + u.row * c.v_row + head * c.v_head + lane * 8;
    u.k = (u16 *)l.k + head * l.k_head + lane * 8;
    u.v = (u16 *)l.v + head * l.v_head + lane * 8;
}

// The row's place in the cache, once its slot is known to be in bounds.
template <class S>
static __device__ __forceinline__ void find_place(const ctxkv_store_fast_layer &l, unit<S> &u) {
    const u32 slot = (u32)u.slot;
    const u32 block = l.block_shift >= 0 ? slot >> l.block_shift : slot / l.block_size;
    const u32 page = slot - block * l.block_size;
    u.k += wide(block, l.k_block, wide(page, l.k_page, 0)) * 8;
    u.v += wide(block, l.v_block, wide(page, l.v_page, 0)) * 8;
}
template <class S>
static __device__ __forceinline__ void find_place(const ctxkv_store_layer &l, unit<S> &u) {
    const i64 block = u.slot / l.block_size, page = u.slot - block * l.block_size;
    u.k += block * l.k_block + page * l.k_page;
    u.v += block * l.v_block + page * l.v_page;
}

template <class S, class LAYER>
static __device__ __forceinline__ void read_unit(
    const ctxkv_store_common &c, const LAYER &l, bool mine, unit<S> &u) {
    const bool by2 = c.flags & CTXKV_STORE_SRC_BY2;
    u.slot = -1, u.position = 0;
    u.angles[0] = u.angles[1] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int v = 0; v < S::VECS; v++) u.k_words[v] = u.v_words[v] = make_uint4(0, 0, 0, 0);
    if (!mine) return;
    u.slot = load_i64(l.slots + u.row);
#pragma unroll
    for (int v = 0; v < S::VECS; v++) {
        u.k_words[v] = S::load(u.k_src + v * 256, by2);
        u.v_words[v] = S::load(u.v_src + v * 256, by2);
    }
}

// Checks the slot and the position, asks for the table row.
template <class S, class LAYER>
static __device__ __forceinline__ void check_unit(
    const ctxkv_store_common &c, const LAYER &l, int lane, unit<S> &u) {
    const bool rope = S::rope(c) != CTXKV_STORE_ROPE_NONE;
    u.fault = CTXKV_FAULT_KIND_NONE;
    if (u.slot < 0) return;
    if (rope && u.slot < l.slot_count) u.position = load_i64(c.positions + u.row);
    u.fault = fault_kind(u.slot, l.slot_count, u.position, rope ? c.max_position : -1);
    if (u.fault != CTXKV_FAULT_KIND_NONE) return;
    if (rope) load_angles<S>(c, u.position, lane, u.angles);
    find_place<S>(l, u);
}

template <class S>
static __device__ __forceinline__ void finish_unit(
    const ctxkv_store_common &c, const float *weight, bool by2, int layer, int lane, unit<S> &u) {
    float k[S::VECS][8];
#pragma unroll
    for (int v = 0; v < S::VECS; v++) bf16_unpack8(u.k_words[v], k[v]);
    k_norm<S>(c, weight, lane, k);
    if (S::rope(c) == CTXKV_STORE_ROPE_GPTJ) rope_gptj<S>(u.angles, k);
    if (S::rope(c) == CTXKV_STORE_ROPE_NEOX) rope_neox<S>(u.angles, lane, k);
    if (u.slot < 0) return;
    if (u.fault == CTXKV_FAULT_KIND_NONE) {
        const bool past = c.flags & CTXKV_STORE_PAST;
#pragma unroll
        for (int v = 0; v < S::VECS; v++) {
            S::store(u.k + v * 256, bf16_pack8(k[v]), by2, past);
            S::store(u.v + v * 256, u.v_words[v], by2, past);
        }
    } else if (u.first_head && lane == 0) {
        fault_report(
            c.faults, c.first_layer + layer, u.row, u.fault,
            u.fault == CTXKV_FAULT_KIND_SLOT ? u.slot : u.position);
    }
}

// Units are (row, head) in row-major order, one to a group of lanes. Every lane of a warp goes all
// the way: the exchanges are warp-wide.
template <class S, class INDEX, class LAYER>
static __device__ __forceinline__ void store_units(
    const ctxkv_store_common &c, const LAYER &l, bool by2) {
    const int lane = threadIdx.x & (S::LANES - 1), groups = blockDim.x / S::LANES;
    const INDEX units = (INDEX)l.rows * (INDEX)c.heads;
    const INDEX i = (INDEX)blockIdx.x * groups + threadIdx.x / S::LANES;
    unit<S> u;
    place_unit<S>(c, l, lane, i, u);
    launch_wait_after((u64)u.k_src | (u64)u.v_src | (u64)(l.slots + u.row) | (u64)u.k | (u64)u.v);
    // Not before: blocks of launches to come would crowd those that run on a few multiprocessors.
    launch_next();
    read_unit<S>(c, l, i < units, u);
    check_unit<S>(c, l, lane, u);
    finish_unit<S>(c, l.k_weight, by2, blockIdx.y, lane, u);
}

#define STORE_FAST(name, hd, norm, rope)                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        ctxkv_store_##name(const __grid_constant__ ctxkv_store_fast p) {                           \
        typedef shape<hd, norm, rope, true> S;                                                     \
        store_units<S, u32>(p.c, p.layer[blockIdx.y], false);                                      \
    }
#define STORE_ANY(hd)                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        ctxkv_store_any_##hd(const __grid_constant__ ctxkv_store_any p) {                          \
        typedef shape<hd, RUNTIME, RUNTIME, false> S;                                              \
        store_units<S, u64>(p.c, p.layer[blockIdx.y], p.layer[blockIdx.y].by2);                    \
    }
STORE_FAST(plain, 64, CTXKV_STORE_NORM_PLAIN, CTXKV_STORE_ROPE_NONE)
STORE_FAST(gptj, 64, CTXKV_STORE_NORM_PLAIN, CTXKV_STORE_ROPE_GPTJ)
STORE_FAST(neox_64, 64, CTXKV_STORE_NORM_RMS, CTXKV_STORE_ROPE_NEOX)
STORE_FAST(neox_128, 128, CTXKV_STORE_NORM_RMS, CTXKV_STORE_ROPE_NEOX)
STORE_FAST(neox_256, 256, CTXKV_STORE_NORM_RMS, CTXKV_STORE_ROPE_NEOX)
STORE_FAST(neox_512, 512, CTXKV_STORE_NORM_RMS, CTXKV_STORE_ROPE_NEOX)
STORE_ANY(64)
STORE_ANY(128)
STORE_ANY(256)
STORE_ANY(512)
