"""Histories whose truth is known: what is counted, and that a rule which calls everything or nothing is red."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import backtest, calibration, calibration_samples, replay
from benchmarks.ab.backtest import Backtest, BacktestEvent
from benchmarks.ab.calibration import CaseTimings
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import CaseResult, MeasurePair, PairTiming
from benchmarks.report import pages
from benchmarks.report.further_pages import backtest as page
from benchmarks.report.further_pages import calibration as calibration_page
from harness import jsonl
from tests.benchmarks import comparisons

RULES = Rules()
PAIRS, CASES = 40, 5
GOALS = ("calls that are right", "changes of 3% found", "slowdowns traced to their commit")


def quiet(r: random.Random) -> float:
    return abs(r.gauss(0.0, 0.004))


@pytest.fixture(scope="module")
def measured() -> list[CaseTimings]:
    """Pairs of a machine as quiet as a GPU."""
    return calibration.timings(comparisons.calibration_pairs(PAIRS, CASES, quiet))


def always(verdict: CompareVerdict) -> replay.Judge:
    """A rule that looks at one pair and then answers this."""

    def judge(results: Sequence[CaseResult], measure: MeasurePair, rules: Rules) -> None:
        measure([one.case for one in results])
        for one in results:
            one.verdict = verdict

    return judge


def missed(events: Sequence[BacktestEvent]) -> list[str]:
    return [one.name for one in backtest.shares(events) if not one.met]


def test_compare_finds_the_changes_and_their_commits_on_a_quiet_machine(measured: list[CaseTimings]) -> None:
    events = replay.replay(measured, RULES, seed=0)
    assert missed(events) == []
    assert len(events) >= replay.LEAST
    shares = {one.name: one for one in backtest.shares(events)}
    assert [shares[name].goal for name in GOALS] == [0.95, 0.9, 0.9]
    assert shares[GOALS[0]].hits == sum(event.change != 0 for event in events), "every change is called"
    assert all(event.pairs == 3 for event in events if event.change <= 0), "with the other cases three pairs decide"
    assert all(event.pairs > 3 for event in events if event.change > 0 and event.commit), "the search takes pairs too"
    kinds = Counter(event.change for event in events)
    assert set(kinds) == set(replay.CHANGES)
    assert len({event.commit for event in events}) == replay.COMMITS + 1, "every commit, and none"
    assert {event.half for event in events} == {0, 1}
    assert {event.case for event in events} == {one.case for one in measured}


def test_the_same_seed_gives_the_same_histories(measured: list[CaseTimings]) -> None:
    first, again, other = (replay.replay(measured, RULES, seed, always(CompareVerdict.SAME)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    "verdict", [CompareVerdict.SLOWER, CompareVerdict.FASTER, CompareVerdict.SAME, CompareVerdict.UNDECIDED]
)
def test_a_rule_that_answers_one_thing_misses_every_goal(measured: list[CaseTimings], verdict: CompareVerdict) -> None:
    """It calls everything, or nothing."""
    assert missed(replay.replay(measured, RULES, 0, always(verdict))) == list(GOALS)


def told(by: Callable[[float], CompareVerdict]) -> replay.Judge:
    """A rule that says of one pair what a function makes of its log-ratio."""

    def judge(results: Sequence[CaseResult], measure: MeasurePair, rules: Rules) -> None:
        for case, pair in measure([one.case for one in results]).items():
            assert isinstance(pair, PairTiming)
            next(one for one in results if one.case == case).verdict = by(pair.log_ratio)

    return judge


def plain(log_ratio: float) -> CompareVerdict:
    """What is beyond 2 %."""
    if abs(log_ratio) < 0.02:
        return CompareVerdict.SAME
    return CompareVerdict.SLOWER if log_ratio > 0 else CompareVerdict.FASTER


def without_noise(pairs: int = 8) -> CaseTimings:
    """Each pair of which is what was injected."""
    ratios = {0.0: 0.0, 0.03: 0.03, 0.1: 0.1}
    pair = {level: PairTiming(10.0, 10.0 + 10 * ratio, ratio) for level, ratio in ratios.items()}
    return CaseTimings("a", (pair,) * pairs, ratios, tuple(range(pairs)))


def test_the_truth_is_what_the_commits_do() -> None:
    """A rule that knows the truth is right throughout; one that never sees the last commits is not."""
    events = replay.replay([without_noise()], RULES, 0, told(plain))
    assert missed(events) == []
    assert all(event.suspects == ((event.commit,) if event.change > 0 else ()) for event in events)
    assert all(event.right == event.called == (event.change != 0) for event in events)
    turned = replay.replay([without_noise()], RULES, 0, told(lambda ratio: plain(-ratio)))
    assert set(GOALS) == set(missed(turned)), "a change called in the wrong direction is not found"


def test_a_search_that_leaves_two_commits_has_not_found_it() -> None:
    event = BacktestEvent("a", 0, 0.1, 3, CompareVerdict.SLOWER, (2, 3), 9)
    (traced,) = [one for one in backtest.shares([event]) if one.name == GOALS[2]]
    assert (traced.hits, traced.trials, traced.met) == (0, 1, False)
    found = dataclasses.replace(event, suspects=(3,))
    (traced,) = [one for one in backtest.shares([found, event]) if one.name == GOALS[2]]
    assert (traced.hits, traced.share) == (1, 0.5)


def test_bounds_are_those_of_the_binomial() -> None:
    one = backtest.Share("x", 19, 20, 0.9)
    assert one.least == pytest.approx(0.7839, abs=1e-4), "beta.ppf(0.05, 19, 2)"
    nothing = backtest.Share("x", 0, 0, 0.9)
    assert (nothing.share, nothing.least, nothing.met) == (None, 0.0, False)


def test_the_rules_are_fitted_on_the_other_half(measured: list[CaseTimings], monkeypatch: pytest.MonkeyPatch) -> None:
    fitted_on: list[set[int]] = []

    def fit(some: Sequence[CaseTimings], rules: Rules) -> Rules:
        fitted_on.append({id(pair) for one in some for pair in one.pairs})
        return dataclasses.replace(rules, smallest_change=len(fitted_on) / 1000)

    def judge(results: Sequence[CaseResult], measure: MeasurePair, rules: Rules) -> None:
        by_ratio = {pair[level].log_ratio: id(pair) for one in measured for pair in one.pairs for level in pair}
        seen = {
            by_ratio[found.log_ratio if found.log_ratio in by_ratio else -found.log_ratio]
            for found in measure([one.case for one in results]).values()
            if isinstance(found, PairTiming)
        }
        assert not seen & fitted_on[round(rules.smallest_change * 1000) - 1]

    monkeypatch.setattr(calibration, "fit", fit)
    replay.replay(measured, RULES, 0, judge)
    assert len(fitted_on) == 2


def test_cases_are_compared_that_the_same_processes_have_measured() -> None:
    """Of three, one has pairs of its own between those of all: in the half of these it is compared alone."""
    pairs = comparisons.calibration_pairs(24, 3, quiet)
    own = (dataclasses.replace(pair, cases=pair.cases[:1]) for pair in pairs[12:20])
    some = [*pairs[:12], *own, *pairs[20:]]
    measured = calibration.timings(some)
    processes = {id(pair): number for one in measured for number, pair in zip(one.numbers, one.pairs, strict=True)}
    by_ratio = {pair[level].log_ratio: id(pair) for one in measured for pair in one.pairs for level in pair}
    asked: dict[str, set[int]] = {}

    def judge(results: Sequence[CaseResult], measure: MeasurePair, rules: Rules) -> None:
        names = [one.case for one in results]
        asked.setdefault(names[0], set()).add(len(names))
        for _ in range(3):
            seen = [found.log_ratio for found in measure(names).values() if isinstance(found, PairTiming)]
            pairs_seen = {by_ratio[ratio if ratio in by_ratio else -ratio] for ratio in seen}
            assert len(pairs_seen) == len(names)
            assert len({processes[pair] for pair in pairs_seen}) == 1
        for one in results:
            one.verdict = CompareVerdict.SAME

    replay.replay(measured, RULES, 0, judge)
    assert asked == {"case 0": {1, 3}, "case 1": {3}, "case 2": {3}}


def test_each_use_of_a_pair_is_counted_by_the_pairs_that_cases_have() -> None:
    event = BacktestEvent("a", 0, 0.0, None, CompareVerdict.SAME, (), 9)
    found = Backtest("cpu", "identity", 8, 3, 0, "2026-01-01T00:00:00.000Z", None, None, "x", (event,) * 2)
    assert found.uses == 18 / 24
    assert dataclasses.replace(found, case_pairs=12).uses == 18 / 12


def test_a_change_that_could_not_be_injected_is_in_no_history() -> None:
    coarse = dataclasses.replace(without_noise(), injected={0.0: 0.0, 0.1: 0.1})
    events = replay.replay([coarse], RULES, 0, told(plain))
    assert {event.change for event in events} == {0.0, 0.1, -0.1}
    assert missed(events) == [GOALS[1]], "nothing shows that 3 % is found"
    with pytest.raises(ValueError, match="no recorded case has work injected"):
        replay.replay([dataclasses.replace(coarse, injected={0.0: 0.0})], RULES, 0)


def test_takes_the_name_of_any_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", "--gpu", "gpu-geforce-rtx-5090", "--out", str(tmp_path)]) == 2
    assert "gpu-geforce-rtx-5090.pairs.jsonl must hold" in capsys.readouterr().err


def test_the_command_writes_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["backtest", "--gpu", "h200", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert (
        "must hold 12 pairs of one machine state, and has 0; python -m benchmarks calibrate" in capsys.readouterr().err
    )
    file = calibration_samples.path(tmp_path, "h200")
    for pair in comparisons.calibration_pairs(16, 4, quiet):
        jsonl.append(file, pair)
    with file.open("a") as torn:
        torn.write('{"identity": "torn')
    assert main(arguments) == 0
    said, warned = capsys.readouterr()
    assert "1 line is damaged and left out, the first: h200.pairs.jsonl:17: " in warned
    summary = json.loads(said.splitlines()[-1])
    assert summary["missed"] == []
    found = backtest.load(tmp_path, "h200")
    assert found is not None
    assert (found.recorded, found.cases, summary["events"]) == (16, 4, len(found.events))
    assert found.events == tuple(
        replay.replay(calibration.timings(calibration_samples.read(tmp_path, "h200")[0]), Rules.of_device("cuda"), 0)
    )
    (read,), damaged = page.read(tmp_path)
    assert (read, damaged) == (found, [])
    assert calibration_page.read(tmp_path) == ([], []), "it is no calibration"
    section = page.show(read)
    rows = [[cell.text for cell in row] for row in section.shares.rows]
    assert [row[0] for row in rows[:3]] == list(GOALS)
    assert section.missed == ""
    assert f"{len(found.events)} histories of eight commits, made of 16 recorded pairs" in section.sentence


def test_a_page_says_which_goals_are_missed(tmp_path: Path) -> None:
    events = tuple(replay.replay([without_noise()], RULES, 0, always(CompareVerdict.SLOWER)))
    found = Backtest("cpu", "identity", 8, 1, 0, "2026-01-01T00:00:00.000Z", "a" * 40, False, "x", events)
    backtest.save(tmp_path, found)
    assert backtest.load(tmp_path, "cpu") == found
    assert page.show(found).missed == ", ".join(GOALS)
    reached = [row[5].text for row in page.show(found).shares.rows[:3]]
    assert reached == ["no"] * 3
    pages.build(tmp_path, pages.ReportSettings(script=False))
    text = (tmp_path / "report" / "calibration.html").read_text()
    assert "made of 8 recorded pairs of processes of 1 cases" in text
    assert f"<strong>Goals missed:</strong> {', '.join(GOALS)}" in text
    file = backtest.path(tmp_path, "cpu")
    file.write_text(file.read_text().replace('"commit": null', '"commit": 3'))
    _, (damaged,) = page.read(tmp_path)
    assert "cpu.backtest.json is no backtest: " in damaged
    pages.build(tmp_path, pages.ReportSettings(script=False))
    assert "cpu.backtest.json is no backtest: " in (tmp_path / "report" / "index.html").read_text()
