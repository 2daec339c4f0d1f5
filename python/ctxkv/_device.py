# SPDX-License-Identifier: Apache-2.0
"""Devices: what plans are made on."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from ctypes import byref, c_void_p
from typing import Any, Optional, Sequence

from . import _abi, _cublas
from ._library import check, choice, integer, library


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


def _forget_devices() -> None:
    # A child of a fork opens its own devices: the parent's threads are not there.
    device.cache_clear()


os.register_at_fork(after_in_child=_forget_devices)
