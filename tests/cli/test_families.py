# SPDX-License-Identifier: Apache-2.0
"""Every kind of draft from end to end: synth, run, verify, bench, diagnose."""

import json

import numpy as np
import pytest
from helpers import file_bytes, ok, read_file, refused, run_args

SHAPE = ["--kv-heads", 2, "--layers", 2, "--rows", 6, "--max-position", 64]
SMALL = [*SHAPE, "--hidden-size", 256]
QWEN = ["--family", "qwen3", *SMALL]
LAGUNA = ["--family", "laguna", *SMALL]
GEMMA = ["--family", "gemma4", *SMALL]
# Options of synth, the cache type, what must stand in config.json.
DRAFTS = [
    (["--family", "muse", *SHAPE], "bf16", {"architectures": ["MuseSparkDSparkModel"]}),
    (["--family", "muse", *SHAPE, "--fp32-norms", "--table-type", "fp32"], "fp8_e4m3", {}),
    (QWEN, "bf16", {"architectures": ["DFlashDraftModel"], "head_dim": 128}),
    ([*QWEN, "--bias", "--v-scale", 0.612], "fp16",
     {"attention_bias": True, "dflash_config": {"attention_value_scale": 0.612}}),
    ([*QWEN, "--head-dim", 64, "--rotary-dim", 48, "--gptj"], "bf16",
     {"partial_rotary_factor": 0.75, "is_neox_style": False}),
    ([*QWEN, "--head-dim", 256, "--zero-centered", "--scales"], "fp8_e4m3",
     {"norm_zero_centered_gamma": True}),
    ([*QWEN, "--sliding", 4, "--layer-tables", "--table-type", "fp16"], "bf16",
     {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}),
    ([*QWEN, "--no-affine", "--nope"], "bf16", {"norm_affine": False, "use_rope": False}),
    (LAGUNA, "bf16", {"architectures": ["DFlashLagunaForCausalLM"]}),
    ([*LAGUNA, "--bias", "--rotary-dim", 64, "--scales"], "fp8_e5m2", {"attention_bias": True}),
    ([*GEMMA], "bf16", {"architectures": ["Gemma4DSparkModel"], "global_head_dim": 512,
                        "num_global_key_value_heads": 2, "attention_k_eq_v": True}),
    ([*GEMMA, "--head-dim", 128, "--bias", "--v-scale", 2, "--table", "--scales"], "fp8_e4m3", {}),
]


def make(folder, options, cache="bf16"):
    """A draft, its context and its caches, and the call of diagnose about them."""
    ok("synth", folder, *options)
    context, out = folder / "context.safetensors", folder / "out.safetensors"
    told = ok(*run_args(folder, context, out, "--cache-type", cache))
    assert told.endswith("faults: none\n")
    return out, ["diagnose", "--model", folder, "--context", context, "--cache", out]


def diagnosis(call, code):
    return json.loads(ok(*call, "--json", code=code))


@pytest.mark.parametrize("options, cache, keys", DRAFTS)
def test_end_to_end(tmp_path, options, cache, keys):
    folder = tmp_path / "d"
    out, call = make(folder, options, cache)
    config = json.loads((folder / "config.json").read_text())
    for key, value in keys.items():
        assert config[key] == value, key
    scalar = tmp_path / "scalar"
    again = run_args(folder, folder / "context.safetensors", scalar, "--cache-type", cache)
    ok(*again, "--cpu-mask", "scalar", "--threads", 1)
    assert ok("verify", out, scalar).startswith("equal: 2 layers")
    report = diagnosis(call, 0)
    assert report["equal"] and report["shape"]["cache_type"] == cache
    # Half of the heads by each of two ranks.
    whole = read_file(out)["kv_cache.1"]
    size = 1 if "fp8" in cache else 2
    bits = np.frombuffer(whole[2], np.uint8).reshape(*whole[1][:3], whole[1][3] * size)
    assert bits.any()
    for rank in range(2):
        ok(*again, "--tp-size", 2, "--tp-rank", rank)
        half = read_file(scalar)["kv_cache.1"]
        assert half[2] == bits[:, rank : rank + 1].tobytes()
    path = tmp_path / "b.json"
    bench = ["bench", "--device", "cpu", "--model", folder, "--rows", 3, "--seconds", 0.001]
    ok(*bench, "--cache-type", cache, "--json", path)
    data = json.loads(path.read_text())
    assert data["checked"] and data["family"] == options[1] and data["cache_type"] == cache
    assert [r["op"] for r in data["results"]] == ["norms", "projection", "store", "chain"]


def changed(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


@pytest.mark.parametrize(
    "options, change, verdict",
    [
        (QWEN, {"dflash_config": {"attention_value_scale": 0.612}}, "v_scale_missing"),
        (QWEN, {"norm_zero_centered_gamma": True}, "gain_centre_missing"),
        (QWEN, {"partial_rotary_factor": 0.5}, "rope_whole_head"),
        (QWEN, {"is_neox_style": False}, "rope_neox"),
        (LAGUNA, {"partial_rotary_factor": 0.5}, "rope_whole_head"),
        (GEMMA, {"dflash_config": {"attention_value_scale": 3}}, "v_scale_missing"),
    ],
)
def test_an_engine_without_the_option(tmp_path, options, change, verdict):
    """The engine did not know the key that the draft has."""
    folder = tmp_path / "d"
    _, call = make(folder, options)
    changed(folder, change)
    assert diagnosis(call, 1)["verdict"] == [verdict]


def test_options_change_what_they_name(tmp_path):
    def halves(*options):
        out, _ = make(tmp_path / "d", [*QWEN, *options])
        _, shape, data = read_file(out)["kv_cache.0"]
        array = np.frombuffer(data, np.uint16).reshape(shape)
        return array[..., :128], array[..., 128:]

    k, v = halves()
    scaled = halves("--v-scale", 2)
    assert (scaled[0] == k).all() and (scaled[1][v != 0] == v[v != 0] + 0x80).all()
    partial = halves("--rotary-dim", 32)
    bare = halves("--nope")
    assert (partial[0][..., 32:] == bare[0][..., 32:]).all()
    assert (partial[0][..., :32] != bare[0][..., :32]).any() and (partial[1] == v).all()
    plain = halves("--zero-centered")
    assert (plain[0] != k).any() and (plain[1] != v).any()


def test_sliding_layers_keep_the_last_rows(tmp_path):
    folder = tmp_path / "d"
    make(folder, [*QWEN, "--sliding", 4])
    slots = np.frombuffer(read_file(folder / "context.safetensors")["slot_mapping"][2], np.int64)
    slots = slots.reshape(2, 6)
    assert (slots[0] >= 0).tolist() == [False] * 2 + [True] * 4
    assert (slots[1] >= 0).sum() == 4 and slots[1][0] == -1  # every fifth row is a hole


def test_diagnose_cache_types(tmp_path):
    """FP8 may stand as bytes, whose kind must then be given; another kind is refused by name."""
    folder = tmp_path / "d"
    out, call = make(folder, [*QWEN, "--scales"], "fp8_e4m3")
    refused(*call, "--cache-type", "fp8_e5m2", words=["F8_E4M3", "F8_E5M2"])
    refused(*call, "--cache-type", "fp4", words=["--cache-type", "fp4"])
    tensors = {
        name: ("U8", np.frombuffer(data, np.uint8).reshape(shape))
        for name, (_, shape, data) in read_file(out).items()
    }
    out.write_bytes(file_bytes(tensors))
    refused(*call, words=["kv_cache.0", "U8", "--cache-type"])
    assert diagnosis([*call, "--cache-type", "fp8_e4m3"], 0)["equal"]
    other = diagnosis([*call, "--cache-type", "fp8_e5m2"], 1)
    assert other["verdict"] == ["e4m3_bits"]
    first = other["clean"]["first"]
    assert len(first["recorded"]) == len(first["expected"]) == 4
    out.write_bytes(file_bytes({n: ("I8", a) for n, (_, a) in tensors.items()}))
    refused(*call, words=["I8", "F8_E4M3"])
    out, call = make(folder, [*QWEN, "--scales"], "fp8_e4m3")
    ok(*run_args(folder, folder / "context.safetensors", out, "--cache-type", "fp8_e4m3"))
    plain = {n: ("BF16", np.zeros((1, 2, 16, 256), np.uint16)) for n in tensors}
    out.write_bytes(file_bytes(plain))
    refused(*call, words=["k_scales", "BF16"])


def test_speculators_config(tmp_path):
    """The layers' keys one level down, as the speculators library writes them."""
    folder = tmp_path / "d"
    out, call = make(folder, QWEN)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    outer = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}
    path.write_text(json.dumps({**outer, "transformer_layer_config": config}))
    assert diagnosis(call, 0)["equal"]
    path.write_text(json.dumps({**outer, "speculators_model_type": "eagle3"}))
    refused(*call, words=["speculators_model_type", "eagle3", "dspark"])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--family", "gemma4", "--gptj"], ["--gptj", "gemma4"]),
        (["--bias"], ["--bias", "muse"]),
        (["--family", "laguna", "--rotary-dim", 9], ["--rotary-dim", "9"]),
        (["--family", "laguna", "--rotary-dim", 256], ["--rotary-dim", "256", "128"]),
        (["--cache-type", "int8"], ["--cache-type", "int8", "fp8_e4m3"]),
    ],
)
def test_bench_refuses(options, words):
    refused("bench", *options, words=words)


def test_bench_compares_like_with_like(tmp_path):
    path = tmp_path / "b.json"
    run = ["bench", "--device", "cpu", "--family", "gemma4", "--hidden-size", 64, "--heads", 1,
           "--layers", 1, "--rows", 2, "--seconds", 0.001]
    ok(*run, "--json", path)
    refused_options = [["--cache-type", "fp16"], ["--bias"], ["--family", "laguna"]]
    for options in refused_options:
        told = ok(*run, *options, "--compare", path, "--no-check", "--head-dim", 512, code=2)
        assert "floor" in told
    assert "0 of 4" in ok(*run, "--compare", path, "--tolerance", 100)
