# SPDX-License-Identifier: Apache-2.0
# The chain bound to a draft's torch tensors, and the torch operators.
"""`ContextKV`: the context K/V chain of one draft, bound to its weights and caches.

The operators of the namespace `ctxkv` are registered when this is imported:

- `norms(Tensor x, int plan) -> Tensor`
- `context_kv_(Tensor(a!)[] caches, Tensor x, Tensor? positions, Tensor?[] slots, int plan) -> ()`

They have fake implementations and declare what they write, so torch.compile keeps them; `ContextKV`
and `ContextNorms` call them by themselves while compiling. Everything runs on torch's current
stream and may be captured in CUDA graphs."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Optional, Sequence, Union

import torch

from ._descriptors import Norm
from ._streams import assert_not_capturing, current_stream, device_of
from .plans import Chain, FaultReport

Slots = Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]]

_plans: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_ids = itertools.count(1)


def register_plan(plan: Any) -> int:
    """A number for the operators to find a plan by, for as long as it lives. Never used twice."""
    number = next(_ids)
    _plans[number] = plan
    return number


def _plan(number: int) -> Any:
    plan = _plans.get(number)
    if plan is None:
        raise RuntimeError(f"ctxkv plan {number} is no longer there: its owner was let go")
    return plan


def _pair(cache: Any, head_dim: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(K view, V view) of [num_blocks, block_size, H, head_dim] each."""
    if not isinstance(cache, torch.Tensor):
        key, value = cache
        return key, value
    if cache.dim() != 4 or cache.shape[-1] != 2 * head_dim:
        raise ValueError(
            f"{name} has shape {list(cache.shape)}, must be [num_blocks, H, block_size, "
            f"{2 * head_dim}] (K, then V) or a pair of K and V views"
        )
    return cache.transpose(1, 2).split(head_dim, dim=-1)


class ContextKV:
    """hidden norm -> layer norms -> K/V projection -> K norm, RoPE -> cache insert, for one draft.

    weights: BF16 [L, 2*H*head_dim, D] (each layer's K rows, then V rows; with v_from_k only the K
        rows), or a list of L tensors [2*H*head_dim, D]; used where they lie.
    num_kv_heads: H of this tensor-parallel rank. head_dim: 64, 128, 256 or 512.
    hidden, layer: `Norm`s. hidden_weight: [D], layer_weights: [L, D] or L of [D]; BF16 or FP32,
        None for weightless; copied. For the Qwen3 family: Norm("rms", eps) and Norm("absent").
    bias: BF16 [L, 2*H*head_dim], bias_add: "fused" or "after" the rounding (Laguna).
    k_norm: "plain", "rms" (with k_norm_weight [L, head_dim], to which k_gain_centre is added) or
        "absent". rope: "none", "gptj", "neox" of the first rotary_dim elements (0: all), with
        cos_sin [max_position, rotary_dim] in BF16, FP16 or FP32, or one table for each layer.
    v_norm: "absent" or "rms" (weightless, v_eps), v_scale: None or a factor, v_from_k: V is made
        of raw K (Gemma 4). cache_type: "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", the last two with
        k_scales and v_scales, an FP32 tensor of one value for each layer, read by every call.
    max_rows: rows of one pass. Longer calls go in several, where a row's bits do not depend on its
        neighbours (not: "rms" norms with numerics "stock").
    Raises ValueError for arguments, RuntimeError for the machine or during a capture.
    """

    def __init__(
        self,
        weights: Union[torch.Tensor, Sequence[torch.Tensor]],
        num_kv_heads: int,
        *,
        head_dim: int = 64,
        hidden: Norm = Norm(),
        layer: Norm = Norm(),
        hidden_weight: Optional[torch.Tensor] = None,
        layer_weights: Union[None, torch.Tensor, Sequence[torch.Tensor]] = None,
        bias: Optional[torch.Tensor] = None,
        bias_add: str = "fused",
        k_norm: str = "plain",
        k_eps: float = 1e-5,
        k_norm_weight: Optional[torch.Tensor] = None,
        k_gain_centre: float = 0.0,
        rope: str = "none",
        rotary_dim: int = 0,
        cos_sin: Union[None, torch.Tensor, Sequence[torch.Tensor]] = None,
        v_norm: str = "absent",
        v_eps: float = 1e-5,
        v_scale: Optional[float] = None,
        v_from_k: bool = False,
        cache_type: str = "bf16",
        k_scales: Optional[Sequence[torch.Tensor]] = None,
        v_scales: Optional[Sequence[torch.Tensor]] = None,
        max_rows: int = 2048,
        numerics: str = "stock",
        projection: str = "auto",
    ) -> None:
        first = weights if isinstance(weights, torch.Tensor) else weights[0]
        if isinstance(weights, torch.Tensor) and weights.dim() != 3:
            raise ValueError(f"weights has shape {list(weights.shape)}, must have 3 dimensions")
        assert_not_capturing("a ContextKV")
        self.num_layers, self.hidden_size = len(weights), first.shape[-1]
        self.num_kv_heads, self.head_dim, self.device = num_kv_heads, head_dim, first.device
        self._rope, self._index = rope != "none", first.get_device()
        self.hidden_kind, self.layer_kind = hidden.kind, layer.kind
        self._split = numerics == "invariant" or "rms" not in (hidden.kind, layer.kind)
        shape = {"num_layers": self.num_layers, "hidden_size": self.hidden_size}
        heads = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
        self._arguments: dict[str, Any] = {
            "norms": {
                **shape, "hidden": hidden, "layer": layer, "hidden_weight": hidden_weight,
                "layer_weights": layer_weights, "numerics": numerics,
            },
            "projection": {
                **shape, **heads, "weights": weights, "bias": bias, "bias_add": bias_add,
                "k_only": v_from_k, "mode": projection,
            },
            "store": {
                "num_layers": self.num_layers, **heads, "k_norm": k_norm, "k_eps": k_eps,
                "k_norm_weight": k_norm_weight, "k_gain_centre": k_gain_centre, "rope": rope,
                "rotary_dim": rotary_dim, "cos_sin": cos_sin, "v_norm": v_norm, "v_eps": v_eps,
                "v_scale": v_scale, "v_from_k": v_from_k, "cache_type": cache_type,
                "k_scales": k_scales, "v_scales": v_scales,
            },
            "max_rows": max_rows,
        }
        self.chain = Chain(device_of(self.device), **self._arguments)
        self.max_rows = max_rows
        self._caches: Optional[list[torch.Tensor]] = None
        self._bound: Any = None
        self._other: Optional[Chain] = None
        self._lock = threading.Lock()
        self._workspaces: dict[int, Any] = {}
        self._id = register_plan(self)

    def bind(self, caches: Sequence[Any], keep: bool = True) -> None:
        """Binds the caches of all layers: each [num_blocks, H, block_size, 2*head_dim] (K, then V;
        any strides; of cache_type, FP8 also as uint8), or a pair of K and V views [num_blocks,
        block_size, H, head_dim].

        keep: hold the tensors, so that the memory stays. May not overlap a call, nor be captured.
        """
        assert_not_capturing("a binding of caches")
        if len(caches) != self.num_layers:
            raise ValueError(f"caches has {len(caches)} layers, must have {self.num_layers}")
        pairs = [_pair(c, self.head_dim, f"caches[{i}]") for i, c in enumerate(caches)]
        self.chain.bind_caches([k for k, _ in pairs], [v for _, v in pairs], keep)
        if all(isinstance(c, torch.Tensor) for c in caches):
            flat = list(caches)
        else:
            flat = [k for k, _ in pairs] + [v for _, v in pairs]
        self._bound = tuple(c.data_ptr() for c in flat)
        self._caches = flat if keep else None

    def __call__(
        self, x: torch.Tensor, positions: Optional[torch.Tensor] = None, slots: Slots = None
    ) -> None:
        """x: BF16 [T, D]. positions: int64 [T], None without RoPE. slots: int64 [R], R <= T, for
        all layers, or one per layer (None: that layer stores nothing); None: nothing is done."""
        if slots is None:
            return
        lists = [slots] if isinstance(slots, torch.Tensor) else list(slots)
        if torch.compiler.is_compiling():
            if self._caches is None:
                raise RuntimeError("no caches: call bind (with keep) before compiling")
            torch.ops.ctxkv.context_kv_(self._caches, x, positions, lists, self._id)
            return
        self._run(self.chain, x, positions, lists)

    def faults(self) -> FaultReport:
        """Rows that runs skipped since the last reading (waits for a CUDA device)."""
        return self.chain.faults()

    def _workspace(self, chain: Chain, stream: int) -> int:
        """The plan's own for the first stream, one of torch's for each further stream."""
        if self.device.type != "cuda":
            return 0
        if stream not in self._workspaces:
            own = None
            if self._workspaces:
                size = chain.workspace_size + 256
                own = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._workspaces.setdefault(stream, own)
        held = self._workspaces[stream]
        return 0 if held is None else -(-held.data_ptr() // 256) * 256

    def _plain(self, vector: torch.Tensor, most: int) -> bool:
        return (
            vector.dtype is torch.int64
            and vector.dim() == 1
            and vector.shape[0] <= most
            and vector.get_device() == self._index
            and vector.is_contiguous()
        )

    def _addresses(
        self, x: torch.Tensor, positions: Optional[torch.Tensor], lists: list[Any]
    ) -> Optional[tuple[int, list[int], list[int]]]:
        """Where the positions and slots lie, and the slots' lengths; None where that is not plain
        to see: then the checked call takes or refuses them."""
        try:
            if (
                x.dtype is not torch.bfloat16 or x.dim() != 2 or x.get_device() != self._index
                or x.shape[1] != self.hidden_size or x.stride(1) != 1
                or len(lists) not in (1, self.num_layers)
            ):
                return None
            rows, at = x.shape[0], 0
            if positions is not None:
                if not self._plain(positions, rows) or positions.shape[0] != rows:
                    return None
                at = positions.data_ptr()
            elif self._rope:
                return None
            addresses, lengths = [], []
            for slots in lists:
                if slots is None:
                    addresses.append(0)
                    lengths.append(0)
                elif self._plain(slots, rows):
                    addresses.append(slots.data_ptr())
                    lengths.append(slots.shape[0])
                else:
                    return None
            return at, addresses, lengths
        except AttributeError:  # no tensor
            return None

    def _run(
        self, chain: Chain, x: torch.Tensor, positions: Optional[torch.Tensor], lists: list[Any]
    ) -> None:
        stream = current_stream(self.device)
        found = self._addresses(x, positions, lists)
        if found is None:
            chain.run(x, positions, lists, stream)
            return
        rows, most = x.shape[0], self.max_rows
        if rows > most and self._split:
            for start in range(0, rows, most):
                part = slice(start, start + most)
                self._run(
                    chain, x[part], None if positions is None else positions[part],
                    [None if s is None else s[part] for s in lists],
                )
            return
        chain.run_raw(
            x.data_ptr(), x.stride(0), rows, *found, stream, self._workspace(chain, stream)
        )

    def run_on(
        self, caches: Sequence[torch.Tensor], x: torch.Tensor, positions: Optional[torch.Tensor],
        lists: list[Any],
    ) -> None:
        """The operator's body: caches are the bound ones, or copies that a compiler put there."""
        if tuple(c.data_ptr() for c in caches) == self._bound:
            self._run(self.chain, x, positions, lists)
            return
        count = self.num_layers
        whole = len(caches) == count
        given = list(caches) if whole else list(zip(caches[:count], caches[count:]))
        pairs = [_pair(c, self.head_dim, f"caches[{i}]") for i, c in enumerate(given)]
        with self._lock:
            if self._other is None:
                assert_not_capturing("a plan for copied caches")
                self._other = Chain(device_of(self.device), **self._arguments)
            assert_not_capturing("a binding of copied caches")
            self._other.bind_caches([k for k, _ in pairs], [v for _, v in pairs])
            self._run(self._other, x, positions, lists)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()


# ---- operators ---------------------------------------------------------------------------------
_library = torch.library.Library("ctxkv", "DEF")
_tags = (torch.Tag.needs_exact_strides,) if hasattr(torch.Tag, "needs_exact_strides") else ()
_library.define("norms(Tensor x, int plan) -> Tensor", tags=_tags)
_library.define(
    "context_kv_(Tensor(a!)[] caches, Tensor x, Tensor? positions, Tensor?[] slots, int plan)"
    " -> ()",
    tags=_tags,
)


def norms_op(x: torch.Tensor, plan: int) -> torch.Tensor:
    """ctxkv::norms: BF16 [T, D] -> BF16 [L, T, D]."""
    norms = _plan(plan)
    layers, width = norms.shape
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"x has shape {list(x.shape)}, must be [T, {width}]")
    out = torch.empty((layers, x.shape[0], width), dtype=torch.bfloat16, device=x.device)
    norms.run(x, out, current_stream(x.device))
    return out


def _norms_fake(x: torch.Tensor, plan: int) -> torch.Tensor:
    layers, width = _plan(plan).shape
    return x.new_empty((layers, x.shape[0], width), dtype=torch.bfloat16)


def context_kv_op(
    caches: Sequence[torch.Tensor], x: torch.Tensor, positions: Optional[torch.Tensor],
    slots: Sequence[Optional[torch.Tensor]], plan: int,
) -> None:
    """ctxkv::context_kv_: the chain of a ContextKV, into the caches given."""
    _plan(plan).run_on(caches, x, positions, list(slots))


def _context_kv_fake(
    caches: Sequence[torch.Tensor], x: torch.Tensor, positions: Optional[torch.Tensor],
    slots: Sequence[Optional[torch.Tensor]], plan: int,
) -> None:
    return None


for _key in ("CPU", "CUDA"):
    _library.impl("norms", norms_op, _key)
    _library.impl("context_kv_", context_kv_op, _key)
torch.library.register_fake("ctxkv::norms", _norms_fake, lib=_library)
torch.library.register_fake("ctxkv::context_kv_", _context_kv_fake, lib=_library)
