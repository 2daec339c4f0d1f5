# SPDX-License-Identifier: Apache-2.0
# The chain in torch operations, written from docs/numerics.md alone: bits, not speed.
from __future__ import annotations

import re
from pathlib import Path

import torch

_TABLE = Path(__file__).resolve().parents[2] / "src" / "ops" / "rsqrt_table.inc"
F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64


def bits(x: torch.Tensor) -> torch.Tensor:
    """FP32 bit patterns as non-negative int64."""
    return x.contiguous().view(I32).to(I64) & 0xFFFFFFFF


def from_bits(b: torch.Tensor) -> torch.Tensor:
    return torch.where(b >= 1 << 31, b - (1 << 32), b).to(I32).view(F32)


def bf16_bits(x: torch.Tensor) -> torch.Tensor:
    """FP32 to BF16 bit patterns (int64), nearest even, NaN to 0x7FFF."""
    b = bits(x)
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return torch.where((b & 0x7FFFFFFF) > 0x7F800000, torch.full_like(b, 0x7FFF), rounded)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    b = bf16_bits(x)
    return torch.where(b >= 1 << 15, b - (1 << 16), b).to(torch.int16).view(torch.bfloat16)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """FP32 rounded to BF16, as FP32."""
    return from_bits(bf16_bits(x) << 16)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """FP32 a*b + c with one rounding: the double sum is rounded to odd, then to FP32."""
    p, c = a.to(F64) * b.to(F64), c.to(F64)
    p, c = torch.broadcast_tensors(p, c)
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)
    even = (s.contiguous().view(I64) & 1) == 0
    # Towards the error where the double sum was rounded and ended even.
    up = torch.nextafter(s, torch.where(error > 0, torch.inf, -torch.inf).to(F64))
    odd = torch.where((error != 0) & even & torch.isfinite(s), up, s)
    return odd.to(F32)


# ---- rsqrt -------------------------------------------------------------------------------------
def _coefficients() -> torch.Tensor:
    numbers = re.findall(r"\{(\d+), (\d+), (\d+)\}", _TABLE.read_text())
    rows = [[int(word) for word in row] for row in numbers]
    assert len(rows) == 128
    return torch.tensor(rows, dtype=I64)


_C = _coefficients()


def _square_high(x: torch.Tensor) -> torch.Tensor:
    """The partial products of x*x in columns >= 19, in units of 2^19."""
    total = torch.zeros_like(x)
    for i in range(17):
        bit = (x >> i) & 1
        if 2 * i >= 19:
            total = total + (bit << (2 * i - 19))
        for j in range(i + 1, 17):
            if i + j + 1 >= 19:
                total = total + ((bit & (x >> j) & 1) << (i + j + 1 - 19))
    return total


def rsqrt(x: torch.Tensor, ftz: bool) -> torch.Tensor:
    """rsqrt.approx(.ftz).f32 of sm_90."""
    b = bits(x)
    sign, magnitude = b >> 31, b & 0x7FFFFFFF
    nan = torch.full_like(b, 0x7FFFFFFF)
    subnormal = (magnitude > 0) & (magnitude < 0x00800000)
    scaled = magnitude.clone()
    shift = torch.zeros_like(b)
    if ftz:
        magnitude = torch.where(subnormal, torch.zeros_like(b), magnitude)
        scaled = magnitude
    else:
        # 2^24 times as large, exactly; the root is then 2^12 too small.
        big = bits(from_bits(magnitude) * torch.tensor(2.0**24))
        scaled = torch.where(subnormal, big, magnitude)
        shift = torch.where(subnormal, torch.full_like(b, 12), shift)
    exponent, m = (scaled >> 23) - 127, scaled & 0x7FFFFF
    odd = exponent & 1
    k = (exponent - odd) // 2
    c = _C[(odd * 64 + (m >> 17)).clamp(0, 127)]
    low = m & 0x1FFFF
    p = (c[..., 0] * 2**14 - c[..., 1] * low + c[..., 2] * _square_high(low) * 4 - 1) >> 16
    result = ((126 - k + shift) << 23) | (p & 0x7FFFFF)
    result = torch.where((odd == 0) & (m == 0), (127 - k + shift) << 23, result)
    result = torch.where(magnitude == 0, 0x7F800000 | (sign << 31), result)
    result = torch.where((magnitude == 0x7F800000) & (sign == 0), torch.zeros_like(b), result)
    result = torch.where((magnitude > 0x7F800000) | ((sign == 1) & (magnitude != 0)), nan, result)
    return from_bits(result)


# ---- norms -------------------------------------------------------------------------------------
def _butterfly(s: torch.Tensor, steps: tuple[int, ...]) -> torch.Tensor:
    """Sum over the last dimension as a warp's xor shuffles do it: lane 0's result."""
    lanes = torch.arange(s.shape[-1])
    for step in steps:
        s = s + s[..., lanes ^ step]
    return s[..., 0]


def _row_sum(v: torch.Tensor, order: str, contracted: bool) -> torch.Tensor:
    """Sum of squares over [..., 8192] in the named order."""
    shape = v.shape[:-1]
    # Column t*8 + k*2048 + e belongs to thread t, as its value 8k + e.
    q = v.reshape(*shape, 4, 256, 8).transpose(-3, -2).reshape(*shape, 256, 32)
    if order == "pair":
        p = fma(q[..., 0::2], q[..., 0::2], q[..., 1::2] * q[..., 1::2])
        while p.shape[-1] > 1:
            p = p[..., 0::2] + p[..., 1::2]
        sums = p[..., 0]
    else:
        pairs = q.reshape(*shape, 256, 16, 2)
        a, b = pairs[..., 0::2, :], pairs[..., 1::2, :]
        p = fma(a, a, b * b) if contracted else a * a + b * b
        while p.shape[-2] > 1:
            p = p[..., 0::2, :] + p[..., 1::2, :]
        sums = p[..., 0, 0] + p[..., 0, 1]
    warps = _butterfly(sums.reshape(*shape, 8, 32), (16, 8, 4, 2, 1))
    return _butterfly(warps, (4, 2, 1))


def row_norm(x, weight=None, eps=1e-5, centre=0.0, input_scale=False, order="pair"):
    """BF16 [..., 8192] -> BF16: SPEC 3.1."""
    x = x.to(F32)
    gain = None if weight is None else weight.to(F32) + torch.tensor(centre, dtype=F32)
    before = gain is not None and input_scale
    v = x * gain if before else x
    contracted = weight is not None and (input_scale or weight.dtype == F32)
    s = _row_sum(v, order, contracted)
    r = rsqrt(fma(s, torch.tensor(1 / 8192), torch.tensor(eps, dtype=F32)), ftz=True)
    y = r.unsqueeze(-1) * v
    if gain is not None and not input_scale:
        y = y * gain
    return to_bf16(y)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, rows: int, centre: float = 0.0
) -> torch.Tensor:
    """BF16 [..., n] -> BF16, in a call over `rows` rows: SPEC 5."""
    n = x.shape[-1]
    threads = min(n // 8, 1024 if rows < 256 else 256)
    x = x.to(F32)
    vectors = x.reshape(*x.shape[:-1], n // 8, 8)
    sums = torch.zeros(*x.shape[:-1], threads)
    for first in range(0, n // 8, threads):
        part = vectors[..., first : first + threads, :]
        count = part.shape[-2]
        for e in range(8):
            sums[..., :count] = fma(part[..., e], part[..., e], sums[..., :count])
    total = None
    for first in range(0, threads, 32):
        lanes = sums[..., first : first + 32].clone()
        step = 1
        while step < 32:
            old = lanes.clone()
            for i in range(0, lanes.shape[-1] - step):
                lanes[..., i] = old[..., i] + old[..., i + step]
            step *= 2
        warp = lanes[..., 0]
        total = warp if total is None else total + warp
    mean = total / torch.tensor(float(n))
    r = rsqrt(mean + torch.tensor(eps, dtype=F32), ftz=False)
    y = x * r.unsqueeze(-1)
    return to_bf16(y if weight is None else y * (weight.to(F32) + torch.tensor(centre)))


# ---- projection --------------------------------------------------------------------------------
def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sign, significand (8 bits) and exponent of finite BF16 values."""
    b = bits(x.to(F32)) >> 16
    exponent, fraction = (b >> 7) & 0xFF, b & 0x7F
    significand = torch.where(exponent > 0, fraction | 0x80, fraction)
    return 1 - 2 * (b >> 15), significand, exponent.clamp(min=1) - 127


def mma16(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One k16 step on finite values: acc FP32 [...], a and b BF16 [..., 16]."""
    sa, ma, ea = _parts(a)
    sb, mb, eb = _parts(b)
    sign, product, exponent = sa * sb, ma * mb, ea + eb
    c = bits(acc)
    ce, cf = (c >> 23) & 0xFF, c & 0x7FFFFF
    cm = torch.where(ce > 0, cf | 0x800000, cf)
    ce = ce.clamp(min=1) - 127
    none = torch.full_like(exponent, -(1 << 20))
    top = torch.where(product != 0, exponent, none).amax(-1)
    top = torch.maximum(top, torch.where(cm != 0, ce, none[..., 0]))
    # Units of 2^(top - 25): a product has 14 bits below its point, acc 23.
    shift = (top.unsqueeze(-1) - exponent).clamp(0, 63)
    aligned = (product << 11) >> shift
    terms = (sign * aligned).sum(-1)
    own = (cm << 2) >> (top - ce).clamp(0, 63)
    total = terms + (1 - 2 * (c >> 31)) * own
    magnitude = total.abs()
    # Truncated to 24 bits, then scaled exactly; a double holds every case here.
    length = torch.frexp(magnitude.to(F64)).exponent.to(I64)
    cut = (length - 24).clamp(min=0)
    kept = (magnitude >> cut) << cut
    value = torch.ldexp(kept.to(F64), (top - 25).clamp(min=-400))
    value = torch.where(total < 0, -value, value).to(F32)
    return torch.where(total == 0, torch.zeros_like(value), value)


def project(
    n: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, after: bool = False
) -> torch.Tensor:
    """BF16 n [T, D], w [N, D] -> BF16 [T, N]: the one chain of k16 steps; the bias after it, or
    after its rounding."""
    acc = torch.zeros(n.shape[0], w.shape[0])
    for k in range(0, n.shape[1], 16):
        acc = mma16(acc, n[:, None, k : k + 16], w[None, :, k : k + 16])
    if bias is None:
        return to_bf16(acc)
    return to_bf16((round_bf16(acc) if after else acc) + bias.to(F32))


# ---- store -------------------------------------------------------------------------------------
def plain_k_norm(k: torch.Tensor, eps: float) -> torch.Tensor:
    """BF16 [..., 64] -> BF16: SPEC 3.4."""
    k = k.to(F32)
    s = k * k
    while s.shape[-1] > 1:
        half = s.shape[-1] // 2
        s = s[..., :half] + s[..., half:]
    r = rsqrt(fma(s, torch.tensor(1 / 64), torch.tensor(eps, dtype=F32)), ftz=False)
    return to_bf16(k * r)


def rope(n: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, kind: str) -> torch.Tensor:
    """BF16 n [T, H, d], table [P, r]: GPT-J or NeoX pairs of the first r elements."""
    width = table.shape[1]
    if width < n.shape[-1]:
        turned = rope(n[..., :width], positions, table, kind)
        return torch.cat((turned, n[..., width:]), -1)
    half = width // 2
    at = table[positions].to(F32)[:, None]
    c, s, x = at[..., :half], at[..., half:], n.to(F32)
    a, b = (x[..., 0::2], x[..., 1::2]) if kind == "gptj" else (x[..., :half], x[..., half:])
    first, second = fma(a, c, -(b * s)), fma(b, c, a * s)
    if kind == "gptj":
        return to_bf16(torch.stack((first, second), -1).flatten(-2))
    return to_bf16(torch.cat((first, second), -1))


def fp8(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """BF16 -> uint8: x / scale to nearest even, saturated, NaN as 0x7F."""
    dtype = torch.float8_e4m3fn if kind == "fp8_e4m3" else torch.float8_e5m2
    y = x.to(F32) / scale
    most = torch.finfo(dtype).max
    stored = y.clamp(-most, most).to(dtype).view(torch.uint8)
    return torch.where(torch.isnan(y), torch.full_like(stored, 0x7F), stored)


def insert(key_cache, value_cache, k, v, slots, limit: int | None = None, positions=None) -> None:
    """Row by row into views [num_blocks, block_size, H, d]; what does not fit is skipped."""
    size = key_cache.shape[1]
    for t, slot in enumerate(slots.tolist()):
        beyond = limit is not None and not 0 <= int(positions[t]) < limit
        if 0 <= slot < key_cache.shape[0] * size and not beyond:
            key_cache[slot // size, slot % size] = k[t]
            value_cache[slot // size, slot % size] = v[t]


def store_layer(k, v, positions, slots, table, kind, views, norm) -> None:
    """One layer of SPEC 3.4 or 5; norm: the K norm as a function."""
    n = norm(k)
    limit = None
    if kind != "none":
        limit = table.shape[0]
        n = rope(n, positions.clamp(0, limit - 1), table, kind)
    insert(*views, n, v, slots, limit, positions)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, whatever they mean as numbers."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = {1: torch.int8, 2: torch.int16, 4: I32, 8: I64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))
