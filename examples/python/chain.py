#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# The chain on plain host memory, without numpy or torch: two layers, one KV head, three rows.
import struct

import ctxkv

LAYERS, HEADS, D, ROWS, BLOCK = 2, 1, 8192, 3, 16


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def filled(shape, value: float) -> ctxkv.Tensor:
    count = 1
    for size in shape:
        count *= size
    return ctxkv.Tensor.from_bytes(bf16(value) * count, shape)


def views(cache: ctxkv.Tensor):
    """K and V of storage [num_blocks, H, block_size, 128] as [num_blocks, block_size, H, 64]."""
    blocks, heads, size, both = cache.shape
    shape, strides = (blocks, size, heads, both // 2), (heads * size * both, both, size * both, 1)
    return cache.view(shape, strides), cache.view(shape, strides, both // 2)


weights = filled((LAYERS, 2 * HEADS * 64, D), 2.0**-13)
chain = ctxkv.Chain(
    ctxkv.device("cpu"),
    norms={"num_layers": LAYERS},
    projection={"weights": weights, "num_layers": LAYERS, "num_kv_heads": HEADS},
    store={"num_layers": LAYERS, "num_kv_heads": HEADS},
    max_rows=ROWS,
)
caches = [ctxkv.Tensor((1, HEADS, BLOCK, 128)) for _ in range(LAYERS)]
keys, values = zip(*map(views, caches))
chain.bind_caches(keys, values)

slots = ctxkv.Tensor.from_bytes(struct.pack("<3q", 3, -1, 99), (ROWS,), "i64")
chain.run(filled((ROWS, D), 1.0), None, slots)

row = caches[1].tobytes()[3 * 256 : 4 * 256]
k, v = (struct.unpack("<f", b"\0\0" + part)[0] for part in (row[:2], row[128:130]))
print(f"layer 1, slot 3: K {k:.1f}, V {v:.1f}")
faults = chain.faults()
print(f"skipped: {faults.count // LAYERS} row; first: slot {faults.value}, below {faults.limit}")
