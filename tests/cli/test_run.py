# SPDX-License-Identifier: Apache-2.0
"""run: values by hand, slots, tiers, tensor parallel (B24), faults (B02, B06)."""

import json
import zlib

import numpy as np
import pytest
from helpers import (
    D,
    bf16,
    caches,
    heads_model,
    ok,
    ones_context,
    read_file,
    refused,
    run_args,
    write_context,
    write_model,
)


# ---- run: values by hand
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
    """Rows beyond a piece have the bits that they have alone; the first fault of all counts."""
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
    for more in (
        ["--threads", 1],
        ["--cpu-mask", "scalar"],
        ["--cpu-mask", "avx2"],
        ["--projection", "exact"],
        ["--numerics", "pair"],
        ["--device", "auto"],
    ):
        if more[0] == "--device" and json.loads(ok("info", "--json"))["cuda"]["devices"]:
            continue
        assert ok(*run_args(tmp_path / "d", context, tmp_path / "b", *more)) == base
        assert ok("verify", tmp_path / "a", tmp_path / "b").startswith("equal: 2 layers")
    # The two orders' sums rarely differ on such rows; selftest's crc_packed tells them apart.
    ok(*run_args(tmp_path / "d", context, tmp_path / "b", "--numerics", "packed"))
    refused(*run_args(tmp_path / "d", context, tmp_path / "c", "--projection", "cublas"))


# ---- tensor parallel, B24
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
            assert (mine[layer] == whole[layer][:, first : first + local]).all()
            assert (mine[layer][0, 0, 0, 64:] == bf16([first + 1.0])).all()


@pytest.mark.parametrize("heads, ranks", [(3, 2), (8, 3), (2, 3)])
def test_ranks_refused(tmp_path, heads, ranks):
    model = heads_model(tmp_path / "m", heads)
    context = ones_context(tmp_path / "c", 1)
    args = run_args(model, context, tmp_path / "o", "--tp-size", ranks)
    refused(*args, words=[f"{heads} KV heads", f"{ranks} tensor-parallel ranks"])
    refused(*args, "--tp-rank", ranks, words=["--tp-rank", ranks])
    assert not (tmp_path / "o").exists()


# ---- faults, B06
def test_position_past_the_table(tmp_path):
    model = write_model(tmp_path / "m", 1, 2, config={"use_rope": True})
    table = np.full((2048, 64), 0x3F80, np.uint16)
    table[:, 32:] = 0
    context = write_context(
        tmp_path / "c",
        2,
        slots=[0, 1],
        positions=[2047, 2048],
        extra={
            "cos_sin_cache": ("BF16", table),
            "after": ("BF16", np.full((64, 64), 0x7FC0, np.uint16)),
        },
    )
    text = ok(*run_args(model, context, tmp_path / "o"))
    assert (
        "faults: 2 rows skipped; first: layer 0, row 1: position 2048 must be >= 0 and below 2048"
        in text
    )
    assert text.count("rows 1") == 2
    for cache in caches(tmp_path / "o"):
        assert cache[0, 0, 0].all() and not cache[0, 0, 1:].any()
        assert not ((cache & 0x7FFF) > 0x7F80).any()
    refused(*run_args(model, context, tmp_path / "no", "--checked"), words=["2048"])
    assert not (tmp_path / "no").exists()
    refused(
        *run_args(
            model, context, tmp_path / "no", "--checked", "--num-blocks", 1, "--block-size", 1
        )
    )
    text = ok(*run_args(model, context, tmp_path / "o", "--num-blocks", 1, "--block-size", 1))
    assert "row 1: slot 1 must be below 1" in text


def test_table_handed_in_or_made(tmp_path):
    """--table holds what run computes from theta."""
    for more in ([], ["--table"]):
        ok(
            "synth",
            tmp_path / "d",
            "--kv-heads",
            1,
            "--layers",
            1,
            "--rows",
            5,
            "--max-position",
            3000,
            *more,
        )
        ok(
            *run_args(
                tmp_path / "d", tmp_path / "d/context.safetensors", tmp_path / f"o{len(more)}"
            )
        )
    assert (tmp_path / "o0").read_bytes() == (tmp_path / "o1").read_bytes()


def test_absurd_slots(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 2, slots=[1, 2**62])
    refused(*run_args(model, context, tmp_path / "o"), words=["--num-blocks", 2**62])
    text = ok(*run_args(model, context, tmp_path / "o", "--num-blocks", 1))
    assert f"slot {2**62}" in text
