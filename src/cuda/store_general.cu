// SPDX-License-Identifier: Apache-2.0
// The store for what store.cu's kernels do not know (SPEC 5): tables of any float type, of any
// rotary_dim, one per layer; FP16 and FP8 caches; V scaled, normed or made of K.
//
// Lanes and heads as in store.cu. Rotation partners go through shared memory, for with a partial
// rotary_dim they may be in any lane.
#include "faults.cuh"
#include "head_sums.cuh"
#include "narrow.cuh"
#include "params.h"
#include "prim.cuh"
#include "store_general.h"

#define THREADS 128

template <int HD> struct shape {
    static constexpr int LANES = HD / 8 < 32 ? HD / 8 : 32, VECS = HD / 8 / LANES;
};

// What a group of lanes holds of one head of one row.
template <int HD> struct unit {
    const u16 *k_src, *v_src;
    i64 row, slot, position;
    i64 k_at, v_at; // elements from the start of the caches
    int head;
    unsigned fault;
    uint4 k[shape<HD>::VECS], v[shape<HD>::VECS];
    float cosine[shape<HD>::VECS][8], sine[shape<HD>::VECS][8];
};

// a / b for a >= 0, b > 0, in 32 bits where they suffice.
static __device__ __forceinline__ i64 quotient(i64 a, i64 b) {
    return (a | b) >> 32 ? a / b : (i64)((u32)a / (u32)b);
}

static __device__ __forceinline__ float table_value(const void *table, unsigned type, i64 i) {
    if (type == CTXKV_GENERAL_TABLE_FP32) return __ldg((const float *)table + i);
    const u16 h = __ldg((const u16 *)table + i);
    return type == CTXKV_GENERAL_TABLE_FP16 ? fp16_value(h) : bf16_low(h);
}

// COUNT (4 or 8) neighbouring values, on a multiple of their size.
template <int COUNT>
static __device__ __forceinline__ void table_values(
    const void *table, unsigned type, i64 i, float *out) {
    if (type == CTXKV_GENERAL_TABLE_FP32) {
#pragma unroll
        for (int n = 0; n < COUNT; n += 4) {
            const float4 w = __ldg((const float4 *)((const float *)table + i + n));
            out[n] = w.x, out[n + 1] = w.y, out[n + 2] = w.z, out[n + 3] = w.w;
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < COUNT; n += 4) {
        const uint2 w = __ldg((const uint2 *)((const u16 *)table + i + n));
        const u32 words[2] = {w.x, w.y};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u16 h = (u16)(words[e / 2] >> (e % 2 * 16));
            out[n + e] = type == CTXKV_GENERAL_TABLE_FP16 ? fp16_value(h) : bf16_low(h);
        }
    }
}

// The cosines and sines of elements [first, first + 8) of a head: element i's pair has its angle at
// i/2 (GPT-J) or i modulo rotary_dim/2 (NeoX).
static __device__ __forceinline__ void load_angles(
    const ctxkv_store_general &p, const ctxkv_general_layer &l, i64 position, int first,
    float *cosine, float *sine) {
    const int half = l.rotary_dim / 2;
    const bool gptj = p.rope == CTXKV_STORE_ROPE_GPTJ;
    const i64 row = position * l.rotary_dim;
    if (first >= l.rotary_dim) return;
    if (l.flags & CTXKV_GENERAL_TABLE_WIDE) {
        if (gptj) {
            table_values<4>(l.table, p.table_type, row + first / 2, cosine);
            table_values<4>(l.table, p.table_type, row + half + first / 2, sine);
        } else {
            const int j = first < half ? first : first - half;
            table_values<8>(l.table, p.table_type, row + j, cosine);
            table_values<8>(l.table, p.table_type, row + half + j, sine);
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
        if (gptj && e >= 4) break;
        const int i = gptj ? first + 2 * e : first + e;
        if (i >= l.rotary_dim) break;
        const int j = gptj ? i / 2 : i < half ? i : i - half;
        cosine[e] = table_value(l.table, p.table_type, row + j);
        sine[e] = table_value(l.table, p.table_type, row + half + j);
    }
}

template <int HD>
static __device__ __forceinline__ void read_unit(
    const ctxkv_store_general &p, const ctxkv_general_layer &l, int lane, bool mine, unit<HD> &u) {
    typedef shape<HD> S;
    u.slot = -1, u.fault = CTXKV_FAULT_KIND_NONE;
#pragma unroll
    for (int v = 0; v < S::VECS; v++) {
        u.k[v] = u.v[v] = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int e = 0; e < 8; e++) u.cosine[v][e] = u.sine[v][e] = 0.0f;
    }
    if (!mine) return;
    const bool by2 = p.flags & CTXKV_GENERAL_SRC_BY2, from_k = p.flags & CTXKV_GENERAL_V_FROM_K;
    u.slot = load_i64(l.slots + u.row);
#pragma unroll
    for (int v = 0; v < S::VECS; v++) {
        u.k[v] = by2 ? load16_by2(u.k_src + v * 256) : load16_stream(u.k_src + v * 256);
        if (from_k)
            u.v[v] = u.k[v];
        else
            u.v[v] = by2 ? load16_by2(u.v_src + v * 256) : load16_stream(u.v_src + v * 256);
    }
    if (u.slot < 0) return;
    const bool rope = p.rope != CTXKV_STORE_ROPE_NONE;
    u.position = 0;
    if (rope && u.slot < l.slot_count) u.position = load_i64(p.positions + u.row);
    u.fault = fault_kind(u.slot, l.slot_count, u.position, rope ? l.max_position : -1);
    if (u.fault != CTXKV_FAULT_KIND_NONE) return;
    if (rope)
#pragma unroll
        for (int v = 0; v < S::VECS; v++)
            load_angles(p, l, u.position, (v * 32 + lane) * 8, u.cosine[v], u.sine[v]);
    const i64 block = quotient(u.slot, l.block_size), page = u.slot - block * l.block_size;
    u.k_at = block * l.k_block + page * l.k_page + u.head * l.k_head + lane * 8;
    u.v_at = block * l.v_block + page * l.v_page + u.head * l.v_head + lane * 8;
}

template <int HD> static __device__ __forceinline__ void round_all(float (*k)[8]) {
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++) bf16_unpack8(bf16_pack8(k[v]), k[v]);
}

template <int HD> static __device__ __forceinline__ void scale_all(float (*k)[8], float r) {
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++)
#pragma unroll
        for (int e = 0; e < 8; e++) k[v][e] = mul_rn(k[v][e], r);
}

template <int HD>
static __device__ __forceinline__ float rms_scale(const float (*k)[8], float eps) {
    return rsqrt_any(add_rn(__fdiv_rn(head_sum_rms<HD>(k), (float)HD), eps));
}

template <int HD>
static __device__ __forceinline__ void k_norm(
    const ctxkv_store_general &p, const float *weight, int lane, float (*k)[8]) {
    if (p.norm == CTXKV_STORE_NORM_ABSENT) return;
    if (HD == 64 && p.norm == CTXKV_STORE_NORM_PLAIN) {
        scale_all<HD>(k, rsqrt_any(fma_rn(head_sum_folded64(k[0], lane), 1.0f / 64, p.k_eps)));
    } else {
        scale_all<HD>(k, rms_scale<HD>(k, p.k_eps));
#pragma unroll
        for (int v = 0; v < shape<HD>::VECS; v++) {
            float g[8];
            load8_const(weight + (v * 32 + lane) * 8, g);
#pragma unroll
            for (int e = 0; e < 8; e++) k[v][e] = mul_rn(k[v][e], g[e]);
        }
    }
    round_all<HD>(k);
}

static __device__ __forceinline__ float turned(float a, float b, float c, float s, bool first) {
    return first ? fma_rn(a, c, -mul_rn(b, s)) : fma_rn(a, c, mul_rn(b, s));
}

// head: the group's HD floats of shared memory.
template <int HD>
static __device__ __forceinline__ void rope_neox(
    int rotary_dim, const unit<HD> &u, int lane, float *head, float (*k)[8]) {
    const int half = rotary_dim / 2;
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++) {
        float4 *to = (float4 *)(head + (v * 32 + lane) * 8);
        to[0] = make_float4(k[v][0], k[v][1], k[v][2], k[v][3]);
        to[1] = make_float4(k[v][4], k[v][5], k[v][6], k[v][7]);
    }
    __syncwarp();
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++) {
        const int first = (v * 32 + lane) * 8;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int i = first + e;
            if (i >= rotary_dim) break;
            const bool lower = i < half;
            const float other = head[lower ? i + half : i - half];
            k[v][e] = turned(k[v][e], other, u.cosine[v][e], u.sine[v][e], lower);
        }
    }
    __syncwarp();
}

template <int HD>
static __device__ __forceinline__ void rope_gptj(
    int rotary_dim, const unit<HD> &u, int lane, float (*k)[8]) {
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if ((v * 32 + lane) * 8 + 2 * j >= rotary_dim) break;
            const float x = k[v][2 * j], y = k[v][2 * j + 1];
            k[v][2 * j] = turned(x, y, u.cosine[v][j], u.sine[v][j], true);
            k[v][2 * j + 1] = turned(y, x, u.cosine[v][j], u.sine[v][j], false);
        }
}

// Eight values that are BF16 already, as the cache holds them, to element `at`.
static __device__ __forceinline__ void put8(
    void *cache, i64 at, uint4 words, unsigned type, bool wide, float scale) {
    if (type == CTXKV_GENERAL_CACHE_BF16 || type == CTXKV_GENERAL_CACHE_FP16) {
        u16 *to = (u16 *)cache + at;
        if (type == CTXKV_GENERAL_CACHE_FP16) {
            float v[8];
            bf16_unpack8(words, v);
            words = make_uint4(
                fp16_pack(v[0], v[1]), fp16_pack(v[2], v[3]), fp16_pack(v[4], v[5]),
                fp16_pack(v[6], v[7]));
        }
        if (wide)
            store16(to, words);
        else
            store16_by2(to, words);
        return;
    }
    float v[8];
    bf16_unpack8(words, v);
    const uint2 w =
        type == CTXKV_GENERAL_CACHE_E5M2 ? fp8_pack8<true>(v, scale) : fp8_pack8<false>(v, scale);
    unsigned char *to = (unsigned char *)cache + at;
    if (wide) {
        asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(to), "r"(w.x), "r"(w.y) : "memory");
        return;
    }
    const u32 halves[2] = {w.x, w.y};
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = (unsigned char)(halves[i / 4] >> (i % 4 * 8));
}

// V as it came (a NaN's payload, too) unless something is computed.
template <int HD>
static __device__ __forceinline__ void make_value(const ctxkv_store_general &p, unit<HD> &u) {
    if (!(p.flags & (CTXKV_GENERAL_V_NORM | CTXKV_GENERAL_V_SCALE))) return;
    float x[shape<HD>::VECS][8];
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++) bf16_unpack8(u.v[v], x[v]);
    if (p.flags & CTXKV_GENERAL_V_NORM) {
        scale_all<HD>(x, rms_scale<HD>(x, p.v_eps));
        round_all<HD>(x);
    }
    if (p.flags & CTXKV_GENERAL_V_SCALE) scale_all<HD>(x, p.v_scale);
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++) u.v[v] = bf16_pack8(x[v]);
}

template <int HD>
static __device__ __forceinline__ void finish_unit(
    const ctxkv_store_general &p, const ctxkv_general_layer &l, int lane, float *head,
    unit<HD> &u) {
    float k[shape<HD>::VECS][8];
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++) bf16_unpack8(u.k[v], k[v]);
    k_norm<HD>(p, l.k_weight, lane, k);
    if (p.rope == CTXKV_STORE_ROPE_GPTJ) rope_gptj<HD>(l.rotary_dim, u, lane, k);
    if (p.rope == CTXKV_STORE_ROPE_NEOX) rope_neox<HD>(l.rotary_dim, u, lane, head, k);
    make_value<HD>(p, u);
    if (u.slot < 0) return;
    if (u.fault != CTXKV_FAULT_KIND_NONE) {
        if (u.head == 0 && lane == 0)
            fault_report(
                p.faults, p.first_layer + blockIdx.y, u.row, u.fault,
                u.fault == CTXKV_FAULT_KIND_SLOT ? u.slot : u.position);
        return;
    }
    const bool wide = l.flags & CTXKV_GENERAL_CACHE_WIDE;
    const float k_scale = l.k_scale ? *(const volatile float *)l.k_scale : 1.0f;
    const float v_scale = l.v_scale ? *(const volatile float *)l.v_scale : 1.0f;
#pragma unroll
    for (int v = 0; v < shape<HD>::VECS; v++) {
        put8(l.k, u.k_at + v * 256, bf16_pack8(k[v]), p.cache_type, wide, k_scale);
        put8(l.v, u.v_at + v * 256, u.v[v], p.cache_type, wide, v_scale);
    }
}

// Units are (row, head) in row-major order, one to a group of lanes. Every lane of a warp goes all
// the way: the exchanges are warp-wide.
template <int HD> static __device__ __forceinline__ void store_units(const ctxkv_store_general &p) {
    constexpr int LANES = shape<HD>::LANES, GROUPS = THREADS / LANES;
    __shared__ float heads[GROUPS][HD];
    const ctxkv_general_layer &l = p.layer[blockIdx.y];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const i64 i = (i64)blockIdx.x * GROUPS + group;
    unit<HD> u;
    u.row = quotient(i, p.heads);
    u.head = (int)(i - u.row * p.heads);
    u.k_src = (const u16 *)l.k_src + u.row * p.k_row + u.head * p.k_head + lane * 8;
    u.v_src = (const u16 *)l.v_src + u.row * p.v_row + u.head * p.v_head + lane * 8;
    launch_next();
    launch_wait();
    read_unit<HD>(p, l, lane, u.row < l.rows, u);
    finish_unit<HD>(p, l, lane, heads[group], u);
}

#define STORE_GENERAL(hd)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        ctxkv_store_general_##hd(const __grid_constant__ ctxkv_store_general p) {                  \
        store_units<hd>(p);                                                                        \
    }
STORE_GENERAL(64)
STORE_GENERAL(128)
STORE_GENERAL(256)
STORE_GENERAL(512)
