"""What a run prints: plain lines in a log, a bar with the time left on a terminal."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest

from benchmarks import console
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history.speedup import BaselineComparison
from tests.benchmarks.synthetic import failed, key, passed

DENSE, NSA = passed(key(implementation="sdpa-flash"), 5.0), passed(key(), 10.0)


def test_a_line_says_how_far_how_long_and_how_fast() -> None:
    line = console.progress(NSA, 3, 20, 12.0, [DENSE])
    assert line.startswith("[ 3/20   12 s,   68 s left] prefill-forward/4x2x16/b1/s64/float32/nsa ")
    assert line.endswith("PASSED  10 ms  0.50x as fast as sdpa-flash")


def test_a_line_without_a_figure_says_why() -> None:
    record = failed(key(implementation="flex"), CaseOutcome.UNSUPPORTED, "flex: not here")
    assert console.progress(record, 1, 1, 0.5, []).endswith("UNSUPPORTED  flex: not here")


def test_a_log_gets_plain_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    with console.RunProgress([DENSE.key, NSA.key]) as progress:
        progress.finished(DENSE)
        progress.finished(NSA)
    out, err = capsys.readouterr()
    assert err == ""
    assert [line[:6] for line in out.splitlines()] == ["[1/2  ", "[2/2  "]
    assert "\r" not in out
    assert out.splitlines()[1].endswith("0.50x as fast as sdpa-flash")


def test_what_is_not_trustworthy_says_so_on_its_line_and_below_the_table() -> None:
    unmet = dataclasses.replace(NSA, unmet="4 of 6 samples", other_load=1.5)
    line = console.progress(unmet, 3, 20, 12.0, [])
    assert line.endswith(
        "PASSED  10 ms  NOT TRUSTWORTHY: load 1.5 of other processes on the cores of 2 thread(s); unmet precision"
        " (4 of 6 samples)"
    )
    *_, row = console.table([BaselineComparison(unmet, (DENSE,))]).splitlines()
    assert row.endswith("10 ms?  sdpa-flash 5 ms (0.50x)")
    assert console.warning([DENSE, unmet]) == (
        "?: NOT TRUSTWORTHY, 1 of 2 figures (1 under load, 1 with unmet precision); measure again on an idle machine"
    )
    assert console.warning([DENSE, NSA]) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with console.RunProgress([DENSE.key, NSA.key]) as progress:
        assert DENSE.key.name in terminal.getvalue()
        progress.finished(DENSE)
        assert "1/2 [00:00<00:00, " in terminal.getvalue()
        assert NSA.key.name in terminal.getvalue()
    assert DENSE.key.name in capsys.readouterr().out


def test_the_table_has_one_column_for_every_length_of_name() -> None:
    long = passed(key("prefill-forward-backward", head_dim_k=192, inputs="local"))
    rows = [BaselineComparison(NSA, (DENSE,)), BaselineComparison(long, ())]
    _, first, second = console.table(rows).splitlines()
    assert first.endswith("10 ms  sdpa-flash 5 ms (0.50x)")
    assert second.endswith("/local        10 ms")
    assert first.index("10 ms") == second.index("10 ms")
