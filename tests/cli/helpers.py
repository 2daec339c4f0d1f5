# SPDX-License-Identifier: Apache-2.0
"""Runs the command line named by CTXKV_BIN, and makes checkpoints and contexts byte by byte."""

import json
import os
import struct
import subprocess
from pathlib import Path

import numpy as np

BIN = os.environ.get("CTXKV_BIN", "build/tools/ctxkv/ctxkv")
D = 8192
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "U8": 1}


def cli(*args, env=None, **options):
    """The finished process; text decoded, nothing from the terminal."""
    merged = {**os.environ, **(env or {})}
    return subprocess.run(
        [BIN, *map(str, args)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=merged,
        timeout=300,
        **options,
    )


def ok(*args, code=0, **options):
    done = cli(*args, **options)
    assert done.returncode == code, (args, done.returncode, done.stdout, done.stderr)
    if code < 2:
        assert done.stderr == b"", done.stderr
    return done.stdout.decode()


def refused(*args, words=(), **options):
    """Exit 2, exactly one line on stderr, holding every word; nothing on stdout."""
    done = cli(*args, **options)
    text = done.stderr.decode(errors="surrogateescape")
    assert done.returncode == 2, (args, done.returncode, done.stdout, text)
    assert text.endswith("\n") and text.count("\n") == 1 and "\r" not in text, text
    assert text.startswith("ctxkv"), text
    assert done.stdout == b"", done.stdout
    for word in words:
        assert str(word) in text, (word, text)
    return text


def bf16(values):
    """FP32 to BF16 bits, round to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def head_bytes(head, pad=0):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    text += b" " * pad
    return struct.pack("<Q", len(text)) + text


def file_bytes(tensors, pad=0):
    """tensors: name -> (dtype, array). pad: blanks after the head, which shift the data."""
    head, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        head[name] = {
            "dtype": dtype,
            "shape": list(np.shape(array)),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return head_bytes(head, pad) + data


def read_file(path):
    """name -> (dtype, shape, bytes), by a reader of its own."""
    raw = Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + size])
    head.pop("__metadata__", None)
    data = raw[8 + size :]
    return {
        name: (info["dtype"], info["shape"], data[slice(*info["data_offsets"])])
        for name, info in head.items()
    }


def caches(path):
    """The layers' caches as uint16 arrays."""
    tensors = read_file(path)
    return [
        np.frombuffer(tensors[f"kv_cache.{i}"][2], np.uint16).reshape(tensors[f"kv_cache.{i}"][1])
        for i in range(len(tensors))
    ]


def write_model(
    folder, heads=1, layers=1, k=None, v=None, prefix="", pad=0, config=None, extra=None
):
    """A weightless-norm draft; k, v: arrays [heads*64, D] of BF16 bits, the same in each layer."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(7)
    tensors = {}
    for i in range(layers):
        for part, given in (("k", k), ("v", v)):
            array = given
            if array is None:
                array = bf16(rng.standard_normal((heads * 64, D)).astype(np.float32) / 32)
            tensors[f"{prefix}layers.{i}.self_attn.{part}_proj.weight"] = ("BF16", array)
    tensors.update(extra or {})
    (folder / "model.safetensors").write_bytes(file_bytes(tensors, pad))
    base = {
        "hidden_size": D,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 * heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "norm_affine": False,
        "use_rope": False,
        "max_position_embeddings": 4096,
    }
    base.update(config or {})
    base = {key: value for key, value in base.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(base))
    return folder


def write_context(path, rows=3, slots=None, positions=None, pad=0, extra=None, x=None):
    rng = np.random.default_rng(8)
    if x is None:
        x = bf16(rng.standard_normal((rows, D)).astype(np.float32))
    if positions is None:
        positions = np.arange(rows)
    tensors = {"positions": ("I64", np.asarray(positions, np.int64)), "hidden_states": ("BF16", x)}
    if slots is not None:
        tensors["slot_mapping"] = ("I64", np.asarray(slots, np.int64))
    tensors.update(extra or {})
    Path(path).write_bytes(file_bytes(tensors, pad))
    return path


def run_args(model, context, out, *more):
    return ("run", "--device", "cpu", "--model", model, "--context", context, "--out", out, *more)


def heads_model(folder, heads, config=None):
    """x all 1 gives norms of 1; V of head h is h + 1, K rows give +-1 after the K norm."""
    k = np.zeros((heads * 64, D), np.float32)
    v = np.zeros((heads * 64, D), np.float32)
    for h in range(heads):
        k[h * 64 : h * 64 + 64] = 2.0**-13 * 256
        k[h * 64 + 1 : h * 64 + 64 : 2] *= -1
        v[h * 64 : h * 64 + 64] = 2.0**-13 * (h + 1)
    return write_model(folder, heads, 2, bf16(k), bf16(v), config=config)


def ones_context(path, rows, **more):
    return write_context(path, rows, x=np.full((rows, D), 0x3F80, np.uint16), **more)
