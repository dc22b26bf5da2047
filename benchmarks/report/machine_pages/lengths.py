"""Pictures of the newest figures over the length: throughput and speed-up, parts, memory, distance from the limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases.key import NSA, PART
from benchmarks.history.records import Record
from benchmarks.history.speedup import BaselineComparison, speed_up
from benchmarks.report import references, style
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.labels import TITLES, label
from benchmarks.report.published import PublishedSeries
from benchmarks.report.references import Points, Reference

MEMORY_MODES = ("memory", "prefill-forward-backward", "train-step")
_REFERENCE_MARKERS = "+x12|_34"


@dataclass(frozen=True)
class LengthCurve:
    """One line over the length."""

    label: str
    points: Points
    style: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Comparisons that differ in length alone."""

    mode: str
    label: str
    """`labels.label`; the figures of one are on the same inputs."""
    compared: tuple[BaselineComparison, ...]
    """By length; where batches differ at one length, that with the largest."""

    @property
    def batches(self) -> dict[int, int]:
        """Sequences at each length."""
        return {one.nsa.key.num_keys: one.nsa.key.batch for one in self.compared}

    def records(self) -> list[Record]:
        """NSA and baselines."""
        return [record for comparison in self.compared for record in (comparison.nsa, *comparison.baselines)]

    def lines(self, value: Callable[[Record], float | None]) -> list[LengthCurve]:
        """A line per implementation that has a value."""
        points: dict[str, Points] = {}
        for record in self.records():
            y = value(record)
            if y is not None and y > 0:
                points.setdefault(record.key.implementation, []).append((record.key.num_keys, y))
        return [LengthCurve(name, line, style.of_implementation(name)) for name, line in points.items()]


def groups(compared: Sequence[BaselineComparison]) -> list[Group]:
    """The comparisons of one machine by mode and label."""
    best: dict[tuple[str, str], dict[int, BaselineComparison]] = {}
    for comparison in compared:
        key = comparison.nsa.key
        at_lengths = best.setdefault((key.mode, label(comparison.nsa)), {})
        known = at_lengths.get(key.num_keys)
        if known is None or known.nsa.key.batch <= key.batch:
            at_lengths[key.num_keys] = comparison
    return [
        Group(mode, name, tuple(found for _, found in sorted(at_lengths.items())))
        for (mode, name), at_lengths in sorted(best.items())
    ]


def throughput(folder: ReportFolder, machine: str, group: Group, known: Sequence[PublishedSeries]) -> list[Picture]:
    """Tokens per second, and below how many times as fast as each baseline NSA is."""
    ours = group.lines(lambda record: record.tokens_per_s)
    if not _drawable(ours):
        return []
    key, ratios = group.compared[0].nsa.key, _speed_ups(group)
    published = references.throughput(known, key, machine, group.batches)
    panels = [("tokens per second", [*ours, *_dotted(published)])]
    if ratios:
        panels.append(("NSA is × as fast as", [*ratios, *_dotted(references.speed_up(known, key))]))
    title = f"{TITLES[group.mode]}, {group.label}"
    lines = [line for _, of_panel in panels for line in of_panel]
    legend = style.legend_inch(line.label for line in lines)

    def draw(figure: Figure) -> None:
        heights = [3, 2][: len(panels)]
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        axes: list[Axes] = list(grid[:, 0])
        for axis, (unit, of_panel) in zip(axes, panels, strict=True):
            _lines(axis, of_panel)
            style.logarithmic(axis, unit)
        if ratios:
            axes[1].axhline(1, color=style.BLACK, linewidth=1)
        _finish(figure, axes, lines, title, legend, group.batches)

    height = 3.4 + 1.5 * (len(panels) - 1) + legend
    return [folder.picture(f"{title}: throughput and speed-up", (machine, group.mode, group.label), height, draw)]


def _speed_ups(group: Group) -> list[LengthCurve]:
    points: dict[str, Points] = {}
    for comparison in group.compared:
        for other in comparison.baselines:
            faster = speed_up(comparison.nsa, other)
            if faster is not None:
                points.setdefault(other.key.implementation, []).append((comparison.nsa.key.num_keys, faster))
    return [LengthCurve(name, line, style.of_implementation(name)) for name, line in points.items()]


def memory(folder: ReportFolder, machine: str, group: Group) -> list[Picture]:
    """Peak memory above the inputs."""
    lines = group.lines(lambda record: record.known_peak_mib)
    title = f"Peak memory, {TITLES.get(group.mode, 'forward + backward').lower()}, {group.label}"
    return _single(folder, title, (machine, "memory", group.mode, group.label), lines, "MiB above the inputs", [group])


def parts(folder: ReportFolder, machine: str, name: str, of_label: Sequence[Group]) -> list[Picture]:
    """Latency of each part of the forward pass, and of the whole."""
    lines = []
    for number, group in enumerate(group for group in of_label if group.mode.startswith(PART)):
        points = [(c.nsa.key.num_keys, c.nsa.latency_ms) for c in group.compared if c.nsa.latency_ms is not None]
        lines.append(LengthCurve(group.mode.removeprefix(PART), points, style.nth(number + 1)))
    whole = [line for g in of_label if g.mode == "prefill-forward" for line in g.lines(lambda r: r.latency_ms)]
    lines += [LengthCurve("whole forward", line.points, line.style) for line in whole if line.label == NSA]
    return _single(folder, f"Parts of the forward pass, {name}", (machine, "parts", name), lines, "ms", of_label)


def limits(folder: ReportFolder, machine: str, mode: str, of_mode: Sequence[Group]) -> list[Picture]:
    """NSA's share of the device's limit, a line per label."""
    lines = []
    for number, group in enumerate(of_mode):
        shares = [(c.nsa.key.num_keys, c.nsa.share_of_limit) for c in group.compared]
        points = [(x, 100 * share) for x, share in shares if share is not None]
        lines.append(LengthCurve(group.label, points, style.nth(number)))
    title = f"{TITLES.get(mode, mode)}: share of the measured limit"
    return _single(folder, title, (machine, "limit", mode), lines, "% of the measured limit", of_mode, from_zero=True)


def _single(
    folder: ReportFolder, title: str, words: tuple[str, ...], lines: Sequence[LengthCurve], unit: str,
    of: Sequence[Group], *, from_zero: bool = False,
) -> list[Picture]:  # fmt: skip
    """One pair of axes; [] where no line has two lengths."""
    if not _drawable(lines):
        return []
    legend, batches = style.legend_inch(line.label for line in lines), _batches(of)

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        _lines(axis, lines)
        if from_zero:
            axis.set_ylim(0, max(100.0, 1.05 * max(y for line in lines for _, y in line.points)))
            axis.set_ylabel(unit)
            axis.grid(True, axis="y", **style.GRID)
        else:
            style.logarithmic(axis, unit)
        _finish(figure, [axis], lines, title, legend, batches)

    return [folder.picture(title, words, 3.3 + legend, draw)]


def _batches(of: Sequence[Group]) -> dict[int, int]:
    """Sequences at each length, where all groups have as many there; else none can stand below a tick."""
    pairs = {pair for group in of for pair in group.batches.items()}
    found = dict(pairs)
    return found if len(found) == len(pairs) else {}


def _drawable(lines: Sequence[LengthCurve]) -> bool:
    return any(len(line.points) > 1 for line in lines)


def _dotted(known: Sequence[Reference]) -> list[LengthCurve]:
    """Published figures as lines below ours."""
    markers = itertools.cycle(_REFERENCE_MARKERS)
    return [
        LengthCurve(one.label, one.points, {**style.PUBLISHED, "marker": next(markers), "zorder": 1}) for one in known
    ]


def _lines(axis: Axes, lines: Sequence[LengthCurve]) -> None:
    for line in lines:
        if line.points:
            axis.plot(*zip(*line.points, strict=True), label=style.drawable(line.label), **line.style)


def _finish(
    figure: Figure,
    axes: Sequence[Axes],
    lines: Sequence[LengthCurve],
    title: str,
    legend: float,
    batches: Mapping[int, int],
) -> None:
    labels = style.over_lengths(axes[-1], [x for line in lines for x, _ in line.points], batches)
    for axis in axes[:-1]:
        axis.grid(True, axis="x", **style.GRID)
    style.headline(figure, title)
    style.frame(figure, bottom=labels + legend)
    style.legend_below(figure, axes)
