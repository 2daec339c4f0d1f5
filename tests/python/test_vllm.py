# SPDX-License-Identifier: Apache-2.0
# The vLLM plugin against vLLM 0.33.0's real classes, on a CPU.
from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("vllm", reason="NOT RUN: needs vllm==0.33.0 (scripts/python-tests installs it)")

import vllm_drafts as drafts
from ctxkv import _vllm_path
from ctxkv import vllm as plugin
from ctxkv.vllm_model import CtxkvDFlashQwen3, CtxkvMuseSparkDSpark, CtxkvQwen3DSpark
from vllm import ModelRegistry
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.models.muse_spark.common.dspark import MuseSparkDSparkForCausalLM

import oracle
from helpers import BF16, bf16, python, rng, slots, views

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("on_torch")]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said():
    """A function giving the plugin's log lines."""
    logger, handler = logging.getLogger("vllm.ctxkv"), Lines()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lambda: handler.lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def stock_of(model) -> type:
    return MuseSparkDSparkForCausalLM if hasattr(model, "_stacked_kv_weight") else (
        DFlashQwen3ForCausalLM
    )


def run_stock(model, x, at, mapping) -> list[torch.Tensor]:
    found = drafts.fresh_caches(model)
    drafts.drafter(stock_of(model), model).precompute_and_store_context_kv(x, at, mapping)
    return found


def run_ours(model, x, at, mapping, cls=CtxkvMuseSparkDSpark) -> list[torch.Tensor]:
    found = drafts.fresh_caches(model)
    drafts.drafter(cls, model).precompute_and_store_context_kv(x, at, mapping)
    return found


def inputs(model, rows: int, seed: int = 1):
    g = rng(seed)
    width = model.layers[0].self_attn.qkv_proj.weight.shape[1]
    x = bf16(g, rows, width)
    at = torch.randint(0, drafts.MAX_POSITION, (rows,), generator=g)
    lists = [slots(g, rows, 64, holes=l % 2 == 1) for l in range(len(model.layers))]
    return x, at, lists


def by_oracle(model, x, at, lists) -> list[torch.Tensor]:
    """The Muse Spark chain by docs/numerics.md from the model's own weights."""
    wanted = drafts.fresh_caches(model)

    def normed(norm, x):
        return oracle.row_norm(
            x, norm.weight, drafts.EPS, norm.fused_gain_center, norm.applies_weight_before_norm
        )

    h = normed(model.hidden_norm, x)
    for l, cache in enumerate(wanted):
        if lists[l] is None:
            continue
        kv = oracle.project(normed(model._context_pre_norms[l], h), model._stacked_kv_weight[l])
        kv = kv.view(len(x), 2, model._num_kv_heads, 64)
        rope = model._rotary_emb
        oracle.store_layer(
            kv[:, 0], kv[:, 1], at, lists[l], rope and rope.cos_sin_cache,
            "gptj" if rope else "none", views(cache),
            lambda rows: oracle.plain_k_norm(rows, drafts.EPS),
        )
    return wanted


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """The functional oracle: torch's own sums round elsewhere, by an ulp or two of BF16."""
    for a, b in zip(got, want, strict=True):
        untouched = a.view(torch.int16) == 0x5A5A
        assert torch.equal(untouched, b.view(torch.int16) == 0x5A5A)
        torch.testing.assert_close(a[~untouched], b[~untouched], rtol=2**-6, atol=2**-5)


KINDS = {
    "plain": {},
    "no-rope": {"rope": False},
    "weightless": {"weight": False},
    "centred": {"centred": True},
    "fp32-input-scale": {"dtype": torch.float32, "before": True, "centred": True},
    "three-heads-block-5": {"heads": 3, "block_size": 5},
    "flashinfer": {"backend": "FLASHINFER", "heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_muse_spark_has_the_oracles_bits_and_stocks_values(kind: str, said) -> None:
    model = drafts.muse_spark(seed=len(kind), **KINDS[kind])
    x, at, lists = inputs(model, 4)
    if kind.endswith("block-5"):
        lists = [torch.tensor([0, 7, -1, 19]), torch.tensor([5, 4, 11, -3])]
    got = run_ours(model, x, at, lists)
    assert len(said()) == 1 and said()[0].startswith("ctxkv: context K/V by ctxkv on cpu")
    for l, (a, b) in enumerate(zip(got, by_oracle(model, x, at, lists), strict=True)):
        assert oracle.same(a, b), f"layer {l}"
    close(got, run_stock(model, x, at, lists))


def test_the_functional_oracle_can_fail() -> None:
    model = drafts.muse_spark()
    x, at, lists = inputs(model, 3)
    got = run_ours(model, x, at, lists)
    with pytest.raises(AssertionError):
        close(got, run_stock(model, x, at + 1, lists))
    with pytest.raises(AssertionError):
        close(got, run_stock(model, x, at, [lists[1], lists[0]]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cls", [CtxkvDFlashQwen3, CtxkvQwen3DSpark])
def test_qwen3_has_stocks_values(cls: type, bias: bool, said) -> None:
    model = drafts.qwen3(seed=3, bias=bias, dim=128, layers=3)
    x, at, lists = inputs(model, 7)
    got = run_ours(model, x, at, [lists[0], None, lists[2]], cls)
    assert "by ctxkv on cpu: 3 layers, 2 KV heads of 128" in said()[0]
    close(got, run_stock(model, x, at, [lists[0], None, lists[2]]))
    assert issubclass(CtxkvQwen3DSpark, Qwen3DSparkForCausalLM)


@pytest.mark.parametrize("rows", [3, 260])
def test_qwen3_has_the_oracles_bits(rows: int) -> None:
    model = drafts.qwen3(seed=rows, bias=True, heads=1, width=64)
    x, at, _ = inputs(model, rows)
    chosen = torch.arange(rows) % 64
    chosen[64:] = -1
    got = run_ours(model, x, at, chosen, CtxkvDFlashQwen3)
    wanted = drafts.fresh_caches(model)
    n = oracle.rms_norm(x, model._hidden_norm_weight, 1e-6, rows)
    for l, cache in enumerate(wanted):
        weights = model._fused_kv_weight.view(2, -1, 64)[l]
        kv = oracle.project(n, weights, model._fused_kv_bias.view(2, -1)[l]).view(rows, 2, 1, 64)
        oracle.store_layer(
            kv[:, 0], kv[:, 1], at, chosen, model._rope_cos_sin_cache, "neox", views(cache),
            lambda k, l=l: oracle.rms_norm(k, model._k_norm_weights[l], 1e-6, 2 * rows),
        )
        assert oracle.same(got[l], cache), f"layer {l}"


@pytest.mark.parametrize("mapping", ["none", "one", "list", "tuple", "some", "fewer", "empty"])
def test_every_kind_of_slot_mapping(mapping: str, said) -> None:
    model = drafts.muse_spark(layers=3)
    x, at, lists = inputs(model, 4)
    if mapping == "empty":
        x, at, lists = x[:0], at[:0], [s[:0] for s in lists]
    given = {
        "none": None, "one": lists[1], "list": lists, "tuple": tuple(lists),
        "some": [lists[0], None, lists[2]], "fewer": [s[:2] for s in lists], "empty": lists,
    }[mapping]
    got = run_ours(model, x, at, given)
    assert "by ctxkv" in said()[0]
    if mapping == "empty":
        wanted = drafts.fresh_caches(model)  # stock's own torch steps do not take no rows
        assert all(oracle.same(a, b) for a, b in zip(got, wanted, strict=True))
        return
    close(got, run_stock(model, x, at, given))
    if mapping == "none":
        assert all(bool((c.view(torch.int16) == 0x5A5A).all()) for c in got)


def test_caches_in_a_hybrid_layout() -> None:
    """One buffer for all layers: block strides of it, not of a contiguous cache."""
    model = drafts.muse_spark(layers=3)
    shared = torch.full((4, 3, 1, 16, 128), 0x5A5A, dtype=torch.int16).view(BF16)
    for l, attn in enumerate(model._attn_layers):
        attn.kv_cache = shared[:, l]
    x, at, lists = inputs(model, 4)
    cls = CtxkvMuseSparkDSpark
    drafts.drafter(cls, model).precompute_and_store_context_kv(x, at, lists)
    wanted = by_oracle(model, x, at, lists)
    for l, want in enumerate(wanted):
        assert oracle.same(shared[:, l], want), f"layer {l}"


def test_moved_caches_and_new_weights_are_noticed() -> None:
    model = drafts.muse_spark()
    x, at, lists = inputs(model, 3)
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    for _ in range(2):
        got = drafts.fresh_caches(model)
        draft.precompute_and_store_context_kv(x, at, lists)
        assert all(oracle.same(a, b) for a, b in zip(got, by_oracle(model, x, at, lists)))
    first = got
    model.layers[0].self_attn.qkv_proj.weight.mul_(-2)
    model._build_fused_kv_buffers()
    got = drafts.fresh_caches(model)
    draft.precompute_and_store_context_kv(x, at, lists)
    assert all(oracle.same(a, b) for a, b in zip(got, by_oracle(model, x, at, lists)))
    assert not oracle.same(first[0], got[0]) and draft._ctxkv_path.chain is not None


def test_load_weights_forgets_the_plan(monkeypatch) -> None:
    model = drafts.muse_spark()
    x, at, lists = inputs(model, 3)
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    draft.precompute_and_store_context_kv(x, at, lists)
    monkeypatch.setattr(MuseSparkDSparkForCausalLM, "load_weights", lambda self, w: {"seen", *w})
    model.hidden_norm.weight.data.mul_(3)  # in place: copied by the old plan
    assert draft.load_weights(["w"]) == {"seen", "w"}
    assert draft._ctxkv_path.chain is None and not draft._ctxkv_path.graphs
    got = drafts.fresh_caches(model)
    draft.precompute_and_store_context_kv(x, at, lists)
    assert all(oracle.same(a, b) for a, b in zip(got, by_oracle(model, x, at, lists)))


def test_long_calls_go_in_passes(monkeypatch) -> None:
    model = drafts.muse_spark()
    x, at, lists = inputs(model, 9)
    whole = run_ours(model, x, at, lists)
    monkeypatch.setenv("CTXKV_MAX_ROWS", "4")
    assert all(oracle.same(a, b) for a, b in zip(whole, run_ours(model, x, at, lists)))


# ---- when stock stays --------------------------------------------------------------------------
class OtherImpl:
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        drafts.insert_by_torch(key, value, *views(kv_cache), slot_mapping, "auto", 1, 1)


def _attn(model):
    return model._attn_layers[1]


def _fp16_cache(model) -> None:
    _attn(model).kv_cache = _attn(model).kv_cache.to(torch.float16)


REASONS = {
    "kv_cache_dtype is nvfp4": lambda m: setattr(_attn(m), "kv_cache_dtype", "nvfp4"),
    "attention backend OtherImpl": lambda m: setattr(_attn(m), "impl", OtherImpl()),
    "RoPE of type Identity": lambda m: setattr(m, "_rotary_emb", torch.nn.Identity()),
    "the layers differ in the layers' norm's eps": lambda m: setattr(
        m._context_pre_norms[1], "variance_epsilon", 1e-3
    ),
    "variance over fewer columns": lambda m: setattr(m.hidden_norm, "variance_size_override", 4096),
    "the K/V weights are torch.float16": lambda m: setattr(
        m, "_stacked_kv_weight", m._stacked_kv_weight.to(torch.float16)
    ),
    "a layer shares the cache of x": lambda m: setattr(
        _attn(m).impl, "kv_sharing_target_layer_name", "x"
    ),
    "attn_type is encoder_only": lambda m: setattr(_attn(m).impl, "attn_type", "encoder_only"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_unsupported_drafts_run_stock_and_say_why_once(reason: str, said, monkeypatch) -> None:
    model = drafts.muse_spark(seed=2)
    x, at, lists = inputs(model, 3)
    REASONS[reason](model)
    calls = []
    monkeypatch.setattr(
        MuseSparkDSparkForCausalLM, "precompute_and_store_context_kv",
        lambda self, *given: calls.append(given),
    )
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    for _ in range(3):
        draft.precompute_and_store_context_kv(x, at, lists)
    draft.precompute_and_store_context_kv(x, at)
    assert [given[2] for given in calls] == [lists, lists, lists, None]
    assert calls[0][0] is x and calls[0][1] is at
    lines = said()
    assert any(reason in line for line in lines) and len(lines) <= 2, lines
    assert all(line.startswith("ctxkv: context K/V by vLLM's own chain: ") for line in lines)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, x, at, s: (x.half(), at, s),
        lambda m, x, at, s: (x, at.int(), s),
        lambda m, x, at, s: (x, at, [i.int() for i in s]),
        lambda m, x, at, s: (_fp16_cache(m), (x, at, s))[1],
    ],
    ids=["fp16-states", "int32-positions", "int32-slots", "fp16-cache"],
)
def test_single_calls_may_run_stock(change, said, monkeypatch) -> None:
    model = drafts.muse_spark(seed=4)
    good = inputs(model, 3)
    calls = []
    monkeypatch.setattr(
        MuseSparkDSparkForCausalLM, "precompute_and_store_context_kv",
        lambda self, *given: calls.append(given),
    )
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    draft.precompute_and_store_context_kv(*change(model, *good))
    assert len(calls) == 1 and "vLLM's own chain" in said()[-1]
    drafts.fresh_caches(model)
    for attn in model._attn_layers:
        attn.kv_cache = attn.kv_cache.to(BF16)
    draft.precompute_and_store_context_kv(*good)
    assert len(calls) == 1, "the next good call goes by ctxkv again"


def test_really_runs_stock_with_another_backend() -> None:
    model = drafts.muse_spark(seed=6)
    x, at, lists = inputs(model, 4)
    wanted = run_stock(model, x, at, lists)
    _attn(model).impl = OtherImpl()
    got = run_ours(model, x, at, lists)
    assert all(oracle.same(a, b) for a, b in zip(got, wanted))


def test_nothing_is_made_during_a_capture(said, monkeypatch) -> None:
    model = drafts.muse_spark()
    x, at, lists = inputs(model, 3)
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    with monkeypatch.context() as patch:
        patch.setattr(_vllm_path, "capturing", lambda: True)
        draft.precompute_and_store_context_kv(x, at, lists)
    assert "being captured" in said()[0] and draft._ctxkv_path.chain is None
    draft.precompute_and_store_context_kv(x, at, lists)
    assert draft._ctxkv_path.chain is not None
    with monkeypatch.context() as patch:
        patch.setattr(_vllm_path, "capturing", lambda: True)
        draft.precompute_and_store_context_kv(x, at, lists)  # same caches: launches alone
        assert len(said()) == 2
        launched = draft._ctxkv_path.chain
        drafts.fresh_caches(model)
        draft.precompute_and_store_context_kv(x, at, lists)
    assert "the caches have moved" in said()[-1]
    # A graph may launch this plan for as long as it likes: new weights do not end it.
    draft._ctxkv_path.forget()
    draft.precompute_and_store_context_kv(x, at, lists)
    assert draft._ctxkv_path.graphs == [launched] and draft._ctxkv_path.chain is not launched


def test_plugin_off(said, monkeypatch) -> None:
    monkeypatch.setenv("CTXKV_VLLM", "0")
    model = drafts.muse_spark()
    x, at, lists = inputs(model, 3)
    draft = drafts.drafter(CtxkvMuseSparkDSpark, model)
    draft.precompute_and_store_context_kv(x, at, lists)
    assert draft._ctxkv_path.chain is None and "CTXKV_VLLM=0" in said()[0]


# ---- registration ------------------------------------------------------------------------------
@pytest.fixture
def registry(monkeypatch) -> dict:
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    return ModelRegistry.models


def test_register_is_lazy_and_idempotent(registry) -> None:
    before = set(registry)
    plugin.register()
    plugin.register()
    assert set(registry) == before and set(plugin.MODELS) <= before
    for arch, name in plugin.MODELS.items():
        assert (registry[arch].module_name, registry[arch].class_name) == (
            "ctxkv.vllm_model", name,
        )
    loaded = registry["MuseSparkDSparkModel"].load_model_cls()
    assert loaded is CtxkvMuseSparkDSpark and issubclass(loaded, MuseSparkDSparkForCausalLM)


def test_register_can_be_turned_off(registry, said, monkeypatch) -> None:
    monkeypatch.setenv("CTXKV_VLLM", "0")
    before = dict(registry)
    plugin.register()
    assert registry == before and said() == ["ctxkv: off (CTXKV_VLLM=0)"]


def test_register_never_raises(said, monkeypatch) -> None:
    monkeypatch.setattr(ModelRegistry, "get_supported_archs", lambda: 1 / 0)
    plugin.register()
    assert "stays: division by zero" in said()[0]


def test_other_versions_keep_stock(registry, said, monkeypatch) -> None:
    before = dict(registry)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.34.1")
    plugin.register()
    assert registry == before and "vLLM is 0.34.1, only 0.33.x was tested" in said()[0]


def test_register_without_vllm_is_harmless() -> None:
    done = python(
        "import importlib.metadata as m\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
        "import sys, ctxkv.vllm\nctxkv.vllm.register()\n"
        "assert 'torch' not in sys.modules\nprint('alive')\n"
    )
    assert done.stdout.strip() == "alive", done.stderr


@pytest.mark.slow
def test_vllm_finds_the_plugin_by_itself(tmp_path) -> None:
    info = tmp_path / "ctxkv-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ctxkv\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nctxkv = ctxkv.vllm:register\n"
    )
    done = python(
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm import ModelRegistry\n"
        "assert 'ctxkv.vllm_model' not in sys.modules and 'ctxkv.torch' not in sys.modules\n"
        "print(ModelRegistry.models['MuseSparkDSparkModel'].module_name)\n"
    )
    assert done.stdout.strip().endswith("ctxkv.vllm_model"), done.stderr[-2000:]


def test_the_entry_point_is_the_plugin(root) -> None:
    text = (root / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nctxkv = "ctxkv.vllm:register"' in text
