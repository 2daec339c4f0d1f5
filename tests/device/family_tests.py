#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Qwen3 family's options on a GPU against the CPU's truth, by bytes.

usage: CTXKV_LIBRARY=.../libctxkv.so family_tests.py [name ...]     last line: N passed, N failed
"""
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lib as Q  # noqa: E402
from operands import CPU, GPU, bf16, hostile, pick  # noqa: E402
from runner import main, test  # noqa: E402

CACHES = {0: torch.bfloat16, 1: torch.float16, 2: torch.uint8, 3: torch.uint8}


def equal(a, b):
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def on(where, value):
    if isinstance(value, (list, tuple)):
        return [on(where, v) for v in value]
    return value.to(where) if isinstance(value, torch.Tensor) else value


class Pool:
    """Caches of a random layout in poisoned bytes, the same on the CPU and on the GPU."""
    def __init__(self, rng, cache_type, blocks, page, H, hd):
        self.type, size = CACHES[cache_type], 1 if cache_type >= 2 else 2
        separate, odd = pick(rng, 0, 1), pick(rng, 0, 0, 1)
        inner = (hd if separate else 2 * hd) + odd
        self.shape = (blocks, page, H, hd)
        self.strides = pick(rng, (H * page * inner, inner, page * inner, 1),
                            (H * page * inner + 8, H * inner, inner, 1))
        offset = pick(rng, 0, 0, 1, 3)
        span = blocks * (H * page * inner + 8) + 16
        self.starts = [offset, span + offset if separate else offset + hd]
        cpu = torch.full(((2 if separate else 1) * span * size + 64,), 0x5A, dtype=torch.uint8)
        self.buffers = {"cpu": cpu, "cuda": cpu.cuda()}

    def views(self, where):
        flat = self.buffers[where].view(self.type)
        return [flat.as_strided(self.shape, self.strides, s) for s in self.starts]

    def same(self):
        return torch.equal(self.buffers["cpu"], self.buffers["cuda"].cpu())


def random_options(rng, hd, layers):
    """Arguments of store_desc beside the shape; tensors on the CPU."""
    o = dict(k_norm=pick(rng, Q.K_RMS, Q.K_RMS, Q.K_ABSENT, Q.K_PLAIN if hd == 64 else Q.K_RMS),
             eps=pick(rng, 0.0, 1e-6, 1e-5), rope=pick(rng, Q.ROPE_NONE, Q.GPTJ, Q.NEOX, Q.NEOX),
             cache_type=pick(rng, 0, 1, 2, 3), v_norm=pick(rng, 0, 0, 1), v_eps=pick(rng, 0.0, 1e-6),
             v_scale=pick(rng, 0.0, 0.0, 0.7, -3.0), v_from_k=pick(rng, 0, 0, 1))
    if o["k_norm"] == Q.K_RMS and pick(rng, 1, 1, 0):
        o["weight"] = hostile(rng, layers, hd)
        if pick(rng, 0, 1):
            o["weight"] = o["weight"].float() * 1.00001
        o["k_gain_centre"] = pick(rng, 0.0, 1.0)
    limits = [40] * layers
    if o["rope"]:
        kind = pick(rng, torch.bfloat16, torch.float16, torch.float32)
        own = pick(rng, 0, 1)
        rotary = pick(rng, hd, hd // 2, hd // 4, 2, 22, hd - 2)
        limits = [pick(rng, 40, 37, 51) if own else 40 for _ in range(layers)]
        tables = []
        for n in limits if own else limits[:1]:
            width = pick(rng, rotary, hd // 2) if own else rotary
            values = hostile(rng, n, width)
            if kind == torch.float16:
                values = values.view(torch.int16).view(torch.float16)
            elif kind == torch.float32:
                values = values.float() * 1.0003
            odd = torch.zeros(n * width + 1, dtype=kind)[pick(rng, 0, 1):][:n * width]
            tables.append(odd.view(n, width).copy_(values))
        if own:
            o["tables"] = tables
        else:
            o["table"], o["rotary_dim"] = tables[0], rotary
    if o["cache_type"] >= 2 and pick(rng, 1, 1, 0):
        def one():
            return torch.tensor([pick(rng, 1.0, 0.03125, 0.7, 300.0, 1e-30)], dtype=torch.float32)
        o["scales"] = [[one() for _ in range(layers)] for _ in range(2)]
    return o, limits


def on_device(where, o):
    """The options with their tensors on that device (a table's odd address is kept)."""
    def move(t):
        if not isinstance(t, torch.Tensor) or t.dim() != 2 or where == "cpu":
            return on(where, t)
        room = torch.zeros(t.numel() + 8, dtype=t.dtype, device=where)
        first = t.storage_offset() % 2
        return room[first:first + t.numel()].view(t.shape).copy_(t)
    return {k: [move(t) if isinstance(t, torch.Tensor) else on(where, t) for t in v]
            if isinstance(v, list) else move(v) for k, v in o.items()}


@test
def store_options_equal_the_cpu():
    for case in range(400):
        rng = torch.Generator().manual_seed(7000 + case)
        hd, H, layers = pick(rng, 64, 128, 128, 256, 512), pick(rng, 1, 2, 3, 8), pick(rng, 1, 2, 3)
        T, page = pick(rng, 1, 3, 8, 24, 90), pick(rng, 1, 3, 4, 16)
        o, limits = random_options(rng, hd, layers)
        gap = pick(rng, 0, 8, 3)
        room = [hostile(rng, layers, T, H, hd + gap) for _ in range(2)]
        at = torch.randint(0, 60, (T,), generator=rng) if pick(rng, 0, 1) else \
            torch.randint(0, 37, (T,), generator=rng)
        blocks = T // page + 2
        pools = [Pool(rng, o["cache_type"], blocks, page, H, hd) for _ in range(layers)]
        slots = []
        for _ in range(layers):
            s = torch.randperm(blocks * page, generator=rng)[:T]
            wild = torch.rand(len(s), generator=rng)
            s[wild < 0.1] = pick(rng, -1, -2**63)
            s[wild > 0.93] = pick(rng, blocks * page, 2**63 - 1, 1 << 32)
            slots.append(s if pick(rng, 1, 1, 1, 0) else None)
        found = []
        for device, where in ((GPU, "cuda"), (CPU, "cpu")):
            plan = device.store(layers, H, hd, **on_device(where, o))
            views = [p.views(where) for p in pools]
            Q.bind(plan, [v[0] for v in views], [v[1] for v in views])
            k, v = (on(where, r)[..., :hd] for r in room)
            Q.run_store(plan, k, None if o["v_from_k"] else v, on(where, at) if o["rope"] else None,
                        on(where, slots))
            torch.cuda.synchronize()
            f = Q.faults(plan)
            found.append((f.count, f.kind, f.layer, f.row, f.value, f.limit))
            plan.close()
        text = {k: v for k, v in o.items() if not isinstance(v, (torch.Tensor, list))}
        assert found[0] == found[1], f"case {case}: {found} {text} {limits}"
        assert all(p.same() for p in pools), f"case {case}: hd={hd} H={H} L={layers} T={T} {text}"


@test
def late_bias_and_k_only():
    for case in range(60):
        rng = torch.Generator().manual_seed(8000 + case)
        D_, H, hd = pick(rng, 48, 528, 1024), pick(rng, 1, 3), pick(rng, 64, 128)
        layers, T, parts = pick(rng, 1, 2, 3), pick(rng, 1, 7, 17, 70), pick(rng, 1, 2)
        N, shared = parts * H * hd, pick(rng, 0, 1)
        x, w = hostile(rng, 1 if shared else layers, T, D_), hostile(rng, layers, N, D_)
        bias = hostile(rng, layers, N) if pick(rng, 1, 1, 0) else None
        after, outs = pick(rng, 0, 1), []
        for device, where in ((GPU, "cuda"), (CPU, "cpu")):
            ws = on(where, w)
            plan = device.projection(ws, layers, H, hd, D_, Q.EXACT, on(where, bias),
                                     bias_add=after, k_only=parts == 1)
            kv = torch.full((T, layers, N), float("nan"), dtype=torch.bfloat16, device=where)
            Q.run_projection(plan, on(where, x), kv.transpose(0, 1))
            torch.cuda.synchronize()
            plan.close()
            outs.append(kv)
        assert equal(*outs), f"case {case}: D={D_} H={H} L={layers} T={T} parts {parts} after {after}"


@test
def shared_batches_equal_exact():
    """cuBLAS as AUTO uses it for one input of all layers: one GEMM, or windows of a GEMM a layer."""
    wrong = []
    for D_, columns, rows in ((4096, 256, (64, 65, 100, 128, 200, 256, 300, 512, 700, 1024, 1500, 4097)),
                              (2048, 1024, (1, 17, 100, 700)), (2560, 2048, (1, 17, 100, 700)),
                              (4096, 2048, (1, 17, 100, 700)), (5120, 2048, (1, 17, 100, 700))):
        w = bf16(5, columns, D_, scale=0.02, seed=columns).cuda()
        x = bf16(1, max(rows), D_, seed=D_).cuda()
        plans = [GPU.projection(w, 5, columns // 256, 128, D_, mode) for mode in (Q.AUTO, Q.EXACT)]
        for T in rows:
            outs = []
            for plan in plans:
                kv = torch.empty(T, 5, columns, dtype=torch.bfloat16, device="cuda")
                Q.run_projection(plan, x[:, :T], kv.transpose(0, 1))
                outs.append(kv)
            differ = int((outs[0].view(torch.int16) != outs[1].view(torch.int16)).sum())
            if differ:
                wrong.append((D_, columns, T, differ))
        for plan in plans:
            plan.close()
    assert not wrong, f"(D, columns, T, values): {wrong}"


@test
def chains_with_options_equal_the_cpu():
    D_, H, hd, layers = 1024, 2, 128, 3
    for case in range(24):
        rng = torch.Generator().manual_seed(9000 + case)
        T = (3, 40, 130)[case % 3]
        o, _ = random_options(rng, hd, layers)
        parts = 1 if o["v_from_k"] else 2
        x, hw = bf16(T, D_, seed=case), 1 + bf16(D_, scale=0.1, seed=case + 1)
        w = bf16(layers, parts * H * hd, D_, scale=0.05, seed=case + 2)
        at, blocks = torch.randint(0, 37, (T,), generator=rng), T // 16 + 2
        pools = [Pool(rng, o["cache_type"], blocks, 16, H, hd) for _ in range(layers)]
        slots = [torch.randperm(blocks * 16, generator=rng)[:T] for _ in range(layers)]
        for device, where in ((GPU, "cuda"), (CPU, "cpu")):
            plan = device.chain(
                device.norms_desc((Q.RMS, 1e-6, 0, 0), (Q.ABSENT, 0, 0, 0), layers, D_,
                                  hw=on(where, hw)),
                device.projection_desc(on(where, w), layers, H, hd, D_, k_only=parts == 1),
                device.store_desc(layers, H, hd, **on_device(where, o)), T)
            views = [p.views(where) for p in pools]
            Q.bind(plan, [v[0] for v in views], [v[1] for v in views])
            Q.run_chain(plan, on(where, x), on(where, at) if o["rope"] else None, on(where, slots))
            torch.cuda.synchronize()
            plan.close()
        text = {k: v for k, v in o.items() if not isinstance(v, (torch.Tensor, list))}
        assert all(p.same() for p in pools), f"case {case}: T={T} {text}"


if __name__ == "__main__":
    sys.exit(main())
