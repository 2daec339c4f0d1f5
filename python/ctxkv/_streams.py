# SPDX-License-Identifier: Apache-2.0
# torch's current stream and capture state, and our device of a torch device.
from __future__ import annotations

import torch

from ._device import Device, device

try:  # the address alone, without building a Stream object per call
    _raw_stream = torch._C._cuda_getCurrentRawStream
except AttributeError:

    def _raw_stream(index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream


def current_stream(where: torch.device) -> int:
    """CUstream of torch's current stream on that device; 0 on a CPU."""
    return _raw_stream(where.index or 0) if where.type == "cuda" else 0


def device_of(where: torch.device, programmatic_launch: bool = True) -> Device:
    """Our shared device of a torch device; ValueError for other kinds."""
    if where.type == "cpu":
        return device("cpu")
    if where.type != "cuda":
        raise ValueError(f"device is {where}, must be a CPU or CUDA device")
    index = where.index if where.index is not None else torch.cuda.current_device()
    return device(f"cuda:{index}", programmatic_launch)


def capturing() -> bool:
    """Whether torch's current stream is being captured. Does not initialise CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def assert_not_capturing(what: str) -> None:
    """RuntimeError during a capture, in which a plan cannot be made."""
    if capturing():
        raise RuntimeError(f"{what} cannot be made while a CUDA graph is captured: make it before")


def pdl_supported() -> bool:
    """Whether the current CUDA device takes programmatic dependent launch (sm_90 and later)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
