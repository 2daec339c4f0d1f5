# SPDX-License-Identifier: Apache-2.0
# Finding and loading libctxkv, and turning its statuses into exceptions.
from __future__ import annotations

import ctypes
import functools
import operator
import os
from pathlib import Path
from typing import Any

from . import _abi

# INVALID_ARGUMENT and UNSUPPORTED are about what the caller gave; the rest about the machine.
_ARGUMENT = (1, 2)


def candidates() -> list[str]:
    """Where the library is looked for, best first: $CTXKV_LIBRARY alone when it is set."""
    named = os.environ.get("CTXKV_LIBRARY")
    if named:
        return [named]
    return [str(Path(__file__).with_name("libctxkv.so")), "libctxkv.so.0"]


@functools.cache
def library() -> ctypes.CDLL:
    """libctxkv, loaded at the first use. Loading it makes no CUDA call.

    Raises RuntimeError, with every place that was tried and why, when there is none.
    """
    reasons = []
    for path in candidates():
        try:
            loaded = ctypes.CDLL(path)
            _abi.declare(loaded)
            return loaded
        except (OSError, AttributeError) as error:
            reasons.append(str(error))
    raise RuntimeError(
        "libctxkv cannot be loaded (set CTXKV_LIBRARY to its path): " + "; ".join(reasons)
    )


def check(status: int) -> None:
    """Raises ValueError for a refused argument, RuntimeError for all else, with the C message."""
    if status == 0:
        return
    lib = library()
    name = lib.ctxkv_status_name(status).decode()
    text = lib.ctxkv_last_error().decode() or lib.ctxkv_status_text(status).decode()
    raise (ValueError if status in _ARGUMENT else RuntimeError)(f"{text} [{name}]")


def version() -> str:
    """Version of the loaded library, such as "0.1.0"."""
    return library().ctxkv_version().decode()


def integer(name: str, value: Any) -> int:
    """value as an int that int64 holds, or ValueError naming the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, must be an integer") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} is {number}, must fit 64 bits")
    return number


def real(name: str, value: Any) -> float:
    """value as a float, or ValueError naming the argument."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {value!r}, must be a number") from None


def choice(name: str, value: Any, table: dict[str, int]) -> int:
    """The constant of a name, or ValueError with the names there are."""
    if isinstance(value, str) and value in table:
        return table[value]
    raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, table))}")
