# SPDX-License-Identifier: Apache-2.0
"""Files: what the reference reader accepts or refuses, B22, truncation, checkpoints in pieces."""

import json
import os
import random
import struct

import numpy as np
import pytest
import safetensors
from helpers import (
    D,
    bf16,
    caches,
    cli,
    file_bytes,
    head_bytes,
    ok,
    read_file,
    refused,
    run_args,
    write_context,
    write_model,
)

CACHE = {"kv_cache.0": ("BF16", np.arange(256, dtype=np.uint16).reshape(1, 1, 2, 128))}


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


KV = entry("BF16", [1, 1, 1, 2], 0, 4)
# name: (head, data bytes, accepted). What the reference accepts we accept, but for duplicates.
HEADS = {
    "plain": ({"kv_cache.0": KV}, 4, True),
    "leading blanks": (b"  \t\n" + json.dumps({"kv_cache.0": KV}).encode(), 4, True),
    "metadata": ({"__metadata__": {"a": "b"}, "kv_cache.0": KV}, 4, True),
    "metadata null": ({"__metadata__": None, "kv_cache.0": KV}, 4, True),
    "metadata number": ({"__metadata__": {"a": 1}, "kv_cache.0": KV}, 4, False),
    "metadata list": ({"__metadata__": ["a"], "kv_cache.0": KV}, 4, False),
    "unknown field": ({"kv_cache.0": {**KV, "more": [1, {}]}}, 4, True),
    "scalar": ({"kv_cache.0": KV, "s": entry("F32", [], 4, 8)}, 8, True),
    "empty tensor": ({"kv_cache.0": KV, "e": entry("F32", [3, 0], 4, 4)}, 4, True),
    "out of order": ({"z": entry("U8", [2], 4, 6), "kv_cache.0": KV}, 6, True),
    "hole": ({"kv_cache.0": KV, "z": entry("U8", [2], 5, 7)}, 7, False),
    "hole at the start": ({"kv_cache.0": entry("BF16", [1, 1, 1, 2], 1, 5)}, 5, False),
    "overlap": ({"kv_cache.0": KV, "z": entry("U8", [2], 3, 5)}, 5, False),
    "same place": ({"kv_cache.0": KV, "z": KV}, 4, False),
    "trailing bytes": ({"kv_cache.0": KV}, 5, False),
    "short data": ({"kv_cache.0": KV}, 3, False),
    "size mismatch": ({"kv_cache.0": entry("BF16", [1, 1, 1, 4], 0, 4)}, 4, False),
    "shape overflow": ({"kv_cache.0": KV, "z": entry("U8", [2**33, 2**33], 4, 4)}, 4, False),
    "shape times size overflow": ({"kv_cache.0": KV, "z": entry("F64", [2**61], 4, 4)}, 4, False),
    "negative shape": ({"kv_cache.0": KV, "z": entry("U8", [-1], 4, 3)}, 4, False),
    "real shape": ({"kv_cache.0": KV, "z": entry("U8", [1.0], 4, 5)}, 5, False),
    "backwards": ({"kv_cache.0": entry("BF16", [1, 1, 1, 2], 4, 0)}, 4, False),
    "three offsets": ({"kv_cache.0": {**KV, "data_offsets": [0, 4, 4]}}, 4, False),
    "one offset": ({"kv_cache.0": {**KV, "data_offsets": [0]}}, 4, False),
    "huge offset": ({"kv_cache.0": {**KV, "data_offsets": [0, 2**64]}}, 4, False),
    "no dtype": ({"kv_cache.0": {"shape": [1, 1, 1, 2], "data_offsets": [0, 4]}}, 4, False),
    "no shape": ({"kv_cache.0": {"dtype": "BF16", "data_offsets": [0, 4]}}, 4, False),
    "unknown dtype": ({"kv_cache.0": KV, "z": entry("Q7", [1], 4, 5)}, 5, False),
    "half byte": ({"kv_cache.0": KV, "z": entry("F4", [3], 4, 5)}, 5, False),
    "two halves": ({"kv_cache.0": KV, "z": entry("F4", [2], 4, 5)}, 5, True),
    "list": (b"[]", 0, False),
    "number": (b"7", 0, False),
    "no JSON": (b"{", 0, False),
    "trailing text": (json.dumps({"kv_cache.0": KV}).encode() + b"x", 4, False),
    "bad UTF-8": (b'{"\xff": 1}', 0, False),
    "lone surrogate": (b'{"\\ud800": 1}', 0, False),
    "tensor is a number": ({"kv_cache.0": KV, "z": 4}, 4, False),
}


@pytest.mark.parametrize("name", HEADS)
def test_head_as_the_reference(tmp_path, name):
    head, size, accepted = HEADS[name]
    path = tmp_path / "f.safetensors"
    path.write_bytes(head_bytes(head) + bytes(size))
    try:
        safetensors.deserialize(path.read_bytes())
        reference = True
    except Exception:
        reference = False
    assert reference == accepted
    if accepted:
        assert ok("verify", path, path).startswith("equal")
    else:
        refused("verify", path, path, words=[path])


@pytest.mark.parametrize("second", [b"kv_cache.0", b"kv_cache\\u002e0", b"\\u006bv_cache.0"])
def test_duplicates_are_refused(tmp_path, second):
    """B22 (a): the reference takes the last; escaped spellings are the same name."""
    info = json.dumps(KV).encode()
    other = json.dumps(entry("BF16", [1, 1, 1, 2], 4, 8)).encode()
    path = tmp_path / "f.safetensors"
    path.write_bytes(
        head_bytes(b'{"kv_cache.0":' + info + b',"' + second + b'":' + other + b"}") + bytes(8)
    )
    refused("verify", path, path, words=[path, "duplicate", second.decode()])


def test_b22_heads(tmp_path):
    path = tmp_path / "f.safetensors"

    def case(data, *words):
        path.write_bytes(data)
        refused("verify", path, path, words=[path, *words])
        refused(*run_args(tmp_path, path, tmp_path / "out"), words=["config.json"])

    case(struct.pack("<Q", 2**64 - 1) + b"{}", 2**64 - 1, 10)
    case(struct.pack("<Q", 100) + bytes(42), 100, 50)
    case(bytes(7), 7, 8)
    case(b"", 0, 8)
    case(struct.pack("<Q", 2**63) + b"{}", 2**63)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", 100_000_001) + b"{}")
        f.truncate(8 + 100_000_001)
    refused("verify", path, path, words=[path, "100000000", "100000001"])
    path.unlink()
    path.mkdir()
    refused("verify", path, path, words=[path, "folder"])
    assert sorted(os.listdir(tmp_path)) == ["f.safetensors"]


def test_special_files(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    refused("verify", fifo, fifo, words=["pipe"])
    refused("verify", "/dev/zero", "/dev/zero", words=["device"])
    refused("verify", tmp_path / "none", fifo, words=["none", "No such file"])
    refused("verify", tmp_path / "two\nlines", fifo, words=["two?lines"])
    model = write_model(tmp_path / "m")
    context = write_context(tmp_path / "c")
    for out in (fifo, "/dev/null", tmp_path, tmp_path / "none" / "out"):
        refused(*run_args(model, context, out), words=[out])
    assert sorted(os.listdir(tmp_path)) == ["c", "fifo", "m"]


@pytest.mark.parametrize(
    "name",
    [
        "mit Leerzeichen",
        "größe-模型-é",
        "-dash",
        "per%cent %s%n",
        "x" * 255,
        b"\xff\xfe".decode("utf-8", "surrogateescape"),
    ],
)
def test_names(tmp_path, name):
    """B22 (f)"""
    folder = tmp_path / name
    folder.mkdir()
    model = write_model(folder / "m")
    context = write_context(folder / "c")
    ok(*run_args(model, context, folder / name))
    assert ok("verify", "--", folder / name, folder / name).startswith("equal")
    assert set(os.listdir(folder)) == {"c", "m", name}


@pytest.mark.parametrize("role", ["model", "context", "config", "verify"])
def test_truncated_and_flipped(tmp_path, role):
    """Every cut is refused; a flipped byte of the head never crashes."""
    model = write_model(tmp_path / "m")
    context = write_context(tmp_path / "c")
    out = tmp_path / "out"
    a, b = tmp_path / "a", tmp_path / "b"
    b.write_bytes(file_bytes(CACHE))
    victim = {
        "model": model / "model.safetensors",
        "context": context,
        "config": model / "config.json",
        "verify": a,
    }[role]
    if role == "verify":
        a.write_bytes(b.read_bytes())
    args = ("verify", a, b) if role == "verify" else run_args(model, context, out)
    whole = victim.read_bytes()
    rng = random.Random(3)
    cuts = [0, 1, 7, 8, 9, 20, len(whole) // 2, len(whole) - 1]
    for cut in cuts if role != "config" else range(0, len(whole), 9):
        victim.write_bytes(whole[:cut])
        refused(*args, words=[victim])
    size = min(len(whole), 400)
    for _ in range(60):
        at = rng.randrange(size)
        victim.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        )
        done = cli(*args)
        assert done.returncode in (0, 1, 2), (at, done)
        assert done.returncode != 2 or done.stderr.count(b"\n") == 1
        if done.returncode == 2:
            assert not out.exists()
        elif out.exists():
            out.unlink()


def test_reference_reads_ours_and_we_read_its(tmp_path):
    ok("synth", tmp_path / "d", "--kv-heads", 1, "--layers", 2, "--rows", 3, "--seed", 5)
    out = tmp_path / "out"
    ok(*run_args(tmp_path / "d", tmp_path / "d/context.safetensors", out))
    for path in (tmp_path / "d/model.safetensors", tmp_path / "d/context.safetensors", out):
        theirs = dict(safetensors.deserialize(path.read_bytes()))
        mine = read_file(path)
        assert set(theirs) == set(mine)
        for name, (dtype, shape, data) in mine.items():
            assert (theirs[name]["dtype"], theirs[name]["shape"]) == (dtype, shape)
            assert bytes(theirs[name]["data"]) == data
    # The reference writes the same tensors (its own order and padding): the same caches come out.
    keep = []
    for path in (tmp_path / "d/model.safetensors", tmp_path / "d/context.safetensors"):
        names = {"BF16": "bfloat16", "I64": "int64"}
        specs = {}
        for name, (dtype, shape, data) in read_file(path).items():
            array = np.frombuffer(data, np.uint8)
            keep.append(array)
            specs[name] = safetensors.TensorSpec(
                dtype=names[dtype], shape=shape, data_ptr=array.ctypes.data, data_len=len(data)
            )
        safetensors.serialize_file(specs, str(path), {"written": "by the reference"})
    again = tmp_path / "again"
    ok(*run_args(tmp_path / "d", tmp_path / "d/context.safetensors", again))
    assert out.read_bytes() == again.read_bytes()


def test_misaligned_data(tmp_path):
    """Odd head lengths shift every tensor by one byte; the bits stay."""
    expected = None
    for pad in range(8):
        model = write_model(tmp_path / "m", pad=pad)
        context = write_context(tmp_path / "c", pad=pad, slots=[4, -1, 0])
        ok(*run_args(model, context, tmp_path / "out"))
        data = (tmp_path / "out").read_bytes()
        expected = expected or data
        assert data == expected


def test_shards_prefix_and_merged(tmp_path):
    """One file, shards, a leading "model.", and merged Q, K, V (and gate) rows give one result."""
    heads, layers = 2, 3
    rng = np.random.default_rng(1)
    context = write_context(tmp_path / "c")
    parts = {}
    for i in range(layers):
        for part in "kv":
            parts[i, part] = bf16(rng.standard_normal((heads * 64, D)).astype(np.float32) / 32)
    plain = {
        f"layers.{i}.self_attn.{part}_proj.weight": ("BF16", array)
        for (i, part), array in parts.items()
    }
    junk = ("F32", np.ones((2, 3), np.float32))
    other_rows = bf16(rng.standard_normal((8 * 64, D)).astype(np.float32))
    merged = {
        f"layers.{i}.self_attn.qkv_proj.weight": (
            "BF16",
            np.concatenate([other_rows, parts[i, "k"], parts[i, "v"]]),
        )
        for i in range(layers)
    }
    gated = {
        name: ("BF16", np.concatenate([array, other_rows])) for name, (_, array) in merged.items()
    }
    prefixed = {"model." + name: value for name, value in plain.items()}
    config = {
        "hidden_size": D,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": heads,
        "norm_affine": False,
        "draft_position_mode": "nope",
    }
    results = []
    for kind, tensors in enumerate(
        (plain, {**plain, "lm_head.weight": junk}, prefixed, merged, gated)
    ):
        folder = tmp_path / f"m{kind}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(file_bytes(tensors))
        ok(*run_args(folder, context, folder / "out"))
        results.append((folder / "out").read_bytes())
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    names = list(plain)
    for shard in range(3):
        mine = names[shard::3]
        (folder / f"part {shard}").write_bytes(file_bytes({n: plain[n] for n in mine}))
        weight_map.update({n: f"part {shard}" for n in mine})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    ok(*run_args(folder, context, folder / "out"))
    results.append((folder / "out").read_bytes())
    assert all(data == results[0] for data in results)

    def broken(text, *words):
        index.write_text(text)
        refused(*run_args(folder, context, folder / "no"), words=words)
        assert not (folder / "no").exists()

    name = names[0]
    broken(
        json.dumps({"weight_map": {**weight_map, name: "../m0/model.safetensors"}}), "slash", name
    )
    broken(json.dumps({"weight_map": {**weight_map, name: "/etc/passwd"}}), "slash")
    broken(json.dumps({"weight_map": {**weight_map, name: ".."}}), "..")
    broken(json.dumps({"weight_map": {**weight_map, name: ""}}), name)
    broken(json.dumps({"weight_map": {**weight_map, name: 3}}), name)
    broken(json.dumps({"weight_map": {**weight_map, name: "part 2"}}), name, "part 2")
    broken(json.dumps({"weight_map": {**weight_map, name: "part 9"}}), "part 9", "No such file")
    broken(
        json.dumps({"weight_map": {n: f for n, f in weight_map.items() if n != name}}),
        name,
        "missing",
    )
    broken(json.dumps({"weight_map": []}), "weight_map")
    broken('{"weight_map": {"a": "x", "a": "y"}}', "duplicate")
    broken("", "JSON")
    broken("[]", "weight_map")
    index.unlink()
    refused(*run_args(folder, context, folder / "no"), words=["model.safetensors"])


def test_output_is_replaced_whole(tmp_path):
    model = write_model(tmp_path / "m")
    context = write_context(tmp_path / "c")
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    ok(*run_args(model, context, link))
    assert link.is_symlink() and len(caches(target)) == 1
    os.chmod(target, 0o600)
    ok(*run_args(model, context, target))
    before = target.read_bytes()
    refused(*run_args(model, tmp_path / "none", target))
    assert target.read_bytes() == before
