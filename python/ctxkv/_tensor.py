# SPDX-License-Identifier: Apache-2.0
# DLTensors of whatever holds an array: torch, our own host memory, anything with __dlpack__.
from __future__ import annotations

import ctypes
from ctypes import c_int64
from typing import Any, Iterable, Optional, Sequence

from . import _abi
from ._abi import BFLOAT, BOOL, CPU, CUDA, FLOAT, INT, UINT, DLTensor

# By torch's names; our short names beside them.
DTYPES = {
    "bfloat16": (BFLOAT, 16),
    "float32": (FLOAT, 32),
    "int64": (INT, 64),
    "float16": (FLOAT, 16),
    "float64": (FLOAT, 64),
    "int32": (INT, 32),
    "int16": (INT, 16),
    "int8": (INT, 8),
    "uint8": (UINT, 8),
    "uint16": (UINT, 16),
    "bool": (BOOL, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
}
DTYPES.update(bf16=DTYPES["bfloat16"], fp32=DTYPES["float32"], i64=DTYPES["int64"])

_ALIGNMENT = 64


def describe(
    data: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: tuple[int, int],
    device: tuple[int, int] = (CPU, 0),
    keep: Any = None,
) -> DLTensor:
    """A DLTensor over an address; it keeps its shape, its strides and `keep` alive."""
    count = len(shape)
    tensor = DLTensor()
    tensor.data = data or None
    tensor.device.device_type, tensor.device.device_id = device
    tensor.ndim = count
    tensor.dtype.code, tensor.dtype.bits = dtype
    tensor.dtype.lanes = 1
    sizes = (c_int64 * count)(*shape)
    steps = (c_int64 * count)(*strides)
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(c_int64))
    tensor.strides = ctypes.cast(steps, ctypes.POINTER(c_int64))
    tensor.keep = (sizes, steps, keep)
    return tensor


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


class Tensor:
    """Host memory with a shape, for use without numpy and torch.

    shape: sizes. dtype: "bf16", "fp32", "i64" (or torch's names). fill: a byte for all of it.
    `tobytes()` gives the elements in row-major order, `view()` another look at the same memory.
    """

    def __init__(self, shape: Sequence[int], dtype: str = "bf16", fill: int = 0) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.dtype = dtype
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape is {list(self.shape)}, must not be negative")
        self.strides = tuple(row_major(self.shape))
        self.itemsize = DTYPES[dtype][1] // 8
        self.size = 1
        for size in self.shape:
            self.size *= size
        self.owner: Any = ctypes.create_string_buffer(self.nbytes + _ALIGNMENT)
        start = ctypes.addressof(self.owner)
        self.address = (start + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        if fill:
            ctypes.memset(self.address, fill, self.nbytes)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @classmethod
    def from_bytes(cls, data: Any, shape: Sequence[int], dtype: str = "bf16") -> "Tensor":
        """A copy of a contiguous buffer (bytes, array, numpy array) of the shape's size."""
        made = cls(shape, dtype)
        view = memoryview(data).cast("B")
        if len(view) != made.nbytes:
            raise ValueError(
                f"data has {len(view)} bytes, must have {made.nbytes} for {list(made.shape)}"
            )
        ctypes.memmove(made.address, bytes(view), made.nbytes)
        return made

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> "Tensor":
        """The same memory with another shape, strides and first element (all in elements)."""
        made = object.__new__(Tensor)
        made.shape, made.strides = tuple(shape), tuple(strides)
        made.dtype, made.itemsize, made.owner = self.dtype, self.itemsize, self
        made.size = 1
        for size in made.shape:
            made.size *= size
        made.address = self.address + offset * self.itemsize
        return made

    def tobytes(self) -> bytes:
        """The elements' bytes, row-major. The tensor must be contiguous."""
        if list(self.strides) != row_major(self.shape) and self.size:
            raise ValueError(f"strides are {list(self.strides)}, must be row-major for tobytes")
        return ctypes.string_at(self.address, self.nbytes) if self.nbytes else b""


def _of_torch(tensor: Any, name: str) -> DLTensor:
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{name} lies on device {tensor.device}, must lie on a CPU or CUDA device")
    text = str(tensor.dtype).rpartition(".")[2]
    if text not in DTYPES:
        raise ValueError(f"{name} has dtype {text}, must be bfloat16, float32 or int64")
    device = (CPU, 0) if kind == "cpu" else (CUDA, tensor.device.index or 0)
    return describe(
        tensor.data_ptr(), tensor.shape, tensor.stride(), DTYPES[text], device, tensor
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
# DLManagedTensorVersioned: version, manager_ctx, deleter and flags come before its tensor.
_VERSIONED_OFFSET = 32


def _of_capsule(holder: Any, name: str) -> DLTensor:
    try:
        capsule = holder.__dlpack__()
    except (BufferError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} gives no DLPack tensor: {error}") from None
    if _capsule_valid(capsule, b"dltensor"):
        address = _capsule_pointer(capsule, b"dltensor")
    elif _capsule_valid(capsule, b"dltensor_versioned"):
        address = _capsule_pointer(capsule, b"dltensor_versioned") + _VERSIONED_OFFSET
    else:
        raise ValueError(f"{name}.__dlpack__() is {capsule!r}, must be a DLPack capsule")
    # Borrowed: the capsule is not consumed, so it frees its tensor when it is let go.
    raw = ctypes.string_at(address, ctypes.sizeof(DLTensor))
    tensor = DLTensor.from_buffer_copy(raw)
    tensor.keep = (capsule, holder)
    return tensor


def of(value: Any, name: str) -> DLTensor:
    """The DLTensor of a torch tensor, a `Tensor`, or an object with __dlpack__; ValueError else."""
    if isinstance(value, DLTensor):
        return value
    if isinstance(value, Tensor):
        return describe(
            value.address, value.shape, value.strides, DTYPES[value.dtype], (CPU, 0), value
        )
    if hasattr(value, "data_ptr") and hasattr(value, "stride"):
        return _of_torch(value, name)
    if hasattr(value, "__dlpack__"):
        return _of_capsule(value, name)
    raise ValueError(
        f"{name} is of type {type(value).__name__}, must be a tensor (torch, ctxkv.Tensor, DLPack)"
    )


def optional(value: Any, name: str) -> Optional[DLTensor]:
    """The DLTensor of value, or None for None."""
    return None if value is None else of(value, name)


class TensorList:
    """A C array of DLTensor pointers, with None as NULL."""

    def __init__(self, values: Iterable[Any], name: str) -> None:
        try:
            values = list(values)
        except TypeError:
            raise ValueError(f"{name} is {type(values).__name__}, must be a sequence") from None
        self.tensors = [optional(value, f"{name}[{i}]") for i, value in enumerate(values)]
        self.count = len(self.tensors)
        self.pointers = (_abi.TensorPointer * max(self.count, 1))()
        for i, tensor in enumerate(self.tensors):
            if tensor is not None:
                self.pointers[i] = ctypes.pointer(tensor)


def is_tensor(value: Any) -> bool:
    """Whether `of` takes it (a list or tuple of tensors is none)."""
    return isinstance(value, (DLTensor, Tensor)) or (
        not isinstance(value, (list, tuple)) and hasattr(value, "__dlpack__")
    )
