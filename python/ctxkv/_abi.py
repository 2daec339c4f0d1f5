# SPDX-License-Identifier: Apache-2.0
# The C ABI of include/ctxkv/ctxkv.h in ctypes: structs, constants, prototypes. Loads no library.
from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

# DLPack device types and type codes (dlpack.h).
CPU, CUDA, CUDA_HOST = 1, 2, 3
INT, UINT, FLOAT, BFLOAT, BOOL = 0, 1, 2, 4, 6

NORM_KINDS = {"row": 0, "rms": 1, "absent": 2}
NUMERICS = {"stock": 0, "pair": 1, "packed": 2, "invariant": 3}
PROJECTION_MODES = {"auto": 0, "exact": 1, "cublas": 2}
K_NORMS = {"plain": 0, "rms": 1, "absent": 2}
ROPES = {"none": 0, "gptj": 1, "neox": 2}
V_NORMS = {"absent": 0, "rms": 1}
BIAS_ADDS = {"fused": 0, "after": 1}
CACHE_TYPES = {"bf16": 0, "fp16": 1, "fp8_e4m3": 2, "fp8_e5m2": 3}
FAULT_KINDS = {0: "none", 1: "slot", 2: "position"}
CPU_TIERS = {"scalar": 1, "avx2": 2, "avx512": 4}


class DLDevice(Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


TensorPointer = POINTER(DLTensor)
TensorPointers = POINTER(TensorPointer)
LogFunction = CFUNCTYPE(None, c_void_p, c_char_p)


class DeviceOptions(Structure):
    _c_name_ = "ctxkv_device_options"
    _fields_ = [
        ("size", c_size_t),
        ("threads", c_int32),
        ("cpu_mask", c_uint32),
        ("cublas_path", c_char_p),
        ("programmatic_launch", c_int32),
        ("log", LogFunction),
        ("log_user", c_void_p),
    ]


class DeviceInfo(Structure):
    _c_name_ = "ctxkv_device_info"
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char * 128),
        ("cpu_found", c_uint32),
        ("cpu_used", c_uint32),
        ("threads", c_int32),
        ("cuda_arch", c_int32),
        ("driver", c_int32),
        ("cublas", c_int32),
        ("bits_verified", c_int32),
    ]


class Faults(Structure):
    _c_name_ = "ctxkv_faults"
    _fields_ = [
        ("count", c_uint64),
        ("kind", c_int32),
        ("reserved", c_int32),
        ("layer", c_int64),
        ("row", c_int64),
        ("value", c_int64),
        ("limit", c_int64),
    ]


class Norm(Structure):
    _c_name_ = "ctxkv_norm"
    _fields_ = [
        ("kind", c_int32),
        ("eps", c_float),
        ("gain_centre", c_float),
        ("input_scale", c_int32),
    ]


class NormsDesc(Structure):
    _c_name_ = "ctxkv_norms_desc"
    _fields_ = [
        ("size", c_size_t),
        ("hidden_size", c_int64),
        ("num_layers", c_int64),
        ("hidden", Norm),
        ("layer", Norm),
        ("hidden_weight", TensorPointer),
        ("layer_weights", TensorPointers),
        ("layer_weight_count", c_int64),
        ("numerics", c_int32),
    ]


class ProjectionDesc(Structure):
    _c_name_ = "ctxkv_projection_desc"
    _fields_ = [
        ("size", c_size_t),
        ("hidden_size", c_int64),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("weights", TensorPointers),
        ("weight_count", c_int64),
        ("bias", TensorPointer),
        ("mode", c_int32),
        ("max_rows", c_int64),
        ("bias_add", c_int32),
        ("k_only", c_int32),
    ]


class StoreDesc(Structure):
    _c_name_ = "ctxkv_store_desc"
    _fields_ = [
        ("size", c_size_t),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("k_norm", c_int32),
        ("k_eps", c_float),
        ("k_norm_weight", TensorPointer),
        ("rope", c_int32),
        ("rotary_dim", c_int64),
        ("cos_sin", TensorPointer),
        ("checked", c_int32),
        ("k_scales", TensorPointers),
        ("v_scales", TensorPointers),
        ("scale_count", c_int64),
        ("layer_cos_sin", TensorPointers),
        ("layer_cos_sin_count", c_int64),
        ("cache_type", c_int32),
        ("k_gain_centre", c_float),
        ("v_norm", c_int32),
        ("v_eps", c_float),
        ("v_scale", c_float),
        ("v_from_k", c_int32),
    ]


class ChainDesc(Structure):
    _c_name_ = "ctxkv_chain_desc"
    _fields_ = [
        ("size", c_size_t),
        ("norms", POINTER(NormsDesc)),
        ("projection", POINTER(ProjectionDesc)),
        ("store", POINTER(StoreDesc)),
        ("max_rows", c_int64),
    ]


class ChainCall(Structure):
    _c_name_ = "ctxkv_chain_call"
    _fields_ = [
        ("size", c_size_t),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("rows", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("slot_rows", c_void_p),
        ("slot_count", c_int64),
        ("workspace", c_void_p),
        ("stream", c_void_p),
    ]


STRUCTS = [
    DeviceOptions,
    DeviceInfo,
    Faults,
    Norm,
    NormsDesc,
    ProjectionDesc,
    StoreDesc,
    ChainDesc,
    ChainCall,
]

# Handles (ctxkv_device and the plans) are plain addresses. Statuses are int32.
_T, _TS, _H, _S = TensorPointer, TensorPointers, c_void_p, c_int32
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ctxkv_version": (c_char_p, []),
    "ctxkv_status_name": (c_char_p, [_S]),
    "ctxkv_status_text": (c_char_p, [_S]),
    "ctxkv_last_error": (c_char_p, []),
    "ctxkv_device_options_init_sized": (None, [POINTER(DeviceOptions), c_size_t]),
    "ctxkv_device_open": (_S, [c_char_p, POINTER(DeviceOptions), POINTER(_H)]),
    "ctxkv_device_close": (None, [_H]),
    "ctxkv_device_get_info": (_S, [_H, POINTER(DeviceInfo)]),
    "ctxkv_cuda_device_count": (c_int32, []),
    "ctxkv_norms_desc_init_sized": (None, [POINTER(NormsDesc), c_size_t]),
    "ctxkv_norms_create": (_S, [_H, POINTER(NormsDesc), POINTER(_H)]),
    "ctxkv_norms_destroy": (None, [_H]),
    "ctxkv_norms_run": (_S, [_H, _T, _T, c_void_p]),
    "ctxkv_projection_desc_init_sized": (None, [POINTER(ProjectionDesc), c_size_t]),
    "ctxkv_projection_create": (_S, [_H, POINTER(ProjectionDesc), POINTER(_H)]),
    "ctxkv_projection_destroy": (None, [_H]),
    "ctxkv_projection_run": (_S, [_H, _T, _T, c_void_p]),
    "ctxkv_store_desc_init_sized": (None, [POINTER(StoreDesc), c_size_t]),
    "ctxkv_store_create": (_S, [_H, POINTER(StoreDesc), POINTER(_H)]),
    "ctxkv_store_destroy": (None, [_H]),
    "ctxkv_store_bind_caches": (_S, [_H, _TS, _TS, c_int64]),
    "ctxkv_store_run": (_S, [_H, _T, _T, _T, _TS, c_int64, c_void_p]),
    "ctxkv_store_faults": (_S, [_H, POINTER(Faults)]),
    "ctxkv_chain_desc_init_sized": (None, [POINTER(ChainDesc), c_size_t]),
    "ctxkv_chain_create": (_S, [_H, POINTER(ChainDesc), POINTER(_H)]),
    "ctxkv_chain_destroy": (None, [_H]),
    "ctxkv_chain_bind_caches": (_S, [_H, _TS, _TS, c_int64]),
    "ctxkv_chain_run": (_S, [_H, _T, _T, _TS, c_int64, c_void_p]),
    "ctxkv_chain_call_init_sized": (None, [POINTER(ChainCall), c_size_t]),
    "ctxkv_chain_run_call": (_S, [_H, POINTER(ChainCall)]),
    "ctxkv_chain_workspace_size": (c_size_t, [_H]),
    "ctxkv_chain_faults": (_S, [_H, POINTER(Faults)]),
    "ctxkv_chain_memory": (c_size_t, [_H]),
    "ctxkv_rope_table": (_S, [c_float, c_int64, c_int64, _T]),
    "ctxkv_rope_inv_freq": (_S, [c_float, c_int64, POINTER(c_float)]),
    "ctxkv_rope_row": (_S, [POINTER(c_float), c_int64, c_int64] + 2 * [POINTER(c_float)]),
    "ctxkv_rsqrt": (c_float, [c_float, c_int32]),
    "ctxkv_mma16": (c_float, [POINTER(c_uint16), POINTER(c_uint16), c_float]),
    "ctxkv_bf16": (c_uint16, [c_float]),
    "ctxkv_fp16": (c_uint16, [c_float]),
    "ctxkv_fp8": (c_uint8, [c_float, c_int32]),
    "ctxkv_constant": (c_int32, [c_char_p]),
}


def declare(library: ctypes.CDLL) -> None:
    """Gives every function of the header its prototype on `library`."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
