# SPDX-License-Identifier: Apache-2.0
# CTXKV_RECORD: a recorded call read by the reference reader, and checked by the command line.
from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="NOT RUN: needs vllm==0.33.0 (scripts/python-tests installs it)")

import vllm_drafts as drafts
from ctxkv.record import Recorder, save
from ctxkv.vllm_model import CtxkvDFlashQwen3, CtxkvMuseSparkDSpark
from safetensors import safe_open
from safetensors.torch import load_file

import oracle
from helpers import BF16, bf16, rng, stock_cache, views
from test_vllm import inputs

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def recording(monkeypatch, tmp_path) -> Path:
    drafts.torch_operators(monkeypatch)
    monkeypatch.setenv("CTXKV_RECORD", str(tmp_path / "calls"))
    monkeypatch.delenv("CTXKV_VLLM", raising=False)
    return tmp_path / "calls"


def recorded(folder: Path, index: int = 0) -> tuple[dict, dict, dict]:
    names = sorted(folder.glob("*.context.safetensors"))
    caches = Path(str(names[index]).replace(".context.", ".caches."))
    with safe_open(caches, "pt") as file:
        metadata = file.metadata()
    return load_file(names[index]), load_file(caches), metadata


def run(model, x, at, lists, cls=CtxkvMuseSparkDSpark) -> None:
    drafts.drafter(cls, model).precompute_and_store_context_kv(x, at, lists)


@pytest.mark.parametrize("by", ["ctxkv", "stock"])
def test_a_call_is_recorded_compactly(by: str, recording, monkeypatch) -> None:
    if by == "stock":
        monkeypatch.setenv("CTXKV_VLLM", "0")
    model = drafts.muse_spark(heads=2)
    for attn in model._attn_layers:  # blocks 90 and 7 of a hundred
        attn.kv_cache = stock_cache(100, 2, 16)
    x, at, _ = inputs(model, 4)
    lists = [torch.tensor([90 * 16 + 3, 7 * 16, -1, 90 * 16]), torch.tensor([7 * 16 + 15, 5])]
    run(model, x, at, lists)
    context, caches, metadata = recorded(recording)
    assert metadata["computed_by"] == by and metadata["block_size"] == "16"
    assert json.loads(metadata["blocks"]) == [[7, 90], [0, 7]]
    assert "--block-size 16 --num-blocks 2" in metadata["command"]
    table = model._rotary_emb.cos_sin_cache[: int(at.max()) + 1]
    assert oracle.same(context["cos_sin_cache"], table)
    assert oracle.same(context["hidden_states"], x) and torch.equal(context["positions"], at)
    assert context["slot_mapping"].tolist() == [[16 + 3, 0, -1, 16], [16 + 15, 5, -1, -1]]
    for l, attn in enumerate(model._attn_layers):
        part = caches[f"kv_cache.{l}"]
        want = torch.zeros(2, 2, 16, 128, dtype=BF16)
        for old, new in zip(lists[l].tolist(), context["slot_mapping"][l].tolist()):
            if old >= 0:
                want[new // 16, :, new % 16] = attn.kv_cache[old // 16, :, old % 16]
        assert oracle.same(part, want)


def test_the_number_of_calls_is_bounded(recording, monkeypatch) -> None:
    monkeypatch.setenv("CTXKV_RECORD_CALLS", "3")
    model = drafts.muse_spark(layers=1)
    x, at, lists = inputs(model, 2)
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    draft.precompute_and_store_context_kv(x, at)  # profiling: not a call to record
    for _ in range(5):
        draft.precompute_and_store_context_kv(x, at, lists)
    assert len(list(recording.glob("*.context.safetensors"))) == 3
    assert not list(recording.glob("*.part"))


def test_what_cannot_be_written_ends_the_recording_alone(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CTXKV_RECORD", str(tmp_path / "file"))
    model = drafts.muse_spark(layers=1)
    x, at, lists = inputs(model, 2)
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    for _ in range(2):
        draft.precompute_and_store_context_kv(x, at, lists)
    assert draft._ctxkv_path.recorder.left == 0
    assert not bool((model._attn_layers[0].kv_cache.view(torch.int16) == 0x5A5A).all())


def test_slots_beyond_the_cache_stay_beyond(tmp_path) -> None:
    recorder = Recorder(tmp_path, 1)
    cache = stock_cache(2, 1, 16)
    x, at = bf16(rng(1), 3, 64), torch.arange(3)
    recorder.write(recorder.take(x, at, torch.tensor([17, 32, 2**40])), [cache], None, "stock")
    context, caches, _ = recorded(tmp_path)
    assert context["slot_mapping"].tolist() == [[1, 16, 16]]
    assert oracle.same(caches["kv_cache.0"][0, :, 1], cache[1, :, 1])
    assert "cos_sin_cache" not in context and recorder.take(x, at, at) is None


def test_no_environment_no_recorder(monkeypatch) -> None:
    monkeypatch.delenv("CTXKV_RECORD")
    assert Recorder.from_environment() is None


# ---- the command line --------------------------------------------------------------------------
def command_line() -> str | None:
    named = os.environ.get("CTXKV_CLI")
    builds = [ROOT / "build" / name / "tools/ctxkv/ctxkv" for name in ("check", "release", "py")]
    return named or next((str(path) for path in builds if path.exists()), None)


ARCHITECTURES = {
    "qwen3": "DFlashDraftModel", "laguna": "DFlashLagunaForCausalLM", "gemma4": "Gemma4DSparkModel",
}


def checkpoint(folder: Path, model, family: str) -> None:
    """The model's weights as its checkpoint: Q rows of the fused projection are left out."""
    tensors, layers = {"hidden_norm.weight": model.hidden_norm.weight}, model.layers
    biased = layers[0].self_attn.qkv_proj.bias if family != "muse" else None
    for l, layer in enumerate(layers):
        attn, name = layer.self_attn, f"layers.{l}.self_attn."
        for what in ("weight", "bias") if biased is not None else ("weight",):
            if family == "gemma4":
                tensors[name + "k_proj." + what] = getattr(attn.k_proj, what)
                continue
            rows = getattr(attn.qkv_proj, what)[attn.q_size :]
            tensors[name + "k_proj." + what] = rows[: attn.kv_size]
            tensors[name + "v_proj." + what] = rows[attn.kv_size :]
        if family == "laguna":
            tensors[f"layers.{l}.input_layernorm.weight"] = layer.input_layernorm.weight
        if family == "muse":
            tensors[name + "pre_qkv_proj_norm.weight"] = attn.pre_qkv_proj_norm.weight
        else:
            tensors[name + "k_norm.weight"] = attn.k_norm.weight
    first = layers[0].self_attn
    config = {
        "hidden_size": first.qkv_proj.weight.shape[1], "num_hidden_layers": len(layers),
        "num_attention_heads": max(first.num_kv_heads, 1), "head_dim": first.head_dim,
        "num_key_value_heads": first.num_kv_heads, "max_position_embeddings": drafts.MAX_POSITION,
    }
    if family == "muse":
        config.update(
            architectures=["MuseSparkDSparkModel"], model_type="muse_spark_dspark",
            rms_norm_eps=drafts.EPS, norm_affine=True, norm_zero_centered_gamma=False,
            use_rope=True, rope_theta=500000.0,
        )
    else:
        config.update(
            architectures=[ARCHITECTURES[family]], model_type=family, rms_norm_eps=1e-6,
            rope_theta=1e6, attention_bias=biased is not None,
        )
        if family == "gemma4":
            config.update(attention_k_eq_v=True)
        if first.v_scale is not None:
            config.update(dflash_config={"attention_value_scale": first.v_scale})
        if first.rotary_emb.rotary_dim != first.head_dim:
            config.update(partial_rotary_factor=first.rotary_emb.rotary_dim / first.head_dim)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save(folder / "model.safetensors", tensors, {"format": "pt"})


def verified(tool: str, metadata: dict, recording: Path, draft: Path) -> None:
    """The recorded commands find the same bits, and one wrong bit."""
    for step in ("command", "verify"):
        words = metadata[step].replace("--model DRAFT", f"--model {draft}").split()
        done = subprocess.run(
            [tool, *words[1:]], cwd=recording, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith("equal: 2 layers")
    name = next(recording.glob("*.caches.safetensors"))
    data = bytearray(name.read_bytes())
    data[-1] ^= 1
    name.write_bytes(bytes(data))
    again = subprocess.run([tool, *words[1:]], cwd=recording, capture_output=True, timeout=120)
    assert again.returncode == 1


@pytest.mark.parametrize("fp8", ["", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("family", ["qwen3", "laguna", "gemma4"])
def test_each_family_and_cache_type_is_verified(family, fp8, recording, tmp_path) -> None:
    """What the plugin computed and what the command line makes of the checkpoint are one."""
    tool = command_line()
    if tool is None:
        pytest.skip("NOT RUN: no ctxkv command line; set CTXKV_CLI to it")
    from ctxkv import vllm_model
    from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkModel
    from vllm.model_executor.models.laguna_dflash import DFlashLagunaModel
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    inner, outer = {
        "qwen3": (DFlashQwen3Model, "CtxkvDFlashQwen3"),
        "laguna": (DFlashLagunaModel, "CtxkvLaguna"),
        "gemma4": (Gemma4DSparkModel, "CtxkvGemma4DSpark"),
    }[family]
    own = {"rotary_dim": 32, "v_scale": 0.612} if family == "qwen3" else {}
    model = drafts.qwen3(width=64, bias=True, cls=inner, **own)
    if fp8:
        drafts.with_fp8(model, fp8)
    x, at, lists = inputs(model, 6)
    run(model, x, at, lists, getattr(vllm_model, outer))
    checkpoint(tmp_path / "DRAFT", model, family)
    metadata = recorded(recording)[2]
    assert ("--cache-type" in metadata["command"]) == bool(fp8)
    verified(tool, metadata, recording, tmp_path / "DRAFT")


@pytest.mark.parametrize("family", ["muse", "qwen3"])
def test_a_recorded_call_is_verified_by_the_command_line(family: str, recording, tmp_path) -> None:
    tool = command_line()
    if tool is None:
        pytest.skip("NOT RUN: no ctxkv command line; set CTXKV_CLI to it")
    model = drafts.muse_spark(heads=2) if family == "muse" else drafts.qwen3(width=256)
    cls = CtxkvMuseSparkDSpark if family == "muse" else CtxkvDFlashQwen3
    x, at, lists = inputs(model, 6)
    run(model, x, at, lists, cls)
    checkpoint(tmp_path / "DRAFT", model, family)
    metadata = recorded(recording)[2]
    key, _ = views(load_file(next(recording.glob("*.caches.safetensors")))["kv_cache.0"])
    assert bool((key != 0).any())
    verified(tool, metadata, recording, tmp_path / "DRAFT")
