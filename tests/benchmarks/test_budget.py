"""What a limited time is spent on: the rotation of a week, information per second, and what is said of the rest."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import budget, runner, worker
from benchmarks.__main__ import main
from benchmarks.ab import calibration, paired_run, result
from benchmarks.ab.checkout import Sources
from benchmarks.ab.result import CompareVerdict, Rules, Side
from benchmarks.ab.stages import StageClock
from benchmarks.ab.trial import PairedSamples
from benchmarks.budget import BudgetCase
from benchmarks.cases.key import Key
from benchmarks.commands import compare
from benchmarks.commands import run as run_command
from benchmarks.history.store import CaseVisit, Store
from benchmarks.report.machine_pages import tables as machine_tables
from benchmarks.runner import Measurement
from benchmarks.timing import peak
from harness import arguments, jsonl, machines
from tests.benchmarks import stored
from tests.benchmarks.comparisons import comparison_result
from tests.benchmarks.full_results import write_calibration
from tests.benchmarks.synthetic import FINGERPRINT, key, passed

NOW = "2026-03-20T00:00:00.000Z"


def case(
    name: str, cost_s: float = 60.0, last_utc: str = NOW, unknown: float = 1.0, reached: bool = True
) -> BudgetCase:
    return BudgetCase(name, (), cost_s, last_utc, unknown, reached)


def visit(utc: str, nsa_sha256: str, case_s: float | None) -> CaseVisit:
    where = dataclasses.replace(FINGERPRINT, nsa_sha256=nsa_sha256)
    return CaseVisit(utc, where, "torch", case_s, None, None, None)


def night(number: int) -> str:
    return f"2026-03-{number + 1:02d}T02:00:00.000Z"


@pytest.mark.parametrize("seed", range(5))
def test_seven_nights_meet_every_case(seed: int) -> None:
    """However dear a case is and however little it tells: within any seven nights in a row of three weeks."""
    draw = random.Random(seed)
    found = [
        case(f"case {n}", draw.choice([5.0, 30.0, 300.0]), "", draw.random(), draw.random() < 0.1) for n in range(60)
    ]
    needed_s = budget.choose(found, 1.0, night(0)).needed_s
    met: list[set[str]] = []
    for number in range(21):
        plan = budget.choose(found, needed_s, night(number))
        assert plan.enough
        assert sum(one.cost_s for one in plan.chosen) <= needed_s
        met.append({one.case for one in plan.chosen})
        assert met[-1] | {one.case for one in plan.left_out} == {one.case for one in found}
        found = [dataclasses.replace(one, last_utc=night(number)) if one.case in met[-1] else one for one in found]
    for begin in range(15):
        assert set().union(*met[begin : begin + budget.NIGHTS]) == {one.case for one in found}


def test_a_budget_that_cannot_meet_every_case_says_what_can() -> None:
    plan = budget.choose([case(f"case {n}", 600.0, "") for n in range(14)], 600.0, NOW)
    assert [one.case for one in plan.chosen] == ["case 0"]
    assert not plan.enough
    assert budget.message(plan).splitlines() == [
        "1 of 14 cases fit in the budget of 10 min; UNMEASURED: " + ", ".join(f"case {n}" for n in range(1, 14)),
        "each case within 7 nights needs 30 min a night",
    ]
    assert budget.message(budget.choose([case("a")], 90.0, NOW)) == "the budget of 90 s suffices for all 1 cases"
    assert budget.message(budget.choose([case("a", 60.0)], 1.0, NOW)).splitlines() == [
        "the budget of 1 s suffices for no case; 1 case is measured all the same, about 60 s",
        "each case within 7 nights needs 69 s a night",
    ]
    assert budget.message(budget.choose([case("a"), case("b")], 1.0, NOW)).startswith(
        "the budget of 1 s suffices for no case; 1 case is measured all the same, about 60 s; UNMEASURED: b\n"
    )


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (case("b"), case("a", cost_s=90.0)),
        (case("b", unknown=0.9), case("a", unknown=0.5)),
        (case("b", reached=True), case("a", reached=False)),
        (case("b", last_utc="2026-03-15T00:00:00.000Z"), case("a", last_utc="2026-03-18T00:00:00.000Z")),
        (case("b", unknown=0.5, cost_s=30.0), case("a", unknown=0.9, cost_s=60.0)),
    ],
    ids=["cheaper", "less known", "reached", "longer ago", "more per second"],
)
def test_what_tells_more_per_second_is_chosen(better: BudgetCase, worse: BudgetCase) -> None:
    oldest = case("oldest", 200.0, "2026-03-01T00:00:00.000Z")  # what the rotation takes
    plan = budget.choose([worse, better, oldest], 200.0 + max(better.cost_s, worse.cost_s), NOW)
    assert [one.case for one in plan.chosen] == ["oldest", "b"]


def test_what_is_known_of_a_case(tmp_path: Path) -> None:
    a, b, of_baseline = key(length=8192), key("decode"), key(implementation="sdpa-flash", length=8192)
    write_calibration(tmp_path)
    costs_s = (2.0, 4.0, 6.0, 8.0)
    visits = {
        a.name: [visit(night(n), "new" if n else "old", costs_s[n]) for n in range(4)],
        of_baseline.name: [visit(night(5), "new", None)],
    }
    first, second = budget.cases([a, of_baseline, b], visits, calibration.load(tmp_path, "cpu"), "new")
    assert (first.case, first.keys) == (a.case, (a, of_baseline))
    assert first.cost_s == 6.0 + 5.0  # the median of its last three; the baseline's is not known: that of the mode
    assert first.last_utc == night(3)
    assert not first.reached
    assert 0 < first.unknown < 0.2
    assert (second.cost_s, second.last_utc, second.reached, second.unknown) == (budget.UNKNOWN_COST_S, "", True, 1.0)
    (changed, _) = budget.cases([a, b], visits, None, "other sources")
    assert changed.reached
    assert changed.unknown == 1.0


@pytest.mark.parametrize(("text", "time_s"), [("20m", 1200), ("90s", 90), ("1h30m", 5400), ("0.5h", 1800)])
def test_reads_a_time(text: str, time_s: float) -> None:
    assert arguments.time_s(text) == time_s


@pytest.mark.parametrize("text", ["", "20", "m", "20 m", "-5m", "0s", "1d", "20mm", "٢٠m", "２０m"])
def test_refuses_what_is_no_time(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--gpu", "cpu", f"--budget={text}"])
    assert f"must be a time such as 20m, 90s or 1h30m; got {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["10001h", "9" * 400 + "h", "1000000m"])
def test_refuses_more_than_a_year(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be at most 10000h; got"):
        arguments.time_s(text)


def test_a_run_measures_what_was_met_longest_ago_and_names_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven quick nights in a row, each told to take a second: together they meet each case of a mode."""
    monkeypatch.setattr(worker, "run", runner.run)
    monkeypatch.setattr(peak, "measure", lambda machine: None)
    monkeypatch.setattr(runner, "measure", lambda the_key, device, plan, where, *_: Measurement(
        dataclasses.replace(passed(the_key), fingerprint=where, case_s=10.0)
    ))  # fmt: skip
    monkeypatch.setattr(run_command, "build_page", lambda results: results)
    words = ["run", "--quick", "--gpu", "cpu", "--cases", "part-*", "--budget", "1s", "--out", str(tmp_path)]
    met: list[str] = []
    for _ in range(7):
        assert main(words) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        newest = Store(tmp_path).records("cpu")[-1]
        met.append(newest.key.case)
        assert newest.key.case not in told["unmeasured"]
    visits = Store(tmp_path).visits("cpu")
    assert sorted(set(met)) == sorted({*met, *told["unmeasured"]})
    assert {one.case_s for found in visits.values() for one in found} == {10.0}
    shown = machine_tables.unmeasured(visits, Store(tmp_path).runs("cpu")[-1].utc)
    oldest_first = sorted(set(met) - {met[-1]}, key=lambda name: -met[::-1].index(name))
    assert [row[0].text for row in shown.rows] == [f"{name}/nsa" for name in oldest_first]


def test_the_clock_ends_it_between_two_cases() -> None:
    keys = [key(implementation="sdpa-flash"), key(), key("decode")]
    assert not run_command._over(keys, 2, 59.0, 60.0)
    assert not run_command._over(keys, 1, 61.0, 60.0)  # NSA's own figure follows
    assert run_command._over(keys, 2, 61.0, 60.0)
    assert not run_command._over(keys, 3, 61.0, 60.0)


def test_the_time_of_a_case_is_kept(tmp_path: Path) -> None:
    stored.write(tmp_path, dataclasses.replace(passed(key()), case_s=1.25), passed(key("decode")))
    assert [one.case_s for found in Store(tmp_path).visits("cpu").values() for one in found] == [1.25, None]


def test_a_comparison_ends_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pairs at 40 s each: after the second the minute is over, and what is open says so."""
    clock = iter(range(0, 4000, 40))
    samples = PairedSamples((10.0,) * 6, ((10.0,),) * 6)
    monkeypatch.setattr(paired_run, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(paired_run.trial, "run", lambda starter, keys, *_, **__: [samples for _ in keys])
    side = cast(Sources, SimpleNamespace(side=Side("main", "a" * 40, False, "b" * 16)))
    rules = paired_run.CaseRules(Rules(), None)
    found, interrupted = paired_run.measure(machines.recognise(None), [key(), key("decode")], side, side, rules, 60.0)
    assert not interrupted
    assert {one.verdict for one in found} == {CompareVerdict.UNDECIDED}
    assert {one.reason for one in found} == {"the budget was over after 2 pairs of processes"}
    assert {len(one.changes) for one in found} == {2}


def test_what_is_decided_when_a_comparison_is_interrupted_stays_decided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """33 cases are two groups, each of which is analysed before either goes on; the oracle is asked in each first
    pair."""
    asked: list[tuple[int, int, bool]] = []
    wild = random.Random(4)

    def measured(
        _: object, keys: list[Key], __: Rules, first: int, *, check: bool, clock: StageClock
    ) -> list[PairedSamples]:
        if len(asked) == 15:
            raise KeyboardInterrupt
        asked.append((len(keys), first, check))
        clock.add({"samples": 2.4, "start": 0.2})
        calm = keys[0].num_queries == 64
        ratios = [1.0 if calm and key is keys[0] else wild.uniform(0.5, 2.0) for key in keys]
        return [PairedSamples((10.0,) * 6, ((10.0 * ratio,),) * 6) for ratio in ratios]

    monkeypatch.setattr(paired_run.trial, "run", measured)
    side = cast(Sources, SimpleNamespace(side=Side("main", "a" * 40, False, "b" * 16)))
    rules = paired_run.CaseRules(Rules(), None)
    keys = [key(length=64 * (i + 1)) for i in range(33)]
    found, interrupted = paired_run.measure(machines.recognise(None), keys, side, side, rules)
    assert interrupted
    of_17, of_16 = [(17, 0, True), (17, 1, False), (17, 0, False)], [(16, 0, True), (16, 1, False), (16, 0, False)]
    second = [(16, 1, False), (16, 0, False), (16, 1, False)]
    assert asked == [*of_17, *of_16, *second, *second, (16, 0, False), (16, 1, False), (16, 0, False)]
    assert found[0].verdict is CompareVerdict.SAME
    assert {one.verdict for one in found[1:]} == {CompareVerdict.UNDECIDED}
    assert {one.reason for one in found[1::2]} == {"interrupted after 6 pairs of processes"}
    assert {one.reason for one in found[2::2]} == {"interrupted after 9 pairs of processes"}
    said = capsys.readouterr().out
    assert "[17 cases, pair 1 of at most 12; 17 of 33 cases begun] 0 s (samples 2), 0 s in all, about 0 s to" in said


def test_what_the_last_analysis_said_of_a_case_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two groups is interrupted when the first one has come to its end."""
    count, wild = 0, random.Random(4)

    def measured(_: object, keys: list[Key], *__: object, **___: object) -> list[PairedSamples]:
        nonlocal count
        count += 1
        if count > 6 + 6 + 6:  # of the first group's last analysis
            raise KeyboardInterrupt
        return [PairedSamples((10.0,) * 6, ((10.0 * wild.uniform(0.5, 2.0),),) * 6) for _ in keys]

    monkeypatch.setattr(paired_run.trial, "run", measured)
    side = cast(Sources, SimpleNamespace(side=Side("main", "a" * 40, False, "b" * 16)))
    keys = [key(length=64 * (i + 1)) for i in range(33)]
    rules = paired_run.CaseRules(Rules(), None)
    found, interrupted = paired_run.measure(machines.recognise(None), keys, side, side, rules)
    assert interrupted
    assert all("12 pairs of processes leave it between" in str(one.reason) for one in found[0::2])
    assert {one.reason for one in found[1::2]} == {"interrupted after 6 pairs of processes"}


def test_a_comparison_takes_what_was_compared_longest_ago(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [key(length=64), key(length=128), key(length=256)]
    stored.write(tmp_path, *(dataclasses.replace(passed(one), case_s=10.0) for one in keys))
    for day, one in zip((3, 1, 2), keys, strict=True):
        utc = f"2026-02-{day:02d}T00:00:00.000Z"
        compared = dataclasses.replace(comparison_result(CompareVerdict.SAME), utc=utc, key=one)
        jsonl.append(result.path(tmp_path, utc, compared.base, compared.head), compared)
    asked = argparse.Namespace(out=tmp_path, budget=60.0)
    rules = paired_run.CaseRules(Rules(), None)
    plan = compare._planned(asked, machines.recognise(None), keys, rules, asked.budget)
    assert plan is not None
    assert [one.case for one in plan.chosen] == [keys[1].case, keys[2].case]  # 3 pairs of 10 s each
    assert f"UNMEASURED: {keys[0].case}" in capsys.readouterr().out
    assert compare._planned(asked, machines.recognise(None), keys, rules, None) is None


def test_a_gpu_takes_the_times_of_another_for_cases_that_it_has_no_record_of(tmp_path: Path) -> None:
    """Or each counts for 15 s, and most of a comparison that would fit is left out."""
    fast, other = key(length=64), key(length=128)
    stored.write(tmp_path, dataclasses.replace(passed(fast), case_s=2.0))
    h100 = dataclasses.replace(machines.recognise(None), id="h100-sxm", device="cuda")
    assert compare._visits(tmp_path, h100) == {}  # a CPU's are no GPU's
    record = passed(fast)
    fingerprint = dataclasses.replace(record.fingerprint, machine="h200")
    stored.write(tmp_path, dataclasses.replace(record, fingerprint=fingerprint, case_s=3.0))
    assert [visit.case_s for visit in compare._visits(tmp_path, h100)[fast.name]] == [3.0]
    assert [visit.case_s for visit in compare._visits(tmp_path, machines.recognise(None))[fast.name]] == [2.0]
    fingerprint = dataclasses.replace(record.fingerprint, machine="h100-sxm")
    own = dataclasses.replace(passed(other), fingerprint=fingerprint, case_s=4.0)
    stored.write(tmp_path, own)
    found = compare._visits(tmp_path, h100)
    assert {name: [visit.case_s for visit in of_case] for name, of_case in found.items()} == {
        fast.name: [3.0], other.name: [4.0]
    }  # fmt: skip
