"""Pictures of the newest figures: throughput and peak memory against length, PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.cases import NSA
from benchmarks.records import Record
from benchmarks.verdict import Comparison

matplotlib.rcParams["text.parse_math"] = False  # what a record calls itself is shown as it stands, "$" and all

# Okabe and Ito's colours, told apart in any colour vision; markers and dashes tell the lines apart in print.
STYLES: dict[str, dict[str, Any]] = {
    NSA: {"color": "#0072B2", "marker": "o", "linestyle": "-", "linewidth": 2.6},
    "sdpa-flash": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "sdpa-cudnn": {"color": "#009E73", "marker": "^", "linestyle": "-."},
    "sdpa-efficient": {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
    "sdpa-math": {"color": "#555555", "marker": "v", "linestyle": (0, (5, 1, 1, 1))},
}
TITLES = {
    "prefill-forward": "Prefill, forward",
    "prefill-forward-backward": "Prefill, forward + backward",
    "decode": "Decode, one token per sequence",
    "train-step": "Train step of the decoder LM",
}
PEAK_TITLE = "Peak memory, forward + backward, above the inputs"


@dataclass(frozen=True)
class Picture:
    """One picture on the disk."""

    machine: str
    title: str
    png: str
    """File name, beside the page; the SVG has the same stem."""


def draw(compared: Sequence[Comparison], folder: Path) -> list[Picture]:
    """One picture per machine and mode that has a figure at two lengths or more."""
    pictures = []
    for machine in dict.fromkeys(comparison.nsa.fingerprint.machine for comparison in compared):
        here = [record for c in compared if c.nsa.fingerprint.machine == machine for record in (c.nsa, *c.baselines)]
        for mode, title in TITLES.items():
            of_mode = [record for record in here if record.key.mode == mode]
            pictures += _figure(machine, mode, title, of_mode, lambda r: r.tokens_per_s, "tokens per second", folder)
        measured = [r for r in here if r.key.mode in ("memory", "prefill-forward-backward")]
        pictures += _figure(machine, "memory", PEAK_TITLE, measured, lambda r: r.peak_mem_mib, "MiB", folder)
    return pictures


def _figure(
    machine: str,
    name: str,
    title: str,
    records: Sequence[Record],
    value: Callable[[Record], float | None],
    unit: str,
    folder: Path,
) -> list[Picture]:
    """A panel for each shape, a line for each implementation; [] where nothing has two lengths."""
    panels = [
        (what, lines) for what, lines in _lines(records, value).items() if any(len(x) > 1 for x in lines.values())
    ]
    if not panels:
        return []
    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.4), squeeze=False, layout="constrained")
    for axis, (what, lines) in zip(axes[0], panels, strict=True):
        for implementation, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=implementation, **STYLES.get(implementation, {}))
        _dress(axis, what, unit, sorted({x for points in lines.values() for x, _ in points}))
    figure.suptitle(f"{title} ({machine})")
    stem = f"{machine}-{name}"
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"{stem}.{suffix}", dpi=130)
    plt.close(figure)
    return [Picture(machine, title, f"{stem}.png")]


def _lines(
    records: Sequence[Record], value: Callable[[Record], float | None]
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """shape -> implementation -> (length, value) by length; where batches differ at one length, the largest value."""
    best: dict[str, dict[str, dict[int, float]]] = {}
    for record in records:
        y = value(record)
        if y is not None and y > 0:
            points = best.setdefault(record.key.what, {}).setdefault(record.key.implementation, {})
            length = record.key.num_keys
            points[length] = max(y, points.get(length, y))
    return {what: {name: sorted(x.items()) for name, x in lines.items()} for what, lines in best.items()}


def _dress(axis: Axes, what: str, unit: str, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.margins(y=0.15)
    axis.set_xticks(lengths)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _short(y)))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: _short(y) if f"{y:e}"[0] in "235" else ""))
    axis.set_title(f"{what} (heads × kv heads × head size)" if "x" in what else f"model {what}", fontsize="medium")
    axis.set_xlabel("length in tokens")
    axis.set_ylabel(unit)
    axis.grid(True, which="both", color="#dddddd", linewidth=0.6)
    axis.legend()


def _short(y: float) -> str:
    """12000 -> 12k, 3000000 -> 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if y >= size:
            return f"{y / size:g}{letter}"
    return f"{y:g}"
