"""The comparison of a pull request as Markdown: worst first, short, and nothing in it is markup by accident."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import result
from benchmarks.ab.result import CompareVerdict, ComparisonResult
from benchmarks.report import markdown
from harness import jsonl
from tests.benchmarks.comparisons import comparison_result
from tests.benchmarks.synthetic import key


def measured(verdict: CompareVerdict, change: float, length: int = 64) -> ComparisonResult:
    """A case of a comparison with its figures."""
    return dataclasses.replace(
        comparison_result(verdict),
        key=key(length=length),
        change=change,
        interval=(change - 0.01, change + 0.01),
        base_ms=10.0,
        head_ms=10.0 * (1 + change),
    )


def kept(results: Path, *found: ComparisonResult) -> None:
    """As `compare` keeps them."""
    for one in found:
        jsonl.append(result.path(results, one.utc, one.base, one.head), one)


def test_the_worst_case_stands_first_in_table_and_picture() -> None:
    text = markdown.text([measured(CompareVerdict.SAME, 0.001), measured(CompareVerdict.SLOWER, 0.06, length=128)])
    assert text.startswith("### cpu: 1 SLOWER, 1 SAME\n\na1b2 (a1b2a1b2a1) → c3d4 (c3d4c3d4c3). ")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    name = key(length=128).name
    assert rows[0] == f"| 1 | `{name}` | **SLOWER** | +6.0\u00a0% | +5.0\u00a0% to +7.0\u00a0% | 10 | 10.6 |  |"
    assert 'x-axis "row of the table" [1, 2]' in text
    assert re.findall(r"line \[(.+)\]", text) == ["0.00, 0.00", "5.00, -0.90", "7.00, 1.10", "6.00, 0.10"]
    assert text.endswith("Repeat the first one on that machine:\n\n    python -m benchmarks compare\n")


def test_a_case_without_a_change_is_not_drawn() -> None:
    faster = [measured(CompareVerdict.FASTER, -change, length) for change, length in ((0.08, 128), (0.09, 256))]
    text = markdown.text([comparison_result(CompareVerdict.FAILED), *faster])
    assert 'x-axis "row of the table" [2, 3]' in text
    assert 'y-axis "change of the time, %" -10 --> 5\n' in text


@pytest.mark.parametrize("found", [comparison_result(CompareVerdict.UNDECIDED), measured(CompareVerdict.SAME, 0.0)])
def test_one_point_is_no_picture(found: ComparisonResult) -> None:
    assert "mermaid" not in markdown.text([found])


def test_a_long_comparison_is_cut_and_counts_what_it_leaves_out() -> None:
    text = markdown.text([measured(CompareVerdict.SAME, 0.0, length=64 * number) for number in range(1, 200)])
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 1 + markdown.MOST_ROWS
    assert f"and {199 - markdown.MOST_ROWS} SAME more" in text
    assert len(text.encode()) < 8192  # seven machines fit into a comment's 65,536 characters


def test_a_reason_ends_no_cell_and_calls_nobody() -> None:
    reason = "killed | <b>see</b>\n@somebody"
    row = markdown.text([dataclasses.replace(comparison_result(CompareVerdict.FAILED), reason=reason)]).splitlines()[6]
    assert row.endswith("|  |  | killed \\| &lt;b>see&lt;/b> @&#8203;somebody |")


def test_the_command_writes_the_newest_comparison_of_each_machine(tmp_path: Path) -> None:
    old = dataclasses.replace(measured(CompareVerdict.SLOWER, 0.1), utc="2025-01-01T00:00:00Z")
    kept(tmp_path, old, measured(CompareVerdict.FASTER, -0.1))
    assert main(["comment", "--out", str(tmp_path), "--file", str(tmp_path / "comment.md")]) == 0
    assert "1 FASTER" in (tmp_path / "comment.md").read_text()
    assert "SLOWER" not in (tmp_path / "comment.md").read_text()


def test_a_comparison_of_an_earlier_run_is_not_taken_for_this_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path, measured(CompareVerdict.SLOWER, 0.1))
    since = ["--since", "2026-01-02T03:04:06Z"]
    assert main(["comment", "--out", str(tmp_path), "--file", str(tmp_path / "comment.md"), *since]) == 0
    assert not (tmp_path / "comment.md").exists()
    assert capsys.readouterr().out == f"comment: no comparison in {tmp_path} since 2026-01-02T03:04:06Z\n"
