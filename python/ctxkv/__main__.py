# SPDX-License-Identifier: Apache-2.0
# python -m ctxkv: info, selftest, plot.
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Optional, Sequence, Union


def _info(arguments: argparse.Namespace) -> int:
    from . import _library
    from ._device import Device, cuda_device_count

    all_: dict[str, Any] = {
        "version": _library.version(),
        "library": _library.library()._name,
        "cpu": Device("cpu").info(),
        "cuda": [],
    }
    count = cuda_device_count()
    if not count:
        all_["cuda_reason"] = _library.library().ctxkv_last_error().decode()
    for index in range(count):
        name = f"cuda:{index}"
        try:
            all_["cuda"].append({"device": name, **Device(name).info()})
        except (ValueError, RuntimeError) as error:
            all_["cuda"].append({"device": name, "unusable": str(error)})
    if arguments.json:
        print(json.dumps(all_, indent=2))
        return 0
    cpu = all_["cpu"]
    print(f"ctxkv      {all_['version']} ({all_['library']})")
    print(f"cpu        {cpu['name']}, {cpu['threads']} threads")
    print(f"tiers      found: {' '.join(cpu['cpu_found'])}; used: {cpu['cpu_used']}")
    if not all_["cuda"]:
        print(f"cuda       none: {all_['cuda_reason']}")
    for gpu in all_["cuda"]:
        if "unusable" in gpu:
            print(f"cuda       {gpu['device']} unusable: {gpu['unusable']}")
            continue
        bits = "verified" if gpu["bits_verified"] else "not verified"
        print(
            f"cuda       {gpu['device']} {gpu['name']}, sm_{gpu['cuda_arch']}, driver "
            f"{gpu['driver']}, cuBLAS {gpu['cublas']}, bits {bits}"
        )
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    try:
        from . import selftest
    except ImportError as error:
        raise RuntimeError(f"selftest needs numpy ({error}): pip install numpy") from None
    if not arguments.golden.is_dir():
        raise ValueError(f"--golden: {arguments.golden} is no folder")
    return selftest.run(arguments.golden, arguments.verbose, arguments.quick)


def _names(text: str) -> list[str]:
    return text.split(",")


def _heads(text: str) -> list[Union[int, str]]:
    return [int(part) if part.isdecimal() else part for part in text.split(",")]


def _plot(arguments: argparse.Namespace) -> int:
    from . import plot

    choice = plot.Choice(arguments.ops, arguments.heads, arguments.programs)
    for path in plot.plot(arguments.file, arguments.out, choice):
        print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ctxkv", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="what this build and this machine have")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)
    test = commands.add_parser("selftest", help="compare this machine's bits with the H200's")
    test.add_argument("--golden", type=Path, required=True, help="folder of golden csv files")
    test.add_argument("--verbose", action="store_true", help="tell the checks that passed, too")
    test.add_argument("--quick", action="store_true", help="without rsqrt's 2^24 results")
    test.set_defaults(run=_selftest)
    plot = commands.add_parser("plot", help="draw a benchmark's or a diagnosis's JSON")
    plot.add_argument("file", type=Path, help="JSON written by ctxkv bench or ctxkv diagnose")
    plot.add_argument("--out", type=Path, help="stem of the pictures (default: beside the file)")
    for name, metavar, kind, text in (
        ("--ops", "OP,...", _names, "only these ops of a benchmark"),
        ("--heads", "N,...", _heads, "only these numbers of KV heads, or these shapes"),
        ("--programs", "NAME,...", _names, "only these lines, such as ctxkv,stock,floor"),
    ):
        plot.add_argument(name, metavar=metavar, type=kind, default=(), help=text)
    plot.set_defaults(run=_plot)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status: 0 good, 1 checks failed, 2 bad arguments or no such thing here."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"ctxkv: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
