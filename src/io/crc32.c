// SPDX-License-Identifier: Apache-2.0
// Eight bytes a step, from tables made once.
#include "crc32.h"

#include <pthread.h>
#include <string.h>

static uint32_t table[8][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill(void) {
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320u : 0);
        table[0][i] = value;
    }
    for (int k = 1; k < 8; ++k) {
        for (int i = 0; i < 256; ++i) {
            uint32_t value = table[k - 1][i];
            table[k][i] = (value >> 8) ^ table[0][value & 255];
        }
    }
}

uint32_t io_crc32(uint32_t crc, const void *data, size_t size) {
    pthread_once(&once, fill);
    const uint8_t *from = data;
    crc = ~crc;
    for (; size >= 8; size -= 8, from += 8) {
        uint32_t low, high;
        memcpy(&low, from, 4);
        memcpy(&high, from + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^
              table[4][low >> 24] ^ table[3][high & 255] ^ table[2][high >> 8 & 255] ^
              table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    for (; size; --size) crc = (crc >> 8) ^ table[0][(crc ^ *from++) & 255];
    return ~crc;
}
