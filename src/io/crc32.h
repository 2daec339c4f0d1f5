// SPDX-License-Identifier: Apache-2.0
// CRC-32 (IEEE, as zlib's crc32): start with 0, feed parts in order.
#ifndef CTXKV_IO_CRC32_H
#define CTXKV_IO_CRC32_H

#include <stddef.h>
#include <stdint.h>

uint32_t io_crc32(uint32_t crc, const void *data, size_t size);

#endif
