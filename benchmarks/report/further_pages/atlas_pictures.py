"""The pictures of an atlas: a line per length, in a band from the 10th to the 90th percentile of layers x kv heads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from benchmarks.atlas.record import LAGS, UNIONS, Atlas, Band, HeadCurves, LengthCurves, band
from benchmarks.report import style
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.style import in_k
from nsa.config import BRANCHES

_HEIGHT_INCH = 3.4


def draw(folder: ReportFolder, atlas: Atlas) -> list[Picture]:
    """Every picture of one atlas."""
    lengths = atlas.lengths
    longest = lengths[-1]
    pictures = (
        ("atlas-jaccard", "How alike the choices of rows t and t + lag are (Jaccard index: blocks in both over blocks"
         " in either), forced blocks included", lambda figure: _over_lags(figure, lengths, free=False)),
        ("atlas-jaccard-free", "The same without the forced blocks: what the scores chose",
         lambda figure: _over_lags(figure, lengths, free=True)),
        ("atlas-union", "Distinct blocks that neighbouring queries choose together: the fewer, the more a kernel that"
         " shares them saves. Dotted: no block in common, and all the same", lambda figure: _unions(figure, lengths)),
        ("atlas-distance", "How far back the blocks stand that the scores choose; a point counts the blocks from the"
         " point before it on", lambda figure: _distances(figure, lengths)),
        ("atlas-popularity", "Load of kernels that walk blocks: how often the most chosen block is chosen, over the"
         " mean", lambda figure: _popularity(figure, lengths)),
        ("atlas-mass", "Share of the scores that the chosen blocks hold", lambda figure: _mass(figure, lengths)),
        ("atlas-gates", f"Mean gate of each branch by layer, at {in_k(longest.seq_len)} tokens",
         lambda figure: _gates(figure, longest)),
        ("atlas-layers", f"How alike choices are at {in_k(longest.seq_len)} tokens: a layer's with those of the layer"
         " before, and one decode step's with the next one's", lambda figure: _layers(figure, longest)),
    )  # fmt: skip
    return [folder.picture(title, (name,), _HEIGHT_INCH, what) for name, title, what in pictures]


def _axes(figure: Figure, labels: Sequence[str], title: str) -> Axes:
    style.headline(figure, title)
    style.frame(figure, bottom=0.5 + style.legend_inch(labels))
    axis: Axes = figure.subplots()
    axis.grid(True, axis="y", **style.GRID)
    return axis


def _banded(axis: Axes, x: Sequence[float], bands: Sequence[Band], label: str, number: int) -> None:
    look = style.nth(number)
    axis.plot(x, [one.median for one in bands], label=label, **look)
    axis.fill_between(
        x, [one.p10 for one in bands], [one.p90 for one in bands], color=look["color"], alpha=0.13, linewidth=0
    )


def _log2(axis: Axes, ticks: Sequence[float], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: in_k(x)))
    axis.set_xlabel(label)


def _names(lengths: Sequence[LengthCurves]) -> list[str]:
    return [f"{in_k(one.seq_len)} tokens" for one in lengths]


def _over_lags(figure: Figure, lengths: Sequence[LengthCurves], *, free: bool) -> None:
    names = _names(lengths)
    axis = _axes(figure, names, "Overlap without forced blocks" if free else "Overlap of two rows' choices")

    def at(lag: int) -> Callable[[HeadCurves], float]:
        return lambda head: (head.jaccard_free if free else head.jaccard)[str(lag)]

    for number, (one, name) in enumerate(zip(lengths, names, strict=True)):
        _banded(axis, LAGS, [band(one, at(lag)) for lag in LAGS], name, number)
    _log2(axis, LAGS, "lag in rows")
    axis.set_ylim(0, 1)
    axis.set_ylabel("Jaccard index")
    style.legend_below(figure, [axis])


def _unions(figure: Figure, lengths: Sequence[LengthCurves]) -> None:
    names = _names(lengths)
    axis = _axes(figure, names, "Blocks that neighbours choose together")

    def of(count: int) -> Callable[[HeadCurves], float]:
        return lambda head: head.union[str(count)]

    for number, (one, name) in enumerate(zip(lengths, names, strict=True)):
        _banded(axis, UNIONS, [band(one, of(count)) for count in UNIONS], name, number)
    n_sel = lengths[0].n_sel
    for ends in ([n_sel, n_sel], [n_sel * UNIONS[0], n_sel * UNIONS[-1]]):
        axis.plot([UNIONS[0], UNIONS[-1]], ends, color=style.GREY, linewidth=0.9, linestyle=":")
    _log2(axis, UNIONS, "neighbouring queries")
    style.logarithmic(axis, "distinct blocks")
    style.legend_below(figure, [axis])


def _distances(figure: Figure, lengths: Sequence[LengthCurves]) -> None:
    names = _names(lengths)
    axis = _axes(figure, names, "Distance of the blocks that the scores choose")
    edges: list[float] = []

    def share(number: int) -> Callable[[HeadCurves], float]:
        return lambda head: head.distance[number][1]

    for number, (one, name) in enumerate(zip(lengths, names, strict=True)):
        own = [edge * one.l_sel for edge, _ in one.heads[0].distance]
        edges = max(edges, own, key=len)
        _banded(axis, own, [band(one, share(i)) for i in range(len(own))], name, number)
    _log2(axis, edges[::2], "up to so many tokens back")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_ylim(bottom=0)
    axis.set_ylabel("share of the choices")
    style.legend_below(figure, [axis])


def _popularity(figure: Figure, lengths: Sequence[LengthCurves]) -> None:
    axis = _by_length(figure, lengths, lambda head: head.popularity, "Popularity of blocks")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("maximum over mean")


def _mass(figure: Figure, lengths: Sequence[LengthCurves]) -> None:
    axis = _by_length(figure, lengths, lambda head: head.mass, "Scores that the choice holds")
    axis.set_ylim(0, 1)
    axis.set_ylabel("share of the scores")


def _by_length(figure: Figure, lengths: Sequence[LengthCurves], of: Callable[[HeadCurves], float], title: str) -> Axes:
    label = "median of layers and heads, p10 to p90"
    axis = _axes(figure, [label], title)
    tokens = [one.seq_len for one in lengths]
    bands = [band(one, of) for one in lengths]
    reach = [[one.median - one.p10 for one in bands], [one.p90 - one.median for one in bands]]
    axis.errorbar(tokens, [one.median for one in bands], reach, label=label, capsize=4, **style.nth(0))
    _log2(axis, tokens, "length in tokens")
    style.legend_below(figure, [axis])
    return axis


def _gates(figure: Figure, one: LengthCurves) -> None:
    axis = _axes(figure, BRANCHES, "Gates by layer")
    for number, branch in enumerate(BRANCHES):
        means = [statistics.fmean(head.gates[number] for head in heads) for heads in _by_layer(one)]
        axis.plot(range(len(means)), means, label=branch, **style.nth(number))
    axis.set(ylim=(0, 1), xlabel="layer", ylabel="mean gate", xticks=range(len(_by_layer(one))))
    style.legend_below(figure, [axis])


def _layers(figure: Figure, one: LengthCurves) -> None:
    names = ("with the layer before", "decode step to step")
    axis = _axes(figure, names, "Layer to layer, step to step")
    layers = _by_layer(one)
    axis.plot(range(1, len(layers)), one.layers_jaccard, label=names[0], **style.nth(0))
    steps = [statistics.fmean(head.step_jaccard for head in heads) for heads in layers]
    axis.plot(range(len(layers)), steps, label=names[1], **style.nth(1))
    axis.set(ylim=(0, 1), xlabel="layer", ylabel="Jaccard index", xticks=range(len(layers)))
    style.legend_below(figure, [axis])


def _by_layer(one: LengthCurves) -> list[list[HeadCurves]]:
    layers = range(1 + max(head.layer for head in one.heads))
    return [[head for head in one.heads if head.layer == layer] for layer in layers]
