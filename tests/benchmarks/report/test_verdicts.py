"""The first page: what is said of a case, in which order, and where its commits are shown."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from benchmarks.alerts import movements
from benchmarks.cases import inputs
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import report
from benchmarks.history import accepted, judgement, trend
from benchmarks.history.accepted import Acceptance
from benchmarks.history.judgement import CaseState, Judgement
from benchmarks.history.mutants import Header, MutantOutcome, MutantResult
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from benchmarks.history.trend import SeriesTrend
from benchmarks.report import links, pages
from benchmarks.report.first_page import evidence, verdicts
from benchmarks.report.further_pages.mutants import Commit
from benchmarks.report.links import Link, Repository
from benchmarks.report.pages import ReportSettings
from harness import jsonl
from tests.benchmarks import full_results
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, failed, key, passed

GITHUB = Repository("https://github.com/owner/name")
NOW = datetime(2026, 3, 20, tzinfo=timezone.utc)


def night(number: int, latency_ms: float, **conditions: object) -> Record:
    """NSA's record of one night, on a commit of its own."""
    utc = f"2026-{2 + number // 28:02d}-{1 + number % 28:02d}T00:00:00.000Z"
    conditions = {"commit": f"{number:07x}" + "0" * 33, "nsa_sha256": f"{number:016x}", **conditions}
    where = dataclasses.replace(FINGERPRINT, utc=utc, **conditions)  # type: ignore[arg-type]
    return dataclasses.replace(passed(key(), latency_ms), fingerprint=where)


def followed(results: Path, *records: Record) -> SeriesTrend:
    """The one series of these records."""
    for record in records:
        write(results, record)
    (one,) = trend.follow(Store(results).history("cpu"))
    return one


def judged(results: Path, latencies_ms: list[float]) -> Judgement:
    return judgement.judge(followed(results, *(night(i, ms) for i, ms in enumerate(latencies_ms))), None)


@pytest.mark.parametrize(
    ("latencies_ms", "state", "change", "since"),
    [
        ([10.0] * 8, CaseState.SAME, None, None),
        ([10.0] * 2, CaseState.NEW, None, None),
        ([10.0] * 6 + [10.6] * 3, CaseState.SLOWER, 0.06, 6),
        ([10.0] * 6 + [10.6], CaseState.MAYBE_SLOWER, 0.06, 6),
        ([10.0] * 6 + [9.4], CaseState.MAYBE_FASTER, -0.06, 6),
        ([10.0] * 6 + [9.0] * 4, CaseState.FASTER, -0.1, 6),
        ([10.0] * 6 + [12.0] * 4 + [10.0] * 4, CaseState.FIXED, -1 / 6, 10),
        ([10.0] * 6 + [12.0] * 4 + [11.0] * 4, CaseState.SLOWER, 0.1, 6),
        ([10.0] * 6 + [8.0] * 4 + [10.0] * 4, CaseState.SLOWER, 0.25, 10),
        ([10.0] * 6 + [12.0] * 4 + [12.0 * 1.06], CaseState.SLOWER, 0.2, 6),
        ([10.0] * 6 + [9.0] * (judgement.RECENT + 1), CaseState.SAME, None, None),
    ],
)  # fmt: skip
def test_what_is_said_of_a_case(
    latencies_ms: list[float], state: CaseState, change: float | None, since: int | None, tmp_path: Path
) -> None:
    found = judged(tmp_path, latencies_ms)
    assert (found.state, found.since) == (state, since)
    assert found.change == (None if change is None else pytest.approx(change))


def test_noise_that_would_hide_a_step_is_not_judged(tmp_path: Path) -> None:
    found = judged(tmp_path, [10.0, 13.0, 9.0, 14.0, 10.5, 12.5, 9.5, 13.5])
    assert (found.state, found.why.partition(":")[0]) == (CaseState.NOT_JUDGED, "its runs differ too much")


def test_after_other_conditions_a_case_is_not_judged_until_runs_are_enough(tmp_path: Path) -> None:
    runs = [night(i, 10.0) for i in range(6)] + [night(i, 20.0, torch="2.14.0") for i in (6, 7)]
    found = judgement.judge(followed(tmp_path, *runs), None)
    assert (found.state, found.why) == (
        CaseState.NOT_JUDGED,
        "too few runs since conditions changed: torch 2.13.0 -> 2.14.0",
    )


@pytest.mark.parametrize(
    ("accepted_ms", "latencies_ms", "state", "since"),
    [
        (10.0, [10.0] * 6 + [10.6] * 4, CaseState.SLOWER, 6),
        (10.6, [10.0] * 6 + [10.6] * 4, CaseState.ACCEPTED, 6),
        (10.0, [10.6] * 6, CaseState.SLOWER, None),
        (10.0, [10.6], CaseState.MAYBE_SLOWER, None),
        (12.0, [10.6] * 6, CaseState.FASTER, None),
        (10.0, [10.0], CaseState.SAME, None),
    ],
)
def test_beside_an_accepted_level(
    accepted_ms: float, latencies_ms: list[float], state: CaseState, since: int | None, tmp_path: Path
) -> None:
    one = followed(tmp_path, *(night(i, ms) for i, ms in enumerate(latencies_ms)))
    found = judgement.judge(one, accepted_ms)
    assert (found.state, found.since) == (state, since)


def test_an_accepted_level_counts_under_conditions_that_can_be_compared(tmp_path: Path) -> None:
    one = followed(tmp_path, *(night(i, 10.0) for i in range(4)))
    made = Acceptance("2026-02-03T00:00:00Z", "A", "because", "cpu", "A CPU", key().name, 9.0, None)
    assert judgement.accepted_ms(None, one) is None
    assert judgement.accepted_ms(made, one) == 9.0
    known = dataclasses.replace(made, path="torch", fingerprint=FINGERPRINT)
    assert judgement.accepted_ms(known, one) == 9.0
    assert judgement.accepted_ms(dataclasses.replace(known, path="triton"), one) is None
    other = dataclasses.replace(FINGERPRINT, torch="2.14.0")
    assert judgement.accepted_ms(dataclasses.replace(known, fingerprint=other), one) is None


def test_runs_on_a_busy_cpu_alone_do_not_make_a_case_slower(tmp_path: Path) -> None:
    runs = [night(i, 10.0) for i in range(6)] + [night(i, 12.0, load=4.0) for i in (6, 7, 8)]
    found = judgement.judge(followed(tmp_path, *runs), None)
    assert (found.state, found.why) == (
        CaseState.MAYBE_SLOWER,
        "not to be relied on: load 4.0 before the run on the cores of 2 thread(s)",
    )
    always = [night(i, 10.0 if i < 6 else 12.0, load=4.0) for i in range(9)]
    assert judgement.judge(followed(tmp_path / "always", *always), None).state is CaseState.SLOWER


@pytest.mark.parametrize(("load", "state"), [(None, CaseState.SLOWER), (4.0, CaseState.MAYBE_SLOWER)])
def test_one_first_run_that_is_not_to_be_relied_on_makes_no_case_slower(
    load: float | None, state: CaseState, tmp_path: Path
) -> None:
    runs = [night(0, 10.0, load=load), *(night(i, 12.0) for i in range(1, 6))]
    dense = [dataclasses.replace(run, key=key(implementation="sdpa-flash"), latency_ms=30.0) for run in runs]
    for both in zip(runs, dense, strict=True):
        write(tmp_path, *both)
    (one,) = trend.follow(Store(tmp_path).history("cpu"))
    found = judgement.judge(one, None)
    assert (found.state, found.since) == (state, 1)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:owner/name.git", "https://github.com/owner/name"),
        ("ssh://git@gitlab.example.org:2222/group/owner/name.git", "https://gitlab.example.org/group/owner/name"),
        ("https://user:secret@github.com/owner/name.git", "https://github.com/owner/name"),
        ("https://codeberg.org/owner/name/", "https://codeberg.org/owner/name"),
        ("http://gitea.local:3000/owner/name.git", "http://gitea.local:3000/owner/name"),
        ("https://[github/owner/name", None),
        ("https://github.com:99999999/owner/name", None),
        ("/srv/git/name.git", None),
        ("git@nas.local:name.git", None),
        ("file:///github/name", None),
        ("javascript:alert(1)//github", None),
    ],
)
def test_the_address_of_a_repository(remote: str, address: str | None) -> None:
    assert links.web_address(remote) == address


def test_commits_and_differences_are_linked_where_there_is_a_site() -> None:
    old, new = "a" * 40, "b" * 40
    assert GITHUB.commit(new) == Link("bbbbbbb", f"https://github.com/owner/name/commit/{new}")
    assert GITHUB.difference(old, new) == Link(
        "aaaaaaa...bbbbbbb", f"https://github.com/owner/name/compare/{old}...{new}"
    )
    assert Repository().difference(old, new) == Link("git diff aaaaaaa...bbbbbbb")
    assert GITHUB.commit("no commit's name") == Link("no comm")
    assert GITHUB.commit(None) == Link("unknown")
    assert Repository("https://github.com/owner/name/").commit(new) == GITHUB.commit(new)
    assert GITHUB.difference(old, old) is None
    with pytest.raises(ValueError, match="--repository-url must begin with https://"):
        Repository("javascript:alert(1)")


def test_the_worst_comes_first_and_a_fault_before_it(tmp_path: Path) -> None:
    for i in range(9):
        records = [night(i, 10.0 if i < 6 else 10.0 * by) for by in (1.0, 1.06, 1.2)]
        lengths = (64, 128, 256)
        for length, record in zip(lengths, records, strict=True):
            write(tmp_path, dataclasses.replace(record, key=key(length=length)))
    write(tmp_path, failed(key(length=512), CaseOutcome.INCORRECT, "o: error 1 > budget 0"))
    answers = pages.build(tmp_path, ReportSettings(repository=GITHUB)).answers
    assert [(row.size, row.state, row.kind) for row in answers.rows] == [
        ("512", "wrong", "bad"),
        ("256", "slower", "bad"),
        ("128", "slower", "bad"),
        ("64", "same", ""),
    ]
    assert [row.size for row in answers.faults] == ["512"]
    assert [row.change.replace("\u00a0", " ") for row in answers.slower] == ["20.0 % slower", "6.0 % slower"]
    assert answers.unjudged == []
    ((first, count),) = answers.since
    assert (first.since, count) == (GITHUB.commit("0000006" + "0" * 33), 2)
    assert first.difference is not None
    assert first.difference.text == "0000005...0000006"
    assert first.href == "cpu-prefill-forward-4x2x16.html#case=b1/s256/float32&run=2026-02-07T00:00:00.000Z"


def test_a_case_has_one_row_by_the_path_that_ran_last(tmp_path: Path) -> None:
    """The path before ended slower than it was."""
    for i in range(18):
        record = night(i, 10.0 if i < 6 else 12.0 if i < 9 else 5.0)
        ran = "torch" if i < 9 else "triton"
        write(tmp_path, dataclasses.replace(record, correctness=dataclasses.replace(GREEN, path=ran)))
    found = pages.build(tmp_path).answers
    assert [(row.state, row.value.text) for row in found.rows if row.value] == [("same", "12.8k tokens/s")]
    assert movements.of_runs(Store(tmp_path), "cpu", {}, lambda *_: []) == []
    (standing,) = accepted.standings("cpu", Store(tmp_path).history("cpu"), {})
    assert standing.level_ms == 5.0


def test_a_case_that_is_left_out_for_long_is_not_judged(tmp_path: Path) -> None:
    write(tmp_path, dataclasses.replace(night(0, 10.0), key=key(length=128)))
    for i in range(verdicts.NOT_LATELY):
        write(tmp_path, night(i + 1, 10.0))
    by_size = {row.size: row.judgement for row in pages.build(tmp_path).answers.rows}
    assert by_size["128"] == Judgement(CaseState.NOT_JUDGED, why="not in the last 30 runs of this mode")


def test_an_address_holds_whatever_a_case_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "OFFERED", ("a+b&c d",))
    write(tmp_path, passed(key(inputs="a+b&c d")))
    (row,) = pages.build(tmp_path).answers.rows
    assert row.href.endswith("#case=b1/s64/float32/a%2Bb%26c%20d")


def test_inputs_that_are_offered_no_more_have_no_verdict(tmp_path: Path) -> None:
    """ "local", an invented walk: no later run measures it."""
    write(tmp_path, passed(key(inputs="local")))
    write(tmp_path, passed(key(inputs="recorded")))
    (row,) = pages.build(tmp_path).answers.rows
    assert row.inputs == "recorded"


def test_a_row_has_its_figures(tmp_path: Path) -> None:
    full_results.write_runs(tmp_path, 12)
    rows = pages.build(tmp_path, ReportSettings(now=NOW)).answers.rows
    row = next(row for row in rows if row.mode == "Decode" and row.size == "64k × 32 sequences")
    assert row.value is not None
    assert (row.machine, row.heads, row.dtype, row.inputs) == ("h200", "64x4x128", "bfloat16", "random")
    assert row.value.text.endswith(" tokens/s")
    assert row.value.near == pytest.approx(0.0, abs=0.08)
    assert row.value.dense is not None
    assert row.value.dense[1] == "flash-attn-4", "the fastest that is dense: fla-nsa is another NSA"
    assert row.value.share_of_limit is not None
    assert row.value.reservations == ("2 samples at lowered clocks (power_cap)",)
    assert len(row.value.sparkline) == 12


def test_a_machine_without_a_run_of_late_is_overdue(tmp_path: Path) -> None:
    assert not verdicts.last_run("h200", "H200", "2026-03-18T00:00:01.000Z", NOW, 2.0).overdue
    late = verdicts.last_run("h200", "H200", "2026-03-17T23:59:59.000Z", NOW, 2.0)
    assert (late.overdue, late.days) == (True, 2)
    write(tmp_path, passed(key()))
    index = pages.build(tmp_path, ReportSettings(now=NOW)).index.read_text()
    assert "cpu: last run 76 days ago" in index
    assert "overdue" not in pages.build(tmp_path, ReportSettings(now=NOW, overdue_days=99)).index.read_text().replace(
        "Machines overdue", ""
    )


def test_laws_incidents_and_mutants_are_of_the_newest_that_has_them(tmp_path: Path) -> None:
    assert evidence.laws(tmp_path, GITHUB).text == "none recorded"
    folder = tmp_path / "laws"
    folder.mkdir()
    for day, commit, failures in (("21", "a" * 10, 0), ("22", "b" * 10, 3)):
        summary = {"utc": f"2026-11-{day}T00:00:00", "passed": 10, "failed": failures, "skipped": 1}
        (folder / f"h200-202611{day}-{commit}-laws.json").write_text(json.dumps(summary))
    (folder / "torn.json").write_text("{")
    (folder / "other.json").write_text('{"utc": "2027"}')
    found = evidence.laws(tmp_path, GITHUB)
    assert (found.text, found.kind, found.commit) == ("3 of 13 failed", "bad", GITHUB.commit("b" * 10))
    assert found.note == "on h200"
    assert found.file == f"laws/h200-20261122-{'b' * 10}-laws.json"
    compiled = {"86": {"passed": 22}}
    more: list[tuple[int, dict[str, object], str, str]] = [
        (6, {}, "3 of 13 failed", "bad"),  # a part, such as a stranger's smoke test
        (22, {"architectures": compiled}, "3 of 13 failed", "bad"),  # nothing ran
        (7, {}, "7 passed", "good"),
        (30, {"architectures": compiled}, "7 passed", "good"),
        (60, {"architectures": compiled}, "60 passed", "good"),  # some of a whole suite compile
    ]
    for day, (passed_tests, has, text, kind) in enumerate(more, start=23):
        summary = {"utc": f"2026-11-{day}T00:00:00", "passed": passed_tests, "failed": 0, "skipped": 1, **has}
        (folder / f"h200-202611{day}-{'c' * 10}-laws.json").write_text(json.dumps(summary))
        found = evidence.laws(tmp_path, GITHUB)
        assert (found.text, found.kind) == (text, kind)


@pytest.mark.parametrize(
    ("outcomes", "text", "kind"),
    [
        ("KK", "2 of 2 seen", "good"),
        ("K", "1 of 1 seen, 1 not tried", "plain"),
        ("KS", "1 of 2 seen, 1 survived", "bad"),
    ],
)
def test_mutants_are_green_only_where_all_were_tried(outcomes: str, text: str, kind: str) -> None:
    named = {"K": MutantOutcome.KILLED, "S": MutantOutcome.SURVIVED}
    lines = tuple(MutantResult(str(i), "cache", named[one], 1.0) for i, one in enumerate(outcomes))
    commit = Commit(Header(FINGERPRINT, "0" * 16, {"cache": 2}), lines)
    found = evidence.mutants([commit], GITHUB, "ledger.html")
    assert (found.text, found.kind) == (text, kind)


def test_the_first_page_has_every_headline_number(tmp_path: Path) -> None:
    write(tmp_path, dataclasses.replace(night(0, 10.0), peak_mem_mib=100.0, peak_mem_source="rss_high_water"))
    shown = re.findall(r"<li><span>(?:<a [^>]*>)?([^<]*)", pages.build(tmp_path).index.read_text())
    assert shown == [
        "Cases slower now", "Not judged", "Machines overdue",
        "Open alerts", "Laws and tests", "Incidents", "Mutants", "Peak memory",
    ]  # fmt: skip


def test_without_a_judged_case_the_first_page_does_not_say_no(tmp_path: Path) -> None:
    write(tmp_path, night(0, 10.0))
    write(tmp_path, failed(key(length=512), CaseOutcome.INCORRECT, "o: error 1 > budget 0"))
    page = pages.build(tmp_path).index.read_text()
    assert "Not known</b>: no case can be judged yet" in page
    assert 'class="good">No' not in page
    assert 'href=""' not in page, "a case without a chart has no link"


def test_fail_on_slower_names_the_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(9):
        write(tmp_path, night(i, 10.0 if i < 6 else 10.6))
    arguments = ["--out", str(tmp_path), "--repository-url", "https://github.com/o/n"]
    assert run_report(*arguments) == 0
    assert run_report(*arguments, "--fail-on", "slower") == 1
    last = capsys.readouterr().out.splitlines()[-1].replace("\u00a0", " ")
    assert last == "SLOWER cpu: Prefill, forward, 4x2x16, 64, float32, random inputs: 6.0 % slower since 0000006"
    made = Acceptance("2026-03-01T00:00:00Z", "A", "wanted", "cpu", "A CPU", key().name, 10.6, None)
    jsonl.append(tmp_path / "baselines" / "accepted.jsonl", made)
    assert run_report(*arguments, "--fail-on", "slower") == 0


def run_report(*arguments: str) -> int:
    from benchmarks.__main__ import main

    return main(["report", *arguments])


def test_without_plotly_the_pages_have_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write(tmp_path, passed(key()))
    assert report.build_page(tmp_path).is_file()
    assert "plotly is not installed: the pages have pictures" in capsys.readouterr().err
    assert not (tmp_path / "report" / "plotly.min.js").exists()
