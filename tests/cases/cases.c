// SPDX-License-Identifier: Apache-2.0
// Runs the case named on the command line, or all of them; and what the cases share.
#include "cases.h"

#include <stdio.h>

static const struct {
    const char *name;
    CMUnitTestFunction run;
} all[] = {
    {"B02", b02}, {"B04", b04}, {"B06", b06}, {"B09", b09}, {"B10", b10},
    {"B12", b12}, {"B14", b14}, {"B16", b16}, {"B18", b18}, {"B24", b24},
};

int main(int count, char **arguments) {
    int failed = 0, run = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (count > 1 && strcmp(arguments[1], all[i].name)) continue;
        struct CMUnitTest test = {all[i].name, all[i].run, 0, 0, 0};
        const struct CMUnitTest group[] = {test};
        failed += cmocka_run_group_tests_name(all[i].name, group, 0, 0);
        run++;
    }
    if (!run) fprintf(stderr, "no case named %s\n", arguments[1]);
    return failed || !run;
}

static size_t cache_bytes(const struct caches *c) {
    return (size_t)(c->blocks * c->heads * c->page * 2 * HEAD) * 2;
}

void caches_new(
    struct caches *c, const struct place *place, int64_t layers, int64_t blocks, int64_t page,
    int64_t heads) {
    *c = (struct caches){.layers = layers, .blocks = blocks, .page = page, .heads = heads};
    for (int64_t l = 0; l < layers; l++) {
        c->storage[l] = buffer_new(place, cache_bytes(c));
        c->image[l] = poison_image(cache_bytes(c));
        int64_t stride = heads * page * 2 * HEAD;
        const void *data = c->storage[l].data;
        c->keys[l] = cache_half(&c->k[l], place, data, 0, blocks, page, heads, HEAD, stride);
        c->values[l] = cache_half(&c->v[l], place, data, 1, blocks, page, heads, HEAD, stride);
    }
}

void caches_expect(
    struct caches *c, int64_t layer, int64_t slot, int64_t head, uint16_t k, uint16_t v) {
    int64_t block = slot / c->page, page = slot % c->page;
    uint16_t *row = c->image[layer] + ((block * c->heads + head) * c->page + page) * 2 * HEAD;
    fill_same(row, HEAD, k);
    fill_same(row + HEAD, HEAD, v);
}

void caches_check(const struct caches *c, const struct place *place) {
    for (int64_t l = 0; l < c->layers; l++)
        if (!buffer_is(place, &c->storage[l], c->image[l])) fail_msg("cache of layer %d", (int)l);
}

void caches_poison(struct caches *c, const struct place *place) {
    for (int64_t l = 0; l < c->layers; l++) {
        memset(c->image[l], POISON, cache_bytes(c));
        buffer_put(place, &c->storage[l], 0, c->image[l], cache_bytes(c));
    }
}

void caches_free(struct caches *c, const struct place *place) {
    for (int64_t l = 0; l < c->layers; l++) {
        buffer_free(place, &c->storage[l]);
        free(c->image[l]);
    }
}

const DLTensor *operand_new(
    struct operand *o, const struct place *place, enum type type, int ndim, const int64_t *shape,
    const void *values) {
    static const size_t sizes[] = {[BF16] = 2, [FP32] = 4, [I64] = 8, [I32] = 4, [FP16] = 2};
    size_t bytes = sizes[type];
    for (int i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    o->buffer = buffer_tail(place, bytes);
    if (values) buffer_put(place, &o->buffer, 0, values, bytes);
    return tensor_on(&o->tensor, place, o->buffer.data, type, ndim, shape, 0);
}

void operand_free(struct operand *o, const struct place *place) {
    buffer_free(place, &o->buffer);
}

ctxkv_store *muse_store(
    const struct place *place, int64_t layers, int64_t heads, const DLTensor *table) {
    ctxkv_store_desc desc;
    ctxkv_store_desc_init(&desc);
    desc.num_layers = layers;
    desc.num_kv_heads = heads;
    desc.k_eps = 1e-6f;
    desc.cos_sin = table;
    desc.rope = table ? CTXKV_ROPE_GPTJ : CTXKV_ROPE_NONE;
    ctxkv_store *store;
    assert_ok(ctxkv_store_create(place->device, &desc, &store));
    return store;
}
