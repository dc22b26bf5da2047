"""The search for a law and its command: what it begins from, finds again, writes, and refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as front
from benchmarks.cases import recorded
from benchmarks.cases.recorded import KINDS, Law
from benchmarks.selection import fit, sampling, targets
from benchmarks.selection.curves import Curves
from benchmarks.selection.targets import Target

LAW = Law(1024, (0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1), (0.0, 0.0, 0.0), 0.2, 0.1, "here")


def test_a_search_finds_curves_that_a_law_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a law whose curves are known without a selection: those of the truth, from another beginning."""

    def of_law(law: Law, *_: int) -> Curves:
        return Curves(
            {1: 1 - law.weights[0], 64: law.weights[-1]}, {2: 16 + 16 * law.apart}, {2: sum(law.followed)}, 2.0
        )

    monkeypatch.setattr(sampling, "of_law", of_law)
    truth = dataclasses.replace(LAW, weights=(0.05, 0.05, 0.1, 0.2, 0.2, 0.2, 0.2), apart=0.3, followed=(0.2, 0, 0))
    target = Target(1024, of_law(truth), "made", "here")
    begin = dataclasses.replace(LAW, followed=(0.1, 0.1, 0.1))
    found, slopes = fit.fit("recorded", target, 600, begin)
    assert abs(found.worst[1]) < fit.TOLERANCE / 2
    assert found.law.target == "made; here"
    again, _ = fit.fit("recorded", target, 600, found.law, slopes)
    assert again.law == found.law, "a second fit changes nothing"


@pytest.mark.parametrize("distance", [{}, {2: 0.1}])
def test_what_is_searched_is_a_law_whatever_the_numbers(distance: Mapping[int, float]) -> None:
    target = Target(8192, Curves({1: 0.4}, {}, distance, None), "some", "here")
    size = fit._parameters(LAW, target).size
    for x in (np.full(size, 30.0), np.full(size, -30.0), np.linspace(-9, 9, size)):
        law = fit._law(x, target)
        assert sum(law.weights) == pytest.approx(1, abs=1e-9)
        assert bool(sum(law.followed)) == bool(distance)


def test_the_table_holds_what_was_fitted_and_is_read_again() -> None:
    fits = [fit.Fit(kind, LAW, {"jaccard 1": 0.01, "union 2": -0.03}) for kind in KINDS]
    assert fits[0].worst == ("union 2", -0.03)
    text = fit.table(fits, None)
    assert json.loads(text)["atlas"] is None
    assert json.loads(text)["recorded_p10"] == [json.loads(json.dumps(dataclasses.asdict(LAW)))]


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each fit is off by; nothing is searched."""
    by = [0.02]
    fits = lambda *_: (fit.Fit(kind, LAW, {"jaccard 1": by[0]}) for kind in KINDS)  # noqa: E731
    monkeypatch.setattr(fit, "fit_all", fits)
    return by


def test_the_command_writes_a_table_that_is_read(
    off: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "recorded.json"
    assert front.main(["fit-inputs", "--table", str(table)]) == 0
    monkeypatch.setattr(recorded, "TABLE", table)
    recorded.table.cache_clear()
    try:
        assert recorded.law("recorded-p90", 4096) == LAW
    finally:
        recorded.table.cache_clear()


def test_a_curve_that_is_missed_writes_nothing(
    off: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off[0] = -0.12
    assert front.main(["fit-inputs", "--table", str(tmp_path / "recorded.json")]) == 1
    assert "off by -12.0%" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--evaluations", "0"], "--evaluations must be at least 1; got 0"),
        (["--atlas", "{}/none.json"], "none.json: No such file or directory"),
        (["--atlas", "{}/bad.json"], "bad.json: JSONDecodeError"),
    ],
)
def test_wrong_arguments_are_named(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{")
    assert front.main(["fit-inputs", *(word.format(tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_the_study_has_a_target_for_each_length_and_says_what_it_is() -> None:
    found = targets.of_study()
    assert set(found) == set(KINDS)
    for of_kind in found.values():
        assert [one.num_keys for one in of_kind] == [8192, 16384, 32768, 65536]
    said = {one.num_keys: one.said for one in found["recorded"]}
    assert said[8192] == "trained, 8k"
    assert said[16384].startswith("interpolated from 8192 and 32768 tokens")
    assert said[65536].startswith("extrapolated")
    assert all("assumed" in one.said for one in found["recorded-p10"])
    assert found["recorded"][0].curves.jaccard[1] == 0.43
    assert found["recorded"][1].curves.jaccard[1] == pytest.approx(0.40)
    assert found["recorded"][1].curves.union[64] == pytest.approx((77 * 155) ** 0.5)
