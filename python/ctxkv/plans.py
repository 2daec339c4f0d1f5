# SPDX-License-Identifier: Apache-2.0
# Devices and plans: one class per plan of the C API, for tensors of any framework.
"""Plans of the context K/V chain. Shapes are written as in the C header: T context rows, D hidden
size, L layers, H KV heads of this rank, R <= T slots. Every class raises ValueError where an
argument is refused (argument, what it was, what it must be) and RuntimeError where the machine
fails; nothing has been written then. Streams are CUstream addresses, ignored on a CPU."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import weakref
from ctypes import byref, c_int64, c_void_p
from typing import Any, Callable, NamedTuple, Optional, Sequence, TypeVar

from . import _abi, _cublas, _tensor
from ._library import check, choice, integer, library, real
from ._tensor import TensorList


class Norm(NamedTuple):
    """One norm: kind "row" (Muse Spark, D = 8192), "rms" (Qwen3 family) or "absent"; eps >= 0;
    gain_centre is added to the weight; input_scale: the weight multiplies the input ("row")."""

    kind: str = "row"
    eps: float = 1e-5
    gain_centre: float = 0.0
    input_scale: bool = False


class FaultReport(NamedTuple):
    """What runs skipped: pairs of (layer, row), and the first of them."""

    count: int  # type: ignore[assignment]  # a tuple's count() is not missed here
    kind: str
    layer: int
    row: int
    value: int
    limit: int


class Device:
    """A device that plans are made on.

    name: "cpu", "cuda" or "cuda:N". threads: CPU workers, 0 for as many as may be used. cpu_tiers:
    names out of "scalar", "avx2", "avx512" that may be used, () for all (or $CTXKV_CPU_MASK).
    cublas_path: libcublas, None to look for it. Raises ValueError, or RuntimeError without such a
    device.
    """

    def __init__(
        self,
        name: str = "cpu",
        *,
        threads: int = 0,
        cpu_tiers: Sequence[str] = (),
        cublas_path: Optional[str] = None,
        programmatic_launch: bool = True,
    ) -> None:
        lib = library()
        if not isinstance(name, str):
            raise ValueError(f"name is {name!r}, must be 'cpu', 'cuda' or 'cuda:N'")
        options = _abi.DeviceOptions()
        lib.ctxkv_device_options_init_sized(byref(options), ctypes.sizeof(options))
        options.threads = min(max(integer("threads", threads), -1), 2**31 - 1)
        options.cpu_mask = sum({choice("cpu_tiers", t, _abi.CPU_TIERS) for t in cpu_tiers})
        options.programmatic_launch = int(bool(programmatic_launch))
        path = cublas_path or (_cublas.find() if name.startswith("cuda") else None)
        options.cublas_path = os.fsencode(path) if path else None
        handle = c_void_p()
        check(lib.ctxkv_device_open(name.encode(), byref(options), byref(handle)))
        self.name = name
        self.handle = handle.value
        self._finalizer = weakref.finalize(self, lib.ctxkv_device_close, self.handle)
        self._finalizer.atexit = False  # type: ignore[misc]  # typeshed lacks it

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")

    def info(self) -> dict[str, Any]:
        """Name, CPU tiers found and used, threads, CUDA arch, driver, cuBLAS, bits_verified."""
        raw = _abi.DeviceInfo()
        raw.size = ctypes.sizeof(raw)
        check(library().ctxkv_device_get_info(self.handle, byref(raw)))
        tiers = {bit: name for name, bit in _abi.CPU_TIERS.items()}
        return {
            "name": raw.name.decode(errors="replace"),
            "cpu_found": [name for bit, name in tiers.items() if raw.cpu_found & bit],
            "cpu_used": tiers.get(raw.cpu_used, "none"),
            "threads": raw.threads,
            "cuda_arch": raw.cuda_arch,
            "driver": raw.driver,
            "cublas": raw.cublas,
            "bits_verified": bool(raw.bits_verified),
        }


@functools.cache
def device(name: str = "cpu", programmatic_launch: bool = True) -> Device:
    """The process's shared Device of that name."""
    return Device(name, programmatic_launch=programmatic_launch)


def cuda_device_count() -> int:
    """Number of CUDA devices that the driver shows; 0 without a driver. Initialises CUDA."""
    return library().ctxkv_cuda_device_count()


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


def _norm(name: str, norm: Norm) -> _abi.Norm:
    made = _abi.Norm()
    made.kind = choice(f"{name}.kind", norm.kind, _abi.NORM_KINDS)
    made.eps = real(f"{name}.eps", norm.eps)
    made.gain_centre = real(f"{name}.gain_centre", norm.gain_centre)
    made.input_scale = int(bool(norm.input_scale))
    return made


def _pointer(tensor: Optional[_abi.DLTensor]) -> Any:
    return None if tensor is None else ctypes.pointer(tensor)


def _one_or_list(value: Any, name: str) -> Optional[TensorList]:
    if value is None:
        return None
    return TensorList([value] if _tensor.is_tensor(value) else value, name)


def _norms_desc(
    *,
    num_layers: int,
    hidden_size: int = 8192,
    hidden: Norm = Norm(),
    layer: Norm = Norm(),
    hidden_weight: Any = None,
    layer_weights: Any = None,
    numerics: str = "stock",
) -> tuple[_abi.NormsDesc, Any]:
    desc = _abi.NormsDesc()
    library().ctxkv_norms_desc_init_sized(byref(desc), ctypes.sizeof(desc))
    desc.hidden_size = integer("hidden_size", hidden_size)
    desc.num_layers = integer("num_layers", num_layers)
    desc.hidden, desc.layer = _norm("hidden", hidden), _norm("layer", layer)
    weight = _tensor.optional(hidden_weight, "hidden_weight")
    desc.hidden_weight = _pointer(weight)
    layers = _one_or_list(layer_weights, "layer_weights")
    if layers is not None:
        desc.layer_weights, desc.layer_weight_count = layers.pointers, layers.count
    desc.numerics = choice("numerics", numerics, _abi.NUMERICS)
    return desc, (weight, layers)


def _projection_desc(
    weights: Any,
    *,
    num_layers: int,
    num_kv_heads: int,
    hidden_size: int = 8192,
    head_dim: int = 64,
    bias: Any = None,
    bias_add: str = "fused",
    k_only: bool = False,
    mode: str = "auto",
    max_rows: int = 0,
) -> tuple[_abi.ProjectionDesc, Any]:
    desc = _abi.ProjectionDesc()
    library().ctxkv_projection_desc_init_sized(byref(desc), ctypes.sizeof(desc))
    desc.hidden_size = integer("hidden_size", hidden_size)
    desc.num_layers = integer("num_layers", num_layers)
    desc.num_kv_heads = integer("num_kv_heads", num_kv_heads)
    desc.head_dim = integer("head_dim", head_dim)
    if weights is None:
        raise ValueError("weights is None, must be one tensor, or a list of them")
    given = TensorList([weights] if _tensor.is_tensor(weights) else weights, "weights")
    desc.weights, desc.weight_count = given.pointers, given.count
    bias = _tensor.optional(bias, "bias")
    desc.bias = _pointer(bias)
    desc.bias_add = choice("bias_add", bias_add, _abi.BIAS_ADDS)
    desc.k_only = int(bool(k_only))
    desc.mode = choice("mode", mode, _abi.PROJECTION_MODES)
    desc.max_rows = integer("max_rows", max_rows)
    return desc, (given, bias)


def _store_desc(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int = 64,
    k_norm: str = "plain",
    k_eps: float = 1e-5,
    k_norm_weight: Any = None,
    k_gain_centre: float = 0.0,
    rope: str = "none",
    rotary_dim: int = 0,
    cos_sin: Any = None,
    v_norm: str = "absent",
    v_eps: float = 1e-5,
    v_scale: Optional[float] = None,
    v_from_k: bool = False,
    cache_type: str = "bf16",
    k_scales: Any = None,
    v_scales: Any = None,
    checked: bool = False,
) -> tuple[_abi.StoreDesc, Any]:
    desc = _abi.StoreDesc()
    library().ctxkv_store_desc_init_sized(byref(desc), ctypes.sizeof(desc))
    desc.num_layers = integer("num_layers", num_layers)
    desc.num_kv_heads = integer("num_kv_heads", num_kv_heads)
    desc.head_dim = integer("head_dim", head_dim)
    desc.k_norm = choice("k_norm", k_norm, _abi.K_NORMS)
    desc.k_eps = real("k_eps", k_eps)
    weight = _tensor.optional(k_norm_weight, "k_norm_weight")
    desc.k_norm_weight = _pointer(weight)
    desc.k_gain_centre = real("k_gain_centre", k_gain_centre)
    desc.rope = choice("rope", rope, _abi.ROPES)
    desc.rotary_dim = integer("rotary_dim", rotary_dim)
    if cos_sin is None or _tensor.is_tensor(cos_sin):
        tables: Any = _tensor.optional(cos_sin, "cos_sin")
        desc.cos_sin = _pointer(tables)
    else:
        tables = TensorList(cos_sin, "cos_sin")
        desc.layer_cos_sin, desc.layer_cos_sin_count = tables.pointers, tables.count
    desc.v_norm = choice("v_norm", v_norm, _abi.V_NORMS)
    desc.v_eps = real("v_eps", v_eps)
    desc.v_scale = _v_scale(v_scale)
    desc.v_from_k = int(bool(v_from_k))
    desc.cache_type = choice("cache_type", cache_type, _abi.CACHE_TYPES)
    scales = _scales(desc, k_scales, v_scales)
    desc.checked = int(bool(checked))
    return desc, (weight, tables, scales)


def _v_scale(given: Optional[float]) -> float:
    scale = 0.0 if given is None else real("v_scale", given)
    if given is not None and scale == 0:
        raise ValueError("v_scale is 0, must be another number, or None for V as it is")
    return scale


def _scales(desc: _abi.StoreDesc, k_scales: Any, v_scales: Any) -> Any:
    if (k_scales is None) != (v_scales is None):
        name, other = ("k", "v") if k_scales is None else ("v", "k")
        raise ValueError(f"{name}_scales is None, must be given with {other}_scales")
    if k_scales is None:
        return None
    k, v = TensorList(k_scales, "k_scales"), TensorList(v_scales, "v_scales")
    if k.count != v.count:
        raise ValueError(f"v_scales has {v.count} tensors, must have {k.count} as k_scales")
    desc.k_scales, desc.v_scales, desc.scale_count = k.pointers, v.pointers, k.count
    return k, v


class Norms(_Plan):
    """The hidden norm, then one norm per layer.

    num_layers: L. hidden_size: D. hidden, layer: `Norm`. hidden_weight: [D] BF16 or FP32, or None.
    layer_weights: one [L, D], L of [D], or None. Copied; numerics: "stock", "pair", "packed",
    "invariant".
    """

    _kind = "norms"

    __init__ = _made_of(_norms_desc, keep=False)  # the weights are copied

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

    __init__ = _made_of(_projection_desc)

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

    __init__ = _made_of(_store_desc)

    def run(self, k: Any, v: Any, positions: Any, slots: Any, stream: int = 0) -> None:
        """k, v: BF16 [L, T, H, head_dim] (v None with v_from_k). positions: int64 [T] (None
        without RoPE). slots: one int64 [R] for all layers, or L of them with None where a layer
        stores nothing."""
        keys, values = _tensor.of(k, "k"), _tensor.optional(v, "v")
        where, lists = _tensor.optional(positions, "positions"), _slots(slots)
        check(
            library().ctxkv_store_run(
                self.handle, byref(keys), _pointer(values), _pointer(where), lists.pointers,
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
        first, keep_first = _norms_desc(**norms)
        second, keep_second = _projection_desc(**{"max_rows": max_rows, **projection})
        third, keep_third = _store_desc(**store)
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
                self.handle, byref(given), _pointer(where), lists.pointers, lists.count,
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



def _forget_devices() -> None:
    # A child of a fork opens its own devices: the parent's threads are not there.
    device.cache_clear()


os.register_at_fork(after_in_child=_forget_devices)
