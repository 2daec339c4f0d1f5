#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU and torch: norms, projection and store alone, also of hostile operands.

usage: CTXKV_LIBRARY=.../libctxkv.so op_tests.py [name ...]     last line: N passed, N failed
"""
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lib as Q  # noqa: E402
from operands import CPU, GPU, PAGE, D, Guarded, L, Muse, bf16, hostile, pick, same  # noqa: E402
from runner import main, test  # noqa: E402


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


if __name__ == "__main__":
    sys.exit(main())
