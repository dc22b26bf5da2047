"""Change points where they are, none where there are none, and runs that cannot be compared kept apart."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from benchmarks.history import bridges, trend
from benchmarks.history.bridges import Break
from benchmarks.history.store import LatencySeries, Point
from harness.fingerprint import Fingerprint
from tests.benchmarks.synthetic import FINGERPRINT, key, passed


def of(latencies_ms: list[float], fingerprints: list[Fingerprint] | None = None) -> trend.Trend:
    return trend.of_series(latencies_ms, fingerprints or [FINGERPRINT] * len(latencies_ms))


def noisy(levels_ms: list[float], seed: int, noise: float = 0.015) -> list[float]:
    r = random.Random(seed)
    return [level_ms * (1 + r.gauss(0.0, noise)) for level_ms in levels_ms]


def test_no_change_is_found_where_there_is_none() -> None:
    alarms = sum(bool(of(noisy([10.0] * (5 + seed), seed)).changes) for seed in range(150))
    assert alarms <= 2


@pytest.mark.parametrize("factor", [1.06, 0.94])
@pytest.mark.parametrize("at", [5, 40, 70])
def test_a_change_is_found_where_it_is(factor: float, at: int) -> None:
    for seed in range(10):
        found = of(noisy([10.0] * at + [10.0 * factor] * (80 - at), seed))
        (change,) = found.changes
        assert abs(change.index - at) <= 3
        assert change.change == pytest.approx(factor - 1, abs=0.025)
        assert change.confirmed
        assert found.level_begin == change.index
        assert found.level_ms == pytest.approx(10.0 * factor, rel=0.01)


def test_two_changes_are_told_apart() -> None:
    found = of(noisy([10.0] * 30 + [12.0] * 30 + [11.0] * 30, seed=1))
    assert [change.index for change in found.changes] == [30, 60]
    assert [change.change for change in found.changes] == pytest.approx([0.2, -1 / 12], abs=0.02)


def test_a_slow_drift_does_not_slip_through_in_small_steps() -> None:
    for seed in range(5):
        found = of(noisy([10.0 * 1.002**i for i in range(100)], seed, noise=0.01))
        total = 1.0
        for change in found.changes:
            assert change.change >= trend.SMALLEST_CHANGE
            total *= 1 + change.change
        assert total == pytest.approx(1.002**100, rel=0.07)


def test_a_change_too_small_to_matter_is_none() -> None:
    levels = [10.0] * 50 + [10.15] * 50
    assert of(levels).changes == ()
    fine = trend.of_series(levels, [FINGERPRINT] * 100, smallest=0.01)
    assert [change.index for change in fine.changes] == [50]


def test_one_wild_run_is_no_change() -> None:
    found = of([10.0, 10.1, 9.9, 10.0, 10.1, 20.0, 9.9, 10.0, 10.1, 10.0])
    assert found.changes == ()
    assert found.level_ms == 10.0


def test_the_last_point_alone_asks_for_another_run() -> None:
    calm = noisy([10.0] * 20, seed=3, noise=0.005)
    asked = of([*calm, 11.0])
    assert asked.confirmation_wanted
    (change,) = asked.changes
    assert (change.index, change.confirmed) == (20, False)
    assert asked.level_ms == statistics.median(calm)  # until then the old level stands

    refuted, confirmed = of([*calm, 11.0, 10.0]), of([*calm, 11.0, 11.05])
    assert (refuted.changes, refuted.confirmation_wanted) == ((), False)
    assert [(change.index, change.confirmed) for change in confirmed.changes] == [(20, True)]
    assert confirmed.level_ms == pytest.approx(11.0, rel=0.01)


def test_a_large_last_step_does_not_make_a_level_of_the_run_before_it() -> None:
    """54.9 to 53.5 ms is noise; the run at 38.6 is the first of another level, which a second one must see."""
    calm = noisy([54.9] * 8, seed=5, noise=0.003)
    asked = of([*calm, 53.5, 38.6])
    assert [(change.index, change.confirmed) for change in asked.changes] == [(9, False)]
    assert asked.level_ms == pytest.approx(54.9, rel=0.01)
    (change,) = of([*calm, 53.5, 38.6, 38.7]).changes
    assert (change.index, change.confirmed) == (9, True)
    assert change.change == pytest.approx(38.65 / 54.9 - 1, rel=0.01)


def test_runs_that_cannot_be_compared_split_the_series() -> None:
    newer = dataclasses.replace(FINGERPRINT, torch="2.14.0")
    found = of([10.0] * 10 + [13.0] * 10, [FINGERPRINT] * 10 + [newer] * 10)
    assert found.changes == ()
    assert found.breaks == (Break(10, ("torch 2.13.0 -> 2.14.0",)),)
    assert (found.level_ms, found.level_begin) == (13.0, 10)


def test_two_hosts_that_take_turns_hide_no_change() -> None:
    other = dataclasses.replace(FINGERPRINT, cpu="Another CPU")
    levels = [10.0, 20.0] * 10 + [11.0, 20.0] * 10
    found = of(levels, [FINGERPRINT, other] * 20)
    assert found.breaks == (Break(1, ("cpu A CPU -> Another CPU",)),)
    assert [(change.index, round(change.change, 3), change.confirmed) for change in found.changes] == [(20, 0.1, True)]
    assert (found.level_ms, found.level_begin) == (20.0, 1)
    assert of(levels[:-1], [FINGERPRINT, other] * 19 + [FINGERPRINT]).level_ms == 11.0


def test_commits_and_times_do_not_split_it() -> None:
    runs = [dataclasses.replace(FINGERPRINT, commit=str(i), nsa_sha256=str(i), load=float(i)) for i in range(20)]
    found = of([10.0] * 10 + [13.0] * 10, runs)
    assert found.breaks == ()
    assert [change.index for change in found.changes] == [10]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_series_have_a_level_and_no_change(length: int) -> None:
    found = of([10.0] * length)
    assert (found.changes, found.level_ms) == ((), 10.0)


def test_points_of_the_store_are_series() -> None:
    points = [Point("2026-01-02T03:04:05Z", x, None, None, FINGERPRINT) for x in [10.0] * 9 + [12.0] * 9]
    assert trend.of_points(points) == of([10.0] * 9 + [12.0] * 9)
    with pytest.raises(ValueError, match="latencies_ms must hold at least one point"):
        trend.of_points([])


PATCHED = dataclasses.replace(FINGERPRINT, platform="Linux 6.18.45", threads=4, benchmarks_sha256="2" * 16)
"""Another kernel of the host, other threads, another way of measuring: soft changes."""


def beside(
    ours_ms: list[float], dense_ms: list[float], fingerprints: list[Fingerprint], name: str = "sdpa-cudnn"
) -> trend.Trend:
    """NSA and a dense baseline in the same runs."""
    return trend.of_series(ours_ms, fingerprints, dense_ms=[{name: ms} for ms in dense_ms])


@pytest.mark.parametrize("at", [20, 22])
def test_a_soft_change_hides_no_step(at: int) -> None:
    runs = [FINGERPRINT] * 20 + [PATCHED] * 20
    for seed in range(10):
        ours = noisy([10.0] * at + [10.6] * (40 - at), seed, noise=0.004)
        found = beside(ours, noisy([30.0] * 40, seed + 100, noise=0.004), runs)
        assert [(change.index, change.confirmed) for change in found.changes] == [(at, True)]
        assert found.changes[0].change == pytest.approx(0.06, abs=0.01)
        assert [(one.index, one.bridged) for one in found.breaks] == [(20, True)]
        assert found.level_ms == pytest.approx(10.6, rel=0.01)
        assert len(found.comparable) == 40


def test_a_host_that_is_slower_for_both_raises_no_alarm_and_the_level_is_the_new_hosts() -> None:
    runs = [FINGERPRINT] * 20 + [PATCHED] * 20
    host = [1.0] * 20 + [1.1] * 20
    found = beside([10.0 * by for by in host], [30.0 * by for by in host], runs)
    assert found.changes == ()
    assert found.level_ms == pytest.approx(11.0)
    assert [ms for _, ms in found.comparable] == pytest.approx([11.0] * 40)


@pytest.mark.parametrize(("ours", "change"), [(1.1, None), (1.12, None), (1.21, 0.1), (0.9, -0.1)])
def test_a_last_run_asks_only_for_what_dense_attention_does_not_show_too(ours: float, change: float | None) -> None:
    """Conditions are equal: another GPU of the kind, say, or a host that is slower today."""
    found = beside([10.0] * 20 + [10.0 * ours], [30.0] * 20 + [33.0], [FINGERPRINT] * 21)
    assert [(one.index, round(one.change, 3)) for one in found.changes] == ([] if change is None else [(20, change)])
    assert found.level_ms == 10.0


def test_dense_attention_of_runs_before_the_level_tells_too() -> None:
    ours, dense = [20.0] * 10 + [10.0] * 10 + [11.0], [{"sdpa-cudnn": 30.0}] * 10 + [{}] * 10 + [{"sdpa-cudnn": 33.0}]
    found = trend.of_series(ours, [FINGERPRINT] * 21, dense_ms=dense)
    assert [(one.index, one.confirmed) for one in found.changes] == [(10, True)]
    without = trend.of_series(ours, [FINGERPRINT] * 21, dense_ms=[{}] * 20 + dense[-1:])
    assert [(one.index, one.confirmed) for one in without.changes] == [(10, True), (20, False)]


def test_the_fastest_baseline_that_ran_before_tells() -> None:
    runs, ours = [FINGERPRINT] * 21, [10.0] * 20 + [11.0]
    slower, new = {"sdpa-cudnn": 33.0, "sdpa-flash": 40.0}, {"flash-attn-4": 20.0}
    before = [{"sdpa-cudnn": 30.0, "sdpa-flash": 40.0}] * 20
    assert trend.of_series(ours, runs, dense_ms=[*before, slower | new]).changes == ()
    assert len(trend.of_series(ours, runs, dense_ms=[*before, new]).changes) == 1


def test_a_step_that_two_runs_show_counts_whole() -> None:
    found = beside([10.0] * 20 + [11.0] * 2, [30.0] * 20 + [33.0] * 2, [FINGERPRINT] * 22)
    assert [(one.index, round(one.change, 3), one.confirmed) for one in found.changes] == [(20, 0.1, True)]


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_baseline_alone_that_changes_raises_no_alarm(factor: float) -> None:
    newer = dataclasses.replace(FINGERPRINT, flash_attn="flash-attn 2.9.0")
    dense = [30.0] * 20 + [30.0 * factor] * 20
    for runs in ([FINGERPRINT] * 20 + [newer] * 20, [FINGERPRINT] * 40):
        found = beside([10.0] * 40, dense, runs)
        assert found.changes == ()
        assert found.level_ms == 10.0


def test_a_baseline_that_is_new_is_not_taken_for_a_faster_one() -> None:
    newer = dataclasses.replace(FINGERPRINT, flash_attn="flash-attn-4 4.0.0")
    dense = [{"sdpa-cudnn": 30.0}] * 10 + [{"sdpa-cudnn": 30.0, "flash-attn-4": 20.0}] * 10
    found = trend.of_series([10.0] * 10 + [10.6] * 10, [FINGERPRINT] * 10 + [newer] * 10, dense_ms=dense)
    assert [(change.index, round(change.change, 3)) for change in found.changes] == [(10, 0.06)]


def test_a_soft_change_cuts_where_no_baseline_ran_on_both_sides() -> None:
    runs = [FINGERPRINT] * 10 + [PATCHED] * 10
    for dense in ([], [{"sdpa-cudnn": 30.0}] * 10 + [{"flash-attn-4": 20.0}] * 10):
        found = trend.of_series([10.0] * 10 + [10.6] * 10, runs, dense_ms=dense)
        assert found.changes == ()
        assert [(one.index, one.bridged) for one in found.breaks] == [(10, False)]
        assert [index for index, _ in found.comparable] == list(range(10, 20))


@pytest.mark.parametrize("part", ["torch", "triton", "driver", "device", "cudnn", "cpu", "python"])
def test_a_hard_change_cuts_beside_a_baseline_too(part: str) -> None:
    other = dataclasses.replace(PATCHED, **{part: "another"})
    found = beside([10.0] * 10 + [10.6] * 10, [30.0] * 20, [FINGERPRINT] * 10 + [other] * 10)
    assert found.changes == ()
    assert [(one.index, one.bridged) for one in found.breaks] == [(10, False)]
    assert [one.bridged for one in bridges.breaks([FINGERPRINT, other])] == [False]
    assert [one.bridged for one in bridges.breaks([FINGERPRINT, PATCHED])] == [True]


def test_two_hosts_that_take_turns_with_one_kernel_each_are_one_series() -> None:
    ours, dense = [10.0, 11.0] * 10 + [10.6, 11.66] * 10, [30.0, 33.0] * 20
    found = beside(ours, dense, [FINGERPRINT, PATCHED] * 20)
    assert [(change.index, round(change.change, 3)) for change in found.changes] == [(20, 0.06)]
    assert found.level_ms == pytest.approx(11.66)


def test_three_points_are_enough_to_ask() -> None:
    found = of([10.0, 10.05, 10.7])
    assert [(change.index, change.confirmed) for change in found.changes] == [(2, False)]
    assert found.level_ms == pytest.approx(10.025)
    assert of([10.0, 10.3, 10.5]).changes == (), "these runs differ as much without a step"


def _series(device: str, *days: int) -> LatencySeries:
    """Runs of one case on these days of a month, by some path."""
    record = passed(key())
    fingerprint = dataclasses.replace(record.fingerprint, device=device)
    points = [Point(f"2026-01-{day:02}T00:00:00Z", 10.0, None, None, fingerprint) for day in days]
    return LatencySeries(dataclasses.replace(record, fingerprint=fingerprint), points)


def test_of_several_paths_of_a_case_that_counts_which_ran_last() -> None:
    """Of each device one, whichever path began first or has more runs."""
    ended, once, last, elsewhere = _series("A", 1, 5), _series("A", 3), _series("A", 2, 4, 6), _series("B", 1)
    for history in ([ended, once, last, elsewhere], [last, ended, once, elsewhere]):
        assert trend.newest_paths(history) == [last, elsewhere]
