# SPDX-License-Identifier: Apache-2.0
"""Operands of the device tests, the same on the CPU and on the GPU."""
import torch

import lib as Q

D, L, PAGE = 8192, 5, 16
LIB = Q.Library()
GPU = LIB.device("cuda:0")
CPU = LIB.device("cpu")


def same(a, b):
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


def bf16(*shape, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).bfloat16()


def pick(rng, *values):
    return values[int(torch.randint(0, len(values), (1,), generator=rng))]


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
