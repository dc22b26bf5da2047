"""The fit and its error, on records that are made up; and the estimates that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.estimates import bounds, calibration, estimates, kernel_table, parts, stored
from benchmarks.estimates.calibration import Sample
from benchmarks.estimates.parts import Launches
from benchmarks.estimates.work import PrefillShape

RESULTS = Path(__file__).parents[3] / "results"
PAPER = PrefillShape(64, 4, 128, 128, 65536)


def samples(factor: float, fixed_ms: float) -> list[Sample]:
    alone = [Sample(f"a{x}", factor * x + fixed_ms, {"a": x}) for x in (0.1, 1.0, 10.0)]
    return [*alone, Sample("b", 3.0, {"b": 1.0}), Sample("a + b", 3.0 + factor * 2 + fixed_ms, {"a": 2.0, "b": 1.0})]


def test_the_fit_finds_what_the_records_were_made_of() -> None:
    a, b = calibration.fit(samples(1.7, 0.2))
    assert (a.part, a.records, b.part, b.records) == ("a", 4, "b", 2)
    assert (a.factor, a.fixed_ms) == (pytest.approx(1.7), pytest.approx(0.2))
    assert b.factor + b.fixed_ms == pytest.approx(3.0)


def test_a_record_that_is_left_out_is_not_seen() -> None:
    """One record is 50 % slower than the rest: its own prediction does not know of it."""
    made = samples(1.7, 0.2)
    made[1] = Sample("a1.0", 1.5 * 1.9, {"a": 1.0})
    found = {one.case: one for one in calibration.leave_one_out(made)}
    assert found["a1.0"].error == pytest.approx(1 / 1.5 - 1, abs=1e-3)
    assert found["a + b"].part is None
    assert calibration.leave_one_out([Sample("alone", 1.0, {"a": 1.0})]) == []


def test_no_factor_is_negative() -> None:
    """A part that is faster the longer it is."""
    (found,) = calibration.fit([Sample("short", 2.0, {"a": 1.0}), Sample("long", 1.0, {"a": 2.0})])
    assert found.factor >= 0
    assert found.fixed_ms >= 0


def test_nothing_to_calibrate_on_is_refused() -> None:
    with pytest.raises(ValueError, match="no record"):
        calibration.fit([])


@pytest.fixture(scope="module")
def table() -> kernel_table.KernelTable:
    return kernel_table.read(RESULTS)


def test_a_bound_is_the_scarcest_resource_and_no_more_than_what_was_measured(table: kernel_table.KernelTable) -> None:
    """The H200 took 13.6 ms for the selected forward by query; its L2 allows 12.5, its tensor cores 3.4."""
    found = {one.part: one for one in parts.forward(PAPER, Launches(table, bounds.target("h200")))}
    (kernel,) = found[parts.BY_QUERY].kernels
    assert kernel.resource == "L2"
    assert 11 < kernel.least_ms < 13.6
    assert kernel.by_resource_ms["tensor cores"] < kernel.least_ms
    assert list(found) == ["compressed", "scores", parts.BY_QUERY, "window", "gated sum"]


def test_a_board_takes_the_way_that_its_memory_favours(table: kernel_table.KernelTable) -> None:
    longer = PrefillShape(64, 4, 128, 128, 131072)
    for board, wanted in (("3090", parts.BY_BLOCK), ("4090", parts.BY_QUERY)):
        on = Launches(table, bounds.target(board))
        assert wanted in [one.part for one in parts.forward(longer, on)]
        assert parts.backward(longer, on).part.removeprefix("backward, dq") == wanted.removeprefix("selected")


@pytest.mark.parametrize("board", ["b200", "h100-pcie", "nothing"])
def test_a_board_without_its_figures_is_refused(board: str) -> None:
    with pytest.raises(ValueError, match=board if board != "nothing" else "machines.toml"):
        bounds.target(board)


def test_the_committed_estimates_are_what_the_committed_records_give(table: kernel_table.KernelTable) -> None:
    """Fitting takes no compiler: `estimate` writes this file again, whoever runs it."""
    committed, made = stored.read(RESULTS), estimates.make(RESULTS, table)
    assert committed is not None
    assert [one.part for one in committed.fits] == [one.part for one in made.fits]
    for old, new in zip(committed.parts, made.parts, strict=True):
        assert (old.board, old.heads, old.tokens, old.part, old.resource) == (
            new.board, new.heads, new.tokens, new.part, new.resource,
        )  # fmt: skip
        assert old.estimated_ms == pytest.approx(new.estimated_ms, rel=1e-3)
    assert max(abs(one.error) for one in committed.left_out) < 0.35
    assert len(committed.left_out) > 30
