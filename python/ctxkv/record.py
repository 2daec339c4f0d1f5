# SPDX-License-Identifier: Apache-2.0
# CTXKV_RECORD: what a call was given and what it left, as `ctxkv run` and `ctxkv verify` read it.
"""With CTXKV_RECORD=DIR the vLLM plugin writes, for its first CTXKV_RECORD_CALLS (default 8) calls
of a process, NAME.context.safetensors (hidden_states, positions, slot_mapping, cos_sin_cache) and
NAME.caches.safetensors (kv_cache.0, ...). Only blocks that the call addressed are kept, renumbered
from 0, and only rows that it addressed: the rest is zero, as `ctxkv run` leaves it. The file's
metadata holds the original block numbers and the command that computes the same on a laptop."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import struct
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

logger = logging.getLogger("vllm.ctxkv")

_DTYPES = {
    torch.bfloat16: "BF16", torch.int64: "I64", torch.float32: "F32", torch.float16: "F16",
    torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}

_CACHES = {
    "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}


def save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file; it has its name only when it is complete."""
    head: dict[str, Any] = {"__metadata__": metadata}
    held, offset = [], 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        size = tensor.numel() * tensor.element_size()
        head[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        held.append((tensor, size))
        offset += size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor, size in held:
            if size:
                file.write(ctypes.string_at(tensor.data_ptr(), size))
    os.replace(part, path)


def _rank() -> tuple[int, int]:
    try:
        from vllm.distributed import (
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
        )

        return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    except (ImportError, AssertionError):
        return 0, 1


def _compact(
    slots: torch.Tensor, cache: torch.Tensor, blocks: int
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """New slots, the original blocks in new order, and the addressed rows of the cache."""
    size = cache.shape[2]
    inside = (slots >= 0) & (slots < cache.shape[0] * size)
    kept = torch.unique(slots[inside] // size)
    renumbered = torch.searchsorted(kept, slots.clamp(min=0) // size) * size + slots % size
    # A slot beyond the cache stays beyond it.
    beyond = torch.where(slots < 0, slots, torch.full_like(slots, blocks * size))
    moved = torch.where(inside, renumbered, beyond)
    part = torch.zeros((blocks, *cache.shape[1:]), dtype=cache.dtype)
    block, place = slots[inside] // size, slots[inside] % size
    if block.numel():
        rows = cache[block.to(cache.device), :, place.to(cache.device)].cpu()
        part[moved[inside] // size, :, place] = rows
    return moved, kept.tolist(), part


class Recorder:
    """Writes the first `calls` calls into a folder. Never raises: a failure ends the recording."""

    def __init__(self, folder: Path, calls: int) -> None:
        self.folder, self.left, self.written = folder, calls, 0

    @classmethod
    def from_environment(cls) -> Optional["Recorder"]:
        folder = os.environ.get("CTXKV_RECORD")
        if not folder:
            return None
        calls = os.environ.get("CTXKV_RECORD_CALLS", "8")
        return cls(Path(folder), int(calls) if calls.isdigit() else 8)

    def take(self, states: torch.Tensor, positions: torch.Tensor, mapping: Any) -> Any:
        """Copies of the inputs before the call, or None when enough was recorded."""
        if self.left <= 0:
            return None
        self.left -= 1
        lists = list(mapping) if isinstance(mapping, (list, tuple)) else mapping
        copies = (
            [None if s is None else s.cpu().clone() for s in lists]
            if isinstance(lists, list) else lists.cpu().clone()
        )
        return states.cpu().clone(), positions.cpu().clone(), copies

    def write(
        self, taken: Any, caches: Sequence[torch.Tensor], table: Optional[torch.Tensor], by: str,
        store: Optional[dict[str, Any]] = None,
    ) -> None:
        """The two files, after the call. store: the arguments of `ContextKV` that say what the
        caches hold, for FP8."""
        try:
            self._write(taken, caches, table, by, store or {})
        except (OSError, ValueError, RuntimeError, KeyError, IndexError) as error:
            self.left = 0
            logger.warning("ctxkv: recording to %s ends: %s", self.folder, error)

    def _write(
        self, taken: Any, caches: Sequence[torch.Tensor], table: Optional[torch.Tensor], by: str,
        store: dict[str, Any],
    ) -> None:
        states, positions, mapping = taken
        size = caches[0].shape[2]
        kind = store.get("cache_type", "bf16")
        dtype = _CACHES.get(kind)
        known = (torch.bfloat16,) if kind == "bf16" else (torch.uint8, dtype)
        if any(c.dtype not in known or c.dim() != 4 or c.shape[2] != size for c in caches):
            raise ValueError("only BF16 and FP8 caches of one block size can be recorded")
        if kind != "bf16":
            caches = [c.view(torch.uint8) for c in caches]  # what can be indexed everywhere
        layers = len(caches)
        lists = mapping if isinstance(mapping, list) else [mapping] * layers
        rows = max((s.shape[0] for s in lists if s is not None), default=0)
        slots = torch.full((layers, rows), -1, dtype=torch.int64)
        for layer, given in enumerate(lists):
            if given is not None:
                slots[layer, : given.shape[0]] = given
        used = [
            torch.unique(s[(s >= 0) & (s < c.shape[0] * size)] // size).numel()
            for s, c in zip(slots, caches)
        ]
        blocks = max([*used, 1])
        parts = [_compact(s, c, blocks) for s, c in zip(slots, caches)]
        context = {
            "hidden_states": states, "positions": positions,
            "slot_mapping": torch.stack([moved for moved, _, _ in parts]),
        }
        if table is not None:
            most = int(positions.max()) + 1 if positions.numel() else 1
            used = table[: max(1, min(most, table.shape[0]))]
            context["cos_sin_cache"] = used.to(torch.bfloat16)
        for name in ("k_scales", "v_scales"):
            if store.get(name) is not None:
                context[name] = torch.stack([s.reshape(()).cpu() for s in store[name]])
        rank, ranks = _rank()
        name = f"call-{os.getpid()}-{self.written:04d}-rank{rank}"
        command = (
            f"ctxkv run --model DRAFT --context {name}.context.safetensors --out again.safetensors "
            f"--block-size {size} --num-blocks {blocks}"
        )
        if kind != "bf16":
            command += f" --cache-type {kind}"
        if ranks > 1:
            command += f" --tp-size {ranks} --tp-rank {rank}"
        metadata = {
            "made_by": "ctxkv", "computed_by": by, "block_size": str(size), "command": command,
            "verify": f"ctxkv verify {name}.caches.safetensors again.safetensors",
            "blocks": json.dumps([kept for _, kept, _ in parts]),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        save(self.folder / f"{name}.context.safetensors", context, metadata)
        found = {f"kv_cache.{i}": part.view(dtype) for i, (_, _, part) in enumerate(parts)}
        save(self.folder / f"{name}.caches.safetensors", found, metadata)
        self.written += 1
