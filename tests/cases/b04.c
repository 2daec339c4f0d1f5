// SPDX-License-Identifier: Apache-2.0
// B04: every layer's cache has its own strides and shape, interleaved in one buffer or not.
#include "cases.h"

#define LAYERS 5
#define HEADS 2
#define PAGE 16
#define BLOCKS 8
#define SLOT 33
#define LAYER_STRIDE (HEADS * PAGE * 2 * HEAD)
#define BLOCK_STRIDE (LAYERS * LAYER_STRIDE)

static const uint16_t numbers[LAYERS] = {0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0};

static void expect(uint16_t *image, int64_t block_stride, uint16_t v) {
    for (int h = 0; h < HEADS; h++) {
        uint16_t *row = image + SLOT / PAGE * block_stride + (h * PAGE + SLOT % PAGE) * 2 * HEAD;
        fill_same(row, HEAD, 0x3F80);
        fill_same(row + HEAD, HEAD, v);
    }
}

// own: layer 3 lies in a contiguous buffer of its own, of own_blocks blocks.
static void interleaved(const struct place *place, bool own, int64_t own_blocks) {
    size_t bytes = (size_t)BLOCKS * BLOCK_STRIDE * 2;
    size_t own_bytes = (size_t)own_blocks * LAYER_STRIDE * 2;
    struct buffer shared = buffer_new(place, bytes), alone = buffer_new(place, own_bytes);
    uint16_t *image = poison_image(bytes), *own_image = poison_image(own_bytes);
    struct tensor kt[LAYERS], vt[LAYERS];
    const DLTensor *keys[LAYERS], *values[LAYERS];
    uint16_t ones[LAYERS * HEADS * HEAD], numbered[LAYERS * HEADS * HEAD];
    fill_same(ones, LAYERS * HEADS * HEAD, 0x3F80);
    for (int l = 0; l < LAYERS; l++) {
        bool apart = own && l == 3;
        const char *data = apart ? alone.data : shared.data + 2 * l * LAYER_STRIDE;
        int64_t blocks = apart ? own_blocks : BLOCKS;
        int64_t stride = apart ? LAYER_STRIDE : BLOCK_STRIDE;
        keys[l] = cache_half(&kt[l], place, data, 0, blocks, PAGE, HEADS, HEAD, stride);
        values[l] = cache_half(&vt[l], place, data, 1, blocks, PAGE, HEADS, HEAD, stride);
        fill_same(numbered + l * HEADS * HEAD, HEADS * HEAD, numbers[l]);
        expect(apart ? own_image : image + l * LAYER_STRIDE, stride, numbers[l]);
    }
    struct operand k, v, s;
    operand_new(&k, place, BF16, 4, DIMS(LAYERS, 1, HEADS, HEAD), ones);
    operand_new(&v, place, BF16, 4, DIMS(LAYERS, 1, HEADS, HEAD), numbered);
    const DLTensor *slot = operand_new(&s, place, I64, 1, DIMS(1), (const int64_t[]){SLOT});
    ctxkv_store *store = muse_store(place, LAYERS, HEADS, 0);
    assert_ok(ctxkv_store_bind_caches(store, keys, values, LAYERS));
    assert_ok(ctxkv_store_run(store, &k.tensor.t, &v.tensor.t, 0, &slot, 1, 0));
    assert_true(buffer_is(place, &shared, image));
    assert_true(buffer_is(place, &alone, own_image));
    ctxkv_store_destroy(store);
    operand_free(&k, place);
    operand_free(&v, place);
    operand_free(&s, place);
    buffer_free(place, &shared);
    buffer_free(place, &alone);
    free(image);
    free(own_image);
}

void b04(void **state) {
    (void)state;
    struct place place = place_open(0);
    interleaved(&place, false, 1);
    interleaved(&place, true, BLOCKS);
    interleaved(&place, true, 7);
    place_close(&place);
}
