"""Choices of whole sequences in a small file: what is read is what was written, and only a choice passes for one."""

from __future__ import annotations

import base64
import dataclasses
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

import nsa
from benchmarks.atlas import choices
from benchmarks.atlas.choices import Choices
from nsa import NSAConfig
from tests.benchmarks.synthetic import CONFIG


def indices(seq_len: int, seed: int = 0, config: NSAConfig = CONFIG) -> np.ndarray:
    """block_indices [seq_len, Hkv, n] of random queries and keys of two heads."""
    q, k = torch.randn(2, 1, seq_len, 2, 16, generator=torch.Generator().manual_seed(seed)).unbind()
    return nsa.select_blocks(q, nsa.compress(k, config), config)[0].numpy()


@pytest.mark.parametrize("seq_len", [64, 93])
def test_what_is_read_is_what_was_chosen(seq_len: int, tmp_path: Path) -> None:
    layers = [indices(seq_len, seed) for seed in range(2)]
    made = choices.of_heads(layers, [(1, 0), (0, 1)], CONFIG.l_sel)
    assert made is not None
    path = choices.write(tmp_path, Path("h200-2026-11-24-0123456789.json"), made)
    assert path.name == f"h200-2026-11-24-0123456789-{seq_len}.json"
    found = choices.read(tmp_path, "h200-2026-11-24-0123456789.json", seq_len)
    assert [(head.layer, head.kv_head) for head in found.heads] == [(1, 0), (0, 1)]
    for head in found.heads:
        np.testing.assert_array_equal(found.indices(head, CONFIG), layers[head.layer][:, head.kv_head])


def test_a_file_holds_as_many_heads_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [indices(200)]
    monkeypatch.setattr(choices, "_ROOM", len(choices.encode(0, 1, layers[0][:, 1], 8).blocks) + 100)
    made = choices.of_heads(layers, [(0, 1), (0, 0)], CONFIG.l_sel)
    assert made is not None
    assert [head.kv_head for head in made.heads] == [1]
    monkeypatch.setattr(choices, "_ROOM", 10)
    assert choices.of_heads(layers, [(0, 1)], CONFIG.l_sel) is None
    monkeypatch.undo()
    monkeypatch.setattr(choices, "MOST_TOKENS", 199)
    assert choices.of_heads(layers, [(0, 1)], CONFIG.l_sel) is None


def _changed(change: str) -> Choices:
    rows = indices(64)[:, 0]
    if change == "after its own":
        rows[20, -1] = 3
    if change == "forced left out":
        rows[40, 0] = 1
        rows[40, 1:] = [2, 3, 5]
    if change == "too few":
        rows[63, 1] = -1
        rows[63].sort()
    made = choices.of_heads([rows[:, None]], [(0, 0)], CONFIG.l_sel)
    assert made is not None
    return made


@pytest.mark.parametrize("change", ["after its own", "forced left out", "too few"])
def test_what_is_no_choice_is_refused(change: str) -> None:
    made = _changed(change)
    with pytest.raises(ValueError, match="layer 0, kv_head 0: blocks are no choice of n = 4 blocks of 8 tokens"):
        made.indices(made.heads[0], CONFIG)


def test_settings_of_another_model_and_damage_are_refused(tmp_path: Path) -> None:
    made = _changed("nothing")
    assert made.indices(made.heads[0], CONFIG).shape == (64, 4)
    with pytest.raises(ValueError, match="no choice of n = 5"):
        made.indices(made.heads[0], dataclasses.replace(CONFIG, n_sel=5))
    for blocks in ("~!", base64.b85encode(lzma.compress(b"\0" * 7)).decode(), base64.b85encode(b"plain").decode()):
        damaged = dataclasses.replace(made.heads[0], blocks=blocks)
        with pytest.raises(ValueError, match="hold no choice of 64 rows"):
            made.indices(damaged, CONFIG)
    path = choices.write(tmp_path, Path("a.json"), made)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    with pytest.raises(ValueError, match=r"a-64\.json: ValueError: schema must be 1"):
        choices.read(tmp_path, "a.json", 64)
