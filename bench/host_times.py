# SPDX-License-Identifier: Apache-2.0
"""What the host pays on a GPU: making a Muse Spark chain's plan, and one run of it."""
import ctypes
import statistics
import time

import torch

L, D, EPS = 5, 8192, 1e-5


def plan_times(make, count=7):
    """Milliseconds of the first plan (which may load kernels and cuBLAS) and the median of more,
    each until the device has done what was asked for."""
    times = []
    for _ in range(count + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan = make()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        plan.close()
    return times[0], statistics.median(times[1:])


def run_time(plan, call, batches=40, calls=20):
    """Median microseconds of a run's host side: few enough calls in a row that no queue is full."""
    library, times = plan.library, []
    run = library.lib.ctxkv_chain_run_call
    library.check(run(plan.handle, ctypes.byref(call)))
    for _ in range(batches):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run(plan.handle, ctypes.byref(call))
        times.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def host_times(Q, device, heads=(2, 16), rows=(8, 64, 1024)):
    """A list of {heads, plan_first_ms, plan_ms, run_us: {rows: median}}; weights are resident."""
    result = []
    for H in heads:
        w = (torch.randn(L, 128 * H, D, device="cuda") / 90).bfloat16()
        ones = torch.ones(L + 1, D, device="cuda").bfloat16()
        table = torch.randn(65536, 64, device="cuda").bfloat16()
        most = max(rows)
        caches = [torch.zeros(most // 16, H, 16, 128, device="cuda", dtype=torch.bfloat16)
                  for _ in range(L)]

        def make():
            row = (Q.ROW, EPS, 0, 0)
            norms = device.norms_desc(row, row, L, hw=ones[0], lw=ones[1:])
            return device.chain(norms, device.projection_desc(w, L, H),
                                device.store_desc(L, H, eps=EPS, rope=Q.GPTJ, table=table), most)

        first, again = plan_times(make)
        plan = make()
        Q.bind(plan, *Q.split(caches))
        runs = {}
        for T in rows:
            x = torch.randn(T, D, device="cuda").bfloat16()
            at = torch.arange(T, device="cuda")
            call = Q.chain_call(x, at, [at] * L)
            call.stream = Q.current_stream()
            runs[str(T)] = round(run_time(plan, call), 2)
        plan.close()
        result.append(dict(heads=H, plan_first_ms=round(first, 2), plan_ms=round(again, 2),
                           run_us=runs))
        print(f"host H={H}: first plan {first:.1f} ms, a plan {again:.1f} ms, a run {runs} us",
              flush=True)
    return result
