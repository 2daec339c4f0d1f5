#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# A small draft on torch tensors: bound once, called per step, whole or row by row.
import torch

import ctxkv
from ctxkv import ContextKV, Norm

LAYERS, HEADS, D, ROWS = 2, 2, 8192, 8
torch.manual_seed(0)
weights = (torch.randn(LAYERS, 2 * HEADS * 64, D) / 90).bfloat16()
angles = torch.arange(1024).outer(500000.0 ** (-torch.arange(32) / 32))
draft = ContextKV(
    weights,
    HEADS,
    hidden=Norm("row", 1e-5),
    layer=Norm("row", 1e-5),
    hidden_weight=torch.ones(D).bfloat16(),
    layer_weights=torch.ones(LAYERS, D).bfloat16(),
    rope="gptj",
    cos_sin=torch.cat((angles.cos(), angles.sin()), -1).bfloat16(),
)
x, positions = torch.randn(ROWS, D).bfloat16(), torch.arange(100, 100 + ROWS)
slots = torch.arange(ROWS)


def caches() -> list[torch.Tensor]:
    return [torch.zeros(4, HEADS, 16, 128, dtype=torch.bfloat16) for _ in range(LAYERS)]


whole, single = caches(), caches()
draft.bind(whole)
draft(x, positions, slots)
draft.bind(single)
for t in range(ROWS):
    draft(x[t : t + 1], positions[t : t + 1], slots[t : t + 1])
same = all(torch.equal(a, b) for a, b in zip(whole, single))
tier = ctxkv.device("cpu").info()["name"]
print(f"{tier}: all rows at once or one by one, the same bits: {same}")
