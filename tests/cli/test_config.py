# SPDX-License-Identifier: Apache-2.0
"""config.json and context files that are refused, and what the keys mean."""

import numpy as np
import pytest
from helpers import (
    D,
    bf16,
    file_bytes,
    ok,
    refused,
    run_args,
    write_context,
    write_model,
)


# ---- config and context
@pytest.mark.parametrize(
    "change, words",
    [
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
        (
            {"use_rope": True, "max_position_embeddings": None},
            ["max_position_embeddings", "missing"],
        ),
        (
            {"use_rope": True, "rope_scaling": {"rope_type": "yarn", "factor": 4}},
            ["yarn", "cos_sin_cache"],
        ),
        ({"use_rope": True, "draft_position_mode": "nope"}, ["draft_position_mode"]),
        ({"use_rope": None, "draft_position_mode": "yes"}, ["draft_position_mode", "yes"]),
        ({"is_neox_style": True}, ["is_neox_style", "NeoX"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM"]),
        ({"architectures": ["DeepSeekV4DSparkModel"]}, ["DeepSeekV4DSparkModel", "MLA"]),
        ({"architectures": "x"}, ["architectures"]),
    ],
)
def test_config_refused(tmp_path, change, words):
    model = write_model(tmp_path / "m", config=change)
    context = write_context(tmp_path / "c")
    refused(*run_args(model, context, tmp_path / "o"), words=words)
    assert not (tmp_path / "o").exists()


def test_config_text_refused(tmp_path):
    model = write_model(tmp_path / "m")
    context = write_context(tmp_path / "c")
    whole = (model / "config.json").read_text()
    for text, word in (
        ("[]", "object"),
        (whole[:-1] + ', "head_dim": 64}', "duplicate"),
        (whole + "x", "JSON"),
        ("", "JSON"),
        ('{"a": NaN}', "JSON"),
    ):
        (model / "config.json").write_text(text)
        refused(*run_args(model, context, tmp_path / "o"), words=[word, "config.json"])
    (model / "config.json").unlink()
    refused(*run_args(model, context, tmp_path / "o"), words=["config.json", "No such file"])
    refused(*run_args(context, context, tmp_path / "o"), words=["config.json"])
    refused(*run_args(tmp_path / "none", context, tmp_path / "o"), words=["none"])


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({"hidden_states": None}, ["hidden_states", "missing"]),
        ({"positions": None}, ["positions", "missing"]),
        ({"positions": ("I32", np.arange(3, dtype=np.int32))}, ["positions", "I32", "I64"]),
        ({"positions": ("I64", np.arange(4))}, ["positions", "[4]", "[3]"]),
        ({"positions": ("I64", np.zeros((3, 1), np.int64))}, ["positions", "[3, 1]"]),
        ({"slot_mapping": ("I32", np.arange(3, dtype=np.int32))}, ["slot_mapping", "I32"]),
        ({"slot_mapping": ("I64", np.arange(4))}, ["slot_mapping", "[4]"]),
        (
            {"slot_mapping": ("I64", np.zeros((2, 3), np.int64))},
            ["slot_mapping", "[2, 3]", "[1, R]"],
        ),
        ({"slot_mapping": ("I64", np.int64(0))}, ["slot_mapping", "[]"]),
        ({"hidden_states": ("F16", np.zeros((3, D), np.uint16))}, ["hidden_states", "F16", "BF16"]),
        (
            {"hidden_states": ("BF16", np.zeros((3, 64), np.uint16))},
            ["hidden_states", "[3, 64]", "8192"],
        ),
        ({"hidden_states": ("BF16", np.zeros(D, np.uint16))}, ["hidden_states", "[8192]"]),
        (
            {"cos_sin_cache": ("BF16", np.zeros((9, 32), np.uint16))},
            ["cos_sin_cache", "[9, 32]", "64"],
        ),
        ({"cos_sin_cache": ("I64", np.zeros((9, 64), np.int64))}, ["cos_sin_cache", "I64", "F32"]),
        (
            {"cos_sin_cache": ("BF16", np.zeros((2, 9, 64), np.uint16))},
            ["cos_sin_cache", "[2, 9, 64]", "[1, max_position, 64]"],
        ),
        ({"k_scales": ("F32", np.ones(1, np.float32))}, ["v_scales", "missing"]),
        (
            {k: ("F32", np.ones(2, np.float32)) for k in ("k_scales", "v_scales")},
            ["k_scales", "[2]", "[1]"],
        ),
        (
            {k: ("F32", np.ones(1, np.float32)) for k in ("k_scales", "v_scales")},
            ["k_scales", "--cache-type", "bf16"],
        ),
    ],
)
def test_context_refused(tmp_path, tensors, words):
    model = write_model(tmp_path / "m", config={"use_rope": True})
    base = {
        "hidden_states": ("BF16", np.zeros((3, D), np.uint16)),
        "positions": ("I64", np.arange(3)),
        **tensors,
    }
    (tmp_path / "c").write_bytes(file_bytes({k: v for k, v in base.items() if v}))
    refused(*run_args(model, tmp_path / "c", tmp_path / "o"), words=words)
    assert not (tmp_path / "o").exists()


def test_weight_dtypes(tmp_path):
    context = write_context(tmp_path / "c")
    name = "layers.0.self_attn.k_proj.weight"
    for dtype, array in (
        ("F16", np.zeros((64, D), np.uint16)),
        ("F32", np.zeros((64, D), np.float32)),
    ):
        model = write_model(tmp_path / "m", extra={name: (dtype, array)})
        refused(*run_args(model, context, tmp_path / "o"), words=[name, dtype, "BF16"])
    gains = {
        "hidden_norm.weight": np.linspace(0.5, 1.5, D).astype(np.float32),
        "layers.0.self_attn.pre_qkv_proj_norm.weight": np.linspace(1.5, 0.5, D).astype(np.float32),
    }
    outputs = []
    for narrow in (False, True):
        rounded = {n: (bf16(g).astype(np.uint32) << 16).view(np.float32) for n, g in gains.items()}
        extra = {n: ("BF16", bf16(g)) if narrow else ("F32", g) for n, g in rounded.items()}
        model = write_model(tmp_path / "m", config={"norm_affine": True}, extra=extra)
        ok(*run_args(model, context, tmp_path / "o"))
        outputs.append((tmp_path / "o").read_bytes())
    assert outputs[0] == outputs[1]
    zero = write_model(
        tmp_path / "m",
        config={"norm_affine": True, "norm_zero_centered_gamma": True},
        extra={n: ("F32", g - 1) for n, g in rounded.items()},
    )
    ok(*run_args(zero, context, tmp_path / "o"))
    assert (tmp_path / "o").read_bytes() == outputs[0]
    wrong = {n: ("F16", bf16(g)) for n, g in gains.items()}
    model = write_model(tmp_path / "m", config={"norm_affine": True}, extra=wrong)
    refused(*run_args(model, context, tmp_path / "o2"), words=["hidden_norm.weight", "F16"])
