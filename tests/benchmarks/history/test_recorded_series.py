"""Figures that were made in two ways are never compared: on recorded inputs of two tables of laws, not as a series, a
verdict, or by an anchor; of steps timed alone and in a loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.alerts import movements
from benchmarks.cases import inputs, recorded
from benchmarks.history import accepted, anchor_plan, judgement, trend
from benchmarks.history.accepted import Acceptance, State
from benchmarks.history.judgement import CaseState
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from harness.fingerprint import Fingerprint
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, key, passed

KEY = key(inputs="recorded")
STUDY, ATLAS = "at 8192 tokens: a study", "at 8192 tokens: an atlas; law 01234567"


def night(number: int, sources: str, **conditions: object) -> Fingerprint:
    """Of one night, with these sources of the benches, which are a soft condition."""
    utc, commit = f"2026-02-{1 + number:02d}T00:00:00.000Z", f"{number:07x}" + "0" * 33
    made = {"utc": utc, "commit": commit, "nsa_sha256": f"{number:016x}", "benchmarks_sha256": sources}
    return dataclasses.replace(FINGERPRINT, **{**made, **conditions})  # type: ignore[arg-type]


def nightly(results: Path, begin: int, latency_ms: float, follow: str, sources: str, **conditions: object) -> None:
    """Six nights: NSA on recorded inputs, and dense attention, which takes as long on any."""
    for number in range(begin, begin + 6):
        where = night(number, sources, **conditions)
        found = (passed(KEY, latency_ms), passed(key(implementation="sdpa-flash", inputs="recorded"), 30.0))
        write(results, *(dataclasses.replace(one, fingerprint=where, inputs_follow=follow) for one in found))


def steps(results: Path) -> list[list[float]]:
    """The changes of each series, oldest series first."""
    found = sorted(trend.follow(Store(results).history("cpu")), key=lambda one: one.series.points[0].utc)
    return [[step.change for step in one.trend.changes] for one in found]


def test_a_table_that_changes_begins_a_new_series(tmp_path: Path) -> None:
    nightly(tmp_path / "two", 0, 10.0, STUDY, "a")
    nightly(tmp_path / "two", 6, 15.0, ATLAS, "b")
    assert steps(tmp_path / "two") == [[], []]
    nightly(tmp_path / "one", 0, 10.0, STUDY, "a")
    nightly(tmp_path / "one", 6, 15.0, STUDY, "b")
    assert [len(found) for found in steps(tmp_path / "one")] == [1], "dense attention would join the two"


def test_no_verdict_and_no_alert_lies_across_two_tables(tmp_path: Path) -> None:
    nightly(tmp_path, 0, 10.0, STUDY, "a")
    old = Acceptance(
        "2026-02-07T00:00:00.000Z", "a person", "the level", "cpu", "A CPU", KEY.name, 10.0, None,
        path="torch", fingerprint=night(5, "a"),
    )  # fmt: skip
    baselines = {("cpu", "A CPU", KEY.name): old}
    nightly(tmp_path, 6, 15.0, ATLAS, "b")
    store = Store(tmp_path)
    (standing,) = accepted.standings("cpu", store.history("cpu"), baselines)
    assert standing.state is State.NOT_COMPARABLE
    newest = max(trend.follow(store.history("cpu")), key=lambda one: one.series.points[-1].utc)
    level_ms = judgement.accepted_ms(old, newest)
    assert level_ms is None
    assert judgement.judge(newest, level_ms, old).state is CaseState.SAME
    assert movements.of_runs(store, "cpu", baselines, lambda *_: []) == []


def test_no_anchor_is_measured_for_figures_on_another_table(tmp_path: Path) -> None:
    def planned(results: Path, follow: str) -> bool:
        nightly(results, 0, 10.0, follow, "a")
        return anchor_plan.request(Store(results, "cpu"), night(6, "b", torch="2.14.0"), (KEY,), ()) is not None

    today = inputs.followed(KEY)
    assert today is not None
    assert planned(tmp_path / "same", today)
    assert not planned(tmp_path / "other", STUDY)


def test_a_record_tells_two_fits_to_the_same_curves_apart() -> None:
    law = recorded.law("recorded", 8192)
    assert str(inputs.followed(key(inputs="recorded", length=8192))).endswith(f"{law.target}; law {law.digest}")
    assert dataclasses.replace(law, apart=law.apart + 0.0001).digest != law.digest
    assert inputs.followed(key()) is None


def test_steps_timed_alone_and_in_a_loop_are_two_series(tmp_path: Path) -> None:
    """A step alone was the GPU's time without the host's: 9.1 ms where a loop of them goes at 20."""
    alone = dataclasses.replace(passed(key("train-loop"), 9.1), clock="cuda_event", queued_ahead=True)
    in_a_loop = dataclasses.replace(alone, latency_ms=20.0, queued_ahead=None)
    for number, record in enumerate([alone] * 6 + [in_a_loop] * 6):
        write(tmp_path, dataclasses.replace(record, fingerprint=night(number, "a")))
    found = Store(tmp_path).history("cpu")
    assert sorted(len(one.points) for one in found) == [6, 6]
    assert {one.newest.identity for one in found} == {alone.identity, in_a_loop.identity}
    assert len({alone.identity, in_a_loop.identity}) == 2
    assert steps(tmp_path) == [[], []]
    of_steps = dataclasses.replace(in_a_loop, key=key("train-step"))
    assert of_steps.identity == dataclasses.replace(of_steps, queued_ahead=True).identity


def test_a_record_says_in_short_where_its_inputs_are_from() -> None:
    def source(follow: str | None) -> str | None:
        record: Record = dataclasses.replace(passed(KEY), inputs_follow=follow)
        return record.inputs_source

    assert source("at 8192 tokens: trained, 8k; study of commit 8d4d61e on an H200: 125M model") == "study 8d4d61e"
    assert source("at 8192 tokens: median; atlas of h200, 2026-11-24, commit e4fe0fa0f0; law 0a") == "atlas e4fe0fa0f0"
    assert (
        source("the choices of decode steps of 200 tokens in a.json")
        == "the choices of decode steps of 200 tokens in a.json"
    )
    assert source(None) is None
