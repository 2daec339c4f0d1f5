# SPDX-License-Identifier: Apache-2.0
"""libctxkv on torch tensors by ctypes, for the device tests and the benchmarks (no package needed)."""

import ctypes as C
import os

import torch

I64, VP = C.c_int64, C.c_void_p
ROW, RMS, ABSENT = 0, 1, 2
STOCK, PAIR, PACKED, INVARIANT = 0, 1, 2, 3
AUTO, EXACT, CUBLAS = 0, 1, 2
K_PLAIN, K_RMS, K_ABSENT = 0, 1, 2
ROPE_NONE, GPTJ, NEOX = 0, 1, 2


class DLTensor(C.Structure):
    _fields_ = [("data", VP), ("device_type", C.c_int32), ("device_id", C.c_int32),
                ("ndim", C.c_int32), ("code", C.c_uint8), ("bits", C.c_uint8),
                ("lanes", C.c_uint16), ("shape", C.POINTER(I64)), ("strides", C.POINTER(I64)),
                ("byte_offset", C.c_uint64)]


class DeviceOptions(C.Structure):
    _fields_ = [("size", C.c_size_t), ("threads", C.c_int32), ("cpu_mask", C.c_uint32),
                ("cublas_path", C.c_char_p), ("programmatic_launch", C.c_int32), ("log", VP),
                ("log_user", VP)]


class Info(C.Structure):
    _fields_ = [("size", C.c_size_t), ("name", C.c_char * 128), ("cpu_found", C.c_uint32),
                ("cpu_used", C.c_uint32), ("threads", C.c_int32), ("arch", C.c_int32),
                ("driver", C.c_int32), ("cublas", C.c_int32), ("bits_verified", C.c_int32)]


class Norm(C.Structure):
    _fields_ = [("kind", C.c_int), ("eps", C.c_float), ("gain_centre", C.c_float),
                ("input_scale", C.c_int32)]


PP = C.POINTER(C.POINTER(DLTensor))


class NormsDesc(C.Structure):
    _fields_ = [("size", C.c_size_t), ("hidden_size", I64), ("num_layers", I64), ("hidden", Norm),
                ("layer", Norm), ("hidden_weight", C.POINTER(DLTensor)), ("layer_weights", PP),
                ("layer_weight_count", I64), ("numerics", C.c_int)]


class ProjectionDesc(C.Structure):
    _fields_ = [("size", C.c_size_t), ("hidden_size", I64), ("num_layers", I64),
                ("num_kv_heads", I64), ("head_dim", I64), ("weights", PP), ("weight_count", I64),
                ("bias", C.POINTER(DLTensor)), ("mode", C.c_int), ("max_rows", I64),
                ("bias_add", C.c_int), ("k_only", C.c_int32)]


class StoreDesc(C.Structure):
    _fields_ = [("size", C.c_size_t), ("num_layers", I64), ("num_kv_heads", I64),
                ("head_dim", I64), ("k_norm", C.c_int), ("k_eps", C.c_float),
                ("k_norm_weight", C.POINTER(DLTensor)), ("rope", C.c_int), ("rotary_dim", I64),
                ("cos_sin", C.POINTER(DLTensor)), ("checked", C.c_int32), ("k_scales", PP),
                ("v_scales", PP), ("scale_count", I64), ("layer_cos_sin", PP),
                ("layer_cos_sin_count", I64), ("cache_type", C.c_int), ("k_gain_centre", C.c_float),
                ("v_norm", C.c_int), ("v_eps", C.c_float), ("v_scale", C.c_float),
                ("v_from_k", C.c_int32)]


class ChainDesc(C.Structure):
    _fields_ = [("size", C.c_size_t), ("norms", C.POINTER(NormsDesc)),
                ("projection", C.POINTER(ProjectionDesc)), ("store", C.POINTER(StoreDesc)),
                ("max_rows", I64)]


class Faults(C.Structure):
    _fields_ = [("count", C.c_uint64), ("kind", C.c_int32), ("reserved", C.c_int32),
                ("layer", I64), ("row", I64), ("value", I64), ("limit", I64)]


class ChainCall(C.Structure):
    _fields_ = [("size", C.c_size_t), ("x", VP), ("x_row_stride", I64), ("rows", I64),
                ("positions", VP), ("slots", C.POINTER(VP)), ("slot_rows", C.POINTER(I64)),
                ("slot_count", I64), ("workspace", VP), ("stream", VP)]


TYPES = {torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.int64: (0, 64),
         torch.int32: (0, 32), torch.float16: (2, 16), torch.uint8: (1, 8)}
KINDS = {"n": (None, 0), "b": (torch.bfloat16, 0), "B": (torch.bfloat16, 1),
         "f": (torch.float32, 0), "F": (torch.float32, 1)}


class Error(RuntimeError):
    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


def tensor(t):
    """A DLTensor of t; keeps t alive through the attribute `keep`."""
    if t is None:
        return None
    n = t.dim()
    shape, strides = (I64 * max(n, 1))(*t.shape), (I64 * max(n, 1))(*t.stride())
    code, bits = TYPES[t.dtype]
    kind, index = (2, t.device.index or 0) if t.is_cuda else (1, 0)
    d = DLTensor(t.data_ptr() or None, kind, index, n, code, bits, 1, shape, strides, 0)
    d.keep = (t, shape, strides)
    return d


def pointer(t):
    return C.pointer(t) if t is not None else None


def pointers(tensors):
    """A host array of DLTensor pointers (None entries stay NULL)."""
    views = [tensor(t) for t in tensors]
    array = (C.POINTER(DLTensor) * max(1, len(views)))()
    for i, v in enumerate(views):
        if v is not None:
            array[i] = C.pointer(v)
    array.views = views
    return array


def current_stream():
    return torch.cuda.current_stream().cuda_stream


class Library:
    def __init__(self, path=None):
        self.lib = C.CDLL(path or os.environ["CTXKV_LIBRARY"])
        self.lib.ctxkv_last_error.restype = C.c_char_p
        for name in ("ctxkv_chain_workspace_size", "ctxkv_chain_memory"):
            getattr(self.lib, name).restype = C.c_size_t
            getattr(self.lib, name).argtypes = [VP]

    def init(self, name, struct):
        """By the sized form; libraries built before it have the plain one alone."""
        sized = getattr(self.lib, name + "_sized", None)
        if sized is None:
            getattr(self.lib, name)(C.byref(struct))
        else:
            sized(C.byref(struct), C.c_size_t(C.sizeof(struct)))

    def check(self, status):
        if status:
            raise Error(status, self.lib.ctxkv_last_error().decode())

    def device(self, name="cuda:0", **options):
        o, d = DeviceOptions(), VP()
        self.init("ctxkv_device_options_init", o)
        for key, value in options.items():
            setattr(o, key, value)
        self.check(self.lib.ctxkv_device_open(name.encode(), C.byref(o), C.byref(d)))
        return Device(self, d)


class Handle:
    """One opaque handle; `kind` names its functions."""
    def __init__(self, library, kind, handle, keep=()):
        self.library, self.kind, self.handle, self.keep = library, kind, handle, keep

    def call(self, name, *args):
        self.library.check(getattr(self.library.lib, f"ctxkv_{self.kind}_{name}")(self.handle, *args))

    def close(self, verb="destroy"):
        if self.handle:
            getattr(self.library.lib, f"ctxkv_{self.kind}_{verb}")(self.handle)
            self.handle = None


class Device(Handle):
    def __init__(self, library, handle):
        super().__init__(library, "device", handle)

    def info(self):
        i = Info()
        i.size = C.sizeof(i)
        self.call("get_info", C.byref(i))
        return i

    def make(self, kind, desc, keep):
        h = VP()
        create = getattr(self.library.lib, f"ctxkv_{kind}_create")
        self.library.check(create(self.handle, C.byref(desc), C.byref(h)))
        return Handle(self.library, kind, h, keep)

    def norms_desc(self, hidden, layer, L, D=8192, hw=None, lw=None, numerics=STOCK):
        d = NormsDesc()
        self.library.init("ctxkv_norms_desc_init", d)
        d.hidden_size, d.num_layers, d.numerics = D, L, numerics
        d.hidden, d.layer = Norm(*hidden), Norm(*layer)
        hidden_view, layers = tensor(hw), pointers(lw if isinstance(lw, list) else [lw])
        d.hidden_weight = pointer(hidden_view)
        if lw is not None:
            d.layer_weights = layers
            d.layer_weight_count = len(lw) if isinstance(lw, list) else 1
        d.keep = (hidden_view, layers)
        return d

    def projection_desc(self, weights, L, H, head_dim=64, D=8192, mode=AUTO, bias=None, max_rows=0,
                        bias_add=0, k_only=0):
        d = ProjectionDesc()
        self.library.init("ctxkv_projection_desc_init", d)
        d.hidden_size, d.num_layers, d.num_kv_heads, d.head_dim = D, L, H, head_dim
        weights = weights if isinstance(weights, list) else [weights]
        array, bias_view = pointers(weights), tensor(bias)
        d.weights, d.weight_count, d.mode, d.max_rows = array, len(weights), mode, max_rows
        d.bias, d.bias_add, d.k_only = pointer(bias_view), bias_add, k_only
        d.keep = (array, bias_view)
        return d

    def store_desc(self, L, H, head_dim=64, k_norm=K_PLAIN, eps=1e-5, weight=None, rope=ROPE_NONE,
                   table=None, tables=None, scales=None, **more):
        """tables: one per layer, in place of table. scales: (K's, V's) lists. more: other fields."""
        d = StoreDesc()
        self.library.init("ctxkv_store_desc_init", d)
        d.num_layers, d.num_kv_heads, d.head_dim = L, H, head_dim
        d.k_norm, d.k_eps, d.rope = k_norm, eps, rope
        weight_view, table_view = tensor(weight), tensor(table)
        d.k_norm_weight, d.cos_sin = pointer(weight_view), pointer(table_view)
        d.keep = (weight_view, table_view)
        if tables is not None:
            d.layer_cos_sin, d.layer_cos_sin_count = pointers(tables), L
            d.keep += (d.layer_cos_sin,)
        if scales is not None:
            d.k_scales, d.v_scales, d.scale_count = pointers(scales[0]), pointers(scales[1]), L
            d.keep += (d.k_scales, d.v_scales)
        for name, value in more.items():
            assert name in dict(StoreDesc._fields_), name
            setattr(d, name, value)
        return d

    def norms(self, *args, **kw):
        d = self.norms_desc(*args, **kw)
        return self.make("norms", d, d.keep)

    def projection(self, *args, **kw):
        d = self.projection_desc(*args, **kw)
        return self.make("projection", d, d.keep)

    def store(self, *args, **kw):
        d = self.store_desc(*args, **kw)
        return self.make("store", d, d.keep)

    def chain(self, norms, projection, store, max_rows):
        d = ChainDesc()
        self.library.init("ctxkv_chain_desc_init", d)
        d.norms, d.projection, d.store = C.pointer(norms), C.pointer(projection), C.pointer(store)
        d.max_rows = max_rows
        return self.make("chain", d, (norms.keep, projection.keep, store.keep))


def run_norms(plan, x, out, stream=None):
    a, b = tensor(x), tensor(out)
    plan.call("run", C.byref(a), C.byref(b), VP(current_stream() if stream is None else stream))


def run_projection(plan, normed, kv):
    a, b = tensor(normed), tensor(kv)
    plan.call("run", C.byref(a), C.byref(b), VP(current_stream()))


def bind(plan, keys, values):
    plan.keep_caches = (keys, values)
    plan.call("bind_caches", pointers(keys), pointers(values), I64(len(keys)))


def split(caches, head_dim=64):
    """Key and value views [num_blocks, block_size, H, head_dim] of stock storage."""
    views = [c.transpose(1, 2).split(head_dim, dim=-1) for c in caches]
    return [v[0] for v in views], [v[1] for v in views]


def run_store(plan, k, v, positions, slots):
    a, b, p = tensor(k), tensor(v), tensor(positions)
    plan.call("run", C.byref(a), C.byref(b) if b is not None else None, C.byref(p) if p is not None else None,
              pointers(slots), I64(len(slots)), VP(current_stream()))


def run_chain(plan, x, positions, slots):
    a, p = tensor(x), tensor(positions)
    plan.call("run", C.byref(a), C.byref(p) if p is not None else None, pointers(slots),
              I64(len(slots)), VP(current_stream()))


def shared_workspace(plans):
    """Memory for any of the plans, run one after the other: as one chain has it, or torch's
    allocator gives it to the peers."""
    sizes = [p.library.lib.ctxkv_chain_workspace_size(p.handle) for p in plans]
    return torch.empty(max(sizes), dtype=torch.uint8, device="cuda")


def chain_call(x, positions, slots, workspace=None):
    """The raw form, filled once, for timing."""
    c = ChainCall()
    c.workspace = workspace.data_ptr() if workspace is not None else None
    addresses = (VP * len(slots))(*[s.data_ptr() for s in slots])
    rows = (I64 * len(slots))(*[s.shape[0] for s in slots])
    c.size, c.x, c.x_row_stride, c.rows = C.sizeof(c), x.data_ptr(), x.stride(0), x.shape[0]
    c.positions = positions.data_ptr() if positions is not None else None
    c.slots, c.slot_rows, c.slot_count = addresses, rows, len(slots)
    c.keep = (x, positions, slots, addresses, rows, workspace)
    return c


def run_call(plan, call):
    call.stream = current_stream()
    plan.call("run_call", C.byref(call))


def faults(plan):
    f = Faults()
    plan.call("faults", C.byref(f))
    return f
