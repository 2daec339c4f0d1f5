# SPDX-License-Identifier: Apache-2.0
"""The chain from torch's own BF16 operators on a CPU, as a user would write it; each step timed."""
import time

import torch
import torch.nn.functional as F

D, LAYERS, BLOCK = 8192, 5, 16
EPS = 1e-5


def filled(*shape):
    """Small BF16 values; drawing each of 10^8 would take longer than measuring."""
    count = torch.Size(shape).numel()
    base = (torch.randn(1 << 20) * 0.01).to(torch.bfloat16)
    return base.repeat(-(-count // base.numel()))[:count].view(shape)


class Chain:
    """One number of heads. Sets of weights rotate past the last-level cache."""

    def __init__(self, heads, past_cache=200 << 20):
        self.heads, width = heads, 2 * heads * 64
        sets = past_cache // (LAYERS * width * D * 2) + 1
        self.weights = [filled(LAYERS, width, D).transpose(1, 2) for _ in range(sets)]
        self.hidden, self.gains = filled(D) + 1, filled(LAYERS, D) + 1
        angle = torch.arange(4096.0)[:, None] * 500000.0 ** (-torch.arange(0, 64, 2) / 64)
        self.cos, self.sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
        self.turn = 0

    def rows(self, count):
        blocks = -(-count // BLOCK)
        self.x = filled(count, D)
        self.positions = torch.arange(count)
        self.block, self.offset = self.positions // BLOCK, self.positions % BLOCK
        self.caches = [filled(blocks, self.heads, BLOCK, 128) for _ in range(LAYERS)]
        self.normed = self.norms()
        self.kv = self.projection()

    def norms(self):
        h = F.rms_norm(self.x, (D,), self.hidden, EPS)
        return torch.stack([F.rms_norm(h, (D,), gain, EPS) for gain in self.gains])

    def projection(self, normed=None):
        self.turn += 1
        weights = self.weights[self.turn % len(self.weights)]
        return torch.bmm(self.normed if normed is None else normed, weights)

    def store(self, kv=None):
        kv = (self.kv if kv is None else kv).view(LAYERS, -1, 2, self.heads, 64)
        k, v = F.rms_norm(kv[:, :, 0], (64,), None, EPS), kv[:, :, 1]
        cos, sin = (t[self.positions][:, None] for t in (self.cos, self.sin))
        even, odd = k[..., 0::2], k[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        for cache, rows in zip(self.caches, torch.cat((turned, v), -1)):
            cache[self.block, :, self.offset] = rows

    def chain(self):
        self.store(self.projection(self.norms()))


def measure(run, seconds, most=200):
    """Microseconds: median, p10, p90."""
    for _ in range(2):
        run()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < most):
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    times.sort()
    return times[len(times) // 2], times[len(times) // 10], times[len(times) * 9 // 10]


def all_steps(chain, rows, seconds):
    chain.rows(rows)
    with torch.inference_mode():
        return {op: measure(getattr(chain, op), seconds)
                for op in ("norms", "projection", "store", "chain")}
