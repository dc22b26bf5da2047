"""What the inputs are to follow: quantiles over the heads of an atlas, and between its lengths a line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.atlas import record
from benchmarks.atlas.record import LAGS, SCHEMA, UNIONS, Atlas, HeadCurves, LengthCurves, Trained
from benchmarks.cases import recorded
from benchmarks.cases.recorded import KINDS
from benchmarks.selection import targets
from tests.benchmarks.synthetic import FINGERPRINT

HEADS = 11
"""The tenth of so many from either end is the second."""


def head(layer: int, seq_len: int) -> HeadCurves:
    """The higher its layer, the more alike its neighbours choose; at 64k all less."""
    alike = 0.1 + 0.05 * layer - (0.05 if seq_len > 8192 else 0.0)
    union = {str(count): 16 + count * (1 - alike) for count in UNIONS}
    near = 0.5 + 0.01 * layer
    return HeadCurves(
        layer, 0, dict.fromkeys(map(str, LAGS), alike), dict.fromkeys(map(str, LAGS), alike), union,
        ((1.0, 0.0), (2.0, near), (4.0, 1 - near)), 0.1, 2.0 + layer, 0.5, (0.3, 0.3, 0.4), alike,
    )  # fmt: skip


def atlas(*lengths: int) -> Atlas:
    curves = tuple(
        LengthCurves(seq_len, 16, 3, 64, tuple(head(layer, seq_len) for layer in range(HEADS)), (0.2,) * (HEADS - 1))
        for seq_len in lengths
    )
    trained = Trained(tokens=1, minutes=1.0, loss=1.0, seq_lens=(8192,), text="some", seed=0)
    return Atlas(SCHEMA, FINGERPRINT, "abcdef0123456789", {}, trained, curves)


def test_the_kinds_follow_the_median_and_the_heads_least_and_most_alike() -> None:
    found = targets.of_atlas(atlas(8192))
    assert set(found) == set(KINDS)
    first = {kind: found[kind][0] for kind in KINDS}
    for kind, layer in (("recorded-p10", 1), ("recorded", 5), ("recorded-p90", 9)):
        wanted, curves = head(layer, 8192), first[kind].curves
        assert curves.jaccard == pytest.approx({int(lag): x for lag, x in wanted.jaccard.items()})
        assert curves.union == pytest.approx({int(count): x for count, x in wanted.union.items()})
    assert first["recorded"].curves.distance == pytest.approx({1: 0.0, 2: 0.55, 4: 1.0})
    assert first["recorded"].curves.popularity == pytest.approx(7.0)
    assert first["recorded-p10"].curves.popularity is None
    assert first["recorded"].source == "median over layers and heads; atlas of cpu, 2026-01-02, commit abcdef0123"
    assert first["recorded-p90"].said.startswith("p90 (Jaccard indices and unions) over layers and heads")


def test_lengths_that_were_not_measured_say_so() -> None:
    found = {one.num_keys: one for one in targets.of_atlas(atlas(8192, 32768))["recorded"]}
    assert found[8192].said == found[32768].said == "median over layers and heads"
    assert found[16384].said.startswith("interpolated from 8192 and 32768 tokens")
    assert found[65536].said.startswith("extrapolated from 8192 and 32768 tokens")
    assert found[16384].curves.jaccard[1] == pytest.approx(0.325)
    assert found[65536].curves.jaccard[1] == pytest.approx(0.275)
    assert found[16384].curves.popularity == pytest.approx(7.0)
    (only,) = {one.said for one in targets.of_atlas(atlas(8192))["recorded"]} - {"median over layers and heads"}
    assert only == "as at 8192 tokens (median over layers and heads)"


def test_a_table_names_the_atlas_that_it_is_held_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = record.write(tmp_path, atlas(8192))
    today = recorded.table()
    named: list[str | None] = [None]
    monkeypatch.setattr(recorded, "table", lambda: dataclasses.replace(today, atlas=named[0]))
    assert targets.of_table(tmp_path) == targets.of_study()
    named[0] = file.name
    assert targets.of_table(tmp_path) == targets.of_atlas(atlas(8192))
    file.unlink()
    with pytest.raises(FileNotFoundError):
        targets.of_table(tmp_path)
