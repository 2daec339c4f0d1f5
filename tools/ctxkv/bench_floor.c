// SPDX-License-Identifier: Apache-2.0
// What the machine can do at most, measured in the same run: copying, reading, multiply-adds.
#include <string.h>
#include <unistd.h>

#include "bench.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

// ---- CPU ---------------------------------------------------------------------------------------
typedef struct cpu_job {
    uint8_t *to, *from;
    size_t part;
    uint32_t tiers;
    float sums[64];
} cpu_job;

static void copy_part(void *user, int64_t index) {
    const cpu_job *job = user;
    size_t at = (size_t)index * job->part;
    memcpy(job->to + at, job->from + at, job->part);
}

static void read_part(void *user, int64_t index) {
    const cpu_job *job = user;
    const uint64_t *from = (const uint64_t *)(const void *)(job->from + (size_t)index * job->part);
    uint64_t sums[8] = {0};
    for (size_t i = 0; i < job->part / 8; i += 8) {
        for (size_t k = 0; k < 8; ++k) sums[k] ^= from[i + k];
    }
    for (int k = 1; k < 8; ++k) sums[0] ^= sums[k];
    // A place of its own that nobody reads keeps the loop alive.
    memcpy(job->to + (size_t)index * job->part, &sums[0], sizeof sums[0]);
}

#define FMA_STEPS 100000
#define FMA_CHAINS 12 // hides the latency of two units

#ifdef __x86_64__
__attribute__((target("avx512f"))) static float fma_avx512(void) {
    __m512 d[FMA_CHAINS], a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
    for (int k = 0; k < FMA_CHAINS; ++k) d[k] = b;
    for (int i = 0; i < FMA_STEPS; ++i) {
        for (int k = 0; k < FMA_CHAINS; ++k) d[k] = _mm512_fmadd_ps(d[k], a, b);
    }
    for (int k = 1; k < FMA_CHAINS; ++k) d[0] = _mm512_add_ps(d[0], d[k]);
    return _mm512_reduce_add_ps(d[0]);
}

__attribute__((target("avx2,fma"))) static float fma_avx2(void) {
    __m256 d[FMA_CHAINS], a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f);
    for (int k = 0; k < FMA_CHAINS; ++k) d[k] = b;
    for (int i = 0; i < FMA_STEPS; ++i) {
        for (int k = 0; k < FMA_CHAINS; ++k) d[k] = _mm256_fmadd_ps(d[k], a, b);
    }
    for (int k = 1; k < FMA_CHAINS; ++k) d[0] = _mm256_add_ps(d[0], d[k]);
    return _mm256_cvtss_f32(d[0]);
}
#endif

// Without known vectors: multiplications and additions, as the compiler lays them out.
static float fma_any(void) {
    float d[4 * FMA_CHAINS];
    for (int k = 0; k < 4 * FMA_CHAINS; ++k) d[k] = 1e-3f * (float)k;
    for (int i = 0; i < FMA_STEPS; ++i) {
        for (int k = 0; k < 4 * FMA_CHAINS; ++k) d[k] = d[k] * 0.999f + 1e-3f;
    }
    for (int k = 1; k < 4 * FMA_CHAINS; ++k) d[0] += d[k];
    return d[0];
}

static double fma_width(uint32_t tiers) {
    return tiers & CTXKV_CPU_AVX512 ? 16 : tiers & CTXKV_CPU_AVX2 ? 8 : 4;
}

static void fma_part(void *user, int64_t index) {
    cpu_job *job = user;
    float sum = 0;
#ifdef __x86_64__
    if (job->tiers & CTXKV_CPU_AVX512) {
        sum = fma_avx512();
    } else if (job->tiers & CTXKV_CPU_AVX2) {
        sum = fma_avx2();
    } else
#endif
        sum = fma_any();
    job->sums[index % 64] = sum;
}

// The best of several turns, in seconds; the first warms up.
static double best_of(const bench *all, int threads, cli_work work, cpu_job *job) {
    double best = 1e30, start = cli_now();
    for (int i = 0; i < 5 || (cli_now() - start < all->seconds && i < 100); ++i) {
        double begin = cli_now();
        cli_parallel(threads, threads, work, job);
        double took = cli_now() - begin;
        if (i && took < best) best = took;
    }
    return best;
}

static bool cpu_floors(bench *all) {
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    size_t size = (size_t)(cache > 0 ? cache : 32 << 20) * 4;
    if (size < 64u << 20) size = 64u << 20;
    if (size > 512u << 20) size = 512u << 20;
    all->beyond_cache = size;
    int threads = all->place.info.threads;
    cpu_job job = {
        cli_alloc(&all->place, size),
        cli_alloc(&all->place, size),
        0,
        all->place.info.cpu_found,
        {0}};
    if (!job.to || !job.from) return false;
    memset(job.from, 1, size);
    memset(job.to, 2, size);
    job.part = size / (size_t)threads / 4096 * 4096;
    double bytes = (double)job.part * threads;
    all->copy = 2 * bytes / best_of(all, threads, copy_part, &job) * 1e-9;
    all->read = bytes / best_of(all, threads, read_part, &job) * 1e-9;
    double macs = (double)FMA_STEPS * FMA_CHAINS * fma_width(job.tiers) * threads;
    all->rate = macs / best_of(all, threads, fma_part, &job) * 1e-9;
    return true;
}

// ---- GPU ---------------------------------------------------------------------------------------
#define FLOOR_CALLS 5

// Seconds of one call: the best replay of a graph of several.
static bool gpu_floor(
    bench *all, ctxkv_floor kind, void *to, const void *from, size_t size, double *seconds) {
    ctxkv_replay *replay;
    void *stream;
    ctxkv_device *device = all->place.device;
    ctxkv_status status = all->replay->begin(device, &replay, &stream);
    for (int i = 0; !status && i < FLOOR_CALLS; ++i) {
        status = all->replay->floor(device, kind, to, from, size, stream);
    }
    if (!status) status = all->replay->end(replay);
    double start = cli_now(), one;
    *seconds = 1e30;
    for (int i = 0; !status && (i < 5 || (cli_now() - start < all->seconds && i < 100)); ++i) {
        status = all->replay->run(replay, &one);
        if (i && one < *seconds) *seconds = one;
    }
    *seconds /= FLOOR_CALLS;
    if (status) cli_fail_status("bench");
    all->replay->free(replay);
    return !status;
}

static bool gpu_floors(bench *all) {
    size_t size = all->replay->cache_bytes(all->place.device) * 4, steps = 1 << 14;
    if (size < 64u << 20) size = 64u << 20;
    all->beyond_cache = size;
    void *to = cli_alloc(&all->place, size), *from = cli_alloc(&all->place, size);
    if (!to || !from || !cli_copy(&all->place, to, from, size) || !cli_sync(&all->place)) {
        return false;
    }
    if (all->replay->load_floors(all->place.device)) {
        cli_fail_status("bench");
        return false;
    }
    double copy, read, products, nothing;
    if (!gpu_floor(all, CTXKV_FLOOR_COPY, to, from, size, &copy) ||
        !gpu_floor(all, CTXKV_FLOOR_READ, to, from, size, &read) ||
        !gpu_floor(all, CTXKV_FLOOR_PRODUCTS, to, from, steps, &products) ||
        !gpu_floor(all, CTXKV_FLOOR_READ, to, from, 0, &nothing)) {
        return false;
    }
    all->copy = 2.0 * (double)size / copy * 1e-9;
    all->read = (double)size / read * 1e-9;
    all->rate = all->replay->products(all->place.device, steps) / products * 1e-9;
    all->launch = nothing * 1e6;
    return true;
}

bool bench_floors(bench *all) {
    bool ok = all->replay ? gpu_floors(all) : cpu_floors(all);
    cli_place_reset(&all->place);
    return ok;
}

double bench_floor(const bench *all, double macs, double bytes) {
    double move = bytes / (all->copy > all->read ? all->copy : all->read);
    double multiply = macs / all->rate;
    return (move > multiply ? move : multiply) * 1e-3;
}
