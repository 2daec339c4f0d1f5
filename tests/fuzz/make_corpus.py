# SPDX-License-Identifier: Apache-2.0
"""Writes the seed inputs of the fuzz targets into tests/fuzz/corpus (committed, small)."""

import json
import struct
from pathlib import Path

HERE = Path(__file__).parent


def put(stem, name, data):
    folder = HERE / "corpus" / stem
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def tensors(head, size, pad=0):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    text += b" " * pad
    return struct.pack("<Q", len(text)) + text + bytes(range(256))[:size]


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


two = {"a": entry("BF16", [1, 2], 0, 4), "b": entry("I64", [1], 4, 12)}
put("safetensors", "two", tensors({"__metadata__": {"format": "pt"}, **two}, 12))
put(
    "safetensors",
    "scalar",
    tensors({"s": entry("F32", [], 0, 4), "e": entry("F64", [0, 3], 4, 4)}, 4),
)
put("safetensors", "hole", tensors({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, 3))
put("safetensors", "half", tensors({"a": entry("F4", [3], 0, 1)}, 1))
put("safetensors", "deep", tensors(b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", 0))
put("safetensors", "twice", tensors(b'{"k":{},"\\u006b":{}}', 0))
put("safetensors", "huge", struct.pack("<Q", 2**64 - 1) + b"{}")
put("safetensors", "overflow", tensors({"a": entry("F64", [2**62, 8], 0, 0)}, 0))

muse = {
    "hidden_size": 8192,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "norm_affine": True,
    "norm_zero_centered_gamma": True,
    "draft_position_mode": "rope",
    "rope_theta": 500000,
    "max_position_embeddings": 131072,
}
qwen = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"},
    "rope_scaling": None,
}
put("config", "muse", json.dumps(muse).encode())
put("config", "qwen3", json.dumps(qwen).encode())
laguna = {
    "architectures": ["DFlashLagunaForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_theta": 5e5},
        "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "swa_rope_parameters": None,
}
gemma = {
    "architectures": ["Gemma4DSparkModel"],
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_global_key_value_heads": 2,
    "global_head_dim": 128,
    "attention_k_eq_v": True,
    "layer_types": ["full_attention"],
    "norm_zero_centered_gamma": True,
    "dflash_config": {"attention_value_scale": 0.5},
}
nested = {"speculators_model_type": "dspark", "transformer_layer_config": qwen}
put("config", "laguna", json.dumps(laguna).encode())
put("config", "gemma4", json.dumps(gemma).encode())
put("config", "speculators", json.dumps(nested).encode())
put("config", "bare", json.dumps({**qwen, "norm_affine": False, "is_neox_style": False}).encode())
put("config", "quantised", json.dumps({**muse, "quantization_config": {"bits": 4}}).encode())
put("config", "index", json.dumps({"weight_map": {"a": "x", "b": "y", "c": "../z"}}).encode())
put(
    "config",
    "index2",
    json.dumps({"metadata": {"total_size": 3}, "weight_map": {"a": "x"}}).encode(),
)

for table in ("norms", "store", "chain", "rope"):
    lines = (HERE.parent / "golden" / f"{table}.csv").read_bytes().splitlines()[:3]
    put("golden_csv", table, b"\n".join(lines) + b"\n")
put("golden_csv", "odd", b"a,b\r\n1,-5\n\n,00000001 0000000g\n")

context = {"positions": entry("I64", [2], 0, 16), "hidden_states": entry("BF16", [2, 4], 16, 32)}
slots = {"slot_mapping": entry("I64", [2, 2], 32, 64)}
table = {"cos_sin_cache": entry("BF16", [3, 2], 64, 76)}
put("context", "plain", tensors(context, 32))
put("context", "layers", tensors({**context, **slots, **table}, 76))
put("context", "odd", tensors({**context, **slots, **table}, 76, 1))
scales = {f"{part}_scales": entry("F32", [2], 76 + at, 84 + at)
          for part, at in (("k", 0), ("v", 8))}
put("context", "scales", tensors({**context, **slots, **table, **scales}, 92))
put("context", "tables", tensors({**context, "cos_sin_cache": entry("F16", [2, 3, 2], 32, 56)}, 56))
put("context", "narrow", tensors({**context, "hidden_states": entry("BF16", [4, 2], 16, 32)}, 32))
put("context", "missing", tensors({"positions": entry("I64", [2], 0, 16)}, 16))

lines = {
    "run": "run --model m -c x --out=o --block-size 16 --checked",
    "wrong": "run --threads 0 --nope",
    "synth": "synth --family qwen3 --hidden-size 64 d e",
    "bench": "bench --rows 1,2,x --tolerance nan",
    "verify": "verify -- --help b",
    "options": "synth --family laguna --rotary-dim 48 --bias --v-scale .5 --table-type fp16 "
               "--sliding 4 d",
    "types": "bench --family gemma4 --cache-type fp8_e5m2 --layer-tables --gptj --v-scale 0",
    "bytes": "diagnose -m m -c x -k y --cache-type fp8_e4m3",
    "help": "diagnose --usage",
    "sleep": "run --HANG=1",
}
for name, line in lines.items():
    put("arguments", name, line.replace(" ", "\0").encode())
put("arguments", "words", bytes(range(128, 256)).replace(b"\x80", b"\x80\0"))

# Checkpoint folders: which files there are, the rank, then each file as draft_fuzz.c reads it.
small = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
K, V, N = (f"layers.0.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm"))


def text_file(value):
    text = json.dumps(value).encode()
    return struct.pack("<H", len(text)) + text


def shard(shapes):
    head, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        head[name], end = entry("BF16", shape, end, end + size), end + size
    text = json.dumps(head).encode()
    return struct.pack("<HH", len(text), end // 16) + text


def folder(*files, ranks=1, rank=0):
    kinds = sum(1 << i for i, data in enumerate(files) if data) | (ranks - 1) << 5
    return bytes([kinds, rank]) + b"".join(data for data in files if data)


weights = {K: [128, 16], V: [128, 16], N: [64], "hidden_norm.weight": [16]}
halves = ({n: weights[n] for n in (K, N)}, {n: weights[n] for n in (V, "hidden_norm.weight")})
names = {n: "ab"[i] for i, half in enumerate(halves) for n in half}
index = text_file({"metadata": {"total_size": 8}, "weight_map": names})
config = text_file(small)
put("draft", "one", folder(config, None, shard(weights)))
put("draft", "shards", folder(config, index, None, *map(shard, halves)))
put("draft", "rank", folder(config, None, shard(weights), ranks=4, rank=3))
put("draft", "bias", folder(
    text_file({**small, "attention_bias": True}), None,
    shard({**weights, K.replace("weight", "bias"): [128], V.replace("weight", "bias"): [128]})))
put("draft", "fused", folder(
    config, None,
    shard({"layers.0.self_attn.qkv_proj.weight": [512, 16], N: [64], "hidden_norm.weight": [16]})))
put("draft", "wide", folder(config, None, shard({**weights, K: [127, 16]})))
put("draft", "gone", folder(config, index, None, shard(halves[0])))
V2 = "layers.0.input_layernorm.weight"
put("draft", "laguna", folder(
    text_file({**small, "architectures": ["DFlashLagunaForCausalLM"]}), None,
    shard({K: [128, 16], V: [128, 16], N: [64], V2: [16]})))
put("draft", "gemma4", folder(
    text_file({**small, "architectures": ["Gemma4DSparkModel"], "attention_k_eq_v": True,
               "attention_bias": True}), None,
    shard({K: [128, 16], K.replace("weight", "bias"): [128], N: [64], "hidden_norm.weight": [16]}),
    ranks=2, rank=1))
put("draft", "speculators", folder(
    text_file({"speculators_model_type": "dflash2", "transformer_layer_config": small}), None,
    shard(weights)))
put("draft", "bare", folder(
    text_file({**small, "norm_affine": False}), None, shard({K: [128, 16], V: [128, 16]})))
