#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU and torch: whole chains against the CPU, captures, PDL, faults, offsets.

usage: CTXKV_LIBRARY=.../libctxkv.so device_tests.py [name ...]     last line: N passed, N failed
"""
import ctypes as C
import os
import sys
import threading
import time
import traceback

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lib as Q  # noqa: E402

D, L, PAGE = 8192, 5, 16
LIB = Q.Library()
GPU = LIB.device("cuda:0")
CPU = LIB.device("cpu")
TESTS = []


def test(f):
    TESTS.append(f)
    return f


def same(a, b):
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


def bf16(*shape, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).bfloat16()


class Muse:
    """Operands of a Muse Spark chain on the CPU and on the GPU."""
    def __init__(self, H, T, layers=L, seed=1, kinds="bb", positions=4096, page=PAGE):
        self.H, self.T, self.L, self.page, N = H, T, layers, page, 128 * H
        self.host = dict(
            x=bf16(T, D, seed=seed), hw=1 + bf16(D, scale=0.1, seed=seed + 1),
            lw=1 + bf16(layers, D, scale=0.1, seed=seed + 2),
            w=bf16(layers, N, D, scale=0.02, seed=seed + 3), table=bf16(positions, 64, seed=seed + 4))
        if kinds[0] in "fF":
            self.host["hw"] = self.host["hw"].float() * 1.0009765
        if kinds[1] in "fF":
            self.host["lw"] = self.host["lw"].float() * 1.0009765
        self.scales = (int(kinds[0] in "BF"), int(kinds[1] in "BF"))
        g = torch.Generator().manual_seed(seed + 5)
        self.blocks = (T + page - 1) // page + 3
        self.host["positions"] = torch.randint(0, positions, (T,), generator=g)
        self.host["slots"] = [torch.randperm(self.blocks * page, generator=g)[:T].contiguous()
                              for _ in range(layers)]
        for s in self.host["slots"][1::2]:
            s[::5] = -1
        self.gpu = {k: ([s.cuda() for s in v] if isinstance(v, list) else v.cuda())
                    for k, v in self.host.items()}

    def chain(self, device, where, max_rows=None, mode=Q.AUTO, numerics=Q.STOCK):
        plan = device.chain(
            device.norms_desc((Q.ROW, 1e-5, 0, self.scales[0]), (Q.ROW, 1e-5, 0, self.scales[1]),
                              self.L, hw=where["hw"], lw=where["lw"], numerics=numerics),
            device.projection_desc(where["w"], self.L, self.H, mode=mode),
            device.store_desc(self.L, self.H, rope=Q.GPTJ, table=where["table"]),
            max_rows or self.T)
        return plan

    def caches(self, device="cpu"):
        return [torch.full((self.blocks, self.H, self.page, 128), 0x5A5A, dtype=torch.int16,
                           device=device).view(torch.bfloat16) for _ in range(self.L)]

    def run(self, plan, caches, where, rows=None):
        Q.bind(plan, *Q.split(caches))
        r = slice(0, rows)
        Q.run_chain(plan, where["x"][r], where["positions"][r], [s[r] for s in where["slots"]])


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
def kinds_and_orders_equal_the_cpu():
    for kinds in ("bb", "Bb", "fF", "BB", "FB", "nf"):
        for numerics in (Q.PAIR, Q.PACKED):
            for T in (3, 40, 150, 2100):
                m = Muse(2, T, 3, seed=7, kinds=kinds.replace("n", "b"))
                outs = []
                for device, where in ((GPU, m.gpu), (CPU, m.host)):
                    hw = None if kinds[0] == "n" else where["hw"]
                    plan = device.norms((Q.ROW, 1e-5, 1.0, m.scales[0]), (Q.ROW, 1e-6, 0.5, m.scales[1]),
                                        3, hw=hw, lw=where["lw"], numerics=numerics)
                    out = torch.full((3, T, D), float("nan"), dtype=torch.bfloat16,
                                     device=where["x"].device)
                    Q.run_norms(plan, where["x"], out)
                    plan.close()
                    outs.append(out)
                assert same(*outs), f"{kinds} numerics {numerics} T={T}"


@test
def exact_projection_of_any_shape():
    for (D_, H, hd, layers, T, shared) in ((1024, 2, 64, 1, 5, False), (2560, 1, 128, 3, 70, True),
                                           (48, 3, 64, 2, 17, False), (4096, 1, 256, 2, 33, False),
                                           (8192, 2, 64, 1, 200, False)):
        N = 2 * H * hd
        x = bf16(1 if shared else layers, T, D_, seed=T)
        w, bias = bf16(layers, N, D_, scale=0.05, seed=T + 1), bf16(layers, N, seed=T + 2)
        for b in (None, bias):
            for odd in (False, True):
                outs = []
                for device, on in ((GPU, "cuda"), (CPU, "cpu")):
                    xs, ws = x.to(on), w.to(on)
                    if odd:  # two bytes off, and a row stride of its own
                        room = torch.zeros(layers, N, D_ + 9, dtype=torch.bfloat16, device=on)
                        room[:, :, 1:D_ + 1] = ws
                        ws = [room[i, :, 1:D_ + 1] for i in range(layers)]
                    plan = device.projection(ws, layers, H, hd, D_, Q.EXACT,
                                             b.to(on) if b is not None else None)
                    kv = torch.full((T, layers, N), float("nan"), dtype=torch.bfloat16, device=on)
                    Q.run_projection(plan, xs, kv.transpose(0, 1))
                    if on == "cuda":
                        torch.cuda.synchronize()
                    plan.close()
                    outs.append(kv)
                assert same(*outs), f"D={D_} H={H} L={layers} T={T} bias {b is not None} odd {odd}"


@test
def auto_equals_exact():
    """cuBLAS where AUTO uses it gives the bits of the exact kernel."""
    for H in (1, 2, 4, 8, 16):
        for T in (1, 3, 16, 100, 700):
            x, w = bf16(L, T, D, seed=T).cuda(), bf16(L, 128 * H, D, scale=0.02, seed=H).cuda()
            outs = []
            for mode in (Q.AUTO, Q.EXACT):
                plan = GPU.projection(w, L, H, mode=mode)
                kv = torch.empty(L, T, 128 * H, dtype=torch.bfloat16, device="cuda")
                Q.run_projection(plan, x, kv)
                torch.cuda.synchronize()
                plan.close()
                outs.append(kv)
            assert same(*outs), f"H={H} T={T}"


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
def faults_are_the_smallest_whatever_the_order():
    H, T, layers = 4, 5000, 6
    k = bf16(layers, T, H, 64, seed=3).cuda()
    table = bf16(64, 64, seed=4).cuda()
    caches = [torch.full((400, H, PAGE, 128), 0x5A5A, dtype=torch.int16, device="cuda")
              .view(torch.bfloat16) for _ in range(layers)]
    plan = GPU.store(layers, H, rope=Q.GPTJ, table=table)
    Q.bind(plan, *Q.split(caches))
    positions = torch.randint(0, 64, (T,), device="cuda")
    slots = [torch.arange(T, device="cuda") for _ in range(layers)]
    for i in range(20):
        positions[4000:] = 64 + i
        for layer in (2, 3, 5):
            slots[layer][37 + i::3] = 6400 + layer + (i << 33)
        slots[3][5] = 2**63 - 1
        Q.run_store(plan, k, k, positions, slots)
        f = Q.faults(plan)
        bad = [(s >= 6400) | ((s >= 0) & (positions >= 64)) for s in slots]
        first = next(i for i, b in enumerate(bad) if bool(b.any()))
        row = int(bad[first].nonzero()[0])
        slot_fault = int(slots[first][row]) >= 6400
        assert f.count == sum(int(b.sum()) for b in bad)
        assert (f.layer, f.row, f.kind) == (first, row, 1 if slot_fault else 2), i
        assert f.value == int(slots[first][row] if slot_fault else positions[row])
        assert f.limit == (6400 if slot_fault else 64)
        assert Q.faults(plan).count == 0


@test
def offsets_beyond_2_to_32():
    big = torch.empty((1 << 32) + (1 << 20), dtype=torch.bfloat16, device="cuda")
    k = bf16(1, 3, 1, 64, seed=9).cuda()
    plan = GPU.store(1, 1)
    for stride in (1 << 31, (1 << 32) - 4096, 1 << 32):
        view = big.as_strided((2, PAGE, 1, 128), (stride, 128, 128, 1))
        big[:1 << 16].view(torch.int16).fill_(0x5A5A)
        far = big[stride:stride + PAGE * 128]
        far.view(torch.int16).fill_(0x5A5A)
        Q.bind(plan, [view[..., :64]], [view[..., 64:]])
        Q.run_store(plan, k, k, None, [torch.tensor([PAGE + 3, 2, PAGE], device="cuda")])
        torch.cuda.synchronize()
        rows = far.view(PAGE, 128)
        assert same(rows[3, 64:], k[0, 0, 0]) and same(rows[0, 64:], k[0, 2, 0]), stride
        assert same(big[2 * 128 + 64:3 * 128], k[0, 1, 0])
        rest = torch.ones(PAGE, dtype=torch.bool, device="cuda")
        rest[[0, 3]] = False
        assert bool((rows[rest].view(torch.int16) == 0x5A5A).all())


@test
def many_layers_in_one_launch():
    for layers in (17, 40, 300):
        H, T = 2, 9
        k = bf16(layers, T, H, 64, seed=layers).cuda()
        caches = [torch.full((2, H, PAGE, 128), 0x5A5A, dtype=torch.int16, device="cuda")
                  .view(torch.bfloat16) for _ in range(layers)]
        plan = GPU.store(layers, H)
        Q.bind(plan, *Q.split(caches))
        slots = [torch.randperm(32, device="cuda")[:T].contiguous() for _ in range(layers)]
        Q.run_store(plan, k, k, None, slots)
        torch.cuda.synchronize()
        for layer in range(layers):
            s = slots[layer]
            assert same(caches[layer][s // PAGE, :, s % PAGE, 64:].contiguous(), k[layer]), layer
        plan.close()
    x = bf16(20, D, seed=5).cuda()
    gains = 1 + bf16(30, D, scale=0.1, seed=6).cuda()
    plan, one = (GPU.norms((Q.ROW, 1e-5, 0, 0), (Q.ROW, 1e-5, 0, 0), n, lw=g)
                 for n, g in ((30, gains), (1, gains[29:])))
    out = torch.empty(30, 20, D, dtype=torch.bfloat16, device="cuda")
    last = torch.empty(1, 20, D, dtype=torch.bfloat16, device="cuda")
    Q.run_norms(plan, x, out)
    Q.run_norms(one, x, last)
    assert same(out[29], last[0])


def hostile(rng, *shape):
    """BF16 of a random hostile kind: any bits, subnormals, spread exponents, few values."""
    n = 1
    for d in shape:
        n *= d
    kind = int(torch.randint(0, 5, (1,), generator=rng))
    bits = torch.randint(-32768, 32768, (n,), generator=rng)
    if kind == 1:    # finite, exponents around 1
        bits = (bits & 0x807F) | (torch.randint(120, 134, (n,), generator=rng) << 7)
    elif kind == 2:  # subnormals and zeros
        bits = bits & 0x807F
    elif kind == 3:  # all finite exponents
        bits = (bits & 0x807F) | (torch.randint(0, 255, (n,), generator=rng) << 7)
    elif kind == 4:  # near 1, so that sums meet halfway cases
        bits = 0x3F80 + (bits & 3)
    return bits.to(torch.int16).view(torch.bfloat16).view(*shape)


class Guarded:
    """A strided view into a buffer of NaN patterns, the same on the CPU and on the GPU."""
    def __init__(self, rng, shape, strides, values=None, offset=None):
        span = 1 + sum((d - 1) * s for d, s in zip(shape, strides))
        first = 64 + (int(torch.randint(0, 9, (1,), generator=rng)) if offset is None else offset)
        cpu = torch.full((span + 192,), 0x7FAB, dtype=torch.int16).view(torch.bfloat16)
        self.place = (shape, strides, first)
        if values is not None:
            cpu.as_strided(*self.place).copy_(values)
        self.buffers = {"cpu": cpu, "cuda": cpu.cuda()}

    def on(self, where):
        return self.buffers[where].as_strided(*self.place)

    def same(self):
        return same(*self.buffers.values())


def pick(rng, *values):
    return values[int(torch.randint(0, len(values), (1,), generator=rng))]


@test
def hostile_norms_equal_the_cpu():
    for case in range(150):
        rng = torch.Generator().manual_seed(1000 + case)
        row = pick(rng, 1, 0)
        D_ = 8192 if row else pick(rng, 8, 24, 136, 1000, 2056, 2560, 7168, 12288)
        layers, T = pick(rng, 1, 2, 3), pick(rng, 1, 2, 3, 5, 40, 300)
        kinds = [pick(rng, *((Q.ROW, Q.ROW, Q.ROW, Q.ABSENT) if row else (Q.RMS, Q.ABSENT, Q.RMS)))
                 for _ in range(2)]
        n_out = 1 if kinds[1] == Q.ABSENT else layers
        x = Guarded(rng, (T, D_), (D_ + pick(rng, 0, 8, 7), 1), hostile(rng, T, D_))
        out_row = D_ + pick(rng, 0, 8)
        out = Guarded(rng, (n_out, T, D_), (T * out_row + pick(rng, 0, 8), out_row, 1), offset=0)
        weights, norms = [], []
        for i, kind in enumerate(kinds):
            shape = (D_,) if i == 0 else (layers, D_)
            w = hostile(rng, *shape) if kind != Q.ABSENT and pick(rng, 1, 1, 0) else None
            if w is not None and pick(rng, 1, 0):
                w = w.float() * 1.00001
            weights.append(w)
            scale = pick(rng, 0, 1) if kind == Q.ROW and w is not None else 0
            norms.append((kind, pick(rng, 0.0, 1e-5, 1e-6), pick(rng, 0.0, 1.0), scale))
        numerics = pick(rng, Q.STOCK, Q.PAIR, Q.PACKED, Q.INVARIANT)
        for device, where in ((GPU, "cuda"), (CPU, "cpu")):
            hw, lw = (w.to(where) if w is not None else None for w in weights)
            plan = device.norms(*norms, layers, D_, hw=hw, lw=lw, numerics=numerics)
            Q.run_norms(plan, x.on(where), out.on(where))
            plan.close()
        assert out.same() and x.same(), f"case {case}: {kinds} D={D_} L={layers} T={T} {norms}"


@test
def hostile_projections_equal_the_cpu():
    for case in range(80):
        rng = torch.Generator().manual_seed(2000 + case)
        D_, H, hd = pick(rng, 16, 48, 112, 528, 1040), pick(rng, 1, 2, 3), pick(rng, 64, 128)
        layers, T, N = pick(rng, 1, 2, 3), pick(rng, 1, 2, 7, 16, 17, 65, 130), 2 * H * hd
        shared = pick(rng, 0, 1)
        x = Guarded(rng, (1 if shared else layers, T, D_), (T * (D_ + 8), D_ + pick(rng, 0, 8, 3), 1),
                    hostile(rng, 1 if shared else layers, T, D_))
        blocks = [Guarded(rng, (N // 2, D_), (D_ + pick(rng, 0, 8, 5), 1), hostile(rng, N // 2, D_))
                  for _ in range(2 * layers)]
        bias = hostile(rng, layers, N) if pick(rng, 0, 1) else None
        kv = Guarded(rng, (layers, T, N), pick(rng, (T * N, N, 1), (N, layers * N, 1), (T * N + 9, N + 0, 1)))
        for device, where in ((GPU, "cuda"), (CPU, "cpu")):
            plan = device.projection([b.on(where) for b in blocks], layers, H, hd, D_, Q.EXACT,
                                     bias.to(where) if bias is not None else None)
            Q.run_projection(plan, x.on(where), kv.on(where))
            torch.cuda.synchronize()
            plan.close()
        assert kv.same() and x.same(), f"case {case}: D={D_} H={H} hd={hd} L={layers} T={T}"


@test
def hostile_stores_equal_the_cpu():
    for case in range(150):
        rng = torch.Generator().manual_seed(3000 + case)
        hd, H, layers = pick(rng, 64, 64, 128, 256, 512), pick(rng, 1, 2, 3, 5), pick(rng, 1, 2, 3)
        T, page, positions = pick(rng, 1, 3, 8, 24, 90), pick(rng, 1, 3, 4, 16), 40
        norm = pick(rng, Q.K_PLAIN, Q.K_RMS, Q.K_ABSENT) if hd == 64 else pick(rng, Q.K_RMS, Q.K_ABSENT)
        rope = pick(rng, Q.ROPE_NONE, Q.GPTJ, Q.NEOX)
        gap = pick(rng, 0, 8, 3)
        strides = (T * (H * hd + gap) + gap, H * hd + gap, hd, 1)
        k = Guarded(rng, (layers, T, H, hd), strides, hostile(rng, layers, T, H, hd))
        v = Guarded(rng, (layers, T, H, hd), strides, hostile(rng, layers, T, H, hd))
        table = Guarded(rng, (positions, hd), (hd, 1), hostile(rng, positions, hd))
        weight = hostile(rng, layers, hd) if norm == Q.K_RMS else None
        at = torch.randint(0, positions, (T,), generator=rng)
        at[torch.rand(T, generator=rng) < 0.1] = pick(rng, -1, positions, 2**63 - 1, 1 << 32)
        caches, slots = [], []
        for _ in range(layers):
            blocks, odd = T // page + 2, pick(rng, 0, 0, 1)
            inner = 2 * hd + odd
            caches.append(Guarded(rng, (blocks, page, H, 2 * hd),
                                  (H * page * inner + pick(rng, 0, 8), inner, page * inner, 1),
                                  offset=pick(rng, 0, 0, 1)))
            s = torch.randperm(blocks * page, generator=rng)[:T]
            wild = torch.rand(len(s), generator=rng)
            s[wild < 0.1] = pick(rng, -1, -7, -2**63)
            s[wild > 0.93] = pick(rng, blocks * page, 2**63 - 1, 1 << 32, (1 << 32) + 1)
            s = s[:pick(rng, len(s), len(s), len(s) // 2)].contiguous()
            slots.append(s if pick(rng, 1, 1, 1, 0) else None)
        found = []
        for device, where in ((GPU, "cuda"), (CPU, "cpu")):
            plan = device.store(layers, H, hd, norm, pick(rng, 1e-5, 1e-5) if case % 3 else 0.0,
                                weight.to(where) if weight is not None else None, rope,
                                table.on(where) if rope else None)
            views = [c.on(where) for c in caches]
            Q.bind(plan, [c[..., :hd] for c in views], [c[..., hd:] for c in views])
            Q.run_store(plan, k.on(where), v.on(where), at.to(where) if rope else None,
                        [s.to(where) if s is not None else None for s in slots])
            torch.cuda.synchronize()
            f = Q.faults(plan)
            found.append((f.count, f.kind, f.layer, f.row, f.value, f.limit))
            plan.close()
        assert found[0] == found[1], f"case {case}: {found}"
        assert all(c.same() for c in caches) and k.same() and v.same(), \
            f"case {case}: hd={hd} H={H} L={layers} T={T} norm {norm} rope {rope} page {page}"


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


@test
def host_time_of_a_run():
    m = Muse(2, 8)
    plan, caches = m.chain(GPU, m.gpu), m.caches("cuda")
    Q.bind(plan, *Q.split(caches))
    call = Q.chain_call(m.gpu["x"], m.gpu["positions"], m.gpu["slots"])
    call.stream = Q.current_stream()
    run, handle, ref = LIB.lib.ctxkv_chain_run_call, plan.handle, C.byref(call)
    best = 1e9
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            run(handle, ref)
        best = min(best, (time.perf_counter() - begin) / 20 * 1e6)
    print(f"  host time of one ctxkv_chain_run_call: {best:.1f} us")
    assert best < 40, best


def main(tests):
    names = sys.argv[1:]
    passed = failed = 0
    for f in tests:
        if names and f.__name__ not in names:
            continue
        begin = time.time()
        try:
            f()
            torch.cuda.synchronize()
            passed += 1
            print(f"ok   {f.__name__} ({time.time() - begin:.1f} s)", flush=True)
        except Exception:  # noqa: BLE001
            failed += 1
            print(f"FAIL {f.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(TESTS))
