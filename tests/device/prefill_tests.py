#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many rows of the Qwen3 family on a GPU against the CPU's exact chain, by bytes, faults included.

usage: CTXKV_LIBRARY=.../libctxkv.so prefill_tests.py [name ...]     last line: N passed, N failed
"""
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lib as Q  # noqa: E402
from operands import CPU, GPU, Guarded, bf16, hostile, pick, same  # noqa: E402
from runner import main, test  # noqa: E402

os.environ["CTXKV_CHAIN_WAYS"] = "prefill-always"
PAGE = 16


class Family:
    """Operands of a chain with one hidden norm, K norm gains and NeoX, on both devices."""
    def __init__(self, D, H, hd, T, layers, seed, wild=False, faults=False, odd=0):
        self.D, self.H, self.hd, self.T, self.L = D, H, hd, T, layers
        rng = torch.Generator().manual_seed(seed)
        N, blocks = 2 * H * hd, T // PAGE + 3
        values = dict(x=bf16(T, D, seed=seed), hw=1 + bf16(D, scale=0.1, seed=seed + 1),
                      kw=1 + bf16(layers, hd, scale=0.1, seed=seed + 2), table=bf16(500, hd, seed=seed + 3),
                      w=bf16(layers, N, D, scale=0.02, seed=seed + 4))
        values["positions"] = torch.randint(0, 500, (T,), generator=rng)
        slots = [torch.randperm(blocks * PAGE, generator=rng)[:T].contiguous() for _ in range(layers)]
        if wild:
            for row in range(0, T, 7):
                values["x"][row] = hostile(rng, D)
            for row in range(0, N, 9):
                values["w"][:, row] = hostile(rng, layers, D)
            values["kw"] = hostile(rng, layers, hd)
        if faults:
            values["positions"][3::11] = pick(rng, -1, 500, 2**63 - 1, 1 << 32)
            for s in slots:
                s[::5] = -1
                s[2::13] = pick(rng, blocks * PAGE, 2**63 - 1, 1 << 32)
        self.host = dict(values, slots=slots)
        self.gpu = dict({k: v.cuda() for k, v in values.items()}, slots=[s.cuda() for s in slots])
        inner = 2 * hd + odd
        self.caches = [Guarded(rng, (blocks, PAGE, H, 2 * hd), (H * PAGE * inner, inner, PAGE * inner, 1),
                               offset=odd) for _ in range(layers)]

    def plan(self, device, on, numerics=Q.STOCK):
        return device.chain(
            device.norms_desc((Q.RMS, 1e-6, 0.0, 0), (Q.ABSENT, 0.0, 0.0, 0), self.L, self.D, hw=on["hw"],
                              numerics=numerics),
            device.projection_desc(on["w"], self.L, self.H, self.hd, self.D),
            device.store_desc(self.L, self.H, self.hd, Q.K_RMS, 1e-6, on["kw"], Q.NEOX, on["table"]), self.T)

    def run(self, device, where):
        on = self.host if where == "cpu" else self.gpu
        plan = self.plan(device, on)
        views = [c.on(where) for c in self.caches]
        Q.bind(plan, [c[..., :self.hd] for c in views], [c[..., self.hd:] for c in views])
        Q.run_chain(plan, on["x"], on["positions"], on["slots"])
        torch.cuda.synchronize()
        f = Q.faults(plan)
        plan.close()
        return f.count, f.kind, f.layer, f.row, f.value, f.limit


def check(*args, **options):
    m = Family(*args, **options)
    found = m.run(GPU, "cuda"), m.run(CPU, "cpu")
    assert found[0] == found[1], f"{args} {options}: faults {found}"
    assert all(c.same() for c in m.caches), f"{args} {options}: other bytes"


@test
def few_for_sanitizers():
    for H, hd, T in ((1, 128, 130), (2, 64, 70)):
        check(256, H, hd, T, 2, T, faults=True)


def around_every_tile(wild):
    for T in (65, 96, 128, 130, 255, 256, 257):
        for H in (1, 2):
            for hd in (64, 128):
                check(512, H, hd, T, 3, 10 * T + H, wild=wild, faults=True, odd=(T % 3 == 0) * 3)


@test
def rows_around_every_tile():
    around_every_tile(False)


@test
def hostile_rows():
    around_every_tile(True)


@test
def many_heads_and_widths():
    for D, H, hd, T, layers in ((768, 4, 128, 130, 2), (1280, 8, 128, 257, 2), (1024, 8, 64, 300, 2),
                                (2560, 1, 128, 1000, 2), (256, 8, 128, 1024, 2), (256, 2, 64, 1000, 3),
                                (256, 1, 128, 200, 35), (256, 3, 128, 2500, 5), (256, 1, 64, 20000, 5)):
        check(D, H, hd, T, layers, D + T)


@test
def a_row_does_not_depend_on_the_rest():
    """At the real shapes, where several tiles are chosen among: few rows against many."""
    for H, hd in ((1, 128), (8, 128), (2, 64)):
        m = Family(4096, H, hd, 2304, 5, 77 + H)
        plan, caches = m.plan(GPU, m.gpu, Q.INVARIANT), []
        for T in (2304, 8, 65, 130, 256, 512, 700, 1025, 1600):
            room = [torch.full((m.T // PAGE + 3, PAGE, H, 2 * hd), 0x5A5A, dtype=torch.int16,
                               device="cuda").view(torch.bfloat16) for _ in range(m.L)]
            Q.bind(plan, [c[..., :hd] for c in room], [c[..., hd:] for c in room])
            Q.run_chain(plan, m.gpu["x"][:T], m.gpu["positions"][:T], [s[:T] for s in m.gpu["slots"]])
            torch.cuda.synchronize()
            caches = caches or room
            for layer, s in enumerate(m.gpu["slots"]):
                s = s[:T]
                a, b = (c[layer][s // PAGE, s % PAGE] for c in (room, caches))
                assert same(a, b), f"H={H} hd={hd} T={T} layer {layer}"
        plan.close()


if __name__ == "__main__":
    sys.exit(main())
