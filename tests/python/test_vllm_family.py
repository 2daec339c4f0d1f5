# SPDX-License-Identifier: Apache-2.0
# The Qwen3 family in the plugin: every heir of vLLM 0.33's DFlash chain, its own steps, FP8 caches,
# and the line that says why stock stays.
from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("vllm", reason="NOT RUN: needs vllm==0.33.0 (scripts/python-tests installs it)")

import vllm_drafts as drafts
from ctxkv import vllm_model
from ctxkv import vllm as plugin
from vllm import ModelRegistry
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkModel
from vllm.model_executor.models.laguna_dflash import DFlashLagunaModel
from vllm.model_executor.models.lilicorr import LiLiCorr
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkModel
from vllm.model_executor.models.qwen3_xpress import Qwen3XPressModel

import oracle
from helpers import bf16, rng, slots, views
from test_vllm import close

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("on_torch")]
EPS = 1e-6

# vLLM's inner models and our outer classes for them.
HEIRS = {
    "dflash": (DFlashQwen3Model, "CtxkvDFlashQwen3"),
    "dspark": (Qwen3DSparkModel, "CtxkvQwen3DSpark"),
    "dflash2": (DFlash2Qwen3Model, "CtxkvDFlash2Qwen3"),
    "xpress": (Qwen3XPressModel, "CtxkvXPress"),
    "lilicorr": (LiLiCorr, "CtxkvLiLiCorr"),
    "laguna": (DFlashLagunaModel, "CtxkvLaguna"),
    "gemma4": (Gemma4DSparkModel, "CtxkvGemma4DSpark"),
}


def made(heir: str, **options):
    return drafts.qwen3(seed=len(heir), cls=HEIRS[heir][0], **options)


def inputs(model, rows: int):
    g = rng(rows)
    x = bf16(g, rows, model.hidden_norm.weight.shape[0])
    at = torch.randint(0, drafts.MAX_POSITION, (rows,), generator=g)
    lists = [slots(g, min(rows, 64), 64, holes=l % 2 == 1) for l in range(len(model.layers))]
    return x, at, lists


def run(heir: str, model, x, at, lists) -> list[torch.Tensor]:
    found = drafts.fresh_caches(model)
    outer = getattr(vllm_model, HEIRS[heir][1])
    drafts.drafter(outer, model).precompute_and_store_context_kv(x, at, lists)
    return found


def run_stock(heir: str, model, x, at, lists) -> list[torch.Tensor]:
    found = drafts.fresh_caches(model)
    type(model).precompute_and_store_context_kv(model, x, at, lists)
    return found


def parts(heir: str, model, x: torch.Tensor, l: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer before K's norm, [T, H, d]."""
    layer = model.layers[l]
    attn, rows = layer.self_attn, len(x)
    if heir == "laguna":
        n = oracle.rms_norm(x, layer.input_layernorm.weight, EPS, rows * len(model.layers))
    else:
        n = oracle.rms_norm(x, model.hidden_norm.weight, EPS, rows)
    if heir == "gemma4":
        k = oracle.project(n, attn.k_proj.weight, attn.k_proj.bias)
        k = k.view(rows, attn.num_kv_heads, -1)
        return k, oracle.rms_norm(k, None, EPS, rows)
    w, b = attn.qkv_proj.weight[attn.q_size :], attn.qkv_proj.bias
    kv = oracle.project(n, w, None if b is None else b[attn.q_size :], heir == "laguna")
    kv = kv.view(rows, 2, attn.num_kv_heads, -1)
    return kv[:, 0], kv[:, 1]


def by_oracle(heir: str, model, x, at, lists) -> list[torch.Tensor]:
    """The chain by docs/numerics.md from the model's own weights."""
    wanted = drafts.fresh_caches(model)
    for l, cache in enumerate(wanted):
        attn = model.layers[l].self_attn
        if lists[l] is None:
            continue
        k, v = parts(heir, model, x, l)
        k = oracle.rms_norm(k, attn.k_norm.weight, EPS, len(x))
        k = oracle.rope(k, at, model._rope_cos_sin_cache, "neox")
        if attn.v_scale is not None:
            v = oracle.to_bf16(v.float() * torch.tensor(attn.v_scale, dtype=torch.float32))
        dtype, inner = attn.attn.kv_cache_dtype, attn.attn
        if dtype.startswith("fp8"):
            kind = "fp8_e5m2" if dtype == "fp8_e5m2" else "fp8_e4m3"
            k, v = oracle.fp8(k, inner._k_scale, kind), oracle.fp8(v, inner._v_scale, kind)
        oracle.insert(*views(cache), k, v, lists[l])
    return wanted


def same_layers(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for l, (a, b) in enumerate(zip(got, want, strict=True)):
        assert oracle.same(a, b), f"layer {l}"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heir", HEIRS)
def test_every_heir_has_the_oracles_bits_and_stocks_values(heir: str, bias: bool, caplog) -> None:
    model = made(heir, layers=3, bias=bias, width=64, heads=1)
    x, at, lists = inputs(model, 5)
    lists[1] = None
    caplog.set_level(logging.INFO, "vllm.ctxkv")
    got = run(heir, model, x, at, lists)
    assert "context K/V by ctxkv on cpu: 3 layers, 1 KV heads of 64" in caplog.text
    same_layers(got, by_oracle(heir, model, x, at, lists))
    close(got, run_stock(heir, model, x, at, lists))


def test_lagunas_norms_are_one_call_over_all_layers() -> None:
    """256 rows of two layers in one call: the other order of the sums from T = 128 on."""
    model = made("laguna", layers=2, width=4096, heads=1)
    x, at, _ = inputs(model, 128)
    chosen = torch.full((128,), -1)
    chosen[:48] = torch.arange(48)
    got = run("laguna", model, x, at, [chosen, chosen])
    weights = [layer.input_layernorm.weight for layer in model.layers]
    n = [oracle.rms_norm(x[:48], w, EPS, 256) for w in weights]
    other = oracle.rms_norm(x[:48], weights[0], EPS, 255)
    assert not oracle.same(n[0], other), "the two orders agree here: the test says nothing"
    for l, layer in enumerate(model.layers):
        v = oracle.project(n[l], layer.self_attn.qkv_proj.weight[-64:])
        _, values = views(got[l])
        assert oracle.same(values.reshape(64, 64)[:48], v)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("heir", ["dflash", "gemma4"])
def test_fp8_caches_are_stocks(heir: str, dtype: str) -> None:
    model = made(heir, width=64, heads=2)
    drafts.with_fp8(model, dtype)
    x, at, lists = inputs(model, 6)
    got = run(heir, model, x, at, lists)
    same_layers(got, by_oracle(heir, model, x, at, lists))
    # The scales are read by every call, where they lie.
    outer = getattr(vllm_model, HEIRS[heir][1])
    draft = drafts.drafter(outer, model)
    draft.precompute_and_store_context_kv(x, at, lists)
    chain = draft._ctxkv_path.chain
    for attn in model._attn_layers:
        attn._k_scale.fill_(3.0)
        attn._v_scale.mul_(2)
    again = drafts.fresh_caches(model)
    draft.precompute_and_store_context_kv(x, at, lists)
    assert draft._ctxkv_path.chain is chain
    same_layers(again, by_oracle(heir, model, x, at, lists))
    assert not oracle.same(again[0], got[0])


def test_muse_spark_takes_fp8_caches_too() -> None:
    model = drafts.muse_spark(seed=1)
    x = bf16(rng(2), 3, 8192)
    at, lists = torch.tensor([4, 0, 9]), [torch.tensor([3, 1, 8])] * 2
    wide = drafts.fresh_caches(model)
    drafts.drafter(vllm_model.CtxkvMuseSparkDSpark, model).precompute_and_store_context_kv(
        x, at, lists
    )
    wide = [c.clone() for c in wide]
    drafts.with_fp8(model)
    got = drafts.fresh_caches(model)
    drafts.drafter(vllm_model.CtxkvMuseSparkDSpark, model).precompute_and_store_context_kv(
        x, at, lists
    )
    for attn, was, now in zip(model._attn_layers, wide, got):
        for scale, part in ((attn._k_scale, slice(0, 64)), (attn._v_scale, slice(64, 128))):
            for slot in (1, 3, 8):
                row = was[0, :, slot, part]
                assert oracle.same(now[0, :, slot, part], oracle.fp8(row, scale, "fp8_e4m3"))


@pytest.mark.parametrize("rotary_dim", [16, 32, 64])
def test_partial_rope_and_v_scale(rotary_dim: int) -> None:
    model = made("dflash", width=64, heads=2, dim=128, rotary_dim=rotary_dim, v_scale=0.612)
    x, at, lists = inputs(model, 6)
    got = run("dflash", model, x, at, lists)
    same_layers(got, by_oracle("dflash", model, x, at, lists))
    close(got, run_stock("dflash", model, x, at, lists))


def test_the_table_is_layer_0s_and_may_be_fp32() -> None:
    model = made("dflash", width=64)
    model.layers[1].self_attn.rotary_emb = drafts.rotary(64, True, 10.0)
    model.layers[0].self_attn.rotary_emb.cos_sin_cache = (
        model.layers[0].self_attn.rotary_emb.cos_sin_cache.float() * 1.001
    )
    model._build_fused_kv_buffers()
    x, at, lists = inputs(model, 6)
    got = run("dflash", model, x, at, lists)
    model._rope_cos_sin_cache = model._rope_cos_sin_cache.to(torch.bfloat16)  # as stock rounds it
    same_layers(got, by_oracle("dflash", model, x, at, lists))


class Other(DFlashQwen3Model):
    def _normalize_context_k(self, all_k):
        return all_k


class OtherLaguna(DFlashLagunaModel):
    def _project_context_kv(self, *given):
        return super()._project_context_kv(*given)


def _quantised(model) -> None:
    model._fused_kv_weight = None


REASONS = {
    "_normalize_context_k of Other is overridden": lambda: drafts.qwen3(cls=Other),
    "_project_context_kv of OtherLaguna is overridden": lambda: drafts.qwen3(cls=OtherLaguna),
    "the K/V weights are quantised": lambda: _changed(_quantised),
    "kv_cache_dtype is nvfp4, must be bfloat16 or fp8": lambda: _dtypes("nvfp4"),
    "kv_cache_dtype is int8_per_token_head": lambda: _dtypes("int8_per_token_head"),
    "kv_cache_dtype is float16": lambda: _dtypes("float16"),
    "the layers differ in kv_cache_dtype": lambda: _dtypes("fp8", 1),
    "_k_scale of layer 0 is not one FP32 value": lambda: _scales(torch.ones(2)),
    "_k_scale of layer 1 is not one FP32 value": lambda: _scales(torch.ones(1).half(), 1),
    "v_scale is 0": lambda: drafts.qwen3(v_scale=0.0),
    "RoPE table [256, 128] for heads of 64": lambda: _changed(
        lambda m: setattr(m, "_rope_cos_sin_cache", torch.ones(256, 128))
    ),
    "the K norm's weight is torch.float32": lambda: _changed(
        lambda m: setattr(m, "_k_norm_weights", m._k_norm_weights.float())
    ),
    "head_dim is 96, must be 64, 128, 256 or 512": lambda: drafts.qwen3(dim=96),
    "the draft is not as vLLM 0.33 makes it": lambda: _changed(
        lambda m: delattr(m, "_rope_is_neox")
    ),
}


def _changed(change):
    model = drafts.qwen3()
    change(model)
    return model


def _dtypes(dtype: str, first: int = 0):
    model = drafts.qwen3()
    for attn in model._attn_layers[first:]:
        attn.kv_cache_dtype = dtype
    return model


def _scales(scale: torch.Tensor, layer: int = 0):
    model = drafts.qwen3()
    drafts.with_fp8(model)
    model._attn_layers[layer]._k_scale = scale
    return model


@pytest.mark.parametrize("reason", REASONS)
def test_stock_stays_with_one_line_saying_why(reason: str, caplog, monkeypatch) -> None:
    model = REASONS[reason]()
    heir = "laguna" if isinstance(model, DFlashLagunaModel) else "dflash"
    outer = getattr(vllm_model, HEIRS[heir][1])
    calls, stock = [], outer.__mro__[2]
    monkeypatch.setattr(
        stock, "precompute_and_store_context_kv", lambda self, *given: calls.append(given)
    )
    caplog.set_level(logging.INFO, "vllm.ctxkv")
    draft = drafts.drafter(outer, model)
    x, at, lists = inputs(model, 3)
    for _ in range(3):
        draft.precompute_and_store_context_kv(x, at, lists)
    assert len(calls) == 3
    lines = {record.getMessage() for record in caplog.records if record.name == "vllm.ctxkv"}
    assert len(lines) == 1 and reason in lines.pop()


# ---- registration ------------------------------------------------------------------------------
def test_every_architecture_has_its_class() -> None:
    """Each architecture of vLLM that inherits the chain is taken, and by its own class's heir."""
    for arch, name in plugin.MODELS.items():
        if name == "CtxkvDFlash2Beam":
            continue  # below: its module needs a GPU
        stock = ModelRegistry.models[arch].load_model_cls()
        ours = getattr(vllm_model, name)
        assert issubclass(ours, stock) and ours.__mro__[1] is vllm_model._ByCtxkv, arch
        assert ours.__module__ == "ctxkv.vllm_model" and getattr(vllm_model, name) is ours
    with pytest.raises(AttributeError, match="no attribute 'CtxkvNothing'"):
        vllm_model.CtxkvNothing


def test_no_heir_of_the_chain_is_forgotten() -> None:
    """Every architecture in the registry whose module names DFlash's model is in MODELS."""
    import importlib.util
    from pathlib import Path

    inherit = set()
    for arch, lazy in ModelRegistry.models.items():
        spec = importlib.util.find_spec(lazy.module_name) if hasattr(lazy, "module_name") else None
        if spec is None or not spec.origin:
            continue
        text = Path(spec.origin).read_text()
        if f"class {lazy.class_name}" in text and "DFlashQwen3Model" in text:
            inherit.add(arch)
    assert inherit and inherit <= set(plugin.MODELS), inherit - set(plugin.MODELS)


def test_a_draft_with_a_kernel_of_its_own_stays_stock(caplog) -> None:
    from ctxkv._vllm_families import own_kernel

    class Stands:
        def precompute_and_store_context_kv(self, *given) -> None:
            self.called = given

    body = {"_ctxkv_describe": staticmethod(own_kernel)}
    outer = type("Beam", (vllm_model._ByCtxkv, Stands), body)
    caplog.set_level(logging.INFO, "vllm.ctxkv")
    draft = outer()
    draft.model = Stands()
    draft.precompute_and_store_context_kv(torch.zeros(1, 64), torch.zeros(1), [None])
    assert draft.called[2] == [None]
    assert "Stands inserts by a kernel of its own" in caplog.text
    assert vllm_model._LATER["CtxkvDFlash2Beam"][2] == "own_kernel"
    assert issubclass(vllm_model.CtxkvDFlashQwen3, DFlashQwen3ForCausalLM)
