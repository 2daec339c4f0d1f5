#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every prefill kernel (tile shape x input), alone, against torch.bmm on the stock norms and vLLM's
store kernels; or timed beside the seed's chain and torch.bmm.

usage: DEVICE_PEERS=folder [NVCC=nvcc] prefill_kernels.py [quick | full | bench H:T:SHAPE ...]
DEVICE_PEERS holds peers.py and, below it, peers/ (kernels). Last line: N passed, N failed.
"""
import ctypes as C
import os
import re
import subprocess
import sys
import tempfile

PEERS = os.environ["DEVICE_PEERS"]
WORDS = sys.argv[1:] or ["quick"]
SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "src", "cuda")
os.environ["LIB"] = "1"  # peers.py: define, do not run
sys.argv = ["peers.py", os.path.join(PEERS, "peers"), "/tmp"]
sys.path.insert(0, PEERS)
import peers as P  # noqa: E402
import torch  # noqa: E402

D, LAYERS, EPS = 8192, 32, 1e-5
KV, BY2 = 1, 2
DEV, BF16 = P.dev, torch.bfloat16


def fields(kind, names):
    return [(name, kind) for name in names.split()]


class Layer(C.Structure):
    _fields_ = fields(C.c_int64, "k v slots rows slot_count block_size k_block k_page k_head "
                      "v_block v_page v_head")


class Params(C.Structure):
    _fields_ = [("a", C.c_ubyte * 128)] + fields(
        C.c_int64, "w_maps row_scale gains positions cos_sin k_gain faults kv kv_layer kv_row "
        "max_position rows") + fields(
            C.c_int32, "first_layer heads k_blocks w_rows column_tiles row_tiles group") + [
                ("k_eps", C.c_float), ("flags", C.c_int32), ("a_shared", C.c_int32),
                ("layer", Layer * LAYERS), ("tail", C.c_ubyte * 128)]


class Prenorm(C.Structure):
    _fields_ = fields(C.c_int64, "x h row_scale gain x_row h_row") + fields(
        C.c_int32, "gain_fp32 gain_input") + fields(C.c_float, "hidden_eps layer_eps")


def tensor_map(address, dims, strides, box):
    room, n = (C.c_ubyte * 192)(), len(dims)
    at = (C.addressof(room) + 63) & ~63
    P.ck(P.cu.cuTensorMapEncodeTiled(
        C.c_void_p(at), 9, n, C.c_void_p(address), (C.c_uint64 * n)(*dims),
        (C.c_uint64 * n)(*strides), (C.c_uint32 * n)(*box), (C.c_uint32 * n)(*[1] * n), 0, 3, 2, 0),
        "tensor map")
    return C.string_at(at, 128)


def on_device(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEV)


class Kernel:
    def __init__(self, module, name, shared):
        self.function, self.shared = C.c_void_p(), shared
        P.ck(P.cu.cuModuleGetFunction(C.byref(self.function), module, name.encode()), name)
        if shared:
            P.ck(P.cu.cuFuncSetAttribute(self.function, 8, shared), name)
        self.attribute = P.Attr(6, 0)
        self.attribute.val[0] = 1

    def __call__(self, grid, threads, params):
        config = P.Cfg(grid, 1, 1, threads, 1, 1, self.shared,
                       torch.cuda.current_stream().cuda_stream, C.pointer(self.attribute), 1)
        P.ck(P.cu.cuLaunchKernelEx(C.byref(config), self.function,
                                   (C.c_void_p * 1)(C.addressof(params)), None), "launch")


class Shape:
    def __init__(self, module, name, groups, columns, cluster, _, stages):
        self.name, self.n, self.m, self.cluster = name, columns, 64 * groups, cluster
        self.moves = (groups == 2 and columns == 256) or groups == 3
        self.threads = 128 * groups + (128 if self.moves else 96)
        self.box = min(64, columns // cluster)
        shared = 1024 + stages * ((self.m + columns) * 128 + 1024)
        self.kernel = {kind: Kernel(module, f"ctxkv_prefill_{name}_{kind}", shared)
                       for kind in ("ready", "scaled", "gained")}


def build(stem, *options):
    out = os.path.join(tempfile.mkdtemp(), stem + ".cubin")
    subprocess.run([os.environ.get("NVCC", "nvcc"), "-std=c++17", "-O3", "-fmad=false", "-cubin",
                    "-gencode", "arch=compute_90a,code=sm_90a", *options, "-o", out,
                    os.path.join(SOURCE, stem + ".cu")], check=True)
    module = C.c_void_p()
    P.ck(P.cu.cuModuleLoadData(C.byref(module), open(out, "rb").read()), stem)
    return module


class Problem:
    """Weights, norms and room for h and r of T rows; `w_maps` can be any split of the weights."""

    def __init__(self, W, heads, kinds, hidden, layer, centres, rows):
        self.W, self.H, self.T, (self.L, self.N, _) = W, heads, rows, W.shape
        self.input = "scaled" if layer is None else "gained"
        self.h = torch.full((rows, D), float("nan"), dtype=BF16, device=DEV)
        self.r = torch.full((rows,), float("nan"), device=DEV)
        self.faults = torch.zeros(6, dtype=torch.int64, device=DEV)
        self.scales_input, self.maps, self.gain, self.packed = int(kinds[0] in "BF"), {}, None, None
        if hidden is not None:
            self.gain = hidden.float() + centres[0]
            half = self.gain.to(BF16)
            self.gain = half if torch.equal(half.float(), self.gain) else self.gain
        if layer is not None:
            gains = (layer.float() + centres[1]).view(self.L, -1, 2, 4, 2)
            self.packed = gains.transpose(2, 3).contiguous()

    def w_map(self, box, W):
        key = box, W.data_ptr()
        if key not in self.maps:
            dims, strides = (D, self.L * self.N), (D * 2,)
            self.maps[key] = on_device(tensor_map(W.data_ptr(), dims, strides, (64, box)))
        return self.maps[key].data_ptr()

    def prenorm(self, x):
        gain = 0 if self.gain is None else self.gain.data_ptr()
        fp32 = int(self.gain is not None and self.gain.dtype == torch.float32)
        PRENORM(x.shape[0], 256, Prenorm(x.data_ptr(), self.h.data_ptr(), self.r.data_ptr(), gain,
                                         x.stride(0), D, fp32, self.scales_input, EPS, EPS))

    def launch(self, shape, n=None, W=None, kv=None, cache=None, first=0, count=None, w_maps=None,
               w_rows=None, group=0, flags=0):
        a, count = self.h if n is None else n, count or self.L
        p, layers = Params(), 1 if n is None else self.L
        dims, strides = (D, self.T, layers), (D * 2, self.T * D * 2)
        C.memmove(p.a, tensor_map(a.data_ptr(), dims, strides, (64, shape.m, 1)), 128)
        p.w_maps = w_maps or self.w_map(shape.box, self.W if W is None else W)
        p.row_scale, p.faults = self.r.data_ptr(), self.faults.data_ptr()
        p.gains = 0 if self.packed is None else self.packed.data_ptr()
        p.rows, p.first_layer, p.heads, p.k_blocks = self.T, first, self.H, D // 64
        p.w_rows = w_rows or self.L * self.N
        p.column_tiles = count * self.N // shape.n
        p.row_tiles = -(-self.T // (shape.m * shape.cluster))
        p.group = group or (2 if p.column_tiles <= 10 else 8)
        p.k_eps, p.flags = EPS, flags
        if kv is not None:
            p.flags |= KV
            p.kv, p.kv_layer, p.kv_row = kv
        else:
            positions, slots, table, layer = cache
            p.positions = positions.data_ptr()
            if table is not None:
                p.cos_sin, p.max_position = table.data_ptr(), table.shape[0]
            for i in range(count):
                p.layer[i] = layer(first + i)
                p.layer[i].slots = slots[first + i].data_ptr()
                p.layer[i].rows = slots[first + i].shape[0]
        kind = self.input if n is None else "ready"
        room = 132 // shape.cluster * shape.cluster
        grid = min(p.column_tiles * p.row_tiles * shape.cluster, room)
        shape.kernel[kind](grid, shape.threads, p)


def stock_layout(caches):
    def layer(i):
        c = caches[i]
        block, head, page = c.stride(0), c.stride(1), c.stride(2)
        return Layer(k=c.data_ptr(), v=c.data_ptr() + 128, slot_count=c.shape[0] * c.shape[2],
                     block_size=c.shape[2], k_block=block, k_page=page, k_head=head, v_block=block,
                     v_page=page, v_head=head)
    return layer


def poisoned(*shape):
    return torch.full(shape, 0x5A5A, dtype=torch.int16, device=DEV).view(BF16)


def differences(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def weight(kind, seed, n, centre):
    if kind == "n":
        return None
    values = torch.from_numpy(P.gains(seed, n, centre))
    return (values if kind in "fF" else values.to(BF16)).to(DEV)


def hostile_weights(W):
    W[0, 1] *= 2.0**-110
    W[0, 5, 7], W[0, 70, 9] = float("inf"), float("nan")
    W[0, 9, ::2], W[-1, 3] = 2.0**-133, -0.0
    W[-1, -1] *= 2.0**100


def slots_and_faults(rows, layers, limit, bad_position, hostile):
    """Per layer: the slots handed over, and those of rows that are stored; the expected record."""
    given, stored, count, first = [], [], 0, None
    for layer in range(layers):
        o = torch.randperm(limit, device=DEV)[:rows].contiguous()
        if layer % 2:
            o[::5] = -1
        if layer == layers - 1:
            o = o[:rows - rows // 7].contiguous()
        if hostile:
            o[11], o[rows // 2], o[rows // 3], o[17] = limit, 2**63 - 1, 2**32 + 3, -2**63
        fault = (o >= limit) | ((o >= 0) & bad_position[:o.shape[0]])
        where = fault.nonzero().view(-1)
        count += where.numel()
        if where.numel() and first is None:
            first = [layer, int(where[0])]
        good = o.clone()
        good[fault] = -1
        given.append(o)
        stored.append(good)
    return given, stored, count, first


def check_case(number, heads, rows, layers, hidden_kind, layer_kind, hostile):
    n_columns, seed = 128 * heads, 7000 + 50 * number
    x = torch.randn(rows, D, device=DEV).to(BF16)
    x = P.special_rows(x) if hostile else x
    gh = 1.0 if hidden_kind != "n" and number % 2 else 0.0
    gp = 1.0 if layer_kind != "n" and number % 3 == 0 else 0.0
    hidden = weight(hidden_kind, seed + 1, D, gh)
    layer = weight(layer_kind, seed + 2, layers * D, gp)
    layer = None if layer is None else layer.view(layers, D)
    W = (torch.randn(layers, n_columns, D, device=DEV) / 32).to(BF16)
    if hostile:
        hostile_weights(W)
    n = P.stock_norms(hidden_kind, layer_kind, x, hidden, layer, EPS, EPS, gh, gp, layers)
    want = torch.bmm(n, W.transpose(1, 2))
    problem = Problem(W, heads, hidden_kind + layer_kind, hidden, layer, (gh, gp), rows)
    problem.prenorm(x)
    h_wrong = differences(P.stock_norm(hidden_kind, x, hidden, EPS, gh), problem.h)
    page, table_rows = (16, 5, 64)[number % 3], 4096
    blocks = (rows + page - 1) // page + 3
    table = None if number == 3 else torch.randn(table_rows, 64, device=DEV).to(BF16)
    positions = torch.randint(0, table_rows, (rows,), device=DEV)
    clean = positions.clone()
    if hostile:
        positions[20], positions[22], positions[rows - 1] = -1, table_rows, 2**40
    bad = (positions < 0) | (positions >= table_rows)
    bad = bad if table is not None else torch.zeros_like(bad)
    given, stored, count, first = slots_and_faults(rows, layers, blocks * page, bad, hostile)
    expected = [poisoned(blocks, heads, page, 128) for _ in range(layers)]
    P.stock_store(want, heads, clean, stored, table, expected, EPS)
    passed, failed = int(h_wrong == 0), int(h_wrong != 0)
    for shape in SHAPES.values():
        if n_columns % shape.n:
            continue
        for rows_of_a in (None, n):
            kv = torch.full((layers, rows, n_columns), float("nan"), dtype=BF16, device=DEV)
            problem.launch(shape, rows_of_a, kv=(kv.data_ptr(), kv.stride(0), kv.stride(1)))
            caches = [poisoned(blocks, heads, page, 128) for _ in range(layers)]
            problem.faults.zero_()
            problem.launch(shape, rows_of_a, cache=(positions, given, table, stock_layout(caches)))
            torch.cuda.synchronize()
            found = problem.faults.tolist()
            wrong = (differences(kv, want), sum(map(differences, expected, caches)),
                     int(found[0] != count or (first is not None and found[2:4] != first)))
            passed, failed = passed + (not any(wrong)), failed + any(wrong)
            if any(wrong):
                print("WRONG (kv, caches, faults)", shape.name, rows_of_a is not None, wrong)
    print(f"H={heads} T={rows} L={layers} {hidden_kind}{layer_kind} hostile={hostile} h {h_wrong}: "
          f"{passed} passed, {failed} failed", flush=True)
    return passed, failed


def check_layouts():
    """Separate K and V weights, odd cache strides, launches of some layers, kv rows with gaps."""
    heads, rows, layers, page, n = 2, 257, 3, 16, 256
    blocks = rows // page + 4
    x, hidden, layer = (torch.randn(*size, device=DEV).to(BF16)
                        for size in ((rows, D), (D,), (layers, D)))
    W = (torch.randn(layers, n, D, device=DEV) / 32).to(BF16)
    normed = P.stock_norms("b", "b", x, hidden, layer, EPS, EPS, 0.0, 0.0, layers)
    want = torch.bmm(normed, W.transpose(1, 2))
    parts = [W[i, a:a + n // 2].clone() for i in range(layers) for a in (0, n // 2)]
    problem = Problem(W, heads, "bb", hidden, layer, (0.0, 0.0), rows)
    problem.prenorm(x)
    table = torch.randn(4096, 64, device=DEV).to(BF16)
    positions = torch.randint(0, 4096, (rows,), device=DEV)
    slots = [torch.randperm(blocks * page, device=DEV)[:rows].contiguous() for _ in range(layers)]
    expected = [poisoned(blocks, heads, page, 128) for _ in range(layers)]
    P.stock_store(want, heads, positions, slots, table, expected, EPS)
    passed = failed = 0
    for shape in SHAPES.values():
        maps = on_device(b"".join(tensor_map(w.data_ptr(), (D, n // 2), (D * 2,), (64, shape.box))
                                  for w in parts))
        caches = [poisoned(blocks, heads, page, 131) for _ in range(layers)]
        kv = torch.full((rows, layers, n + 6), float("nan"), dtype=BF16, device=DEV)

        def odd(i):
            out = stock_layout(caches)(i)
            out.k, out.v = caches[i].data_ptr() + 2, caches[i].data_ptr() + 2 * 66
            return out
        for first, count in ((0, 1), (1, 2)):
            for extra in (dict(cache=(positions, slots, table, odd)),
                          dict(kv=(kv.data_ptr(), n + 6, layers * (n + 6)))):
                problem.launch(shape, first=first, count=count, w_maps=maps.data_ptr(),
                               w_rows=n // 2, group=3, flags=BY2, **extra)
        torch.cuda.synchronize()
        nan = torch.full((1,), float("nan"), dtype=BF16, device=DEV)
        wrong = differences(kv[:, :, :n].permute(1, 0, 2).contiguous(), want)
        wrong += differences(kv[:, :, n:].contiguous(), nan)
        for a, b in zip(expected, caches):
            wrong += differences(a[..., :64].contiguous(), b[..., 1:65].contiguous())
            wrong += differences(a[..., 64:].contiguous(), b[..., 66:130].contiguous())
            wrong += sum(differences(b[..., i].contiguous(), poisoned(1)) for i in (0, 65, 130))
        passed, failed = passed + (wrong == 0), failed + (wrong != 0)
        if wrong:
            print("WRONG layouts", shape.name, wrong)
    print(f"layouts: {passed} passed, {failed} failed", flush=True)
    return passed, failed


def bench(heads, rows, shape, layers=5):
    n, page = 128 * heads, 16
    hidden, layer = torch.ones(D, device=DEV).to(BF16), torch.ones(layers, D, device=DEV).to(BF16)
    copies = max(1, min(6, 200 * 2**20 // (layers * n * D * 2)))
    W = [(torch.randn(layers, n, D, device=DEV) / 90).to(BF16) for _ in range(copies)]
    X = [torch.randn(rows, D, device=DEV).to(BF16) for _ in range(max(1, min(6, 6400 // rows)))]
    caches = [poisoned(max(2 * rows // page, 64), heads, page, 128) for _ in range(layers)]
    slots = [torch.randperm(caches[0].shape[0] * page, device=DEV)[:rows].contiguous()
             for _ in range(layers)]
    positions = torch.randint(0, 65536, (rows,), device=DEV)
    table = torch.randn(65536, 64, device=DEV).to(BF16)
    problem = Problem(W[0], heads, "bb", hidden, layer, (0.0, 0.0), rows)
    for w in W:
        problem.w_map(shape.box, w)
    normed = P.stock_norms("b", "b", X[0], hidden, layer, EPS, EPS, 0.0, 0.0, layers)

    def timed(f):
        sets = max(copies, len(X))
        reps, inner = (9, max(sets, 20)) if rows * heads <= 4096 else (5, max(sets, 4))
        return P.graph_us(f, sets, reps, inner)[0]

    def seed(i):
        n_rows = P.seed90("b", "b", X[i % len(X)], hidden, layer, EPS, EPS, 0.0, 0.0, layers)
        kv = torch.bmm(n_rows, W[i % copies].transpose(1, 2))
        P.seed_store(kv, heads, positions, slots, table, caches, EPS)

    def kernel(i):
        cache = positions, slots, table, stock_layout(caches)
        problem.launch(shape, W=W[i % copies], cache=cache)

    def chain(i):
        problem.prenorm(X[i % len(X)])
        kernel(i)
    us = [timed(f) for f in (seed, chain, lambda i: problem.prenorm(X[i % len(X)]), kernel,
                             lambda i: torch.bmm(normed, W[i % copies].transpose(1, 2)))]
    print(f"H={heads} T={rows} {shape.name}: seed chain {us[0]:.1f}, chain {us[1]:.1f} "
          f"({us[1] / us[0]:.3f}), pre-kernel {us[2]:.1f}, kernel {us[3]:.1f}, bmm {us[4]:.1f} us",
          flush=True)


QUICK = [(2, 130, 2, "n", "b", 1), (2, 257, 5, "b", "b", 0), (1, 255, 5, "f", "n", 1),
         (4, 65, 3, "b", "f", 1), (2, 1000, 5, "b", "b", 1), (8, 256, 2, "B", "b", 0),
         (16, 128, 2, "b", "b", 1), (2, 1024, 5, "b", "b", 0)]
FULL = [(h, t, 2 if h > 4 else 5, "b", "b", 1) for h in (1, 2, 4, 8, 16)
        for t in (65, 96, 128, 130, 255, 256, 257, 1000, 1024, 4096)] + [(2, 16384, 5, "b", "b", 0)]

options = [] if WORDS[0] == "bench" else ["-DCTXKV_WATCHDOG"]
module = build("prefill", *options)
PRENORM = Kernel(build("prenorm"), "ctxkv_prenorm", 0)
text = open(os.path.join(SOURCE, "prefill_shapes.inc")).read()
SHAPES = {m[1]: Shape(module, m[1], *map(int, m[2].split(",")))
          for m in re.finditer(r"^SHAPE\((\w+), (.*)\)", text, re.M)}
if WORDS[0] == "bench":
    for word in WORDS[1:]:
        h, t, name = word.split(":")
        bench(int(h), int(t), SHAPES[name])
    sys.exit(0)
cases = QUICK + (FULL if WORDS[0] == "full" else [])
totals = [check_case(i, *case) for i, case in enumerate(cases)]
totals.append(check_layouts())
bad = sum(t[1] for t in totals)
print(f"{sum(t[0] for t in totals)} passed, {bad} failed")
sys.exit(bad != 0)
