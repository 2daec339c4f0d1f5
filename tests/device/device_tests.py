#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU and torch: whole chains against the CPU, captures, PDL, threads; and those of
op_tests.py.

usage: CTXKV_LIBRARY=.../libctxkv.so device_tests.py [name ...]     last line: N passed, N failed
"""
import ctypes as C
import os
import sys
import threading

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lib as Q  # noqa: E402
import op_tests  # noqa: E402, F401
from operands import CPU, GPU, LIB, PAGE, D, L, Muse, bf16, same  # noqa: E402
from runner import main, test  # noqa: E402


@test
def chains_equal_the_cpu():
    """Every H and T: all rows on the GPU, at most 130 of them on the CPU (rows do not interact)."""
    for H in (1, 2, 4, 8, 16):
        for T in (1, 2, 7, 8, 16, 17, 33, 64, 130, 257, 1024, 4096):
            layers = L if H <= 2 and T <= 64 else 2
            m = Muse(H, T, layers, seed=H * 10000 + T)
            plan, got = m.chain(GPU, m.gpu), m.caches("cuda")
            m.run(plan, got, m.gpu)
            torch.cuda.synchronize()
            assert Q.faults(plan).count == 0
            plan.close()
            most = 130 if H <= 2 else 20
            pick = torch.arange(T) if T <= most else torch.randperm(T)[:most].sort().values
            host = dict(m.host, x=m.host["x"][pick], positions=m.host["positions"][pick],
                        slots=[s[pick].contiguous() for s in m.host["slots"]])
            plan, want = m.chain(CPU, host, len(pick)), m.caches()
            m.run(plan, want, host)
            plan.close()
            keep = torch.ones(T, dtype=torch.bool)
            keep[pick] = False
            for layer in range(layers):  # rows that the CPU left out go back to the poison
                s = m.host["slots"][layer][keep]
                s = s[s >= 0].cuda()
                got[layer].view(torch.int16)[s // PAGE, :, s % PAGE] = 0x5A5A
            for a, b in zip(got, want):
                assert same(a, b), f"H={H} T={T}"


@test
def first_use_in_a_capture():
    """B18: 100 replays have the eager bits; 50 graphs do not grow device memory."""
    m = Muse(2, 50)
    plan, eager, caught = m.chain(GPU, m.gpu), m.caches("cuda"), m.caches("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m.run(plan, caught, m.gpu, 17)
    second = m.chain(GPU, m.gpu)
    m.run(second, eager, m.gpu, 17)
    for _ in range(100):
        for c in caught:
            c.view(torch.int16).fill_(0x5A5A)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip(eager, caught))
    graphs, free = [], []
    for T in range(1, 51):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            m.run(plan, caught, m.gpu, T)
        graphs.append(g)
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    # An instantiated graph is some kilobytes of the driver's own; a workspace would be megabytes.
    assert free[4] - free[-1] <= 8 << 20, free
    for T in (1, 33, 50):
        for c in (*caught, *eager):
            c.view(torch.int16).fill_(0x5A5A)
        graphs[T - 1].replay()
        m.run(second, eager, m.gpu, T)
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip(eager, caught)), T


@test
def a_blocking_capture_refuses_plans():
    """B18 b. (The driver does not tell of a capture on a non-blocking stream: the next test. The Python
    package asks torch for that one.)"""
    cu = C.CDLL("libcuda.so.1")
    m, stream, graph = Muse(1, 3, 2), C.c_void_p(), C.c_void_p()
    assert cu.cuStreamCreate(C.byref(stream), 0) == 0
    assert cu.cuStreamBeginCapture_v2(stream, 0) == 0
    try:
        m.chain(GPU, m.gpu)
        raise AssertionError("a plan was made during a capture")
    except Q.Error as e:
        assert e.status == 6 and "captured" in e.text, e
    assert cu.cuStreamEndCapture(stream, C.byref(graph)) == 0
    cu.cuStreamDestroy_v2(stream)


@test
def a_capture_survives_plans_made_and_destroyed():
    """Beside a capture of which the driver does not tell, plans come and go and the graph is right."""
    m = Muse(2, 100)  # norms, cuBLAS, store
    plan, want, got = m.chain(GPU, m.gpu), m.caches("cuda"), m.caches("cuda")
    m.run(plan, want, m.gpu)
    old, graph = m.chain(GPU, m.gpu), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        m.run(plan, got, m.gpu)
        made = m.chain(GPU, m.gpu)
        old.close()
    graph.replay()
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(want, got))
    again = m.caches("cuda")
    m.run(made, again, m.gpu)
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(want, again))
    made.close()
    plan.close()


@test
def dependent_launch_waits_for_slow_producers():
    """SPEC 4.9: x, positions and slots come late from the stream; what follows sees all of it."""
    for programmatic in (1, 0):
        device = LIB.device("cuda:0", programmatic_launch=programmatic)
        for H, T in ((2, 1), (2, 16), (16, 8), (2, 300)):
            m = Muse(H, T)
            plan, want, got = m.chain(device, m.gpu), m.caches("cuda"), m.caches("cuda")
            m.run(plan, want, m.gpu)
            torch.cuda.synchronize()
            late = dict(m.gpu, x=torch.full_like(m.gpu["x"], float("nan")),
                        positions=torch.full_like(m.gpu["positions"], -7),
                        slots=[torch.full_like(s, -1) for s in m.gpu["slots"]])
            Q.bind(plan, *Q.split(got))
            for i in range(60):
                torch.cuda._sleep(20000 + 3000 * i)
                late["x"].copy_(m.gpu["x"])
                late["positions"].copy_(m.gpu["positions"])
                for a, b in zip(late["slots"], m.gpu["slots"]):
                    a.copy_(b)
                Q.run_chain(plan, late["x"], late["positions"], late["slots"])
                seen = [c.clone() for c in got]
                for c in got:  # overwritten at once: nothing of the chain may still be writing
                    c.view(torch.int16).fill_(0x5A5A)
                late["x"].fill_(float("nan"))
                late["positions"].fill_(-7)
                for s in late["slots"]:
                    s.fill_(-1)
                if i % 6 == 0:
                    torch.cuda.synchronize()
                    assert all(same(a, b) for a, b in zip(seen, want)), (programmatic, H, T, i)
                    assert all(bool((c.view(torch.int16) == 0x5A5A).all()) for c in got)
            assert Q.faults(plan).count == 0
            plan.close()
        device.close("close")


@test
def back_to_back_runs_share_the_workspace():
    m = Muse(2, 64)
    plan, got = m.chain(GPU, m.gpu), m.caches("cuda")
    Q.bind(plan, *Q.split(got))
    xs = [bf16(64, D, seed=i).cuda() for i in range(8)]
    alone = []
    for x in xs:
        m.run(plan, got, dict(m.gpu, x=x))
        torch.cuda.synchronize()
        alone.append([c.clone() for c in got])
    for _ in range(20):
        seen = []
        for x in xs:
            Q.run_chain(plan, x, m.gpu["positions"], m.gpu["slots"])
            seen.append([c.clone() for c in got])
        torch.cuda.synchronize()
        for a, b in zip(alone, seen):
            assert all(same(p, q) for p, q in zip(a, b))


@test
def threads_with_their_own_workspaces():
    m = Muse(4, 100, 3)
    plan, want = m.chain(GPU, m.gpu), m.caches("cuda")
    m.run(plan, want, m.gpu)
    torch.cuda.synchronize()
    want = [c.clone() for c in want]
    size, errors = LIB.lib.ctxkv_chain_workspace_size(plan.handle), []

    def work():
        try:
            workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call = Q.chain_call(m.gpu["x"], m.gpu["positions"], m.gpu["slots"])
                call.workspace = workspace.data_ptr()
                for _ in range(200):
                    Q.run_call(plan, call)
            stream.synchronize()
        except Exception as e:  # noqa: BLE001
            errors.append(e)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    got = plan.keep_caches[0]
    for a, b in zip(got, Q.split(want)[0]):
        assert same(a.contiguous(), b.contiguous())


@test
def every_way_has_the_same_bits():
    """Row by row: the shapes and kernels chosen for one T against those for every other T."""
    for H, kinds in ((2, "bb"), (8, "bb"), (1, "fF"), (4, "Bf")):
        most = 2304
        m = Muse(H, most, seed=H, kinds=kinds)
        plan = m.chain(GPU, m.gpu)
        want = m.caches("cuda")
        m.run(plan, want, m.gpu)
        torch.cuda.synchronize()
        for T in (1, 5, 8, 13, 16, 24, 31, 48, 64, 65, 100, 128, 200, 400, 700, 1025):
            got = m.caches("cuda")
            m.run(plan, got, m.gpu, T)
            torch.cuda.synchronize()
            for layer in range(m.L):
                s = m.gpu["slots"][layer][:T]
                s = s[s >= 0]
                a, b = (c[layer][s // PAGE, :, s % PAGE] for c in (got, want))
                assert same(a, b), f"H={H} {kinds} T={T} layer {layer}"
                rest = got[layer].clone()
                rest.view(torch.int16)[s // PAGE, :, s % PAGE] = 0x5A5A
                assert bool((rest.view(torch.int16) == 0x5A5A).all()), f"stray write, T={T}"
        plan.close()


if __name__ == "__main__":
    sys.exit(main())
