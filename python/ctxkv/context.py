# SPDX-License-Identifier: Apache-2.0
# Drop-ins for the two CuTe kernels of vLLM's Muse Spark draft: same names, same signatures.
"""`ContextNorms` and `ContextKvStore` with the names and signatures of vLLM's
muse_spark...cutedsl.draft.context, so that code written for it runs with its import line changed.

Beyond it: any number of layers, each with strides and a block size of its own, CPU tensors, T = 0,
and skipped rows that are reported (`faults`). Other than there, norm weights are copied when a
ContextNorms is made, and a ContextKvStore makes a plan at its first call with a set of caches,
which therefore may not happen during a CUDA graph capture."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional, Sequence

import torch

from . import _tensor
from ._descriptors import Norm
from ._streams import (
    assert_not_capturing,
    capturing,
    current_stream,
    device_of,
    pdl_supported,
)
from .plans import FaultReport, Norms, Store
from .torch import norms_op, register_plan

D = 8192
HEAD_DIM = 64
# Plans of one kernel kept for caches that come and go; one used by a CUDA graph always stays.
_MOST_PLANS = 64


class ContextNormConstants(NamedTuple):
    """What a norms kernel is specialised for."""

    # None: that norm has no weight. Else: its weight is FP32 (or BF16).
    hidden_weight_fp32: Optional[bool]
    pre_weight_fp32: Optional[bool]
    # The weight multiplies the input, else the norm's output.
    hidden_input_scale: bool
    pre_input_scale: bool
    enable_pdl: bool


def _weight_fp32(weight: Optional[torch.Tensor], name: str) -> Optional[bool]:
    if weight is None:
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} has dtype {weight.dtype}, must be bfloat16 or float32")
    if weight.shape[-1:] != (D,):
        raise ValueError(f"{name} has shape {list(weight.shape)}, must end with {D}")
    return weight.dtype == torch.float32


def context_norm_constants(
    hidden_weight: Optional[torch.Tensor],
    pre_weights: Optional[torch.Tensor],
    *,
    hidden_input_scale: bool = False,
    pre_input_scale: bool = False,
) -> ContextNormConstants:
    """The constants for these weights ([8192] and [L, 8192], BF16, FP32 or None); ValueError where
    they are not taken."""
    return ContextNormConstants(
        hidden_weight_fp32=_weight_fp32(hidden_weight, "hidden_weight"),
        pre_weight_fp32=_weight_fp32(pre_weights, "pre_weights"),
        hidden_input_scale=hidden_weight is not None and hidden_input_scale,
        pre_input_scale=pre_weights is not None and pre_input_scale,
        enable_pdl=pdl_supported(),
    )


class _NormsKernel:
    def __init__(self, constants: ContextNormConstants) -> None:
        self.constants = constants

    def _agree(self, weight: Optional[torch.Tensor], name: str, fp32: Optional[bool]) -> None:
        if _weight_fp32(weight, name) != fp32:
            given = "None" if weight is None else str(weight.dtype)
            wanted = {None: "None", True: "torch.float32", False: "torch.bfloat16"}[fp32]
            raise ValueError(f"{name} is {given}, must be {wanted} as in constants")

    def plan(
        self,
        hidden_weight: Optional[torch.Tensor],
        pre_weights: Optional[torch.Tensor],
        num_layers: int,
        hidden: tuple[float, float],
        pre: tuple[float, float],
        where: torch.device,
    ) -> Norms:
        it = self.constants
        self._agree(hidden_weight, "hidden_weight", it.hidden_weight_fp32)
        self._agree(pre_weights, "pre_weights", it.pre_weight_fp32)
        return Norms(
            device_of(where, it.enable_pdl or where.type != "cuda"),
            num_layers=num_layers,
            hidden_size=D,
            hidden=Norm("row", *hidden, it.hidden_input_scale),
            layer=Norm("row", *pre, it.pre_input_scale),
            hidden_weight=hidden_weight,
            layer_weights=pre_weights,
        )


@functools.cache
def _norms_kernel(constants: ContextNormConstants) -> _NormsKernel:
    return _NormsKernel(constants)


def compile_context_norms(constants: ContextNormConstants) -> Any:
    """The maker of norms plans for one set of constants, the same object each time. RuntimeError
    during a CUDA graph capture."""
    assert_not_capturing("a plan of the context norms")
    return _norms_kernel(constants)


class ContextNorms:
    """stack([pre_norm_l(hidden_norm(x)) for l]), bound to its weights.

    hidden_weight: [8192], pre_weights: [num_layers, 8192], each BF16, FP32 or None (weightless).
    Gain centres are added to the weights in FP32; input_scale: the weight multiplies the input,
    else the norm's output. constants: their `context_norm_constants`, if at hand. Made before a
    capture; a call may be captured. Raises ValueError for arguments, RuntimeError for the machine.
    """

    def __init__(
        self,
        hidden_weight: Optional[torch.Tensor],
        pre_weights: Optional[torch.Tensor],
        num_layers: int,
        hidden_eps: float,
        pre_eps: float,
        *,
        device: torch.device,
        hidden_gain_center: float = 0.0,
        pre_gain_center: float = 0.0,
        hidden_input_scale: bool = False,
        pre_input_scale: bool = False,
        constants: Optional[ContextNormConstants] = None,
    ) -> None:
        self.num_layers = num_layers
        if constants is None:
            constants = context_norm_constants(
                hidden_weight,
                pre_weights,
                hidden_input_scale=hidden_input_scale,
                pre_input_scale=pre_input_scale,
            )
        self.kernel = compile_context_norms(constants)
        self.plan = self.kernel.plan(
            hidden_weight,
            pre_weights,
            num_layers,
            (hidden_eps, hidden_gain_center),
            (pre_eps, pre_gain_center),
            torch.device(device),
        )
        self.plan.shape = (num_layers, D)
        self._id = register_plan(self.plan)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: BF16 [T, 8192], unit column stride. Returns BF16 [num_layers, T, 8192]."""
        if torch.compiler.is_compiling():
            return torch.ops.ctxkv.norms(x, self._id)
        return norms_op(x, self._id)


def _value_view(key: torch.Tensor, name: str) -> Any:
    """V follows K in the cache's last dimension: the same view, 64 elements on."""
    if key.dim() != 4 or key.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"{name} has shape {list(key.shape)}, must be [num_blocks, block_size, H, {HEAD_DIM}]"
        )
    if key.dtype != torch.bfloat16:
        raise ValueError(f"{name} has dtype {key.dtype}, must be torch.bfloat16")
    last = key.storage_offset() + HEAD_DIM
    last += sum((n - 1) * s for n, s in zip(key.shape, key.stride()))
    room = key.untyped_storage().nbytes() // 2
    if key.numel() and last >= room:
        raise ValueError(
            f"{name} has no V behind its K: element {last} is needed, its storage has {room}"
        )
    return key.as_strided(key.shape, key.stride(), key.storage_offset() + HEAD_DIM)


class _StoreKernel:
    def __init__(self, heads: int, rope: bool, enable_pdl: bool) -> None:
        self.heads, self.rope, self.enable_pdl = heads, rope, enable_pdl
        self.plans: dict[tuple[Any, ...], Store] = {}
        self.kept: set[tuple[Any, ...]] = set()

    def plan(
        self, eps: float, table: Optional[torch.Tensor], caches: Sequence[torch.Tensor]
    ) -> Store:
        """The plan bound to these caches; made at their first call."""
        where = caches[0].device
        at = None if table is None else (table.data_ptr(), table.shape[0], table.dtype)
        key = (where, eps, at, *((c.data_ptr(), c.shape, c.stride(), c.dtype) for c in caches))
        plan = self.plans.get(key)
        if plan is None:
            assert_not_capturing("a plan of the context K/V store (first call with these caches)")
            plan = self._make(where, eps, table, caches)
            self._forget()
            self.plans[key] = plan
        if where.type == "cuda" and capturing():
            self.kept.add(key)
        return plan

    def _forget(self) -> None:
        loose = [key for key in self.plans if key not in self.kept]
        for key in loose[: len(loose) - _MOST_PLANS + 1]:
            del self.plans[key]

    def _make(
        self, where: torch.device, eps: float, table: Optional[torch.Tensor],
        caches: Sequence[torch.Tensor],
    ) -> Store:
        values = [_value_view(cache, f"caches[{i}]") for i, cache in enumerate(caches)]
        plan = Store(
            device_of(where, self.enable_pdl or where.type != "cuda"),
            num_layers=len(caches),
            num_kv_heads=self.heads,
            head_dim=HEAD_DIM,
            k_norm="plain",
            k_eps=eps,
            rope="gptj" if self.rope else "none",
            cos_sin=table,
        )
        # By address alone, as the original: whoever owns the caches may let them go.
        plan.bind_caches(caches, values, keep=False)
        return plan


@functools.cache
def _store_kernel(heads: int, rope: bool, enable_pdl: bool) -> _StoreKernel:
    return _StoreKernel(heads, rope, enable_pdl)


def compile_context_kv_store(heads: int, rope: bool, enable_pdl: bool) -> Any:
    """The maker and keeper of store plans of `heads` KV heads, the same object each time.
    RuntimeError during a CUDA graph capture."""
    assert_not_capturing("a plan of the context K/V store")
    return _store_kernel(heads, rope, enable_pdl)


class ContextKvStore:
    """K norm with eps, GPT-J RoPE (with rope) and cache insert of num_heads KV heads of 64.

    Made before a CUDA graph capture, as its first call with each set of caches; such calls may be
    captured then. Raises ValueError for arguments, RuntimeError for the machine.
    """

    def __init__(self, num_heads: int, rope: bool, eps: float) -> None:
        self.rope = rope
        self.kernel = compile_context_kv_store(num_heads, rope, pdl_supported())
        self._eps = eps
        self._last: Optional[Store] = None

    # K views are written 64 elements past their end, which no operator schema can declare.
    @torch.compiler.disable
    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        cos_sin_cache: Optional[torch.Tensor],
        caches: Sequence[torch.Tensor],
    ) -> None:
        """Inserts the K/V rows of L = len(caches) layers.

        k, v: BF16 [L, T, H, 64], unit last stride. positions: int64 [T]. slots: per layer int64
        [R], R <= T; negative: the row is not stored. cos_sin_cache: BF16 [max_position, 64], None
        without rope. caches: per layer the K view [num_blocks, block_size, H, 64] of a BF16 cache
        whose V follows K in the last dimension, of any strides.
        """
        if (cos_sin_cache is not None) != self.rope:
            given = "None" if cos_sin_cache is None else "given"
            raise ValueError(f"cos_sin_cache is {given}, must be given exactly with rope")
        if len(caches) == 0 or len(slots) != len(caches):
            raise ValueError(
                f"slots has {len(slots)} tensors for {len(caches)} caches, must have one for each"
            )
        plan = self._last = self.kernel.plan(self._eps, cos_sin_cache, caches)
        rows = max(s.shape[0] for s in slots)
        if rows == 0:
            return
        if rows < k.shape[1]:
            k, v, positions = k[:, :rows], v[:, :rows], positions[:rows]
        where = positions[: k.shape[1]] if self.rope else None
        plan.run(k, v, where, _tensor_list(slots), current_stream(k.device))

    def faults(self) -> FaultReport:
        """What calls with the last caches skipped since the last reading."""
        return self._last.faults() if self._last else FaultReport(0, "none", 0, 0, 0, 0)


def _tensor_list(slots: Sequence[torch.Tensor]) -> list[Any]:
    first = slots[0]
    # Layers mostly share one slot mapping: describe it once.
    if all(slot is first for slot in slots):
        return [_tensor.of(first, "slots[0]")]
    return list(slots)
