"""Anchors on record: which ones a run measures, what they bridge, and that they are no figures of the run's own NSA."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import anchor_plan, anchors, judgement, merge, run_file, speedup, trend
from benchmarks.history.accepted import Acceptance
from benchmarks.history.anchor_plan import AnchorRequest
from benchmarks.history.judgement import CaseState
from benchmarks.history.records import Anchor, Record
from benchmarks.history.store import Store
from benchmarks.report.machine_pages import run_chart, trends
from harness import repository
from harness.fingerprint import Fingerprint
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, failed, key, passed

UPGRADED = "2.14.0"
FORWARD, LONG, DECODE = key(), key(length=128), key("decode")


def night(number: int, **changes: object) -> Fingerprint:
    """Of one night, on a commit of its own."""
    made = {
        "utc": f"2026-02-{1 + number:02d}T00:00:00.000Z",
        "commit": f"{number:07x}" + "0" * 33,
        "nsa_sha256": f"{number:016x}",
    }
    return dataclasses.replace(FINGERPRINT, **{**made, **changes})  # type: ignore[arg-type]


def figure(latency_ms: float, where: Fingerprint, the_key: Key = FORWARD, of: int | None = None) -> Record:
    """One case of a run; with `of` it is an anchor at that night's commit."""
    there = night(of or 0)
    anchor = None if of is None else Anchor(str(there.commit), there.nsa_sha256)
    return dataclasses.replace(passed(the_key, latency_ms), fingerprint=where, anchor=anchor)


def upgraded(number: int) -> Fingerprint:
    return night(number, torch=UPGRADED)


def nightly(results: Path, latencies_ms: list[float], begin: int = 0, **changes: object) -> None:
    for number, latency_ms in enumerate(latencies_ms, start=begin):
        where = night(number, **changes)
        write(results, *(figure(latency_ms, where, one) for one in (FORWARD, LONG, DECODE)))


def followed(results: Path, the_key: Key = FORWARD) -> trend.SeriesTrend:
    (one,) = [one for one in trend.follow(Store(results).history("cpu")) if one.series.newest.key == the_key]
    return one


@pytest.mark.parametrize(("now_ms", "state", "change"), [(11.0, CaseState.SAME, None), (12.1, CaseState.SLOWER, 0.1)])
def test_a_case_is_judged_across_an_upgrade(
    now_ms: float, state: CaseState, change: float | None, tmp_path: Path
) -> None:
    """The upgrade alone takes 10 %: the commit of night 5 shows it."""
    nightly(tmp_path, [10.0] * 6)
    write(tmp_path, figure(now_ms, upgraded(6)), figure(11.0, upgraded(6), of=5))
    nightly(tmp_path, [now_ms] * 3, begin=7, torch=UPGRADED)
    one = followed(tmp_path)
    said = judgement.judge(one, None)
    assert (said.state, said.since) == (state, None if change is None else 6)
    assert said.change == (change and pytest.approx(change))
    assert len(one.trend.comparable) == 10
    assert len(followed(tmp_path, LONG).trend.comparable) == 3, "one anchor tells nothing of the other cases"


def test_a_difference_that_a_bridge_could_explain_is_not_judged_slower(tmp_path: Path) -> None:
    """20 % slower at an upgrade whose effect is known within 10 %, then 11 % faster: 7 % in all, which is open."""
    nightly(tmp_path, [10.0] * 6)
    unsure = dataclasses.replace(figure(10.0, upgraded(6), of=5), interval_ms=(9.0, 11.0))
    write(tmp_path, figure(12.0, upgraded(6)), unsure)
    nightly(tmp_path, [12.0] * 4, begin=7, torch=UPGRADED)
    one = followed(tmp_path)
    assert judgement.judge(one, None).state is CaseState.SLOWER
    nightly(tmp_path, [10.7] * 4, begin=11, torch=UPGRADED)
    one = followed(tmp_path)
    assert [round(change.change, 2) for change in one.trend.changes] == [0.2, -0.11]
    assert judgement.judge(one, None).state is CaseState.FIXED
    accepted = Acceptance("2026-02-01T00:00:00Z", "A", "why", "cpu", "A CPU", FORWARD.name, 10.0, None, path="torch")
    before, after = (dataclasses.replace(accepted, fingerprint=where) for where in (night(5), upgraded(6)))
    assert judgement.judge(one, judgement.accepted_ms(before, one), before).state is not CaseState.SLOWER
    assert judgement.judge(one, judgement.accepted_ms(after, one), after).state is CaseState.SLOWER


def test_runs_of_the_same_sources_are_anchors_too(tmp_path: Path) -> None:
    nightly(tmp_path, [10.0] * 6)
    nightly(tmp_path, [11.0] * 3, begin=6, torch=UPGRADED, nsa_sha256=night(5).nsa_sha256)
    one = followed(tmp_path)
    assert (one.trend.changes, len(one.trend.comparable)) == ((), 9)
    (cut,) = one.trend.breaks
    assert (cut.ratio, cut.cases) == (pytest.approx(1.1), 0)
    assert cut.uncertainty == pytest.approx(anchors.Z * 0.01 * math.sqrt(1 + 1 / 3))


def test_an_anchor_is_no_figure_of_the_run(tmp_path: Path) -> None:
    where = upgraded(6)
    write(tmp_path, figure(10.0, where), passed(key(implementation="sdpa-flash"), utc=where.utc))
    write(tmp_path, figure(99.0, night(7)), figure(5.0, night(7), of=5), failed(FORWARD, CaseOutcome.CRASHED, "boom"))
    store = Store(tmp_path)
    assert len(store) == 4
    assert all(record.anchor is None for record in (*store.records(), *store.current()))
    assert [point.latency_ms for point in followed(tmp_path).series.points] == [10.0, 99.0]
    assert [one.nsa.latency_ms for one in speedup.comparisons(store.records())][-1] != 5.0


def test_anchors_survive_the_file_and_a_merge(tmp_path: Path) -> None:
    written = figure(5.0, night(7), of=5)
    path = write(tmp_path / "theirs", figure(9.0, night(7)), written)
    assert [record.anchor for record in run_file.read_all(tmp_path / "theirs")[0]] == [None, written.anchor]
    for _ in range(2):
        merge.merge(tmp_path / "theirs", tmp_path / "ours", merge.MergeResult())
    (merged,) = (tmp_path / "ours" / "runs").glob(run_file.PATTERN)
    assert merged.read_bytes() == path.read_bytes()
    torn = path.read_text().replace('"anchor":["', '"anchor":[7,"')
    path.write_text(torn)
    found, (damaged,) = run_file.read_all(tmp_path / "theirs")
    assert len(found) == 1
    assert "anchor" in damaged.why


def requested(results: Path, now: Fingerprint, *keys: Key, preferred: tuple[str, ...] = ()) -> AnchorRequest | None:
    return anchor_plan.request(Store(results, "cpu"), now, keys or (FORWARD, LONG, DECODE), preferred)


def test_an_upgrade_asks_for_the_last_commit_on_the_cases_that_it_was_measured_on(tmp_path: Path) -> None:
    assert requested(tmp_path, upgraded(6)) is None, "the first run of a machine"
    nightly(tmp_path, [10.0] * 6)
    assert requested(tmp_path, night(6)) is None, "nothing changed"
    assert requested(tmp_path, night(6, platform="Linux 6.18.45", threads=8)) is None, "only soft conditions"
    assert requested(tmp_path, night(6, cpu="Another CPU", torch=UPGRADED)) is None, "another computer"
    found = requested(tmp_path, upgraded(6), FORWARD, LONG, DECODE, key("train-step"), key(implementation="sdpa-flash"))
    assert found is not None
    assert found.differences == ("torch 2.13.0 -> 2.14.0",)
    (plan,) = found.plans
    assert (plan.commit, plan.nsa_sha256) == (night(5).commit, night(5).nsa_sha256)
    assert plan.keys == (FORWARD, LONG, DECODE), "and no case without an earlier figure"


def test_a_release_or_an_accepted_commit_comes_first_where_it_was_measured(tmp_path: Path) -> None:
    nightly(tmp_path, [10.0] * 6)
    found = requested(tmp_path, upgraded(6), preferred=("f" * 40, str(night(2).commit)))
    assert found is not None
    assert [plan.commit for plan in found.plans] == [night(2).commit, night(5).commit]


def test_another_board_of_a_gpu_asks_for_anchors(tmp_path: Path) -> None:
    nightly(tmp_path, [10.0] * 6, driver="580.10", device="NVIDIA H200", cpu="A host")
    found = requested(tmp_path, night(6, driver="580.10", device="NVIDIA H200 NVL", cpu="Another host"))
    assert found is not None
    assert found.differences == ("device NVIDIA H200 -> NVIDIA H200 NVL", "cpu A host -> Another host")


def test_sources_that_cannot_be_had_again_are_no_anchor(tmp_path: Path) -> None:
    nightly(tmp_path, [10.0], dirty=True)
    nightly(tmp_path, [10.0], begin=1, commit=None)
    assert requested(tmp_path, upgraded(6)) is None


def test_a_run_of_the_same_sources_needs_no_anchors(tmp_path: Path) -> None:
    nightly(tmp_path, [10.0] * 3)
    assert requested(tmp_path, night(6, torch=UPGRADED, nsa_sha256=night(2).nsa_sha256)) is None


def test_what_an_interrupted_run_left_is_measured_by_the_next_one_and_nothing_twice(tmp_path: Path) -> None:
    nightly(tmp_path, [10.0] * 6)
    broken = dataclasses.replace(failed(DECODE, CaseOutcome.CRASHED, "boom"), fingerprint=upgraded(6))
    broken = dataclasses.replace(broken, anchor=Anchor(str(night(5).commit), night(5).nsa_sha256))
    write(tmp_path, figure(11.0, upgraded(6)), figure(11.0, upgraded(6), of=5), broken)
    found = requested(tmp_path, upgraded(7))
    assert found is not None
    assert [plan.keys for plan in found.plans] == [(LONG,)]
    write(tmp_path, figure(11.0, upgraded(7), LONG), figure(11.0, upgraded(7), LONG, of=5))
    assert requested(tmp_path, upgraded(8)) is None


def test_the_smallest_and_the_largest_of_each_class_are_anchors() -> None:
    keys = [key(mode, length=length) for mode in ("decode", "prefill-forward", "train-step") for length in (8, 64, 16)]
    assert [(one.mode, one.num_keys) for one in anchors.cases([*keys, key("part-window"), key("memory")])] == [
        ("decode", 8), ("decode", 64), ("prefill-forward", 8), ("prefill-forward", 64), ("train-step", 64),
    ]  # fmt: skip
    assert anchors.cases(keys[:1]) == keys[:1]


def test_pages_say_by_how_much_how_surely_and_by_which_commit_a_break_is_bridged(tmp_path: Path) -> None:
    nightly(tmp_path, [10.0] * 6)
    write(tmp_path, figure(11.0, upgraded(6)), figure(11.0, upgraded(6), of=5))
    one, store = followed(tmp_path), Store(tmp_path)
    drawn = run_chart.over_runs(one, {point.utc: i for i, point in enumerate(one.series.points)}, None, ())
    (mark,) = [trace for trace in drawn["data"] if trace["name"] == "conditions changed"]
    assert [text.replace("\u00a0", " ") for text in mark["text"]] == ["time +10.0 % ± 2.8 %, 0000005"]
    (said,) = mark["hovertext"]
    assert said.startswith("conditions changed: torch 2.13.0 -&gt; 2.14.0<br>bridged: this case at 0000005")
    assert [shape["line"]["dash"] for shape in drawn["layout"]["shapes"]] == ["dashdot"]
    (nsa, *_) = [trace for trace in drawn["data"] if trace["name"] == "NSA"]
    assert None not in nsa["y"], "the line goes on"
    (boundary,) = trends.boundaries(store.runs("cpu"), store.anchor_ratios("cpu"))
    assert (boundary.bridged, boundary.commits) == (True, ("0000005",))
    assert [one.bridged for one in trends.boundaries(store.runs("cpu"))] == [False]


def test_the_parts_of_the_forward_are_followed_beside_the_dense_baseline_of_the_whole(tmp_path: Path) -> None:
    """Another kernel of the host is slower for all; the part itself becomes 10 % slower on top of it."""
    part, dense = key("part-window"), key(implementation="sdpa-flash")
    for number in range(12):
        where = night(number, platform="Linux-6.18.45" if number >= 6 else "Linux-6.18.44")
        host, ours = (1.1 if number >= 6 else 1.0), (1.1 if number >= 6 else 1.0)
        write(tmp_path, figure(10.0 * host * ours, where, part), figure(30.0 * host, where, dense))
    one = followed(tmp_path, part)
    assert [(change.index, round(change.change, 3)) for change in one.trend.changes] == [(6, 0.1)]
    assert not one.series.points[-1].dense_ms, "it is compared with no baseline all the same"


def test_the_stored_runs_of_the_h200_show_the_forward_of_64k_at_twice_its_first_throughput() -> None:
    """From 1.0 to 2.0 million tokens/s in two changes of level: what no early record knew of cuDNN cuts nothing."""
    name = "prefill-forward/64x4x128/b1/s65536/bfloat16/cold/nsa"
    found = [one for one in Store(repository.ROOT / "results").history("h200") if one.newest.key.name == name]
    points = [point for one in found for point in one.points if point.utc < "2026-11-23T07"]
    if not points:
        pytest.skip("no stored runs of an H200 here")
    of = trend.of_points(points)
    steps = [(str(points[one.index].fingerprint.commit)[:7], one.change) for one in of.changes]
    assert steps == [("81592ac", pytest.approx(-0.430, abs=0.002)), ("9c59cda", pytest.approx(-0.140, abs=0.002))]
    assert [one.uncertainty for one in of.changes] == pytest.approx([0.02, 0.0], abs=0.001)
    assert [round(65536 / ms * 1e3 / 1e6, 1) for ms in (points[0].latency_ms, of.level_ms)] == [1.0, 2.0]
