# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a file that are named on its command line, or all of them."""
import sys
import time
import traceback

import torch

TESTS = []


class NotRun(Exception):
    """Raised by a test whose subject is not there; said, and neither passed nor failed."""


def test(f):
    TESTS.append(f)
    return f


def main():
    wanted = sys.argv[1:]
    unknown = set(wanted) - {f.__name__ for f in TESTS}
    passed, failed = 0, len(unknown)
    for name in sorted(unknown):
        print(f"FAIL {name}: no such test", flush=True)
    for f in TESTS:
        if wanted and f.__name__ not in wanted:
            continue
        begin = time.perf_counter()
        try:
            f()
            torch.cuda.synchronize()
            passed += 1
            print(f"ok   {f.__name__} ({time.perf_counter() - begin:.1f} s)", flush=True)
        except NotRun as why:
            print(f"NOT RUN {f.__name__}: {why}", flush=True)
        except Exception:  # noqa: BLE001
            failed += 1
            print(f"FAIL {f.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0
