# SPDX-License-Identifier: Apache-2.0
"""The commands: arguments, run, tensor parallel, faults, verify, synth, signals, the terminal."""
import json
import os
import pty
import resource
import signal
import subprocess
import time
import zlib

import numpy as np
import pytest
from helpers import (
    BIN, D, bf16, caches, cli, file_bytes, ok, read_file, refused, run_args, write_context,
    write_model)

COMMANDS = ["info", "synth", "run", "verify", "selftest", "bench"]


# ---- arguments ---------------------------------------------------------------------------------
def test_help_and_version():
    top = ok("--help")
    for command in COMMANDS:
        assert f"\n  {command} " in top
        text = ok(command, "--help")
        assert text.startswith(f"Usage: ctxkv {command}")
        assert ok(command, "--usage").startswith(f"Usage: ctxkv {command}")
        assert ok(command, "--version") == ok("--version")
    assert ok("--version").startswith("ctxkv 0.")


def test_manual_page_has_every_option():
    page = os.path.join(os.path.dirname(BIN), "..", "..", "ctxkv.1")
    text = open(page).read().replace("\\-", "-")
    for command in COMMANDS:
        assert f"ctxkv {command}" in text
        for word in ok(command, "--help").replace(",", " ").replace("=", " ").split():
            if word.startswith("--") and len(word) > 2:
                assert word in text, (command, word)


@pytest.mark.parametrize("args, words", [
    ([], ["no command"]),
    (["zz"], ["zz"]),
    (["run"], ["--model", "missing"]),
    (["run", "--model", "x"], ["--context", "missing"]),
    (["run", "--model", "x", "--context", "y"], ["--out", "missing"]),
    (["run", "--model"], ["--model", "DIR"]),
    (["run", "--nope"], ["--nope"]),
    (["run", "--t", "3"], ["--t"]),
    (["run", "-z"], ["-z"]),
    (["run", "extra"], ["extra"]),
    (["run", "--checked=yes"], ["--checked"]),
    (["run", "--threads", "0"], ["--threads", "'0'", "1 to 1024"]),
    (["run", "--threads", "2x"], ["--threads", "'2x'"]),
    (["run", "--threads", ""], ["--threads", "''"]),
    (["run", "--block-size", "0"], ["--block-size", "'0'"]),
    (["run", "--block-size", "99999999999999999999"], ["--block-size", "99999999999999999999"]),
    (["run", "--num-blocks", "-1"], ["--num-blocks", "'-1'"]),
    (["run", "--device", "gpu"], ["--device", "gpu", "cuda:N"]),
    (["run", "--device", "cuda:x"], ["--device", "cuda:x"]),
    (["run", "--numerics", "fast"], ["--numerics", "fast", "pair"]),
    (["run", "--projection", "fast"], ["--projection", "fast", "exact"]),
    (["run", "--cpu-mask", "sse"], ["--cpu-mask", "sse", "avx2"]),
    (["verify"], ["0 files"]),
    (["verify", "a"], ["1 file"]),
    (["verify", "a", "b", "c"], ["'c'"]),
    (["info", "x"], ["'x'"]),
    (["synth"], ["DIR"]),
    (["synth", "a", "b"], ["'b'"]),
    (["synth", "--kv-heads", "0", "a"], ["--kv-heads"]),
    (["synth", "--family", "llama", "a"], ["--family", "llama", "muse"]),
    (["synth", "--hidden-size", "4096", "a"], ["--hidden-size", "8192"]),
    (["synth", "--family", "qwen3", "--no-affine", "a"], ["--no-affine"]),
    (["bench", "--rows", "1,x"], ["--rows", "1,x"]),
    (["bench", "--rows", ""], ["--rows"]),
    (["bench", "--heads", "0"], ["--heads"]),
    (["bench", "--tolerance", "nan"], ["--tolerance"]),
    (["bench", "--json", "/none/x"], ["--json", "/none/x"]),
    (["bench", "--compare", "/none/x"], ["--compare", "/none/x"]),
    (["selftest", "--golden", "/none"], ["--golden", "/none"]),
    (["selftest", "--golden", "/dev"], ["--golden", "/dev"]),
])
def test_wrong_arguments(tmp_path, args, words):
    refused(*args, words=words, cwd=tmp_path)
    assert os.listdir(tmp_path) == []


def test_no_gpu_is_said():
    info = json.loads(ok("info", "--json"))
    if not info["cuda"]["devices"]:
        assert info["cuda"]["reason"]
        refused("bench", "--device", "cuda:0", words=["--device"])


def test_info():
    info = json.loads(ok("info", "--json", "--threads", 1))
    assert info["version"] == ok("--version").split()[1]
    assert info["cpu"]["threads"] == 1
    assert info["cpu"]["used"] in info["cpu"]["found"] and "scalar" in info["cpu"]["found"]
    assert json.loads(ok("info", "--json", "--cpu-mask", "scalar"))["cpu"]["used"] == "scalar"
    mask = {"CTXKV_CPU_MASK": "scalar"}
    assert json.loads(ok("info", "--json", env=mask))["cpu"]["used"] == "scalar"
    assert "used: scalar" in ok("info", env=mask)
    for word in ("tiers", "threads", "cuda", "numerics", "build"):
        assert word in ok("info")


def test_full_standard_output():
    with open("/dev/full", "w") as full:
        done = subprocess.run([BIN, "info"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and b"standard output" in done.stderr


# ---- run: values by hand -----------------------------------------------------------------------
def heads_model(folder, heads, config=None):
    """x all 1 gives norms of 1; V of head h is h + 1, K rows give +-1 after the K norm."""
    k = np.zeros((heads * 64, D), np.float32)
    v = np.zeros((heads * 64, D), np.float32)
    for h in range(heads):
        k[h * 64:h * 64 + 64] = 2.0**-13 * 256
        k[h * 64 + 1:h * 64 + 64:2] *= -1
        v[h * 64:h * 64 + 64] = 2.0**-13 * (h + 1)
    return write_model(folder, heads, 2, bf16(k), bf16(v), config=config)


def ones_context(path, rows, **more):
    return write_context(path, rows, x=np.full((rows, D), 0x3F80, np.uint16), **more)


def test_values_and_slots(tmp_path):
    """B02: negative slots are skipped, -1 is not the last slot; the rest stays zero."""
    model = heads_model(tmp_path / "m", 2)
    context = ones_context(tmp_path / "c", 4, slots=[3, -1, 7, -9223372036854775808])
    text = ok(*run_args(model, context, tmp_path / "o"))
    for cache in caches(tmp_path / "o"):
        assert cache.shape == (1, 2, 16, 128)
        assert set(np.flatnonzero(cache.any(axis=(0, 1, 3)))) == {3, 7}
        for h in range(2):
            for slot in (3, 7):
                assert (cache[0, h, slot, 64:] == bf16([h + 1.0])).all()
                assert (cache[0, h, slot, 0:64:2] == 0x3F80).all()
                assert (cache[0, h, slot, 1:64:2] == 0xBF80).all()
    lines = text.splitlines()
    for i, cache in enumerate(caches(tmp_path / "o")):
        assert lines[i] == f"layer {i}  crc32 {zlib.crc32(cache.tobytes()):08x}  rows 2"
    assert lines[2:] == ["faults: none"]


def test_block_layout(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 3, slots=[[0, 7, 14], [-1, 3, 2]])
    ok(*run_args(model, context, tmp_path / "o", "--block-size", 5, "--num-blocks", 4))
    first, second = caches(tmp_path / "o")
    assert first.shape == (4, 1, 5, 128)
    assert list(map(tuple, np.argwhere(first.any(axis=(1, 3))))) == [(0, 0), (1, 2), (2, 4)]
    assert list(map(tuple, np.argwhere(second.any(axis=(1, 3))))) == [(0, 2), (0, 3)]


def test_default_and_fewer_slots(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    ok(*run_args(model, ones_context(tmp_path / "c", 18), tmp_path / "o"))
    cache = caches(tmp_path / "o")[0]
    assert cache.shape[0] == 2
    assert cache.any(axis=(1, 3)).ravel().tolist() == [True] * 18 + [False] * 14
    ok(*run_args(model, ones_context(tmp_path / "c", 3, slots=[5, 6]), tmp_path / "o"))
    assert np.flatnonzero(caches(tmp_path / "o")[0].any(axis=(0, 1, 3))).tolist() == [5, 6]
    empty = ok(*run_args(model, ones_context(tmp_path / "c", 0), tmp_path / "o"))
    assert "rows 0" in empty and not caches(tmp_path / "o")[0].any()


def test_many_rows_run_in_pieces(tmp_path):
    """Rows beyond a piece have the bits that they have alone, and the layer's first fault counts."""
    model = write_model(tmp_path / "m", 1, 1, config={"use_rope": True})
    rows = 300
    slots = np.arange(rows)
    slots[[270, 290]] = 5000
    positions = np.arange(rows) * 3
    context = write_context(tmp_path / "c", rows, slots=slots, positions=positions)
    text = ok(*run_args(model, context, tmp_path / "o", "--num-blocks", 20))
    assert "faults: 2 rows skipped; first: layer 0, row 270: slot 5000 must be below 320" in text
    x = np.frombuffer(read_file(context)["hidden_states"][2], np.uint16).reshape(rows, D)
    write_context(tmp_path / "c2", 1, slots=[280], positions=[840], x=x[280:281])
    ok(*run_args(model, tmp_path / "c2", tmp_path / "o2", "--num-blocks", 20))
    all_rows, alone = caches(tmp_path / "o")[0], caches(tmp_path / "o2")[0]
    assert (all_rows[17, :, 8] == alone[17, :, 8]).all() and alone[17, :, 8].any()


def test_tiers_threads_and_numerics(tmp_path):
    ok("synth", tmp_path / "d", "--kv-heads", 2, "--layers", 2, "--rows", 9)
    context = tmp_path / "d/context.safetensors"
    base = ok(*run_args(tmp_path / "d", context, tmp_path / "a"))
    for more in (["--threads", 1], ["--cpu-mask", "scalar"], ["--cpu-mask", "avx2"],
                 ["--projection", "exact"], ["--numerics", "pair"], ["--device", "auto"]):
        if more[0] == "--device" and json.loads(ok("info", "--json"))["cuda"]["devices"]:
            continue
        assert ok(*run_args(tmp_path / "d", context, tmp_path / "b", *more)) == base
        assert ok("verify", tmp_path / "a", tmp_path / "b").startswith("equal: 2 layers")
    # The two orders' sums rarely differ on such rows; selftest's crc_packed tells them apart.
    ok(*run_args(tmp_path / "d", context, tmp_path / "b", "--numerics", "packed"))
    refused(*run_args(tmp_path / "d", context, tmp_path / "c", "--projection", "cublas"))


# ---- tensor parallel, B24 ------------------------------------------------------------------------
@pytest.mark.parametrize("heads, ranks", [(4, 2), (4, 4), (2, 4), (8, 16)])
def test_ranks(tmp_path, heads, ranks):
    model = heads_model(tmp_path / "m", heads)
    context = ones_context(tmp_path / "c", 2)
    ok(*run_args(model, context, tmp_path / "all"))
    whole = caches(tmp_path / "all")
    for rank in range(ranks):
        ok(*run_args(model, context, tmp_path / "o", "--tp-size", ranks, "--tp-rank", rank))
        mine = caches(tmp_path / "o")
        local = max(1, heads // ranks)
        first = rank * local if heads >= ranks else rank * heads // ranks
        for layer in range(2):
            assert mine[layer].shape[1] == local
            assert (mine[layer] == whole[layer][:, first:first + local]).all()
            assert (mine[layer][0, 0, 0, 64:] == bf16([first + 1.0])).all()


@pytest.mark.parametrize("heads, ranks", [(3, 2), (8, 3), (2, 3)])
def test_ranks_refused(tmp_path, heads, ranks):
    model = heads_model(tmp_path / "m", heads)
    context = ones_context(tmp_path / "c", 1)
    args = run_args(model, context, tmp_path / "o", "--tp-size", ranks)
    refused(*args, words=[f"{heads} KV heads", f"{ranks} tensor-parallel ranks"])
    refused(*args, "--tp-rank", ranks, words=["--tp-rank", ranks])
    assert not (tmp_path / "o").exists()


# ---- faults, B06 -----------------------------------------------------------------------------------
def test_position_past_the_table(tmp_path):
    model = write_model(tmp_path / "m", 1, 2, config={"use_rope": True})
    table = np.full((2048, 64), 0x3F80, np.uint16)
    table[:, 32:] = 0
    context = write_context(
        tmp_path / "c", 2, slots=[0, 1], positions=[2047, 2048],
        extra={"cos_sin_cache": ("BF16", table), "after": ("BF16", np.full((64, 64), 0x7FC0, np.uint16))})
    text = ok(*run_args(model, context, tmp_path / "o"))
    assert "faults: 2 rows skipped; first: layer 0, row 1: position 2048 must be >= 0 and below 2048" in text
    assert text.count("rows 1") == 2
    for cache in caches(tmp_path / "o"):
        assert cache[0, 0, 0].all() and not cache[0, 0, 1:].any()
        assert not ((cache & 0x7FFF) > 0x7F80).any()
    refused(*run_args(model, context, tmp_path / "no", "--checked"), words=["2048"])
    assert not (tmp_path / "no").exists()
    refused(*run_args(model, context, tmp_path / "no", "--checked", "--num-blocks", 1, "--block-size", 1))
    text = ok(*run_args(model, context, tmp_path / "o", "--num-blocks", 1, "--block-size", 1))
    assert "row 1: slot 1 must be below 1" in text


def test_table_handed_in_or_made(tmp_path):
    """--table holds what run computes from theta."""
    for more in ([], ["--table"]):
        ok("synth", tmp_path / "d", "--kv-heads", 1, "--layers", 1, "--rows", 5, "--max-position", 3000, *more)
        ok(*run_args(tmp_path / "d", tmp_path / "d/context.safetensors", tmp_path / f"o{len(more)}"))
    assert (tmp_path / "o0").read_bytes() == (tmp_path / "o1").read_bytes()


def test_absurd_slots(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 2, slots=[1, 2**62])
    refused(*run_args(model, context, tmp_path / "o"), words=["--num-blocks", 2**62])
    text = ok(*run_args(model, context, tmp_path / "o", "--num-blocks", 1))
    assert f"slot {2**62}" in text


# ---- config and context ----------------------------------------------------------------------------
@pytest.mark.parametrize("change, words", [
    ({"hidden_size": 4096}, ["hidden_size", "4096", "8192"]),
    ({"hidden_size": None}, ["hidden_size", "missing"]),
    ({"hidden_size": "8192"}, ["hidden_size"]),
    ({"head_dim": 128}, ["head_dim", "128", "64"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({"num_hidden_layers": None}, ["num_hidden_layers", "missing"]),
    ({"num_hidden_layers": 2}, ["layers.1.self_attn.k_proj.weight", "missing"]),
    ({"num_key_value_heads": 2}, ["k_proj.weight", "[64, 8192]", "[128, 8192]"]),
    ({"num_key_value_heads": None, "num_attention_heads": None}, ["num_key_value_heads"]),
    ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1"]),
    ({"rms_norm_eps": "x"}, ["rms_norm_eps"]),
    ({"norm_affine": 1}, ["norm_affine"]),
    ({"norm_affine": True}, ["hidden_norm.weight", "missing"]),
    ({"norm_zero_centered_gamma": "yes"}, ["norm_zero_centered_gamma"]),
    ({"use_rope": True, "rope_theta": 0.5}, ["rope_theta", "0.5"]),
    ({"use_rope": True, "max_position_embeddings": None}, ["max_position_embeddings", "missing"]),
    ({"use_rope": True, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, ["yarn", "cos_sin_cache"]),
    ({"use_rope": True, "draft_position_mode": "nope"}, ["draft_position_mode"]),
    ({"use_rope": None, "draft_position_mode": "yes"}, ["draft_position_mode", "yes"]),
    ({"is_neox_style": True}, ["is_neox_style", "NeoX"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ({"attention_bias": True}, ["attention_bias"]),
    ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM"]),
    ({"architectures": ["DeepSeekV4DSparkModel"]}, ["DeepSeekV4DSparkModel", "MLA"]),
    ({"architectures": "x"}, ["architectures"]),
])
def test_config_refused(tmp_path, change, words):
    model = write_model(tmp_path / "m", config=change)
    context = write_context(tmp_path / "c")
    refused(*run_args(model, context, tmp_path / "o"), words=words)
    assert not (tmp_path / "o").exists()


def test_config_text_refused(tmp_path):
    model = write_model(tmp_path / "m")
    context = write_context(tmp_path / "c")
    whole = (model / "config.json").read_text()
    for text, word in (("[]", "object"), (whole[:-1] + ', "head_dim": 64}', "duplicate"),
                       (whole + "x", "JSON"), ("", "JSON"), ('{"a": NaN}', "JSON")):
        (model / "config.json").write_text(text)
        refused(*run_args(model, context, tmp_path / "o"), words=[word, "config.json"])
    (model / "config.json").unlink()
    refused(*run_args(model, context, tmp_path / "o"), words=["config.json", "No such file"])
    refused(*run_args(context, context, tmp_path / "o"), words=["config.json"])
    refused(*run_args(tmp_path / "none", context, tmp_path / "o"), words=["none"])


@pytest.mark.parametrize("tensors, words", [
    ({"hidden_states": None}, ["hidden_states", "missing"]),
    ({"positions": None}, ["positions", "missing"]),
    ({"positions": ("I32", np.arange(3, dtype=np.int32))}, ["positions", "I32", "I64"]),
    ({"positions": ("I64", np.arange(4))}, ["positions", "[4]", "[3]"]),
    ({"positions": ("I64", np.zeros((3, 1), np.int64))}, ["positions", "[3, 1]"]),
    ({"slot_mapping": ("I32", np.arange(3, dtype=np.int32))}, ["slot_mapping", "I32"]),
    ({"slot_mapping": ("I64", np.arange(4))}, ["slot_mapping", "[4]"]),
    ({"slot_mapping": ("I64", np.zeros((2, 3), np.int64))}, ["slot_mapping", "[2, 3]", "[1, R]"]),
    ({"slot_mapping": ("I64", np.int64(0))}, ["slot_mapping", "[]"]),
    ({"hidden_states": ("F16", np.zeros((3, D), np.uint16))}, ["hidden_states", "F16", "BF16"]),
    ({"hidden_states": ("BF16", np.zeros((3, 64), np.uint16))}, ["hidden_states", "[3, 64]", "8192"]),
    ({"hidden_states": ("BF16", np.zeros(D, np.uint16))}, ["hidden_states", "[8192]"]),
    ({"cos_sin_cache": ("BF16", np.zeros((9, 32), np.uint16))}, ["cos_sin_cache", "[9, 32]", "64"]),
    ({"cos_sin_cache": ("F32", np.zeros((9, 64), np.float32))}, ["cos_sin_cache", "F32"]),
])
def test_context_refused(tmp_path, tensors, words):
    model = write_model(tmp_path / "m", config={"use_rope": True})
    base = {
        "hidden_states": ("BF16", np.zeros((3, D), np.uint16)),
        "positions": ("I64", np.arange(3)), **tensors}
    (tmp_path / "c").write_bytes(file_bytes({k: v for k, v in base.items() if v}))
    refused(*run_args(model, tmp_path / "c", tmp_path / "o"), words=words)
    assert not (tmp_path / "o").exists()


def test_weight_dtypes(tmp_path):
    context = write_context(tmp_path / "c")
    name = "layers.0.self_attn.k_proj.weight"
    for dtype, array in (("F16", np.zeros((64, D), np.uint16)), ("F32", np.zeros((64, D), np.float32))):
        model = write_model(tmp_path / "m", extra={name: (dtype, array)})
        refused(*run_args(model, context, tmp_path / "o"), words=[name, dtype, "BF16"])
    gains = {
        "hidden_norm.weight": np.linspace(0.5, 1.5, D).astype(np.float32),
        "layers.0.self_attn.pre_qkv_proj_norm.weight": np.linspace(1.5, 0.5, D).astype(np.float32)}
    outputs = []
    for narrow in (False, True):
        rounded = {n: (bf16(g).astype(np.uint32) << 16).view(np.float32) for n, g in gains.items()}
        extra = {n: ("BF16", bf16(g)) if narrow else ("F32", g) for n, g in rounded.items()}
        model = write_model(tmp_path / "m", config={"norm_affine": True}, extra=extra)
        ok(*run_args(model, context, tmp_path / "o"))
        outputs.append((tmp_path / "o").read_bytes())
    assert outputs[0] == outputs[1]
    zero = write_model(
        tmp_path / "m", config={"norm_affine": True, "norm_zero_centered_gamma": True},
        extra={n: ("F32", g - 1) for n, g in rounded.items()})
    ok(*run_args(zero, context, tmp_path / "o"))
    assert (tmp_path / "o").read_bytes() == outputs[0]
    wrong = {n: ("F16", bf16(g)) for n, g in gains.items()}
    model = write_model(tmp_path / "m", config={"norm_affine": True}, extra=wrong)
    refused(*run_args(model, context, tmp_path / "o2"), words=["hidden_norm.weight", "F16"])


# ---- verify ------------------------------------------------------------------------------------------
def test_verify_names_the_first_difference(tmp_path):
    rng = np.random.default_rng(0)
    layers = [rng.integers(0, 65536, (3, 2, 4, 128), np.uint16) for _ in range(3)]
    names = lambda arrays: {f"kv_cache.{i}": ("BF16", a) for i, a in enumerate(arrays)}
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
        f"A has 0x{was:04x}, B has 0x{now:04x}")
    assert lines[1] == "layer 1: 1 of 3072 elements differ (K 0, V 1)"
    assert lines[2] == "layer 2: 2 of 3072 elements differ (K 2, V 0)"
    assert lines[3] == "3 of 9216 elements differ"
    b.write_bytes(file_bytes(names(layers[:2])))
    refused("verify", a, b, words=[b, "2 layers", "3"])
    b.write_bytes(file_bytes(names([layers[0], layers[1][:2], layers[2]])))
    refused("verify", a, b, words=["kv_cache.1", "[2, 2, 4, 128]", "[3, 2, 4, 128]"])
    b.write_bytes(file_bytes({"x": ("BF16", layers[0])}))
    refused("verify", a, b, words=[b, "kv_cache.0"])
    b.write_bytes(file_bytes({"kv_cache.0": ("F16", layers[0])}))
    refused("verify", b, b, words=["F16", "BF16"])


# ---- synth ---------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("more", [[], ["--shards", 3], ["--nope"], ["--no-affine"], ["--zero-centered"]])
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
            assert (caches(tmp_path / "o")[layer] == whole[layer][:, rank:rank + 1]).all()
    config = json.loads((tmp_path / "d/config.json").read_text())
    config["is_neox_style"] = False
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    refused(*run_args(tmp_path / "d", context, tmp_path / "no"), words=["is_neox_style"])


# ---- atomic output, signals, the terminal ------------------------------------------------------------
def written(folder):
    """Bytes of the unfinished file; 0 when there is none, or it goes while we look."""
    try:
        return sum(e.stat().st_size for e in os.scandir(folder) if e.name != "o")
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_leaves_nothing(tmp_path, number):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    folder = tmp_path / "out"
    folder.mkdir()
    args = run_args(model, context, folder / "o", "--num-blocks", 60000)
    process = subprocess.Popen([BIN, *map(str, args)], stdout=subprocess.DEVNULL)
    # The probe's file appears and goes at once; the one being written grows.
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if written(folder) > 1 << 20:
            break
    process.send_signal(number)
    assert process.wait() == -number
    assert os.listdir(folder) == []


def test_failed_write_leaves_nothing(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    folder = tmp_path / "out"
    folder.mkdir()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    args = run_args(model, context, folder / "o", "--num-blocks", 100)
    refused(*args, preexec_fn=limit, words=[folder / "o", "File too large"])
    assert os.listdir(folder) == []
    refused("synth", folder, "--kv-heads", 1, preexec_fn=limit, words=["File too large"])
    assert os.listdir(folder) == []
    refused("synth", folder / "new", "--kv-heads", 1, preexec_fn=limit)
    assert os.listdir(folder) == []


def test_progress_bar_only_on_a_terminal(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    args = [BIN, *map(str, run_args(model, context, tmp_path / "o", "--num-blocks", 3000))]
    done = cli(*args[1:])
    assert done.returncode == 0 and done.stderr == b""
    main, other = pty.openpty()
    process = subprocess.Popen(args, stderr=other, stdout=subprocess.PIPE)
    out = process.communicate()[0]
    os.close(other)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:
        pass
    os.close(main)
    assert process.returncode == 0 and b"writing" in shown and b"%" in shown
    assert shown.endswith(b"\x1b[K") and b"\r" not in out


# ---- selftest and bench ---------------------------------------------------------------------------------
GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden")


def golden_part(folder, table, rows):
    lines = open(os.path.join(GOLDEN, table)).read().splitlines()
    (folder / table).write_text("\n".join(lines[:1 + rows]) + "\n")
    return lines


def test_selftest_counts(tmp_path):
    golden_part(tmp_path, "norms.csv", 2)
    golden_part(tmp_path, "store.csv", 1)
    golden_part(tmp_path, "inv_freq.csv", 3)
    run = ("selftest", "--device", "cpu", "--golden", tmp_path)
    assert ok(*run).splitlines()[-1] == "14 passed, 0 failed"  # 4 + 5 + 3, and rsqrt twice
    assert ok(*run, "--verbose").count("pass ") == 12
    lines = golden_part(tmp_path, "norms.csv", 2)
    (tmp_path / "norms.csv").write_text("\n".join([lines[0], lines[1].replace("1b7f9121", "1b7f9120", 1)]))
    text = ok(*run, code=1)
    assert text.splitlines()[-1] == "11 passed, 1 failed"
    assert "FAIL norms-nn: stock on sm_90: 1b7f9121, must be 1b7f9120" in text
    for cut, word in ((lines[1].replace(",n,", ",q,", 1), "'q'"), (lines[1].rsplit(",", 1)[0], "columns"),
                      (lines[1].replace("1000", "10x0"), "seed"), (lines[1][:-1], "hexadecimal"),
                      (lines[1].replace("1e-05", "nan"), "eps")):
        (tmp_path / "norms.csv").write_text(lines[0] + "\n" + cut + "\n")
        done = cli(*run)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1, (cut, done)
        assert word.encode() in done.stderr and b"norms.csv" in done.stderr
    (tmp_path / "norms.csv").write_text("")
    assert cli(*run).returncode == 2


def test_bench_reports_and_compares(tmp_path):
    path = tmp_path / "b.json"
    run = ["bench", "--device", "cpu", "--heads", 1, "--layers", 1, "--rows", "1,2", "--seconds", 0.02]
    ok(*run, "--json", path)
    data = json.loads(path.read_text())
    assert [r["op"] for r in data["results"]] == ["norms", "projection", "store", "chain"] * 2
    for r in data["results"]:
        assert 0 < r["p10_us"] <= r["median_us"] <= r["p90_us"] and r["samples"] >= 3
        assert (r["gmac_s"] > 0) == (r["op"] in ("projection", "chain")) and r["gb_s"] > 0
        assert abs(r["copy_share"] - r["gb_s"] / data["copy_gb_s"]) < 1e-3
    lines = ok(*run, "--csv", "--compare", path, "--tolerance", 100).splitlines()
    assert len(lines) == 9 and all(float(line.rsplit(",", 1)[1]) > 0 for line in lines[1:])
    for r in data["results"]:
        r["median_us"] /= 1000
    path.write_text(json.dumps(data))
    assert "slower" in ok(*run, "--compare", path, code=1)
    path.write_text(json.dumps({"results": []}))
    done = cli(*run, "--compare", path)
    assert done.returncode == 2 and b"none of these" in done.stderr
    path.write_text("{}")
    refused(*run, "--compare", path, words=["--compare", path])
