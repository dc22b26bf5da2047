"""The newest comparison of each machine as Markdown, for a pull request: a table, worst first, and a picture of it.

The picture is text too (Mermaid, which GitHub draws), so that a comment needs no place to keep files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.ab.result import CompareVerdict, ComparisonResult
from benchmarks.report.first_page import comparisons
from benchmarks.report.first_page.comparisons import GRAVEST_FIRST, CompareRun
from benchmarks.report.table import digits, percent

MOST_ROWS = 20
"""Of a comparison; a comment may have 65,536 characters, and nobody reads a hundred cases that stayed the same."""
_BAD = (CompareVerdict.FAILED, CompareVerdict.SLOWER)


def text(results: Sequence[ComparisonResult]) -> str:
    """A section per machine; empty without results."""
    return "\n".join(map(_section, comparisons.newest(comparisons.comparisons(results))))


def _section(comparison: CompareRun) -> str:
    ordered = sorted(comparison.results, key=_order)
    shown, left = ordered[:MOST_ROWS], ordered[MOST_ROWS:]
    lines = [f"### {comparison.machine}: {_counts(ordered)}", "", f"{_escaped(comparison.sides)}. "]
    lines[-1] += "The change is that of the time: +3 % is 3 % slower."
    lines += ["", "| # | case | verdict | time | 95 % interval | base, ms | head, ms | why |"]
    lines += ["|--:|---|---|--:|---|--:|--:|---|"]
    lines += [_row(number, one) for number, one in enumerate(shown, 1)]
    if left:
        lines += ["", f"and {_counts(left)} more"]
    lines += _picture(shown)
    if ordered[0].verdict in _BAD:
        lines += ["", "Repeat the first one on that machine:", "", f"    {ordered[0].command}"]
    return "\n".join([*lines, ""])


def _order(one: ComparisonResult) -> tuple[int, float, str]:
    """By verdict, then the slowest change first."""
    return GRAVEST_FIRST.index(one.verdict), -(one.change or 0.0), one.key.name


def _counts(results: Sequence[ComparisonResult]) -> str:
    counts = Counter(one.verdict for one in results)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in GRAVEST_FIRST if counts[verdict])


def _row(number: int, one: ComparisonResult) -> str:
    verdict = f"**{one.verdict.value}**" if one.verdict in _BAD else one.verdict.value
    cells = [
        str(number),
        f"`{one.key.name}`",
        verdict,
        "" if one.change is None else percent(one.change),
        "" if one.interval is None else " to ".join(map(percent, one.interval)),
        "" if one.base_ms is None else digits(one.base_ms),
        "" if one.head_ms is None else digits(one.head_ms),
        _escaped(one.reason or ""),
    ]
    return f"| {' | '.join(cells)} |"


def _picture(shown: Sequence[ComparisonResult]) -> list[str]:
    """The change of each row of the table between the ends of its interval, and 0, the base.

    Lines, since Mermaid's bars begin at the lowest value and not at 0; a line needs two points.
    """
    drawn = [(number, one.change, one.interval) for number, one in enumerate(shown, 1)]
    points = [(number, change, *interval) for number, change, interval in drawn if change is not None and interval]
    if len(points) < 2:
        return []
    numbers, changes, lows, highs = zip(*points, strict=True)
    axis = f"{min(-5.0, 100 * min(lows)):.0f} --> {max(5.0, 100 * max(highs)):.0f}"
    lines = [
        f"    line [{', '.join(f'{100 * y:.2f}' for y in ys)}]" for ys in ([0.0] * len(points), lows, highs, changes)
    ]
    return [
        "",
        "```mermaid",
        '%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#888888, #d98e04, #d98e04, #3b82c4"}}}}%%',
        "xychart-beta",
        '    title "Change of the time; above 0 is slower"',
        f'    x-axis "row of the table" [{", ".join(map(str, numbers))}]',
        f'    y-axis "change of the time, %" {axis}',
        *lines,
        "```",
        "",
        "Blue: the change of each row of the table. Orange: the ends of its 95 % interval. Grey: the base.",
    ]


def _escaped(words: str) -> str:
    """One line that ends no cell, opens no tag and calls nobody."""
    for character, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("@", "@&#8203;")):
        words = words.replace(character, written)
    return " ".join(words.split())
