"""Charts over the length: throughput, speed-up and share of the limit; peak memory; the parts of the forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases.key import NSA, PART
from benchmarks.history.records import Record
from benchmarks.report import references
from benchmarks.report.machine_pages.chart import AXIS, LAYOUT, Chart, digits, log_axis, safe
from benchmarks.report.machine_pages.lengths import Group
from benchmarks.report.published import PublishedSeries
from benchmarks.report.style import in_k

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down", "hexagon")
_COLOURS = tuple(f"var(--line-{number})" for number in range(1, 8))


def over_lengths(group: Group, machine: str, known: Sequence[PublishedSeries]) -> Chart | None:
    """Throughput, speed-up and share of the limit over the length; None where no line has two lengths."""
    key = group.compared[0].nsa.key
    ours = group.lines(lambda record: record.tokens_per_s)
    if not any(len(line.points) > 1 for line in ours):
        return None
    names = [line.label for line in ours]
    data = [_over(line.label, line.points, _style(line.label, names), "y") for line in ours]
    ratios = _ratios(group)
    for name, points in ratios.items():
        data.append(_over(name, points, _style(name, names), "y2", legend=False))
    shares = [(c.nsa.key.num_keys, 100 * c.nsa.share_of_limit) for c in group.compared if c.nsa.share_of_limit]
    if shares:
        data.append(_over(NSA, shares, _style(NSA, names), "y3", legend=False))
    for axis, lines in (
        ("y", references.throughput(known, key, machine, group.batches)),
        ("y2", references.speed_up(known, key)),
    ):
        published: Chart = {"line": {"color": "var(--published)", "dash": "dot"}, "visible": "legendonly"}
        data += [_over(line.label, line.points, published, axis) for line in lines]
    as_fast = [1.0, *(value for points in ratios.values() for _, value in points)]
    throughputs = [value for line in ours for _, value in line.points]
    layout = {
        **LAYOUT, "height": 640, "xaxis": _length_axis(group, "y3"),
        "yaxis": log_axis(throughputs, domain=[0.56, 1], title={"text": "tokens/s"}),
        "yaxis2": log_axis(as_fast, domain=[0.27, 0.5], title={"text": "NSA × as fast"}),
        "yaxis3": {**AXIS, "domain": [0, 0.21], "title": {"text": "% of the limit"}, "rangemode": "tozero"},
    }  # fmt: skip
    if ratios:
        ends = {"xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": 1, "y1": 1}
        layout["shapes"] = [{"type": "line", **ends, "line": {"color": "var(--faint)", "width": 1}}]
    return {"data": data, "layout": layout}


def memory(group: Group) -> Chart | None:
    """Peak memory above the inputs; None where no line has two lengths."""
    lines = group.lines(lambda record: record.known_peak_mib)
    return _single(group, [(line.label, line.points) for line in lines], "MiB above the inputs")


def parts(groups: Sequence[Group]) -> Chart | None:
    """Latency of each part of the forward pass, and of the whole; None where no line has two lengths."""
    lines = []
    for group in groups:
        points = [(c.nsa.key.num_keys, c.nsa.latency_ms) for c in group.compared if c.nsa.latency_ms]
        name = group.mode.removeprefix(PART) if group.mode.startswith(PART) else "whole forward"
        lines.append((name, points))
    return _single(groups[0], lines, "ms")


def _single(group: Group, lines: Sequence[tuple[str, list[tuple[int, float]]]], unit: str) -> Chart | None:
    if not any(len(points) > 1 for _, points in lines):
        return None
    names = [name for name, _ in lines]
    layout = {
        **LAYOUT, "height": 360, "xaxis": _length_axis(group, "y"),
        "yaxis": log_axis([value for _, points in lines for _, value in points], title={"text": unit}),
    }  # fmt: skip
    return {"data": [_over(name, points, _style(name, names), "y") for name, points in lines], "layout": layout}


def _over(name: str, points: Sequence[tuple[int, float]], style: Chart, axis: str, *, legend: bool = True) -> Chart:
    return {
        "type": "scatter", "name": safe(name), "legendgroup": safe(name), "showlegend": legend, "yaxis": axis,
        "x": [tokens for tokens, _ in points], "y": [digits(value) for _, value in points], "mode": "lines+markers",
        "hovertemplate": "%{fullData.name}, %{x} tokens: %{y:.4s}<extra></extra>", **style,
    }  # fmt: skip


def _style(name: str, names: Sequence[str]) -> Chart:
    """Colour, dash and marker of a line: any two differ in more than the colour."""
    if name == NSA:
        return {"line": {"color": "var(--nsa)", "width": 3}, "marker": {"symbol": "circle", "size": 7}}
    number = names.index(name)
    return {
        "line": {"color": _COLOURS[number % len(_COLOURS)], "width": 1.5, "dash": _DASHES[number % len(_DASHES)]},
        "marker": {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7},
    }


def _length_axis(group: Group, anchor: str) -> Chart:
    lengths = sorted(group.batches)
    several = len(set(group.batches.values())) > 1
    return {
        **AXIS, "type": "log", "anchor": anchor, "tickvals": lengths,
        "ticktext": [in_k(x) + (f"<br>× {group.batches[x]}" if several else "") for x in lengths],
        "title": {"text": "length in tokens" + " × sequences" * several},
    }  # fmt: skip


def _ratios(group: Group) -> dict[str, list[tuple[int, float]]]:
    """How many times as fast as each baseline NSA is."""
    found: dict[str, list[tuple[int, float]]] = {}
    for comparison in group.compared:
        for other in comparison.baselines:
            if comparison.nsa.latency_ms and other.latency_ms:
                ratio = other.latency_ms / comparison.nsa.latency_ms
                found.setdefault(other.key.implementation, []).append((comparison.nsa.key.num_keys, ratio))
    return found


def joined_runs(records: Sequence[Record]) -> str:
    """Which runs a curve joins, in a sentence; of one run, that one."""
    runs = sorted({(r.fingerprint.utc, (r.fingerprint.commit or "unknown")[:7]) for r in records}, reverse=True)
    said = ", ".join(f"{utc[:16].replace('T', ' ')} ({commit})" for utc, commit in runs)
    if len(runs) == 1:
        return f"All of one run: {said}."
    return f"Joined from {len(runs)} runs, each ratio within one of them: {said}."


def parts_and_whole(groups: Sequence[Group]) -> str:
    """Where the parts of the forward pass sum to more than the whole, and why that can be; "" where they do not."""
    whole = {c.nsa.key.num_keys: c.nsa for g in groups if not g.mode.startswith(PART) for c in g.compared}
    sums: dict[int, float] = {}
    for group in groups:
        for comparison in group.compared if group.mode.startswith(PART) else ():
            sums.setdefault(comparison.nsa.key.num_keys, 0.0)
            sums[comparison.nsa.key.num_keys] += comparison.nsa.latency_ms or 0.0
    more = [
        f"{in_k(tokens)}: {total:.4g} ms beside {whole[tokens].latency_ms:.4g} ms"
        for tokens, total in sorted(sums.items())
        if tokens in whole and (whole_ms := whole[tokens].latency_ms) and total > whole_ms
    ]
    if not more:
        return ""
    return (
        "The parts sum to more than the whole forward pass at "
        + "; ".join(more)
        + ". Each part is timed alone, after its own launch and with its own reads from memory, and may be of another"
        " run; in the whole pass they share launches and what a cache still holds."
    )
