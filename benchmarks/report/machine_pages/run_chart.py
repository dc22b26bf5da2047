"""The chart of one case over the runs.

The trace of NSA has the numbers of its points' runs as `customdata`: the script writes the words that are shown over a
point from the page's list of runs, which all charts of the page share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from benchmarks.history import judgement
from benchmarks.history.accepted import Acceptance
from benchmarks.history.bridges import Break
from benchmarks.history.store import Point
from benchmarks.history.trend import SeriesTrend
from benchmarks.report import labels, references
from benchmarks.report.machine_pages.chart import AXIS, LAYOUT, Chart, digits, log_axis, safe
from benchmarks.report.published import PublishedSeries
from benchmarks.report.table import percent, plus_minus

_FEW = 120
"""More points than this are small, so that they do not hide one another."""


def over_runs(
    one: SeriesTrend,
    run_numbers: Mapping[str, int],
    acceptance: Acceptance | None,
    known: Sequence[PublishedSeries],
) -> Chart:
    """One case over the runs: NSA near by, with its intervals and changes; below, beside dense attention and the limit.

    `run_numbers`: UTC -> where the run stands in the page's list.
    """
    points = one.series.points
    pieces = _pieces(one)
    level_ms = judgement.accepted_ms(acceptance, one)
    data = [_band(points, pieces), *_nsa(points, pieces, run_numbers)]
    data += [_line("best dense baseline", "dense", points, pieces, _dense, _dense_names(points))]
    data += [_line("limit (100 %)", "limit", points, pieces, _limit)]
    if level_ms is not None:
        ends = [points[one.trend.comparable[0][0]], points[-1]]
        level = labels.throughput(points[-1], level_ms)
        data.append(_level("accepted level", "accepted", ends, level, "y"))
    data += _changes(one)
    key, machine = one.series.newest.key, one.series.newest.fingerprint.machine
    for line in references.at_length(known, key, machine):
        data += [_level(line.label, "published", [points[0], points[-1]], value, "y2") for _, value in line.points]
    conditions = _conditions(one)
    unit = labels.unit(points[-1])
    layout = {
        **LAYOUT,
        "height": 560,
        "xaxis": {**AXIS, "type": "date", "anchor": "y2", "range": _dates(points)},
        "yaxis": {**AXIS, "domain": [0.4, 1], "title": {"text": f"NSA, {unit}"}},
        "yaxis2": log_axis(
            [y for trace in data if trace.get("yaxis") == "y2" for y in trace["y"]],
            domain=[0, 0.32],
            title={"text": unit},
        ),
        "shapes": [shape for _, shape in conditions],
    }
    if conditions:
        data.append(_condition_marks(one, [index for index, _ in conditions]))
    return {"data": [trace for trace in data if trace], "layout": layout}


def _x(point: Point) -> str:
    return point.utc.removesuffix("Z")


def _days(utc: str) -> float:
    return datetime.fromisoformat(utc.removesuffix("Z")).timestamp() / 86400


def _dates(points: Sequence[Point]) -> list[str]:
    """All runs, with a margin; a day around a single one."""
    first, last = (datetime.fromisoformat(_x(point)) for point in (points[0], points[-1]))
    margin = max((last - first) * 0.03, timedelta(hours=12))
    return [(first - margin).isoformat(), (last + margin).isoformat()]


def _side(point: Point, points: Sequence[Point]) -> str:
    """Where the words beside a point have room."""
    first, here, last = (_days(one.utc) for one in (points[0], point, points[-1]))
    share = (here - first) / (last - first) if last > first else 0.5
    return "right" if share < 1 / 3 else "left" if share > 2 / 3 else "center"


def _pieces(one: SeriesTrend) -> list[range]:
    """The points between breaks that cut the series."""
    cuts = [found.index for found in one.trend.breaks if not found.bridged]
    return [range(a, b) for a, b in itertools.pairwise([0, *cuts, len(one.series.points)])]


def _broken(pieces: Sequence[range], value: Callable[[int], Any]) -> list[Any]:
    """A value for each point, with a gap between pieces."""
    values: list[Any] = []
    for piece in pieces:
        values += [None] * bool(values) + [value(i) for i in piece]
    return values


def _band(points: Sequence[Point], pieces: Sequence[range]) -> Chart:
    """A closed outline for each piece."""
    x: list[Any] = []
    y: list[Any] = []
    for piece in pieces:
        bounds = [labels.interval(points[i]) for i in piece]
        there = [_x(points[i]) for i in piece]
        x += [None] * bool(x) + there + there[::-1]
        y += [None] * bool(y) + [digits(low) for low, _ in bounds] + [digits(high) for _, high in bounds[::-1]]
    return {
        "type": "scatter", "name": "95 % interval", "x": x, "y": y, "fill": "toself", "fillcolor": "var(--band)",
        "line": {"width": 0}, "mode": "lines", "hoverinfo": "skip",
    }  # fmt: skip


def _nsa(points: Sequence[Point], pieces: Sequence[range], run_numbers: Mapping[str, int]) -> list[Chart]:
    """The same line in both panels; hollow points where a figure is not to be relied on."""
    x = _broken(pieces, lambda i: _x(points[i]))
    y = _broken(pieces, lambda i: digits(labels.throughput(points[i])))
    marks = _broken(pieces, lambda i: "circle-open" if points[i].reservations else "circle")
    line = {"color": "var(--nsa)", "width": 1.5}
    marker: Chart = {"symbol": "circle", "size": 6 if len(points) <= _FEW else 4}
    if "circle-open" in marks:
        marker = {"symbol": marks, "size": [9 if mark == "circle-open" else marker["size"] for mark in marks]}
    near = {
        "type": "scatter", "name": "NSA", "meta": "runs", "legendgroup": "NSA", "x": x, "y": y, "mode": "lines+markers",
        "line": line, "marker": marker,
        "customdata": _broken(pieces, lambda i: run_numbers[points[i].utc]),
        "text": _broken(pieces, lambda i: _said(points[i])),
    }  # fmt: skip
    far = {
        "type": "scatter", "name": "NSA", "legendgroup": "NSA", "showlegend": False, "x": x, "y": y, "yaxis": "y2",
        "mode": "lines+markers" if len(points) <= _FEW else "lines", "marker": {"size": 3},
        "line": {**line, "width": 2}, "hoverinfo": "skip",
    }  # fmt: skip
    return [near, far]


def _said(point: Point) -> str:
    """The figure in words; the run's date, commit and conditions are put below."""
    value = labels.throughput(point)
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    text += f" {labels.unit(point)}, {point.latency_ms:.4g} ms"
    if point.interval_ms:
        text += f"<br>95 % interval {point.interval_ms[0]:.4g} to {point.interval_ms[1]:.4g} ms"
    if point.share_of_limit:
        text += f"<br>{point.share_of_limit:.0%} of the limit"
    if point.dense_ms:
        ms, name = min((ms, name) for name, ms in point.dense_ms.items())
        text += f"<br>{ms / point.latency_ms:.2f}× as fast as {safe(name)}"
    return text + "".join(f"<br>○ {safe(why)}" for why in point.reservations)


def _dense(point: Point) -> float | None:
    return labels.throughput(point, min(point.dense_ms.values())) if point.dense_ms else None


def _dense_names(points: Sequence[Point]) -> Callable[[int], str]:
    return lambda i: safe(min((ms, name) for name, ms in points[i].dense_ms.items())[1]) if points[i].dense_ms else ""


def _limit(point: Point) -> float | None:
    return labels.throughput(point) / point.share_of_limit if point.share_of_limit else None


def _line(
    name: str,
    colour: str,
    points: Sequence[Point],
    pieces: Sequence[range],
    value: Callable[[Point], float | None],
    text: Callable[[int], str] | None = None,
) -> Chart:
    """One of the lower panel; {} where no point has a value."""
    y = _broken(pieces, lambda i: digits(value(points[i])))
    if not any(y):
        return {}
    trace = {
        "type": "scatter", "name": name, "x": _broken(pieces, lambda i: _x(points[i])), "y": y, "yaxis": "y2",
        "mode": "lines+markers" if len(points) <= _FEW else "lines", "marker": {"size": 3},
        "line": {"color": f"var(--{colour})", "width": 1.5, "dash": "dash" if colour == "dense" else "dot"},
        "hovertemplate": f"{name}: %{{y:.4s}}<extra></extra>",
    }  # fmt: skip
    if text is not None:
        trace["text"] = _broken(pieces, text)
        trace["hovertemplate"] = f"{name}, %{{text}}: %{{y:.4s}}<extra></extra>"
    return trace


def _level(name: str, colour: str, ends: Sequence[Point], value: float, axis: str) -> Chart:
    """A level line; figures of others are off until the reader asks for them."""
    return {
        "type": "scatter", "name": safe(name), "x": [_x(end) for end in ends], "y": [digits(value)] * 2, "yaxis": axis,
        "mode": "lines+markers", "marker": {"size": 3}, "visible": "legendonly" if colour == "published" else True,
        "line": {"color": f"var(--{colour})", "width": 1.5, "dash": "longdash"},
        "hovertemplate": "%{fullData.name}: %{y:.4s}<extra></extra>",
    }  # fmt: skip


def _changes(one: SeriesTrend) -> list[Chart]:
    """Diamonds, filled where a second run has seen the change; those for worse apart from those for better."""
    traces = []
    for name, colour, worse in (("slower", "bad", True), ("faster", "good", False)):
        found = [change for change in one.trend.changes if (change.change > 0) == worse]
        if not found:
            continue
        at = [one.series.points[change.index] for change in found]
        commits = [(point.fingerprint.commit or "unknown")[:7] for point in at]
        sides = [_side(point, one.series.points) for point in at]
        said = [f"{percent(abs(change.change)).lstrip('+')}{plus_minus(change.uncertainty)} {name}" for change in found]
        seen = ["" if change.confirmed else "? (not yet seen again)" for change in found]
        traces.append(
            {
                "type": "scatter", "name": name, "x": [_x(point) for point in at],
                "y": [digits(labels.throughput(point)) for point in at], "mode": "markers+text",
                "text": [
                    f"<b>{text}{mark[:1]}</b> {safe(commit)}"
                    for text, mark, commit in zip(said, seen, commits, strict=True)
                ],
                "textposition": [f"top {side}" for side in sides], "cliponaxis": False,
                "textfont": {"color": f"var(--{colour})"},
                "marker": {
                    "size": 11, "color": f"var(--{colour})",
                    "symbol": ["diamond" if change.confirmed else "diamond-open" for change in found],
                },
                "hovertext": [
                    f"{text} since {safe(commit)}{mark}"
                    for text, mark, commit in zip(said, seen, commits, strict=True)
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )  # fmt: skip
    return traces


def _conditions(one: SeriesTrend) -> list[tuple[int, Chart]]:
    """A vertical line where conditions changed: dashed where the series is cut, dotted where it goes on, both where
    a ratio with an uncertainty bridges it."""
    return [
        (
            found.index,
            {
                "type": "line", "xref": "x", "yref": "paper", "x0": _x(one.series.points[found.index]),
                "x1": _x(one.series.points[found.index]), "y0": 0, "y1": 1, "layer": "below",
                "line": {"color": "var(--faint)", "width": 1, "dash": _dash(found)},
            },
        )
        for found in one.trend.breaks
    ]  # fmt: skip


def _dash(found: Break) -> str:
    if found.ratio is not None:
        return "dashdot"
    return "dot" if found.bridged else "dash"


def _condition_marks(one: SeriesTrend, indices: Sequence[int]) -> Chart:
    """What one points at to read what changed: a mark on each vertical line, and beside it what bridges a break."""
    by_index = {found.index: found for found in one.trend.breaks}
    at = [one.series.points[i] for i in indices]
    said = [
        f"conditions changed: {'<br>'.join(map(safe, by_index[i].differences))}<br>{_bridged(by_index[i])}"
        for i in indices
    ]
    return {
        "type": "scatter", "name": "conditions changed", "x": [_x(point) for point in at],
        "y": [digits(labels.throughput(point)) for point in at], "yaxis": "y2", "mode": "markers+text",
        "marker": {"symbol": "line-ns-open", "size": 16, "color": "var(--faint)"}, "hovertext": said,
        "text": [_ratio(by_index[i]) for i in indices], "textfont": {"color": "var(--faint)"}, "cliponaxis": False,
        "textposition": ["bottom " + _side(point, one.series.points).replace("center", "right") for point in at],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _ratio(found: Break) -> str:
    """What an upgrade did to the time, and which commit says so: "time +3.4 % ± 1.2 %, 0123456"; "" without anchors."""
    if found.ratio is None or not found.commits:
        return ""
    commits = ", ".join(safe(commit[:7]) for commit in found.commits)
    return f"time {percent(found.ratio - 1)}{plus_minus(found.uncertainty)}, {commits}"


def _bridged(found: Break) -> str:
    """In a sentence: by what the series goes on."""
    if not found.bridged:
        return "not comparable with the runs before"
    if found.ratio is None:
        return "followed beside the dense baseline"
    did = f"{percent(found.ratio - 1)}{plus_minus(found.uncertainty)}: a smaller step here is no change"
    if not found.commits:
        return f"an earlier record does not know this; by dense attention it did {did}"
    who = f"{found.cases} other cases of its class" if found.cases else "this case"
    commits = ", ".join(safe(commit[:7]) for commit in found.commits)
    return f"bridged: {who} at {commits}, measured on both sides, took {did}"
