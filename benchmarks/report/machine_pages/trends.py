"""Pictures of the throughput over the runs of one machine: a row per case with its noise band and its changes.

All rows of a picture share one pair of axes, each with a scale of its own that its label tells: axes take half the time
of a picture, and there are many cases.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.history import bridges
from benchmarks.history.anchors import AnchorRatio
from benchmarks.history.conditions import Conditions
from benchmarks.history.store import LatencySeries, Point
from benchmarks.history.trend import Change
from benchmarks.report import labels, style
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.references import Reference
from benchmarks.report.table import NBSP, percent
from harness.fingerprint import Fingerprint

ROWS = 8
"""More cases than this are drawn on further pictures."""
TICKS = 6
_ROW_INCH = 0.72
_MIDDLE, _HALF = 0.56, 0.38
"""Of a row's height: where the middle of its line is and how far that goes; below it there is room for words."""
_NAME_LETTERS, _LETTER_INCH = 26, 0.07  # of a row's name, at most, and the width of one
_NEAR = 0.25  # of the width: the words of two changes that are no farther apart would lie on one another
_MOST_MARKERS = 120  # more of them lie on one another, and take most of the time
_LEAST_REACH = 0.02  # noise alone does not fill a row


@dataclass(frozen=True)
class TrendRow:
    """One case over the runs."""

    label: str
    """What tells it from the other rows of its picture: "64k", "b32 8k"."""
    series: LatencySeries
    changes: Sequence[Change]
    """Of the latency, as `benchmarks.history.trend` found them."""
    references: Sequence[Reference]
    """Published throughput of the same case on the same machine: (tokens, tokens per second)."""


@dataclass(frozen=True)
class Scale:
    """From a throughput to the height in the picture."""

    bottom: float
    """Height of the row's lower edge; a row is 1 high."""
    value: float
    """The throughput there."""
    reach: float
    """How far the row goes on both sides, as a share of it."""

    @classmethod
    def of(cls, row: TrendRow, bottom: float) -> Scale:
        """Of a row whose points and bands fill it."""
        lows, highs = zip(*map(labels.interval, row.series.points), strict=True)
        value = (min(lows) + max(highs)) / 2
        return cls(bottom, value, max(_LEAST_REACH, max(highs) / value - 1))

    @property
    def middle(self) -> float:
        """Height of `value`."""
        return self.bottom + _MIDDLE

    def __call__(self, throughput: float) -> float:
        return self.middle + _HALF * (throughput / self.value - 1) / self.reach

    def all(self, throughputs: Iterable[float]) -> list[float]:
        """The height of each."""
        return [self(throughput) for throughput in throughputs]

    def __str__(self) -> str:
        return f"{style.in_short(self.value)}/s ±{100 * self.reach:.0f}{NBSP}%"


@dataclass(frozen=True)
class Boundary:
    """Between two runs under different conditions."""

    utc: str
    """Of the later one."""
    differences: tuple[str, ...]
    bridged: bool = False
    """Whether series with a dense baseline, or with an anchor, go on."""
    commits: tuple[str, ...] = ()
    """Those of the anchors, in short; none where a dense baseline tells."""


def boundaries(
    runs: Sequence[Fingerprint], anchors: Mapping[Conditions, Sequence[AnchorRatio]] | None = None
) -> list[Boundary]:
    """Where machine, software or harness changed between one run and the next, oldest first.

    `anchors`: the machine's, by their new conditions.
    """
    return [
        Boundary(runs[one.index].utc, one.differences, one.bridged, tuple(commit[:7] for commit in one.commits))
        for one in bridges.breaks(runs, anchors)
    ]


def draw(
    folder: ReportFolder, machine: str, title: str, rows: Sequence[TrendRow], marked: Sequence[Boundary]
) -> list[Picture]:
    """The cases that have two runs or more, `ROWS` on a picture."""
    long = [row for row in rows if len(row.series.points) > 1]
    pieces = [long[first : first + ROWS] for first in range(0, len(long), ROWS)]
    pictures = []
    for number, piece in enumerate(pieces, start=1):
        numbered = title if len(pieces) == 1 else f"{title} ({number} of {len(pieces)})"
        pictures.append(_picture(folder, machine, numbered, piece, marked))
    return pictures


def _picture(
    folder: ReportFolder, machine: str, title: str, rows: Sequence[TrendRow], marked: Sequence[Boundary]
) -> Picture:
    commits = {point.utc: _commit(point) for row in rows for point in row.series.points}
    runs = sorted(commits)
    at = {utc: number for number, utc in enumerate(runs)}
    scales = [Scale.of(row, bottom=-number) for number, row in enumerate(rows)]

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        for row, scale in zip(rows, scales, strict=True):
            _row(axis, row, scale, at)
        for boundary in marked:
            if runs[0] < boundary.utc <= runs[-1]:
                after = min(number for utc, number in at.items() if utc >= boundary.utc)
                dash = ":" if boundary.bridged else (0, (4, 3))
                axis.axvline(after - 0.5, color=style.GREY, linewidth=1, linestyle=dash)
        names = [_name(row, scale) for row, scale in zip(rows, scales, strict=True)]
        axis.set_yticks([scale.middle for scale in scales], names, size="small")
        axis.set_ylim(1 - len(rows), 1)
        axis.set_xlim(-0.5, len(runs) - 0.5)
        step = -(-len(runs) // TICKS)
        axis.set_xticks(range(0, len(runs), step), [commits[utc] for utc in runs[::step]], size="small")
        axis.set_xlabel("commit of the run, oldest first")
        style.headline(figure, title)
        longest = max(len(line) for name in names for line in name.split("\n"))
        style.frame(figure, left=0.2 + _LETTER_INCH * longest, bottom=0.55)

    height = 1.0 + _ROW_INCH * len(rows)
    return folder.picture(f"{title}: throughput over the runs", (machine, "trend", title), height, paint)


def _name(row: TrendRow, scale: Scale) -> str:
    """What stands beside a row, in lines of at most `_NAME_LETTERS` letters where words allow it."""
    return "\n".join([*textwrap.wrap(style.drawable(row.label, 100), _NAME_LETTERS), str(scale)])


def _commit(point: Point) -> str:
    return (point.fingerprint.commit or "unknown")[:7] + ("+" if point.fingerprint.dirty else "")


def _row(axis: Axes, row: TrendRow, scale: Scale, at: dict[str, int]) -> None:
    x = [at[point.utc] for point in row.series.points]
    lows, highs = zip(*map(labels.interval, row.series.points), strict=True)
    axis.axhline(scale.middle, **style.GRID)
    axis.axhline(scale.bottom, color=style.GREY, linewidth=0.4)
    axis.fill_between(x, scale.all(lows), scale.all(highs), color=style.BLUE, alpha=0.2, linewidth=0)
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(x) <= _MOST_MARKERS else {}
    axis.plot(x, scale.all(map(labels.throughput, row.series.points)), color=style.BLUE, linewidth=1, **marker)
    at_left, last = False, -len(at)
    for change in row.changes:
        point = row.series.points[change.index]
        place = (at[point.utc], scale(labels.throughput(point)))
        at_end, near = place[0] > 0.8 * len(at), place[0] - last < _NEAR * len(at)
        at_left = at_end or (near and not at_left)
        _mark(axis, place, change, at_left=at_left)
        last = place[0]
    _refer(axis, row.references, scale)


def _mark(axis: Axes, place: tuple[float, float], change: Change, *, at_left: bool) -> None:
    """A filled diamond where a second run confirmed it, else a hollow one; beside it the change of the throughput, on
    the side of the line that is free."""
    rises = change.change < 0
    colour = style.GREEN if rises else style.VERMILION
    face = colour if change.confirmed else "white"
    axis.plot(*place, "D", color=colour, markersize=6, markerfacecolor=face, zorder=4, clip_on=False)
    words = percent(1 / (1 + change.change) - 1) + ("" if change.confirmed else "?")
    text: dict[str, Any] = {"size": "small", "color": colour, "weight": "bold", "ha": "right" if at_left else "left"}
    text["bbox"] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5}
    offset = (-7 if at_left else 7, 4 if at_left == rises else -12)
    axis.annotate(words, place, offset, textcoords="offset points", **text)


def _refer(axis: Axes, references: Sequence[Reference], scale: Scale) -> None:
    """Lines where they are in sight; the others in words, so that they do not flatten what was measured."""
    text: dict[str, Any] = {"ha": "right", "va": "bottom", "size": "x-small", "color": style.PUBLISHED["color"]}
    text["transform"] = axis.get_yaxis_transform()
    away = []
    for reference in references:
        ((_, value),) = reference.points
        if abs(scale(value) - scale.middle) < 1 - _MIDDLE:
            axis.axhline(scale(value), **style.PUBLISHED)
            words = f"{reference.label} {style.in_short(value)}"
            axis.text(0.995, scale(value), style.drawable(words), **text)
        else:
            away.append(f"{reference.of} {style.in_short(value)}")
    if away:
        words = style.drawable(f"published: {', '.join(away)}", 78)
        axis.text(0.995, scale.bottom + 0.01, words, **text)
