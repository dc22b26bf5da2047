"""What the tables of the pages say, and in which order: verdicts, incidents, calibration, references."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import regression.ledger
from benchmarks.ab import open_bounds, result
from benchmarks.ab.result import CompareVerdict, Side
from benchmarks.history import accepted, speedup, trend
from benchmarks.history.store import Store
from benchmarks.report import changes, references
from benchmarks.report.first_page import comparisons, evidence
from benchmarks.report.folder import ReportFolder
from benchmarks.report.further_pages import calibration, ledger
from benchmarks.report.links import Repository
from benchmarks.report.machine_pages import lengths
from benchmarks.report.machine_pages import tables as machine_tables
from benchmarks.report.machine_pages.tables import Race, faster_from
from benchmarks.report.published import PublishedSeries, PublishedSource
from benchmarks.report.table import NBSP, Cell, ReportTable, percent
from regression.contract import Bound, Evidence, ReproVerdict, aspects
from regression.ledger import LedgerEntry
from regression.runner import Pace
from tests.benchmarks import full_results
from tests.benchmarks.synthetic import key, passed


def texts(table: ReportTable) -> list[list[str]]:
    assert all(len(row) == len(table.head) for row in table.rows)
    return [[cell.text.replace(NBSP, " ") for cell in row] for row in table.rows]


def column(table: ReportTable, name: str) -> list[str]:
    return [row[list(table.head).index(name)] for row in texts(table)]


def comparisons_of(results: Path) -> list[comparisons.CompareRun]:
    found, damaged = result.read(results)
    assert damaged == []
    return comparisons.comparisons(found)


def test_the_gravest_verdict_comes_first(tmp_path: Path) -> None:
    full_results.write_verdicts(tmp_path)
    (comparison,) = comparisons_of(tmp_path)
    assert column(comparison.table, "verdict") == ["FAILED", "SLOWER", "UNDECIDED", "FASTER", "SAME"]
    assert column(comparison.table, "change of time") == ["–", "+8.1 %", "+2.0 %", "−6.0 %", "+0.2 %"]
    assert comparison.summary.text.replace(NBSP, " ") == "1 FAILED, 1 SLOWER, 1 UNDECIDED, 1 FASTER, 1 SAME"
    assert comparison.summary.kind == "bad"


def test_the_newest_comparison_of_each_machine_is_shown_the_others_in_a_line(tmp_path: Path) -> None:
    elsewhere = full_results.run_of(1, "cpu", "A CPU")
    full_results.write_verdicts(tmp_path, "2026-01-01T00:00:00Z", fingerprint=elsewhere)
    full_results.write_verdicts(tmp_path, "2026-02-01T00:00:00Z")
    full_results.write_verdicts(tmp_path, "2026-03-01T00:00:00Z", verdict=CompareVerdict.SAME, reason=None)
    found = comparisons_of(tmp_path)
    assert [(one.machine, one.utc[5:7]) for one in comparisons.newest(found)] == [("h200", "03"), ("cpu", "01")]
    assert column(comparisons.earlier(found), "when") == ["2026-02-01 00:00"]


def test_speed_is_of_exactly_that_commit(tmp_path: Path) -> None:
    full_results.write_verdicts(tmp_path, "2026-03-01T00:00:00Z", verdict=CompareVerdict.SAME, reason=None)
    full_results.write_verdicts(tmp_path, "2026-04-01T00:00:00Z", head=Side("working tree", "c" * 40, True, "d" * 16))
    speed = comparisons.speed(comparisons_of(tmp_path))
    commit = full_results.run_of(full_results.SLOWER_FROM).commit
    assert {place: cell.text for place, cell in speed.items()} == {("h200", commit): f"5{NBSP}SAME"}


def test_the_ledger_has_a_row_per_commit_newest_first(tmp_path: Path) -> None:
    full_results.write_incidents(tmp_path, 1)
    full_results.write_incidents(tmp_path, 2, red="window-leak")
    entries, damaged = ledger.read(tmp_path)
    assert damaged == []
    old, new = (str(full_results.run_of(number).commit) for number in (1, 2))
    table = ledger.rows(entries, {("h200", old): Cell("12 SAME")})
    assert column(table, "commit") == [new[:10], old[:10]]
    assert column(table, "speed") == ["not judged", "12 SAME"]
    assert column(table, "causality") == ["RED: window-leak", "1 of 1 green"]
    assert column(table, "NaN") == column(table, "stalls") == ["1 of 1 green"] * 2
    assert column(table, "detectors") == ["4 of 4 fire"] * 2
    assert column(ledger.red(entries), "incident") == ["window-leak"]
    assert column(table, "not run") == ["none", "none"]


def test_a_run_that_was_cut_off_says_what_it_did_not_replay(tmp_path: Path) -> None:
    full_results.write_incidents(tmp_path, 1)
    full_results.write_incidents(tmp_path, 2)
    newer = max((tmp_path / "regression").rglob("*.jsonl"))
    lines = newer.read_text().splitlines()
    for kept, wanted in ((len(lines) - 1, json.loads(lines[-1])["incident"]), (1, "4 incidents")):
        newer.write_text("\n".join(lines[:kept]) + "\n")
        table = ledger.rows(ledger.read(tmp_path)[0], {})
        assert column(table, "not run") == [wanted, "none"]
    said = evidence.incidents(ledger.read(tmp_path)[0], Repository(), "ledger.html")
    assert (said.text, said.kind, said.note) == ("1 green, 4 not run", "plain", "on h200")


@pytest.mark.parametrize(
    ("aspect", "judgement", "wanted"),
    [
        ("future_seen", "LEAK", "causality"),
        ("loss_nats", "TOO_GOOD", "causality"),
        ("loss_nats", "NONFINITE", "NaN"),
        ("nonfinite", "PASSED", "NaN"),
        ("end", "STALLED", "stalls"),
        ("host_syncs", "PASSED", "stalls"),
        ("end", "CRASHED", "other promises"),
        ("error", "PASSED", "other promises"),
    ],
)
def test_an_aspect_stands_in_its_column(aspect: str, judgement: str, wanted: str) -> None:
    assert ledger.column_of(ledger.IncidentAspect(aspect, judgement, "")) == wanted


def test_a_detector_that_does_not_fire_is_red(tmp_path: Path) -> None:
    full_results.write_incidents(tmp_path, 1)
    (path,) = (tmp_path / "regression").rglob("*.jsonl")
    entry = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**entry, "part": "faulty", "verdict": "PASSED", "ok": False}) + "\n")
    table = ledger.rows(ledger.read(tmp_path)[0], {})
    assert column(table, "detectors") == ["RED: window-leak"]
    assert column(table, "causality") == ["not looked at"]


def test_the_newest_entry_counts_and_an_injected_fault_does_not(tmp_path: Path) -> None:
    full_results.write_incidents(tmp_path, 1, red="window-leak")
    (path,) = (tmp_path / "regression").rglob("*.jsonl")
    lines = path.read_text().splitlines()
    full_results.write_incidents(tmp_path, 1)
    injected = [json.dumps({**json.loads(line), "injected": "window-leak"}) for line in lines]
    path.write_text("\n".join([*lines, *path.read_text().splitlines(), *injected, "torn"]))
    entries, damaged = ledger.read(tmp_path)
    assert column(ledger.rows(entries, {}), "causality") == ["1 of 1 green"]
    assert [line.partition(".jsonl:")[2][:19] for line in damaged] == ["25: JSONDecodeError"]


def test_the_calibration_is_told_in_a_sentence(tmp_path: Path) -> None:
    full_results.write_calibration(tmp_path)
    (tmp_path / "calibration" / "h100.json").write_text("{")
    (one,), (damaged,) = calibration.read(tmp_path)
    assert "h100.json is no calibration" in damaged
    shown = calibration.show(ReportFolder(tmp_path / "report"), one, {})
    (section,) = shown.classes
    sentence = section.sentence.replace(NBSP, " ")
    assert f"faster or slower in {len(full_results.LENGTHS)} of 240 comparisons" in sentence
    assert sentence.startswith(f"{len(one.cases)} cases, each in 60 pairs of processes. "), "an earlier file"
    assert shown.bounds == ("all cases, no alarm in 99%: " + open_bounds.find(one)[-1].text.partition(": ")[2],)
    more = dataclasses.replace(one, cases=(dataclasses.replace(one.cases[0], pairs=131), *one.cases[1:]))
    (of_more,) = calibration.show(ReportFolder(tmp_path / "more"), more, {}).classes
    assert ", each in 60 to 131 pairs of processes. " in of_more.sentence
    assert "A slowdown of 3 % was found in" in sentence
    assert (section.missed, section.unjudged) == ("", ""), "of a CPU 3 % in 90 % is wanted"
    on_gpu = dataclasses.replace(one, fingerprint=dataclasses.replace(one.fingerprint, machine="h200"))
    (of_gpu,) = calibration.show(ReportFolder(tmp_path / "other"), on_gpu, {}).classes
    names = ", ".join(case.case for case in one.cases)
    wanted = "A slowdown of 3 % in 99 % and 1 % in 90 % of the comparisons should be found"
    wanted += f"; it is found less often on {names}."
    assert of_gpu.missed.replace(NBSP, " ") == wanted
    first, *others = one.cases
    short = dataclasses.replace(first, rates=tuple(rate for rate in first.rates if rate.slowdown != 0.03))
    (of_short,) = calibration.show(
        ReportFolder(tmp_path / "short"), dataclasses.replace(one, cases=(short, *others)), {}
    ).classes
    assert of_short.missed == "", "what was not tried is not missed"
    said = of_short.unjudged.replace(NBSP, " ")
    assert said == f"No slowdown of 3 % could be injected into {first.case}."
    assert column(section.rates, "95 % bound")[0].startswith("at most ")
    assert column(section.cases, "false alarms") == [f"1 of {240 // len(full_results.LENGTHS)}"] * len(one.cases)


def test_headlines_name_the_fastest_baseline(tmp_path: Path) -> None:
    found = []
    for length, flash_ms, cudnn_ms in ((64, 5.0, 4.0), (128, 30.0, 20.0)):
        found += [passed(key(implementation="sdpa-flash", length=length), flash_ms)]
        found += [passed(key(implementation="sdpa-cudnn", length=length), cudnn_ms), passed(key(length=length), 10.0)]
    table = machine_tables.headlines(lengths.groups(speedup.comparisons(found)))
    wanted = ["Prefill, forward, 4x2x16 float32 random inputs", "128", "10 ms", "sdpa-cudnn 20 ms", "2.00×", "128"]
    assert texts(table) == [wanted]


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [((0.5, 1.1, 2.0), "2k"), ((1.5, 0.9, 2.0), "4k"), ((2.0, 0.9), "no measured length"), ((2.0, 2.0), "1k")],
)
def test_faster_from_means_at_every_longer_length(ratios: tuple[float, ...], wanted: str) -> None:
    record = passed(key())
    races = [Race(1024 * 2**number, record, record, ratio) for number, ratio in enumerate(ratios)]
    assert faster_from(races) == wanted


SURVEY = PublishedSource("survey", "A survey", "NVIDIA H200", "h200")
SHAPE = (4, 2, 16, 16)


def series(**changes: object) -> PublishedSeries:
    values = ((1.0, 3.0), (8.0, 8.0))
    one = PublishedSeries(SURVEY, "prefill-forward", "flash-attn-4", "ms", (64, 128), values, shape=SHAPE, batch=1)
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def test_a_reference_is_of_the_same_case_on_the_same_machine() -> None:
    (line,) = references.throughput([series()], key(), "h200", {})
    assert line.points == [(64, 32_000.0), (128, 16_000.0)]
    assert line.label == "published: flash-attn-4 (survey, NVIDIA H200)"
    assert references.throughput([series()], key(), "a100", {}) == []
    for name, other in (("mode", "decode"), ("shape", (4, 4, 16, 16)), ("shape", None), ("dtype", "float16")):
        assert references.throughput([series(**{name: other})], key(), "h200", {}) == [], other
    assert references.throughput([series(batch=None)], key(), "h200", {}) == [], "a batch that is unknown"


def test_decode_makes_one_token_per_sequence() -> None:
    one = series(mode="decode", batch=None, cached_tokens=1024)
    (line,) = references.throughput([one], key("decode"), "h200", {128: 8})
    assert line.points == [(64, 8000.0), (128, 1000.0)]
    (line,) = references.throughput([one], key("decode"), "h200", {128: 1})
    assert line.points == [(64, 8000.0)], "another batch"


def test_a_ratio_never_becomes_a_throughput_nor_the_other_way() -> None:
    ratio = series(unit="ratio", against="flash-attn", expected=True, source=dataclasses.replace(SURVEY, machine=None))
    assert references.throughput([ratio], key(), "h200", {}) == []
    assert references.speed_up([series()], key()) == []
    (line,) = references.speed_up([ratio], key())
    assert line.label == "computed: flash-attn-4 (survey, NVIDIA H200) / flash-attn"
    assert line.points == [(64, 2.0), (128, 8.0)]


def test_percent_has_a_true_minus() -> None:
    assert percent(-0.0312) == f"−3.1{NBSP}%"


def test_changes_are_told_newest_first_and_where_a_case_stands(tmp_path: Path) -> None:
    full_results.write_runs(tmp_path, 12)
    full_results.write_accepted(tmp_path)
    opened = Store(tmp_path)
    history = [one for one in opened.history("h200") if one.newest.key.mode == "decode"]
    standings = accepted.standings("h200", history, accepted.current(tmp_path))
    followed = trend.follow(history)
    table = changes.table(followed, Repository())
    commit = str(full_results.run_of(full_results.SLOWER_FROM).commit)
    before = str(full_results.run_of(full_results.SLOWER_FROM - 1).commit)
    assert column(table, "commit") == [commit[:7]] * 4
    assert column(table, "what changed") == [f"git diff {before[:7]}...{commit[:7]}"] * 4
    assert all(change.startswith("+") for change in column(table, "change of time"))
    assert column(table, "seen again") == ["yes"] * 4
    assert column(changes.standings(standings), "against its baseline") == ["MISSING", "NEW", "NEW", "NEW", "NEW"]
    wanted = "Changes of level over the runs: 4 slower, 0 faster, 0 not seen again yet. Beside the accepted baselines: "
    assert changes.news(followed, standings) == wanted + "1 MISSING, 4 NEW."


def test_a_change_that_one_run_saw_asks_for_another(tmp_path: Path) -> None:
    full_results.write_runs(tmp_path, full_results.SLOWER_FROM + 1)
    opened = Store(tmp_path)
    followed = trend.follow(one for one in opened.history("h200") if one.newest.key.mode == "decode")
    assert column(changes.table(followed, Repository()), "seen again") == ["not yet: python -m benchmarks run"] * 4
    assert changes.news(followed, []).endswith("4 slower, 0 faster, 4 not seen again yet. No baseline is accepted.")


def test_the_ledger_reads_what_the_regression_suite_writes(tmp_path: Path) -> None:
    where = full_results.run_of(1)
    evidence = Evidence(future_seen=(), host_syncs=Bound(3.0, 1.0))
    judged_so = aspects(evidence)
    pace = Pace(1.0, 0.5, 0.1, 3, 0.2, 30.0, {})
    written = LedgerEntry(
        where, "step2-stall", "product", "cuda", None, ReproVerdict.PASSED, ReproVerdict.SLOW, False, "too many",
        judged_so, evidence, pace, "python -m regression run step2-stall",
    )  # fmt: skip
    path = regression.ledger.create(tmp_path, where)
    regression.ledger.append(path, written)
    entries, damaged = ledger.read(tmp_path)
    assert damaged == []
    table = ledger.rows(entries, {})
    assert (column(table, "causality"), column(table, "stalls")) == (["1 of 1 green"], ["RED: step2-stall"])


def test_every_sign_of_a_column_is_one_of_the_regression_suite() -> None:
    known = {field.name for field in dataclasses.fields(Evidence)} | {verdict.value for verdict in ReproVerdict}
    assert {sign for signs in ledger.COLUMNS.values() for sign in signs} <= known
