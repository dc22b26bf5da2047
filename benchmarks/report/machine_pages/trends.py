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
"""Of a row's height: where the middle of its line is and how far that goes; beside it there is room for words."""
_NAME_LETTERS, _LETTER_INCH = 26, 0.07  # of a row's name, at most, and the width of one
_RIGHT_INCH = 0.15
_PUBLISHED_LETTER_INCH, _PUBLISHED_LINE_INCH = 0.056, 0.13  # of the words on what others published
_NEAR = 0.25  # of the width: the words of two changes that are no farther apart would lie on one another
_MOST_MARKERS = 120  # more of them lie on one another, and take most of the time
_BEHIND: dict[str, Any] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5}  # the box behind words
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
    names = [_name(row, Scale.of(row, bottom=0)) for row in rows]
    left_inch = 0.2 + _LETTER_INCH * max(len(line) for name in names for line in name.split("\n"))
    letters = int((style.WIDTH_INCH - left_inch - _RIGHT_INCH) / _PUBLISHED_LETTER_INCH)
    published = [_published(row.references, Scale.of(row, bottom=0), letters) for row in rows]
    strips = [len(lines) * _PUBLISHED_LINE_INCH / _ROW_INCH for lines in published]
    scales = [Scale.of(row, bottom=-number - sum(strips[:number])) for number, row in enumerate(rows)]
    height = len(rows) + sum(strips)

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        for row, scale, lines, strip in zip(rows, scales, published, strips, strict=True):
            _row(axis, row, scale, at)
            _refer(axis, lines, scale, strip)
        for boundary in marked:
            if runs[0] < boundary.utc <= runs[-1]:
                after = min(number for utc, number in at.items() if utc >= boundary.utc)
                dash = ":" if boundary.bridged else (0, (4, 3))
                axis.axvline(after - 0.5, color=style.GREY, linewidth=1, linestyle=dash)
        axis.set_yticks([scale.middle for scale in scales], names, size="small")
        axis.set_ylim(1 - height, 1)
        axis.set_xlim(-0.5, len(runs) - 0.5)
        step = -(-len(runs) // TICKS)
        axis.set_xticks(range(0, len(runs), step), [commits[utc] for utc in runs[::step]], size="small")
        axis.set_xlabel("commit of the run, oldest first")
        style.headline(figure, title)
        style.frame(figure, left=left_inch, right=_RIGHT_INCH, bottom=0.55)

    return folder.picture(
        f"{title}: throughput over the runs", (machine, "trend", title), 1.0 + _ROW_INCH * height, paint
    )


def _name(row: TrendRow, scale: Scale) -> str:
    """What stands beside a row, in lines of at most `_NAME_LETTERS` letters where words allow it."""
    return "\n".join([*textwrap.wrap(style.drawable(row.label, 100), _NAME_LETTERS), str(scale)])


def _commit(point: Point) -> str:
    return (point.fingerprint.commit or "unknown")[:7] + ("+" if point.fingerprint.dirty else "")


def _row(axis: Axes, row: TrendRow, scale: Scale, at: dict[str, int]) -> None:
    x = [at[point.utc] for point in row.series.points]
    lows, highs = zip(*map(labels.interval, row.series.points), strict=True)
    axis.axhline(scale.middle, **style.GRID)
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
    for reference in row.references:
        if _in_sight(reference, scale):
            axis.axhline(scale(_value(reference)), **style.PUBLISHED)


def _mark(axis: Axes, place: tuple[float, float], change: Change, *, at_left: bool) -> None:
    """A filled diamond where a second run confirmed it, else a hollow one; beside it the change of the throughput, on
    the side of the line that is free."""
    rises = change.change < 0
    colour = style.GREEN if rises else style.VERMILION
    face = colour if change.confirmed else "white"
    axis.plot(*place, "D", color=colour, markersize=6, markerfacecolor=face, zorder=4, clip_on=False)
    words = percent(1 / (1 + change.change) - 1) + ("" if change.confirmed else "?")
    text: dict[str, Any] = {"size": "small", "color": colour, "weight": "bold", "ha": "right" if at_left else "left"}
    text["bbox"] = _BEHIND
    offset = (-7 if at_left else 7, 4 if at_left == rises else -12)
    axis.annotate(words, place, offset, textcoords="offset points", **text)


def _published(references: Sequence[Reference], scale: Scale, letters: int) -> list[str]:
    """What others published, in lines of at most `letters`: the dotted lines from the top down, then the others."""
    ordered = sorted(references, key=_value, reverse=True)
    drawn = [f"{one.label} {style.in_short(_value(one))}" for one in ordered if _in_sight(one, scale)]
    away = [f"{one.of} {style.in_short(_value(one))}" for one in ordered if not _in_sight(one, scale)]
    said = [*drawn, *([f"published, out of sight: {', '.join(away)}"] if away else [])]
    return [line for words in said for line in textwrap.wrap(style.drawable(words, 3 * letters), letters)]


def _value(reference: Reference) -> float:
    ((_, value),) = reference.points
    return value


def _in_sight(reference: Reference, scale: Scale) -> bool:
    """Whether its line does not flatten what was measured."""
    return abs(scale(_value(reference)) - scale.middle) < 1 - _MIDDLE


def _refer(axis: Axes, lines: Sequence[str], scale: Scale, strip: float) -> None:
    """Published figures in words, in a strip of their own below the row."""
    axis.axhline(scale.bottom - strip, color=style.GREY, linewidth=0.4)
    text: dict[str, Any] = {"ha": "right", "va": "bottom", "size": "x-small", "color": style.PUBLISHED["color"]}
    text |= {"transform": axis.get_yaxis_transform(), "bbox": _BEHIND}
    for number, words in enumerate(lines, start=1):
        axis.text(0.995, scale.bottom - strip * number / len(lines), words, **text)
