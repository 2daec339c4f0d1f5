# SPDX-License-Identifier: Apache-2.0
# Random inputs and caches that the tests share.
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16
POISON = 0x5A5A


def bf16(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers with a spread of exponents."""
    x = torch.randn(shape, generator=generator) * scale
    return (x * torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())).to(BF16)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisoned(*shape: int) -> torch.Tensor:
    """BF16 memory of 0x5A bytes."""
    return torch.full(shape, POISON, dtype=torch.int16).view(BF16)


def stock_cache(blocks: int, heads: int, size: int, dim: int = 64) -> torch.Tensor:
    """vLLM's storage: [num_blocks, H, block_size, 2*head_dim], K then V."""
    return poisoned(blocks, heads, size, 2 * dim)


def views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V views [num_blocks, block_size, H, head_dim] of a stock cache."""
    return cache.transpose(1, 2).split(cache.shape[-1] // 2, dim=-1)


def slots(generator: torch.Generator, rows: int, places: int, holes: bool = False) -> torch.Tensor:
    """Distinct slots; with holes, every third is negative."""
    chosen = torch.randperm(places, generator=generator)[:rows]
    if holes:
        chosen[::3] = -1
    return chosen


def table(generator: torch.Generator, positions: int, dim: int = 64) -> torch.Tensor:
    angle = torch.rand(positions, dim // 2, generator=generator) * 6.3
    return torch.cat((angle.cos(), angle.sin()), -1).to(BF16)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, as this one finds ctxkv."""
    path = os.pathsep.join([str(ROOT / "python")] * bool(os.environ.get("CTXKV_LIBRARY")))
    inherited = {**os.environ, **environment}
    if path:
        inherited["PYTHONPATH"] = path
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited, capture_output=True, text=True, timeout=120
    )
