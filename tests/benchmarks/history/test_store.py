"""The store answers from every run: by column, the newest, the history, and what is damaged by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import run_file, speedup
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from tests.benchmarks.stored import damaged, everything, run, write
from tests.benchmarks.synthetic import failed, key, passed


def test_nothing_yet(tmp_path: Path) -> None:
    opened = Store(tmp_path)
    assert (len(opened), opened.machines(), opened.records(), opened.current(), opened.damaged()) == (
        0, [], [], [], []
    )  # fmt: skip


def test_gives_back_what_was_written_oldest_run_first(tmp_path: Path) -> None:
    new, old = run(2, passed(key()), failed(key(length=128), CaseOutcome.CRASHED, "µ \n '")), run(1, passed(key()))
    write(tmp_path, *new)
    write(tmp_path, *old)
    assert everything(tmp_path) == [*old, *new]


def test_filters_by_column(tmp_path: Path) -> None:
    first = run(1, passed(key()), passed(key("decode")))
    second = run(2, passed(key(implementation="sdpa-flash"), machine="h200"))
    for one in (first, second):
        write(tmp_path, *one)
    opened = Store(tmp_path)
    assert opened.machines() == ["h200", "cpu"]
    assert opened.runs("cpu") == [first[0].fingerprint]
    assert opened.records(machine="h200") == second
    assert opened.records(mode="decode") == first[1:]
    assert opened.records(implementation="nsa") == first
    assert opened.records(since=second[0].fingerprint.utc) == second
    assert opened.records(machine="h200", mode="decode") == []


def test_damaged_lines_are_named_and_cost_no_other(tmp_path: Path) -> None:
    path = write(tmp_path, passed(key()))
    with path.open("ab") as file:
        file.write(b'{"key":\n\n\xff\n' + b"[" * 100_000 + b"\n")
    run_file.append(path, passed(key(length=128)))
    assert len(everything(tmp_path)) == 2
    lines = damaged(tmp_path)
    assert [(line.path, line.line) for line in lines] == [(path, 3), (path, 5), (path, 6)]
    assert "truncated" in lines[0].why


def test_half_a_surrogate_pair_is_a_damaged_line(tmp_path: Path) -> None:
    path = write(tmp_path, passed(key()))
    path.write_text(path.read_text().replace("sdpa", "x").replace('"A CPU"', '"\\ud800"', 1))
    assert [line.line for line in damaged(tmp_path)] == [1, 2]


def compared(found: list[Record]) -> list[speedup.BaselineComparison]:
    return sorted(speedup.comparisons(found), key=lambda comparison: comparison.nsa.key.name)


def test_current_answers_as_everything_would(tmp_path: Path) -> None:
    dense, nsa = passed(key(implementation="sdpa-flash")), passed(key())
    crashed = failed(key(), CaseOutcome.CRASHED, "boom")
    alone = passed(key("decode"))
    runs = [
        run(1, dense, nsa, alone), run(2, dense, nsa), run(3, nsa, alone), run(4, crashed), run(5, dense),
        run(6, dataclasses.replace(nsa, key=dataclasses.replace(nsa.key, backend_asked="auto"))),
    ]  # fmt: skip
    for number, one in enumerate(runs, start=1):
        write(tmp_path, *one)
        opened = Store(tmp_path)
        assert compared(opened.current()) == compared(opened.records()), number
        assert not number > 2 or len(opened.current()) < len(opened.records())


def test_history_keeps_what_differs_apart(tmp_path: Path) -> None:
    other_config = {**(key().config or {}), "w": 16}
    interval = dataclasses.replace(passed(key(), 10.0), interval_ms=(9.0, 11.0))
    other = passed(key(config=other_config), 5.0)
    write(tmp_path, *run(2, interval, other, failed(key("decode"), CaseOutcome.CRASHED, "boom")))
    write(tmp_path, *run(1, passed(key(), 9.0)))
    opened = Store(tmp_path)
    series = opened.history("cpu")
    assert opened.history("h200") == []
    assert sorted([point.latency_ms for point in one.points] for one in series) == [[5.0], [9.0, 10.0]]
    (longer,) = (one for one in series if len(one.points) == 2)
    assert longer.newest == run(2, interval)[0]
    assert [point.interval_ms for point in longer.points] == [None, (9.0, 11.0)]
    assert longer.points[1].fingerprint == run(2, interval)[0].fingerprint
