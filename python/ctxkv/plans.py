# SPDX-License-Identifier: Apache-2.0
# One class per plan of the C API, for tensors of any framework.
"""Plans of the context K/V chain. Shapes are written as in the C header: T context rows, D hidden
size, L layers, H KV heads of this rank, R <= T slots. Every class raises ValueError where an
argument is refused (argument, what it was, what it must be) and RuntimeError where the machine
fails; nothing has been written then. Streams are CUstream addresses, ignored on a CPU."""

from __future__ import annotations

import ctypes
import inspect
import weakref
from ctypes import byref, c_int64, c_void_p
from typing import Any, Callable, NamedTuple, Sequence, TypeVar

from . import _abi, _tensor
from ._descriptors import norms_desc, pointer, projection_desc, store_desc
from ._device import Device
from ._library import check, integer, library, real
from ._tensor import TensorList


class FaultReport(NamedTuple):
    """What runs skipped: pairs of (layer, row), and the first of them."""

    count: int  # type: ignore[assignment]  # a tuple's count() is not missed here
    kind: str
    layer: int
    row: int
    value: int
    limit: int


_Self = TypeVar("_Self", bound="_Plan")


class _Plan:
    """A handle, the tensors that it uses where they lie, and its end."""

    _kind = ""

    def _create(self, where: Device, desc: Any, keep: Any) -> None:
        lib = library()
        if not isinstance(where, Device):
            raise ValueError(f"device is {where!r}, must be a ctxkv.Device")
        handle = c_void_p()
        create = getattr(lib, f"ctxkv_{self._kind}_create")
        check(create(where.handle, byref(desc), byref(handle)))
        self.device = where
        self.handle = handle.value
        self._keep = keep
        # Not at exit: the driver may be gone by then, and the process ends anyway.
        self._finalizer = weakref.finalize(
            self, getattr(lib, f"ctxkv_{self._kind}_destroy"), self.handle
        )
        self._finalizer.atexit = False  # type: ignore[misc]  # typeshed lacks it

    def close(self) -> None:
        """Destroys the plan; no run may be under way. May be called again."""
        self._finalizer()
        self.handle = None

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _made_of(
    describe: Callable[..., tuple[Any, Any]], keep: bool = True
) -> Callable[..., None]:
    """The __init__ of a plan: a device, then the arguments of describe, as help() shows them.
    keep: the tensors are used where they lie."""

    def __init__(self: Any, device: Device, *arguments: Any, **named: Any) -> None:
        desc, tensors = describe(*arguments, **named)
        self._create(device, desc, tensors if keep else None)

    own, given = inspect.signature(__init__).parameters, inspect.signature(describe).parameters
    shown = [own["self"], own["device"], *given.values()]
    setattr(__init__, "__signature__", inspect.Signature(shown, return_annotation=None))
    return __init__


class Norms(_Plan):
    """The hidden norm, then one norm per layer.

    num_layers: L. hidden_size: D. hidden, layer: `Norm`. hidden_weight: [D] BF16 or FP32, or None.
    layer_weights: one [L, D], L of [D], or None. Copied; numerics: "stock", "pair", "packed",
    "invariant".
    """

    _kind = "norms"

    __init__ = _made_of(norms_desc, keep=False)  # the weights are copied

    def run(self, x: Any, out: Any, stream: int = 0) -> None:
        """x: BF16 [T, D]. out: BF16 [L, T, D], or [1, T, D] when the layer norm is absent."""
        given, to = _tensor.of(x, "x"), _tensor.of(out, "out")
        check(library().ctxkv_norms_run(self.handle, byref(given), byref(to), stream or None))


class Projection(_Plan):
    """x W^T for every layer, K columns then V columns.

    weights: BF16, one [L, 2*H*head_dim, D], or L of [2*H*head_dim, D], or 2L of [H*head_dim, D];
    used where they lie. bias: BF16 [L, 2*H*head_dim] or None. bias_add: "fused", BF16(acc + bias),
    or "after", BF16(BF16(acc) + bias). k_only: no V, half the columns. mode: "auto", "exact",
    "cublas".
    """

    _kind = "projection"

    __init__ = _made_of(projection_desc)

    def run(self, normed: Any, kv: Any, stream: int = 0) -> None:
        """normed: BF16 [L, T, D] or [1, T, D]. kv: BF16 [L, T, 2*H*head_dim], any outer strides."""
        given, to = _tensor.of(normed, "normed"), _tensor.of(kv, "kv")
        check(library().ctxkv_projection_run(self.handle, byref(given), byref(to), stream or None))


class _Caching(_Plan):
    """What Store and Chain share: caches and faults."""

    def bind_caches(self, keys: Sequence[Any], values: Sequence[Any], keep: bool = True) -> None:
        """Binds L views [num_blocks, block_size, H, head_dim] each, of any strides.

        The memory must stay until the next bind or the end of the plan: the plan holds the tensors,
        unless keep is False.
        """
        k, v = TensorList(keys, "keys"), TensorList(values, "values")
        if k.count != v.count:
            raise ValueError(f"values has {v.count} tensors, must have {k.count} as keys")
        bind = getattr(library(), f"ctxkv_{self._kind}_bind_caches")
        check(bind(self.handle, k.pointers, v.pointers, k.count))
        self._caches = (k, v) if keep else None

    def faults(self) -> FaultReport:
        """Reads and clears what runs skipped. On a CUDA device it waits for the device."""
        raw = _abi.Faults()
        check(getattr(library(), f"ctxkv_{self._kind}_faults")(self.handle, byref(raw)))
        kind = _abi.FAULT_KINDS.get(raw.kind, str(raw.kind))
        return FaultReport(raw.count, kind, raw.layer, raw.row, raw.value, raw.limit)


def _slots(slots: Any) -> TensorList:
    return TensorList([slots] if slots is None or _tensor.is_tensor(slots) else slots, "slots")


class Store(_Caching):
    """K norm, RoPE and cache insert.

    num_layers, num_kv_heads, head_dim (64, 128, 256, 512). k_norm: "plain" (head_dim 64), "rms"
    with k_norm_weight [L, head_dim] (k_gain_centre is added to it; None: weightless), or "absent".
    rope: "none", "gptj" or "neox" of the first rotary_dim elements (0: all) with cos_sin
    [max_position, rotary_dim] in BF16, FP16 or FP32, or L of them; used where they lie.
    v_norm: "absent", or "rms" with v_eps, weightless. v_scale: V becomes BF16(V * v_scale); None:
    no. v_from_k: V is made of raw K. cache_type: "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"; for FP8,
    k_scales and v_scales: L FP32 values each, in tensors that every run reads, None for 1.
    checked: CPU only, fail instead of skipping.
    """

    _kind = "store"

    __init__ = _made_of(store_desc)

    def run(self, k: Any, v: Any, positions: Any, slots: Any, stream: int = 0) -> None:
        """k, v: BF16 [L, T, H, head_dim] (v None with v_from_k). positions: int64 [T] (None
        without RoPE). slots: one int64 [R] for all layers, or L of them with None where a layer
        stores nothing."""
        keys, values = _tensor.of(k, "k"), _tensor.optional(v, "v")
        where, lists = _tensor.optional(positions, "positions"), _slots(slots)
        check(
            library().ctxkv_store_run(
                self.handle, byref(keys), pointer(values), pointer(where), lists.pointers,
                lists.count, stream or None,
            )
        )


class Chain(_Caching):
    """Norms, projection and store with one workspace for at most max_rows rows.

    norms, projection, store: dicts of the arguments of `Norms`, `Projection` (with "weights") and
    `Store`. Runs may overlap only if each brings its own workspace.
    """

    _kind = "chain"

    def __init__(
        self,
        device: Device,
        *,
        norms: dict[str, Any],
        projection: dict[str, Any],
        store: dict[str, Any],
        max_rows: int,
    ) -> None:
        lib = library()
        first, keep_first = norms_desc(**norms)
        second, keep_second = projection_desc(**{"max_rows": max_rows, **projection})
        third, keep_third = store_desc(**store)
        desc = _abi.ChainDesc()
        lib.ctxkv_chain_desc_init_sized(byref(desc), ctypes.sizeof(desc))
        desc.norms, desc.projection = ctypes.pointer(first), ctypes.pointer(second)
        desc.store = ctypes.pointer(third)
        desc.max_rows = integer("max_rows", max_rows)
        self._create(device, desc, (keep_second, keep_third))
        del keep_first
        self.num_layers, self.max_rows = first.num_layers, desc.max_rows
        self._run_call = lib.ctxkv_chain_run_call
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    @property
    def workspace_size(self) -> int:
        """Bytes of a workspace for max_rows rows, to be 256-byte aligned."""
        return library().ctxkv_chain_workspace_size(self.handle)

    @property
    def memory(self) -> int:
        """Bytes that the plan holds beside the caller's tensors."""
        return library().ctxkv_chain_memory(self.handle)

    def run(self, x: Any, positions: Any, slots: Any, stream: int = 0) -> None:
        """x: BF16 [T, D], T <= max_rows. positions, slots: as `Store.run` takes them."""
        given, where = _tensor.of(x, "x"), _tensor.optional(positions, "positions")
        lists = _slots(slots)
        check(
            library().ctxkv_chain_run(
                self.handle, byref(given), pointer(where), lists.pointers, lists.count,
                stream or None,
            )
        )

    def _new_call(self) -> tuple[Any, Any, Any, Any]:
        call = _abi.ChainCall()
        library().ctxkv_chain_call_init_sized(byref(call), ctypes.sizeof(call))
        slots, rows = (c_void_p * self.num_layers)(), (c_int64 * self.num_layers)()
        call.slots, call.slot_rows = ctypes.addressof(slots), ctypes.addressof(rows)
        return call, slots, rows, byref(call)

    def run_raw(
        self,
        x: int,
        x_row_stride: int,
        rows: int,
        positions: int,
        slots: Sequence[int],
        slot_rows: Sequence[int],
        stream: int = 0,
        workspace: int = 0,
    ) -> None:
        """The same from addresses, unchecked but for what the C call checks: x BF16 [rows, D],
        positions int64 [rows] or 0, slots one address or L (0: nothing stored) with their lengths.
        """
        # Popping is atomic: threads never share a call struct.
        try:
            entry = self._calls.pop()
        except IndexError:
            entry = self._new_call()
        call, addresses, lengths, pointer = entry
        count = len(slots)
        if count != len(slot_rows) or count > self.num_layers:
            raise ValueError(f"slots has {count} addresses, must be 1 or {self.num_layers}")
        for i in range(count):
            addresses[i] = slots[i]
            lengths[i] = slot_rows[i]
        call.x, call.x_row_stride, call.rows, call.positions = x, x_row_stride, rows, positions
        call.slot_count, call.workspace, call.stream = count, workspace, stream
        status = self._run_call(self.handle, pointer)
        self._calls.append(entry)
        if status:
            check(status)


def rope_table(
    theta: float, rotary_dim: int, positions: int, dtype: str = "bf16"
) -> _tensor.Tensor:
    """vLLM's cos/sin table of the GPU, bit for bit: [positions, rotary_dim], cos then sin, as
    "bf16", "float16" or "fp32"."""
    theta, dim = real("theta", theta), integer("rotary_dim", rotary_dim)
    rows = integer("positions", positions)
    table = _tensor.Tensor((max(rows, 0), max(dim, 0)), dtype)
    look = _tensor.of(table, "table")
    check(library().ctxkv_rope_table(theta, dim, rows, byref(look)))
    return table
