# SPDX-License-Identifier: Apache-2.0
"""verify, and the files that synth makes."""

import json
import os

import numpy as np
import pytest
from helpers import (
    D,
    bf16,
    caches,
    file_bytes,
    ok,
    read_file,
    refused,
    run_args,
)


# ---- verify
def test_verify_names_the_first_difference(tmp_path):
    rng = np.random.default_rng(0)
    layers = [rng.integers(0, 65536, (3, 2, 4, 128), np.uint16) for _ in range(3)]

    def names(arrays):
        return {f"kv_cache.{i}": ("BF16", a) for i, a in enumerate(arrays)}

    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(file_bytes(names(layers)))
    b.write_bytes(file_bytes(names(layers), pad=3))
    assert ok("verify", a, b) == "equal: 3 layers, 9216 elements\n"
    changed = [layer.copy() for layer in layers]
    changed[1][2, 1, 3, 64 + 17] ^= 0x8000
    changed[2][0, 0, 0, 5] ^= 1
    changed[2][0, 0, 0, 6] ^= 1
    b.write_bytes(file_bytes(names(changed)))
    lines = ok("verify", a, b, code=1).splitlines()
    was, now = layers[1][2, 1, 3, 81], changed[1][2, 1, 3, 81]
    assert lines[0] == (
        f"differ: first at layer 1, block 2, offset 3, head 1, V, column 17: "
        f"A has 0x{was:04x}, B has 0x{now:04x}"
    )
    assert lines[1] == "layer 1: 1 of 3072 elements differ (K 0, V 1)"
    assert lines[2] == "layer 2: 2 of 3072 elements differ (K 2, V 0)"
    assert lines[3] == "3 of 9216 elements differ"
    b.write_bytes(file_bytes(names(layers[:2])))
    refused("verify", a, b, words=[b, "2 layers", "3"])
    b.write_bytes(file_bytes(names([layers[0], layers[1][:2], layers[2]])))
    refused("verify", a, b, words=["kv_cache.1", "[2, 2, 4, 128]", "[3, 2, 4, 128]"])
    b.write_bytes(file_bytes({"x": ("BF16", layers[0])}))
    refused("verify", a, b, words=[b, "kv_cache.0"])
    b.write_bytes(file_bytes({"kv_cache.0": ("I16", layers[0])}))
    refused("verify", b, b, words=["I16", "BF16"])


def test_verify_fp8_caches(tmp_path):
    """FP8 beside FP8 or its bytes; another kind is refused by name."""
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 256, (3, 2, 4, 128), np.uint8)
    paths = {}
    for dtype in ("F8_E4M3", "F8_E5M2", "U8"):
        paths[dtype] = tmp_path / dtype
        paths[dtype].write_bytes(file_bytes({"kv_cache.0": (dtype, cache)}))
    assert ok("verify", paths["U8"], paths["F8_E4M3"]) == "equal: 1 layers, 3072 elements\n"
    refused("verify", paths["F8_E5M2"], paths["F8_E4M3"], words=["F8_E4M3", "F8_E5M2"])
    changed = cache.copy()
    changed[0, 1, 3, 70] ^= 0x80
    paths["U8"].write_bytes(file_bytes({"kv_cache.0": ("U8", changed)}))
    lines = ok("verify", paths["F8_E4M3"], paths["U8"], code=1).splitlines()
    was, now = cache[0, 1, 3, 70], changed[0, 1, 3, 70]
    assert lines[0].endswith(f"head 1, V, column 6: A has 0x{was:02x}, B has 0x{now:02x}")
    assert lines[-1] == "1 of 3072 elements differ"


# ---- synth
def test_synth_is_repeatable_and_careful(tmp_path):
    small = ["--kv-heads", 1, "--layers", 2, "--rows", 7]
    ok("synth", tmp_path / "a", *small)
    ok("synth", tmp_path / "b", *small)
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    ok("synth", tmp_path / "b", *small, "--seed", 2)
    model = "model.safetensors"
    assert (tmp_path / "a" / model).read_bytes() != (tmp_path / "b" / model).read_bytes()
    context = read_file(tmp_path / "a/context.safetensors")
    assert context["hidden_states"][:2] == ("BF16", [7, D])
    slots = np.frombuffer(context["slot_mapping"][2], np.int64)
    assert (slots < 0).any() and len(set(slots[slots >= 0])) == (slots >= 0).sum()
    ok("synth", tmp_path / "b", *small, "--per-layer-slots")
    assert read_file(tmp_path / "b/context.safetensors")["slot_mapping"][1] == [2, 7]
    for foreign in ("config.json", model):
        folder = tmp_path / foreign.replace(".", "_")
        folder.mkdir()
        (folder / foreign).write_text("{}")
        refused("synth", folder, *small, words=[foreign, "must not be replaced"])
        assert os.listdir(folder) == [foreign]
    (tmp_path / "file").write_text("x")
    refused("synth", tmp_path / "file", words=["file"])
    refused("synth", tmp_path / "no" / "deep", words=["No such file"])


@pytest.mark.parametrize(
    "more", [[], ["--shards", 3], ["--nope"], ["--no-affine"], ["--zero-centered"]]
)
def test_synth_variants_run(tmp_path, more):
    ok("synth", tmp_path / "d", "--kv-heads", 1, "--layers", 2, "--rows", 7)
    base = ok(*run_args(tmp_path / "d", tmp_path / "d/context.safetensors", tmp_path / "o"))
    ok("synth", tmp_path / "d", "--kv-heads", 1, "--layers", 2, "--rows", 7, *more)
    text = ok(*run_args(tmp_path / "d", tmp_path / "d/context.safetensors", tmp_path / "o"))
    assert (text == base) == (more in ([], ["--shards", 3]))
    assert (tmp_path / "d/model.safetensors").exists() == (more != ["--shards", 3])


@pytest.mark.parametrize("more", [[], ["--head-dim", 64, "--hidden-size", 896], ["--shards", 2]])
def test_qwen3(tmp_path, more):
    shape = ["--family", "qwen3", "--kv-heads", 2, "--layers", 2, "--rows", 6]
    ok("synth", tmp_path / "d", *shape, "--hidden-size", 1024, *more)
    context = tmp_path / "d/context.safetensors"
    ok(*run_args(tmp_path / "d", context, tmp_path / "all"))
    whole = caches(tmp_path / "all")
    assert whole[0].shape[3] == (128 if more[:1] == ["--head-dim"] else 256) and whole[0].any()
    for rank in range(2):
        ok(*run_args(tmp_path / "d", context, tmp_path / "o", "--tp-size", 2, "--tp-rank", rank))
        for layer in range(2):
            assert (caches(tmp_path / "o")[layer] == whole[layer][:, rank : rank + 1]).all()
    config = json.loads((tmp_path / "d/config.json").read_text())
    config["is_neox_style"] = False
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    ok(*run_args(tmp_path / "d", context, tmp_path / "gptj"))
    half = whole[0].shape[3] // 2
    gptj = caches(tmp_path / "gptj")[0]
    rope = "--nope" not in more
    assert (gptj[..., :half] != whole[0][..., :half]).any() == rope
    assert (gptj[..., half:] == whole[0][..., half:]).all()


def test_qwen3_bias(tmp_path):
    """K and V biases are cut out with the heads; a promised one that is missing is named."""
    folder = tmp_path / "d"
    ok(
        "synth",
        folder,
        "--family",
        "qwen3",
        "--kv-heads",
        2,
        "--layers",
        2,
        "--rows",
        6,
        "--hidden-size",
        256,
    )
    context = folder / "context.safetensors"
    ok(*run_args(folder, context, tmp_path / "plain"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    refused(*run_args(folder, context, tmp_path / "no"), words=["layers.0.self_attn.k_proj.bias"])
    tensors = {
        name: (dtype, np.frombuffer(data, np.uint16).reshape(shape))
        for name, (dtype, shape, data) in read_file(folder / "model.safetensors").items()
    }
    rng = np.random.default_rng(2)
    for i in range(2):
        for part in "kv":
            bias = bf16(rng.standard_normal(256).astype(np.float32))
            tensors[f"layers.{i}.self_attn.{part}_proj.bias"] = ("BF16", bias)
    (folder / "model.safetensors").write_bytes(file_bytes(tensors))
    ok(*run_args(folder, context, tmp_path / "all"))
    assert "differ" in ok("verify", tmp_path / "plain", tmp_path / "all", code=1)
    for rank in range(2):
        ok(*run_args(folder, context, tmp_path / "o", "--tp-size", 2, "--tp-rank", rank))
        for whole, mine in zip(caches(tmp_path / "all"), caches(tmp_path / "o")):
            assert (mine == whole[:, rank : rank + 1]).all()
    nested = {**config, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    (folder / "config.json").write_text(json.dumps(nested))
    refused(*run_args(folder, context, tmp_path / "no"), words=["rope_parameters"])
