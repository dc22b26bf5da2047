"""A series goes on across an upgrade where something tells what that did, and is cut where nothing does."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest

from benchmarks.history import anchors, bridges, trend
from benchmarks.history.anchors import AnchorRatio, SeriesAnchors
from harness.fingerprint import Fingerprint
from tests.benchmarks.synthetic import FINGERPRINT

OLD = FINGERPRINT
NEW = dataclasses.replace(FINGERPRINT, torch="2.14.0")
NEWEST = dataclasses.replace(FINGERPRINT, torch="2.15.0")
MODE = "prefill-forward"
SERIES = ("prefill-forward/case", "torch", "{}")
GPU = dataclasses.replace(FINGERPRINT, driver="580.10", cudnn="9.19.0")
UNKNOWN = dataclasses.replace(GPU, cudnn=None)


def ratio(
    by: float,
    old: Fingerprint = OLD,
    new: Fingerprint = NEW,
    noise: float = 0.01,
    case: str = SERIES[0],
    mode: str = MODE,
) -> AnchorRatio:
    """The sources of one commit took so many times as long under the new conditions."""
    series = (case, *SERIES[1:])
    return AnchorRatio(series, mode, "0123456789", old.conditions, new.conditions, math.log(by), noise)


def found(
    latencies_ms: Sequence[float], runs: Sequence[Fingerprint], *ratios: AnchorRatio, mode: str = MODE
) -> trend.Trend:
    known = SeriesAnchors(anchors.by_new_conditions(ratios), SERIES, mode)
    return trend.of_series(latencies_ms, runs, anchors=known)


def changes(of: trend.Trend) -> list[tuple[int, float]]:
    return [(change.index, round(change.change, 3)) for change in of.changes]


UPGRADE = [OLD] * 10 + [NEW] * 10


def test_what_an_upgrade_does_by_itself_is_no_change_of_level() -> None:
    of = found([10.0] * 10 + [12.0] * 10, UPGRADE, ratio(1.2))
    assert (changes(of), of.level_ms, of.level_begin) == ([], pytest.approx(12.0), 0)
    assert [ms for _, ms in of.comparable] == pytest.approx([12.0] * 20)
    (cut,) = of.breaks
    assert (cut.bridged, cut.commits, cut.cases) == (True, ("0123456789",), 0)
    assert (cut.ratio, cut.uncertainty) == (pytest.approx(1.2), pytest.approx(0.0196))


def test_what_nsa_did_beside_the_upgrade_is_a_change_with_the_uncertainty_of_the_bridge() -> None:
    of = found([10.0] * 10 + [13.2] * 10, UPGRADE, ratio(1.2))
    assert changes(of) == [(10, 0.1)]
    assert of.changes[0].uncertainty == pytest.approx(0.0196)
    assert of.level_ms == 13.2


@pytest.mark.parametrize(("step", "told"), [(1.05, []), (1.08, [(10, 0.08)])])
def test_a_step_at_the_upgrade_that_the_bridge_could_explain_is_not_reported(
    step: float, told: list[tuple[int, float]]
) -> None:
    of = found([10.0] * 10 + [12.0 * step] * 10, UPGRADE, ratio(1.2, noise=0.03))
    assert changes(of) == told


def test_dense_attention_under_other_versions_tells_nothing_of_a_last_run_beside_an_upgrade() -> None:
    known = SeriesAnchors(anchors.by_new_conditions([ratio(1.2)]), SERIES, MODE)
    dense = [{"sdpa-cudnn": ms} for ms in [30.0] * 10 + [40.0]]
    assert changes(trend.of_series([10.0] * 10 + [13.2], UPGRADE[:11], dense_ms=dense, anchors=known)) == [(10, 0.1)]


def test_a_noisy_series_has_a_less_certain_bridge() -> None:
    noisy = [10.0, 10.4] * 5
    assert found([*noisy, *[12.0] * 10], UPGRADE, ratio(1.2)).breaks[0].uncertainty == pytest.approx(
        anchors.Z * bridges.sigma([math.log(ms) for ms in noisy])
    )
    of_class = found([*noisy, *[12.0] * 10], UPGRADE, ratio(1.2, case="a"), ratio(1.2, case="b")).breaks[0]
    assert of_class.uncertainty > anchors.student_t(1) * bridges.sigma([math.log(ms) for ms in noisy])


@pytest.mark.parametrize(("noise", "most"), [(0.006, 0), (0.015, 10)], ids=["a GPU's noise", "a CPU's noise"])
def test_an_upgrade_alone_raises_hardly_an_alarm_and_hides_no_large_step(noise: float, most: int) -> None:
    """100 upgrades with a figure of one process on each side; 95 % intervals leave one in twenty open."""
    alarms = 0
    for seed in range(100):
        random_ms = random.Random(seed)
        before = [10.0 * random_ms.lognormvariate(0, noise) for _ in range(random_ms.randint(4, 20))]
        after = [11.0 * random_ms.lognormvariate(0, noise) for _ in range(random_ms.randint(4, 20))]
        told = ratio(1.1 * random_ms.lognormvariate(0, noise * math.sqrt(2)), noise=0.01 * math.sqrt(2))
        runs = [OLD] * len(before) + [NEW] * len(after)
        alarms += bool(found([*before, *after], runs, told).changes)
        slower = found([*before, *(ms * 1.25 for ms in after)], runs, told).changes
        assert len(before) in [change.index for change in slower if change.change > 0.1]
    assert alarms <= most


def test_two_odd_runs_after_an_upgrade_are_no_change_that_the_bridge_could_explain() -> None:
    of = found([10.0] * 10 + [11.5] * 2 + [12.0] * 8, UPGRADE, ratio(1.2, noise=0.03))
    assert changes(of) == []


def test_a_later_step_under_the_new_conditions_is_as_certain_as_ever() -> None:
    of = found([10.0] * 10 + [12.0] * 5 + [12.6] * 5, UPGRADE, ratio(1.2, noise=0.03))
    assert [(*one, change.uncertainty) for one, change in zip(changes(of), of.changes, strict=True)] == [
        (15, 0.05, 0.0)
    ]


@pytest.mark.parametrize(("step", "told"), [(1.05, []), (1.07, [(11, 0.07)])])
def test_uncertainties_of_two_upgrades_add_in_quadrature(step: float, told: list[tuple[int, float]]) -> None:
    """4 % each is 5.7 % together."""
    noise = 0.04 / anchors.Z
    runs = [OLD] * 10 + [NEW] + [NEWEST] * 10
    bridged = [ratio(1.2, noise=noise), ratio(1.5, NEW, NEWEST, noise)]
    of = found([10.0] * 10 + [12.0] + [18.0 * step] * 10, runs, *bridged)
    assert changes(of) == told
    assert [change.uncertainty for change in of.changes] == pytest.approx([math.hypot(0.04, 0.04)] * len(told))


def test_an_anchor_of_the_run_before_last_reaches_over_two_upgrades() -> None:
    runs = [OLD] * 5 + [NEW] * 5 + [NEWEST] * 5
    of = found([10.0] * 5 + [30.0] * 5 + [12.0] * 5, runs, ratio(1.2, OLD, NEWEST))
    assert changes(of) == []
    assert [one.bridged for one in of.breaks] == [False, True]
    assert [i for i, _ in of.comparable] == [*range(5), *range(10, 15)]


def test_another_case_takes_the_mean_of_its_class_with_a_wider_interval() -> None:
    others = [ratio(1.18, case="a"), ratio(1.22, case="b")]
    of = found([10.0] * 10 + [12.0] * 10, UPGRADE, *others)
    assert (changes(of), of.breaks[0].cases) == ([], 2)
    assert of.breaks[0].ratio == pytest.approx(1.2, abs=0.001)
    spread = math.log(1.22 / 1.18) / math.sqrt(2)
    assert of.breaks[0].uncertainty == pytest.approx(anchors.student_t(1) * spread * math.sqrt(1.5))
    of_others = [ratio(1.1, case="c", mode="decode"), ratio(1.1, case="d", mode="decode")]
    narrower = found([10.0] * 10 + [12.0] * 10, UPGRADE, *others, *of_others).breaks[0].uncertainty
    assert narrower < of.breaks[0].uncertainty / 3, "other classes tell how much cases of one class differ"


def test_cases_that_agree_by_chance_are_no_more_certain_than_their_noise() -> None:
    of = found([10.0] * 20, UPGRADE, *(ratio(1.0, case=str(i)) for i in range(2)))
    assert of.breaks[0].uncertainty >= anchors.student_t(1) * 0.01


@pytest.mark.parametrize(
    ("ratios", "mode"),
    [
        ((), MODE),
        ((ratio(1.2, case="a"),), MODE),
        ((ratio(1.2, case="a"), ratio(1.2, case="b", mode="decode")), MODE),
        ((ratio(1.2, case="a", mode="part-window"), ratio(1.2, case="b", mode="part-window")), "part-window"),
        ((ratio(1.2, NEWEST, NEW),), MODE),
        ((ratio(1.2, OLD, NEWEST),), MODE),
    ],
    ids=[
        "none",
        "one other case",
        "one of each class",
        "another part of the forward",
        "from elsewhere",
        "to elsewhere",
    ],
)
def test_without_a_ratio_that_fits_the_series_is_cut(ratios: tuple[AnchorRatio, ...], mode: str) -> None:
    of = found([10.0] * 10 + [13.0] * 10, UPGRADE, *ratios, mode=mode)
    assert (changes(of), of.level_ms, of.level_begin) == ([], 13.0, 10)
    assert [one.bridged for one in of.breaks] == [False]


def test_two_hosts_that_take_turns_are_compared_as_they_are() -> None:
    of = found([10.0, 20.0] * 10 + [11.0, 22.0] * 10, [OLD, NEW] * 20, ratio(2.0, noise=0.1))
    assert changes(of) == [(20, 0.1)]
    assert of.changes[0].uncertainty == 0.0


def test_a_last_run_within_the_uncertainty_of_its_bridge_asks_for_nothing() -> None:
    runs = [*UPGRADE[:10], NEW]
    assert found([10.0] * 10 + [10.5], runs, ratio(1.0, noise=0.03)).changes == ()
    assert found([10.0] * 10 + [10.8], runs, ratio(1.0, noise=0.03)).confirmation_wanted


def beside(ours_ms: list[float], dense_ms: list[float], runs: list[Fingerprint]) -> trend.Trend:
    return trend.of_series(ours_ms, runs, dense_ms=[{"sdpa-cudnn": ms} for ms in dense_ms])


def test_a_condition_that_an_earlier_record_does_not_know_is_followed_beside_dense_attention() -> None:
    of = beside([20.0] * 5 + [10.0] * 5, [30.0] * 5 + [30.3] * 5, [UNKNOWN] * 5 + [GPU] * 5)
    assert changes(of) == [(5, -0.5)]
    (cut,) = of.breaks
    assert (cut.bridged, cut.ratio, cut.commits) == (True, 1.0, ())
    assert of.changes[0].uncertainty == cut.uncertainty == pytest.approx(0.0196)


def test_what_dense_attention_shows_of_it_is_the_uncertainty() -> None:
    dense = [30.0] * 5 + [33.0] * 5
    runs = [UNKNOWN] * 5 + [GPU] * 5
    assert changes(beside([10.0] * 5 + [9.4] * 5, dense, runs)) == [], "it could hide as much"
    assert changes(beside([10.0] * 5 + [8.0] * 5, dense, runs)) == [(5, -0.2)]
    assert beside([10.0] * 10, dense, runs).breaks[0].uncertainty == pytest.approx(math.log(1.1))


@pytest.mark.parametrize(
    ("runs", "bridged"),
    [
        ([UNKNOWN, dataclasses.replace(GPU, torch="2.14.0")], [False]),
        ([dataclasses.replace(GPU, cudnn="9.18.0"), GPU], [False]),
        ([UNKNOWN, GPU, dataclasses.replace(GPU, cudnn="9.20.0")], [True, False]),
        ([dataclasses.replace(OLD, triton="3.6.0"), OLD], [False]),
    ],
    ids=["another torch too", "two numbers", "a second number", "no Triton"],
)
def test_what_both_records_know_must_be_equal(runs: list[Fingerprint], bridged: list[bool]) -> None:
    each = [one for run in runs for one in [run] * 4]
    of = beside([10.0] * len(each), [30.0] * len(each), each)
    assert [one.bridged for one in of.breaks] == bridged
    assert [one.bridged for one in bridges.breaks(each)] == [bridged[0], *([True] if len(bridged) > 1 else [])]
    alone = trend.of_series([10.0] * len(each), each)
    assert not any(one.bridged for one in alone.breaks), "without a baseline"


def first(ours_ms: list[float], dense_ms: list[float], *, sources: str = "2" * 16) -> trend.Trend:
    runs = [FINGERPRINT] + [dataclasses.replace(FINGERPRINT, nsa_sha256=sources)] * (len(ours_ms) - 1)
    return beside(ours_ms, dense_ms, runs)


def test_the_first_run_alone_is_a_level_where_dense_attention_says_that_the_machine_was_as_it_is() -> None:
    of = first([20.0] + [10.0] * 6, [30.1] + [30.0] * 6)
    assert changes(of) == [(1, -0.5)]
    assert of.level_begin == 1
    assert changes(first([20.0] + [10.0] * 6, [40.0] + [30.0] * 6)) == [(1, -0.5)]
    for no_level in (
        first([12.0] + [10.0] * 6, [40.0] + [30.0] * 6),
        first([20.0] + [10.0] * 6, [30.0] * 7, sources=FINGERPRINT.nsa_sha256),
        trend.of_series([20.0] + [10.0] * 6, [FINGERPRINT] * 7),
        first([20.0, 10.0], [30.0] * 2),
    ):
        assert not [change for change in no_level.changes if change.index == 1 and change.confirmed]
