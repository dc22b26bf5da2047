"""The style of the pictures: every line differs in colour, marker and dash, whatever the colour vision or the print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.cases.key import NSA

# Okabe and Ito's colours, which any colour vision tells apart, without their yellow, which white paper swallows.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE, BLACK, GREY = "#56B4E9", "#E69F00", "#000000", "#767676"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, BLACK, GREY)
MARKERS = "os^DvPX*"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
PUBLISHED: dict[str, Any] = {"color": "#8a6d3b", "linestyle": (0, (1, 2)), "linewidth": 1.2, "markersize": 7}
"""What others published: thin, dotted, brown, and always labelled as such."""
GRID: dict[str, Any] = {"color": "#dddddd", "linewidth": 0.6}
LEGEND: dict[str, Any] = {
    "loc": "lower center",
    "frameon": False,
    "fontsize": "small",
    "handlelength": 3.2,
    "borderaxespad": 0.0,
    "borderpad": 0.0,
    "labelspacing": 0.3,
    "columnspacing": 1.2,
}
LEGEND_ROW_INCH = 0.165
WIDTH_INCH = 5.6
"""Of every picture: at 360 CSS pixels its 10 point letters are still 9 pixels high."""

RC: Any = {
    "font.size": 10,
    "text.parse_math": False,  # what a record calls itself is shown as it stands, "$" and all
    "svg.hashsalt": "nsa",  # the same records give the same bytes
    "axes.spines.top": False,
    "axes.spines.right": False,
}
IMPLEMENTATIONS = (
    NSA, "sdpa-flash", "sdpa-cudnn", "fla-nsa", "flex", "flash-attn", "flash-attn-4", "sdpa-math", "sdpa-efficient",
)  # fmt: skip
"""Those with a style of their own on every picture."""


def nth(number: int) -> dict[str, Any]:
    """The style of line `number` of a picture; marker and dash alone tell any two of the first 32 apart."""
    turn = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number + turn) % len(MARKERS)],
        "linestyle": DASHES[(number + 3 * turn) % len(DASHES)],
        "markersize": 5.5,
        "zorder": 3,
    }


def of_implementation(name: str) -> dict[str, Any]:
    """The style of an implementation, the same wherever it is drawn; NSA's line is thick."""
    known = IMPLEMENTATIONS.index(name) if name in IMPLEMENTATIONS else len(IMPLEMENTATIONS) + len(name) % 16
    return {**nth(known), "linewidth": 2.6 if name == NSA else 1.6}


def drawable(text: str, limit: int = 70) -> str:
    """Any text as the fonts and the SVG can show it: printable ASCII, cut where it is too long."""
    plain = "".join(c if c.isascii() and c.isprintable() else "?" for c in text.replace("×", "x"))
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def over_lengths(axis: Axes, tokens: Iterable[int], batches: Mapping[int, int]) -> float:
    """A logarithmic axis of lengths with a tick at each that was measured; `batches` of sequences beside it where
    lengths differ in them, since their figures are no series then. Inches that the labels take below."""
    several = len(set(batches.values())) > 1

    def name(x: float, _: int) -> str:
        return f"{in_k(x)}\n× {batches[round(x)]}" if several and round(x) in batches else in_k(x)

    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(tokens)))
    axis.xaxis.set_major_formatter(FuncFormatter(name))
    axis.set_xlabel("length in tokens" + " × sequences" * several)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(True, axis="x", **GRID)
    return 0.68 if several else 0.5


def logarithmic(axis: Axes, unit: str) -> None:
    """A logarithmic axis of values, already drawn, with a line at 1, 2, 3 and 5 of each decade; fewer over many."""
    axis.set_yscale("log")
    axis.margins(y=0.12)
    low, high = axis.get_ylim()
    decades = math.log10(high / low)
    subs = (1, 2, 3, 5) if decades < 1.7 else (1, 3) if decades < 3 else (1,)
    axis.yaxis.set_major_locator(LogLocator(10, subs=subs, numticks=30))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: in_short(y)))
    axis.set_ylabel(unit)
    axis.grid(True, axis="y", **GRID)


def in_k(tokens: float) -> str:
    """65536 -> 64k, 1000 -> 1000."""
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 256 == 0 else f"{tokens:g}"


def in_short(y: float) -> str:
    """12000 -> 12k, 3000000 -> 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if y >= size:
            return f"{y / size:.3g}{letter}"
    return f"{y:.3g}"


def frame(figure: Figure, *, left: float = 0.75, right: float = 0.15, top: float = 0.4, bottom: float = 0.5) -> None:
    """Margins around the axes in inches: faster than a layout engine, and the same on every picture."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, hspace=0.12)


def legend_inch(labels: Iterable[str]) -> float:
    """Height of a legend of these names below the axes."""
    return sum(_rows(names, columns) for names, columns in _blocks(labels)) * LEGEND_ROW_INCH + 0.08


def legend_below(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend for all axes under the picture, where it hides no line; each name once, the long ones at the end."""
    named: dict[str, Artist] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            named.setdefault(label, handle)
    y_inch = 0.04
    for names, columns in reversed(_blocks(named)):
        place = (0.5, y_inch / figure.get_size_inches()[1])
        figure.legend([named[name] for name in names], names, ncols=columns, bbox_to_anchor=place, **LEGEND)
        y_inch += _rows(names, columns) * LEGEND_ROW_INCH


def _blocks(labels: Iterable[str]) -> list[tuple[list[str], int]]:
    """Names that fit three in a row, then two, then one; each block with its columns."""
    names = dict.fromkeys(map(drawable, labels))
    reach = ((0, 16, 3), (16, 32, 2), (32, 1000, 1))
    blocks = [([name for name in names if low < len(name) <= high], columns) for low, high, columns in reach]
    return [(block, columns) for block, columns in blocks if block]


def _rows(names: Sequence[str], columns: int) -> int:
    return math.ceil(len(names) / columns)


def headline(figure: Figure, text: str) -> None:
    """The title, from the left edge."""
    figure.text(0.01, 1 - 0.08 / figure.get_size_inches()[1], drawable(text, 64), ha="left", va="top", weight="bold")
