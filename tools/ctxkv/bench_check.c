// SPDX-License-Identifier: Apache-2.0
// Nothing is timed before some of its rows were compared with a CPU tier's.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bench_shape.h"

#define MOST_PICKED 3

// A GPU takes other kernels for other numbers of rows, so it is compared at the best tier's speed;
// a CPU is compared with the scalar truth itself.
bool bench_truth_make(bench_truth *truth, const bench *all, int64_t heads) {
    truth->all = *all;
    bench *own = &truth->all;
    own->options.device = "cpu";
    own->options.cpu_mask = all->replay ? 0 : CTXKV_CPU_SCALAR;
    own->options.projection = CTXKV_PROJECTION_EXACT;
    // Stock means another order of sums on sm_100 and later than on a CPU.
    bool packed = all->place.info.cuda_arch >= 100 && all->family == IO_FAMILY_MUSE;
    if (packed && !own->options.numerics) own->options.numerics = CTXKV_NUMERICS_PACKED;
    own->host = own->place = (cli_place){.where = {kDLCPU, 0}};
    own->replay = NULL;
    own->beyond_cache = 1;
    own->row_count = 0;
    bench_shape *shape = truth->shape = calloc(1, sizeof *shape);
    if (!shape) {
        cli_fail("out of memory for the scalar truth");
        return false;
    }
    bench_set_heads(shape, own, heads);
    return cli_place_open(&own->place, &own->options) && bench_make_fixed(shape);
}

void bench_truth_free(bench_truth *truth) {
    if (truth->shape) cli_caches_free(&truth->shape->caches);
    cli_place_reset(&truth->all.host);
    cli_place_close(&truth->all.place);
    free(truth->shape);
    truth->shape = NULL;
}

static int pick(const bench_shape *it, int64_t *picked) {
    int64_t last = it->rows - 1;
    int count = 0;
    if (it->all->replay) picked[count++] = 0;
    if (it->all->replay && last > 1) picked[count++] = last / 2;
    if (!count || last > 0) picked[count++] = last;
    return count;
}

// The picked rows through norms, projection and store, into the truth's first slots.
static bool run_truth(bench_shape *it, const int64_t *picked, int count, int64_t total) {
    bench *all = it->all;
    ctxkv_norms *norms = NULL;
    ctxkv_projection *projection = NULL;
    ctxkv_store *store = NULL;
    if (!bench_make_picked(it, picked, count, total)) return false;
    cli_tensor *rows[] = {&it->normed[0], &it->kv[0], &it->k[0], &it->v[0]};
    bool ok = !ctxkv_norms_create(all->place.device, &it->norms_desc, &norms) &&
              !ctxkv_norms_run(norms, &it->x[0].tensor, &it->normed[0].tensor, NULL);
    for (int i = 0; i < 4; ++i) rows[i]->shape[1] = count;
    it->slots[0].shape[0] = count;
    const DLTensor *slots = &it->slots[0].tensor;
    ok = ok && !ctxkv_projection_create(all->place.device, &it->projection_desc[0], &projection) &&
         !ctxkv_projection_run(projection, &it->normed[0].tensor, &it->kv[0].tensor, NULL) &&
         !ctxkv_store_create(all->place.device, &it->store_desc, &store) &&
         !ctxkv_store_bind_caches(store, it->caches.keys, it->caches.values, all->layers) &&
         !ctxkv_store_run(
             store, &it->k[0].tensor, it->parts == 2 ? &it->v[0].tensor : NULL,
             &it->positions.tensor, &slots, 1, NULL);
    if (!ok) cli_fail_status("bench");
    ctxkv_norms_destroy(norms);
    ctxkv_projection_destroy(projection);
    ctxkv_store_destroy(store);
    return ok;
}

static bool each_block(
    bench_shape *it, const int64_t *picked, int count, uint8_t *image, bool to_device) {
    const cli_caches *caches = &it->caches;
    size_t bytes = caches->bytes / (size_t)caches->blocks;
    bool ok = true;
    for (int i = 0; ok && i < count; ++i) {
        size_t block = (size_t)(picked[i] / BENCH_BLOCK) * bytes;
        for (int64_t l = 0; ok && l < it->all->layers; ++l) {
            uint8_t *here = image + ((size_t)l * MOST_PICKED + (size_t)i) * bytes;
            uint8_t *there = (uint8_t *)caches->storage[l] + block;
            ok = to_device ? cli_to_device(&it->all->place, there, here, bytes)
                           : cli_to_host(&it->all->place, here, there, bytes);
        }
    }
    return ok;
}

static bool same_rows(
    const bench_truth *truth, const bench_shape *it, const int64_t *picked, int count,
    const uint8_t *image) {
    const cli_caches *caches = &it->caches;
    size_t block = caches->bytes / (size_t)caches->blocks,
           head = caches->bytes / (size_t)(caches->blocks * caches->heads * BENCH_BLOCK);
    for (int i = 0; i < count; ++i) {
        for (int64_t l = 0; l < it->all->layers; ++l) {
            const uint8_t *got = image + ((size_t)l * MOST_PICKED + (size_t)i) * block;
            const uint8_t *must = truth->shape->caches.storage[l];
            for (int64_t h = 0; h < it->heads; ++h) {
                size_t of_got = (size_t)(h * BENCH_BLOCK + picked[i] % BENCH_BLOCK) * head;
                size_t of_must = (size_t)(h * BENCH_BLOCK + i) * head;
                if (!memcmp(got + of_got, must + of_must, head)) continue;
                cli_fail(
                    "the chain of %" PRId64 " heads and %" PRId64
                    " rows differs from the %s tier in layer %" PRId64 ", row %" PRId64
                    ": it is not timed",
                    it->heads, it->rows, cli_tier_name(truth->all.place.info.cpu_used), l,
                    picked[i]);
                return false;
            }
        }
    }
    return true;
}

bool bench_compare(bench_truth *truth, bench_shape *it) {
    int64_t picked[MOST_PICKED];
    int count = pick(it, picked);
    size_t bytes =
        (size_t)(it->all->layers * MOST_PICKED) * it->caches.bytes / (size_t)it->caches.blocks;
    uint8_t *image = malloc(bytes);
    size_t mark = truth->all.place.block_count, host_mark = truth->all.host.block_count;
    ctxkv_chain *chain = NULL;
    if (!image) cli_fail("out of memory for %zu bytes of the caches", bytes);
    if (image) memset(image, 0x5A, bytes);
    bool ok =
        image && each_block(it, picked, count, image, true) && bench_make_chain(it, 0, &chain);
    if (ok && bench_run_chain(it, chain, 0)) {
        cli_fail_status("bench");
        ok = false;
    }
    ok = ok && cli_sync(&it->all->place) && each_block(it, picked, count, image, false) &&
         run_truth(truth->shape, picked, count, it->rows) &&
         same_rows(truth, it, picked, count, image);
    ctxkv_chain_destroy(chain);
    cli_place_release(&truth->all.place, mark);
    cli_place_release(&truth->all.host, host_mark);
    free(image);
    return ok;
}
