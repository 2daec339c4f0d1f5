# SPDX-License-Identifier: Apache-2.0
# The plugin's choice, call by call, between ctxkv and vLLM's own chain.
from __future__ import annotations

import logging
import os
from typing import Any, Callable, Optional, Sequence

import torch

from ._streams import capturing
from ._vllm_families import Described, Stock, check_caches
from .record import Recorder
from .torch import ContextKV
from .vllm import enabled

logger = logging.getLogger("vllm.ctxkv")

_MAX_ROWS = 2048
# Where vLLM's drafts keep the weights that a plan was made of.
_WEIGHTS = ("_stacked_kv_weight", "_fused_kv_weight", "_kv_weights", "_fused_k_weight")
_told: set[str] = set()


def _tell(level: int, text: str) -> None:
    """One line per process for each thing there is to say."""
    if text not in _told:
        _told.add(text)
        logger.log(level, "ctxkv: %s", text)


def _max_rows(arguments: dict[str, Any], rows: int) -> int:
    """Rows of one pass. The Qwen3 family's stock order depends on a call's rows: never split."""
    if "rms" in (arguments["hidden"].kind, arguments["layer"].kind):
        return max(rows, _configured_tokens(), 1)
    given = os.environ.get("CTXKV_MAX_ROWS", "")
    return int(given) if given.isdigit() and int(given) else _MAX_ROWS


def _configured_tokens() -> int:
    try:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        return config.scheduler_config.max_num_batched_tokens if config else 8192
    except (ImportError, AttributeError):
        return 8192


class ContextPath:
    """One draft's way through a call: model is vLLM's inner model, describe one of
    `_vllm_families`. Calling it runs the chain by ctxkv, or by `stock` with a line saying why."""

    def __init__(self, model: Any, describe: Callable[[Any], Described]) -> None:
        self.model, self.describe = model, describe
        self.chain: Optional[ContextKV] = None
        self.described: Optional[Described] = None
        self.refused: Optional[str] = None
        self.bound: tuple[int, ...] = ()
        self.captured = False
        self.graphs: list[ContextKV] = []  # plans that captured graphs may still launch
        self.made_of: Sequence[Any] = ()
        self.recorder = Recorder.from_environment()
        self.forget()

    def __call__(
        self, stock: Callable[..., None], states: torch.Tensor, positions: torch.Tensor,
        mapping: Any,
    ) -> None:
        recorder = None if mapping is None or capturing() else self.recorder
        taken = recorder.take(states, positions, mapping) if recorder else None
        ours = self._try(states, positions, mapping)
        if not ours:
            stock(states, positions, mapping)
        if recorder and taken is not None:
            caches = [attn.kv_cache for attn in getattr(self.model, "_attn_layers", ())]
            store = self.described.arguments if self.described is not None else None
            by = "ctxkv" if ours else "stock"
            recorder.write(taken, caches, self._table(), by, store)

    def _table(self) -> Optional[torch.Tensor]:
        if self.described is not None:
            return self.described.table
        rope = getattr(self.model, "_rotary_emb", None)
        return getattr(rope, "cos_sin_cache", getattr(self.model, "_rope_cos_sin_cache", None))

    def _try(self, states: torch.Tensor, positions: torch.Tensor, mapping: Any) -> bool:
        if self.refused is not None:
            _tell(logging.INFO, f"context K/V by vLLM's own chain: {self.refused}")
            return False
        try:
            chain, described = self._prepare(states.shape[0])
            if mapping is None:
                return True  # a profiling run: the plan and its workspace are in place
            self._bind(chain, described, states)
            self._run(chain, states, positions, mapping)
            return True
        except Stock as reason:
            _tell(logging.WARNING, f"context K/V by vLLM's own chain: {reason}")
        except (ValueError, RuntimeError) as error:
            # Refused before anything was launched or written.
            if self.chain is None and not capturing():
                self.refused = str(error)
            _tell(logging.WARNING, f"context K/V by vLLM's own chain: {error}")
        return False

    def forget(self) -> None:
        """Lets the plan go: the next call makes one of the weights as they are then."""
        if self.captured and self.chain is not None:
            self.graphs.append(self.chain)
        self.chain, self.captured = None, False
        self.refused = None if enabled() else "CTXKV_VLLM=0"

    def _weights(self) -> Any:
        return [getattr(self.model, name, None) for name in _WEIGHTS]

    def _prepare(self, rows: int) -> tuple[ContextKV, Described]:
        current = self._weights()
        if self.chain is not None and self.described is not None:
            split = "rms" not in (self.chain.hidden_kind, self.chain.layer_kind)
            same = all(a is b for a, b in zip(current, self.made_of))
            if same and (split or rows <= self.chain.max_rows):
                return self.chain, self.described
        if capturing():
            raise Stock("no plan yet, and a CUDA graph is being captured")
        self.forget()
        try:
            described = self.describe(self.model)
        except Stock as reason:
            self.refused = str(reason)
            raise
        except (AttributeError, AssertionError, TypeError) as error:
            self.refused = f"the draft is not as vLLM 0.33 makes it: {error}"
            raise Stock(self.refused) from error
        most = _max_rows(described.arguments, rows)
        chain = self.chain = ContextKV(described.weights, max_rows=most, **described.arguments)
        self.described, self.made_of, self.bound = described, self._weights(), ()
        weights = described.weights
        _tell(
            logging.INFO,
            f"context K/V by ctxkv on {weights.device}: {weights.shape[0]} layers, "
            f"{chain.num_kv_heads} KV heads of {chain.head_dim}, hidden size "
            f"{weights.shape[2]}, passes of {most} rows",
        )
        return chain, described

    def _bind(self, chain: ContextKV, described: Described, states: torch.Tensor) -> None:
        caches = [attn.kv_cache for attn in self.model._attn_layers]
        now = tuple(c.data_ptr() for c in caches)
        if now == self.bound and self.bound:
            return
        if capturing():
            raise Stock("the caches have moved, and a CUDA graph is being captured")
        kind = described.arguments["cache_type"]
        check_caches(caches, states, chain.num_kv_heads, chain.head_dim, kind)
        # vLLM owns the caches: held here, they would outlive its freeing of them.
        chain.bind(caches, keep=False)
        self.bound = now

    def _run(
        self, chain: ContextKV, states: torch.Tensor, positions: torch.Tensor, mapping: Any
    ) -> None:
        if states.dtype != torch.bfloat16:
            raise Stock(f"context_states are {states.dtype}, must be bfloat16")
        if positions.dtype != torch.int64 or positions.dim() != 1:
            raise Stock(f"context_positions are {positions.dtype} {list(positions.shape)}")
        lists: Sequence[Any] = mapping if isinstance(mapping, (list, tuple)) else [mapping]
        for slots in lists:
            if slots is not None and (slots.dtype != torch.int64 or slots.dim() != 1):
                raise Stock(f"context_slot_mapping is {slots.dtype} {list(slots.shape)}")
        self.captured = self.captured or capturing()
        chain(states, positions, lists)
