// SPDX-License-Identifier: Apache-2.0
// The whole chain on a CPU from plain C memory: two layers, one KV head, three context rows.
// Build: cc chain.c $(pkg-config --cflags --libs ctxkv)
#include <ctxkv/ctxkv.h>
#include <stdio.h>
#include <stdlib.h>

enum { D = 8192, LAYERS = 2, HEADS = 1, ROWS = 3, BLOCKS = 2, BLOCK_SIZE = 16 };

static DLTensor tensor(
    void *data, DLDataType type, int32_t ndim, int64_t *shape, int64_t *strides) {
    return (DLTensor){data, {kDLCPU, 0}, ndim, type, shape, strides, 0};
}

static int done(ctxkv_status status) {
    if (status) fprintf(stderr, "%s: %s\n", ctxkv_status_name(status), ctxkv_last_error());
    return status != CTXKV_OK;
}

int main(void) {
    const DLDataType bf16 = {kDLBfloat, 16, 1}, i64 = {kDLInt, 64, 1};
    size_t weights = (size_t)LAYERS * 2 * HEADS * 64 * D;
    uint16_t *x = malloc(ROWS * D * 2), *w = malloc(weights * 2);
    uint16_t *cache = calloc((size_t)LAYERS * BLOCKS * HEADS * BLOCK_SIZE * 128, 2);
    if (!x || !w || !cache) return 1;
    for (int i = 0; i < ROWS * D; i++) x[i] = ctxkv_bf16((float)(i % 17) - 8.0f);
    for (size_t i = 0; i < weights; i++) w[i] = ctxkv_bf16(((float)(i % 13) - 6.0f) / 64);

    // Weightless norms, no RoPE; see ctxkv.h for weights, gain centres and tables.
    ctxkv_norms_desc norms;
    ctxkv_norms_desc_init(&norms);
    norms.num_layers = LAYERS;
    int64_t w_shape[] = {LAYERS, 2 * HEADS * 64, D};
    DLTensor w_tensor = tensor(w, bf16, 3, w_shape, NULL);
    const DLTensor *w_list[] = {&w_tensor};
    ctxkv_projection_desc projection;
    ctxkv_projection_desc_init(&projection);
    projection.num_layers = LAYERS;
    projection.num_kv_heads = HEADS;
    projection.weights = w_list;
    projection.weight_count = 1;
    ctxkv_store_desc store;
    ctxkv_store_desc_init(&store);
    store.num_layers = LAYERS;
    store.num_kv_heads = HEADS;
    ctxkv_chain_desc desc;
    ctxkv_chain_desc_init(&desc);
    desc.norms = &norms;
    desc.projection = &projection;
    desc.store = &store;
    desc.max_rows = ROWS;

    // vLLM's storage [blocks, heads, block_size, 128]: K in columns 0..63, V in 64..127.
    int64_t shape[] = {BLOCKS, BLOCK_SIZE, HEADS, 64};
    int64_t strides[] = {HEADS * BLOCK_SIZE * 128, 128, BLOCK_SIZE * 128, 1};
    DLTensor keys[LAYERS], values[LAYERS];
    const DLTensor *key_list[LAYERS], *value_list[LAYERS];
    for (int l = 0; l < LAYERS; l++) {
        uint16_t *base = cache + (size_t)l * BLOCKS * HEADS * BLOCK_SIZE * 128;
        keys[l] = tensor(base, bf16, 4, shape, strides);
        values[l] = tensor(base + 64, bf16, 4, shape, strides);
        key_list[l] = &keys[l];
        value_list[l] = &values[l];
    }

    ctxkv_device *device = NULL;
    ctxkv_chain *chain = NULL;
    int64_t slots[ROWS] = {3, -1, 17}, x_shape[] = {ROWS, D}, slot_shape[] = {ROWS};
    DLTensor x_tensor = tensor(x, bf16, 2, x_shape, NULL);
    DLTensor slot_tensor = tensor(slots, i64, 1, slot_shape, NULL);
    const DLTensor *slot_list[] = {&slot_tensor}; // one mapping, shared by the layers
    int failed = done(ctxkv_device_open("cpu", NULL, &device)) ||
                 done(ctxkv_chain_create(device, &desc, &chain)) ||
                 done(ctxkv_chain_bind_caches(chain, key_list, value_list, LAYERS)) ||
                 done(ctxkv_chain_run(chain, &x_tensor, NULL, slot_list, 1, NULL));
    if (!failed)
        printf(
            "layer 0, slot 3: K %04x %04x, V %04x %04x\n", cache[3 * 128], cache[3 * 128 + 1],
            cache[3 * 128 + 64], cache[3 * 128 + 65]);
    ctxkv_chain_destroy(chain);
    ctxkv_device_close(device);
    free(x);
    free(w);
    free(cache);
    return failed;
}
