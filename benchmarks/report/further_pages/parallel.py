"""The page of sequences over several GPUs: share of ideal, waiting and bytes, measured; more of them as a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases.key import CONTEXT_PARALLEL, NSA, Key
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from benchmarks.parallel import model
from benchmarks.parallel.model import Model, ModelledTime
from benchmarks.report import style
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.links import Repository
from benchmarks.report.table import CODE, Cell, ReportTable, digits, number, percent, when
from harness import machines

MODELLED = 8, (131072, 262144, 524288, 1048576)
"""Ranks and lengths that the model is drawn for; the last length is its figure."""
COMMAND = "torchrun --nproc_per_node=2 -m benchmarks.parallel --tokens 131072 262144"
_ALONE = "prefill-forward-backward"
_PANELS = "% of ideal", "% waiting", "GB arriving"
_Values = tuple[int, float | None, float | None, float | None]
"""Tokens, and a value of each panel."""


@dataclass(frozen=True)
class ParallelSection:
    """The page's content."""

    measured: ReportTable
    modelled: ReportTable
    missing: Sequence[str]
    """What a model needs that no record tells, a sentence each."""
    pictures: Sequence[Picture]


def records(stored: Store, machine: str) -> list[Record]:
    """What the page needs of one machine: sequences over several ranks, and the one GPU's times beside them."""
    several = stored.records(machine, CONTEXT_PARALLEL, NSA)
    return [*several, *stored.records(machine, _ALONE, NSA)] if several else []


def show(folder: ReportFolder, found: Sequence[Record], repository: Repository) -> ParallelSection:
    """Tables, and a picture per machine and shape, of the newest record of each case; `found`: what `records` gives."""
    newest = {(one.fingerprint.machine, one.key.case): one for one in found if one.latency_ms is not None}
    several = [one for one in newest.values() if one.shared is not None]
    several.sort(key=lambda one: (one.fingerprint.machine, model.shape(one.key), _packed(one.key), *_size(one.key)))
    modelled, missing, pictures = [], [], []
    for machine, shape in dict.fromkeys((one.fingerprint.machine, model.shape(one.key)) for one in several):
        own = [one for one in several if (one.fingerprint.machine, model.shape(one.key)) == (machine, shape)]
        fitted = None if machine == machines.CPU else _fitted(own, list(newest.values()), machine)
        if isinstance(fitted, str):
            missing.append(f"{machine}, {shape}: {fitted}")
        times = _times(fitted) if isinstance(fitted, Model) else []
        if isinstance(fitted, Model):
            modelled.append(_modelled_row(machine, shape, fitted, times[-1]))
        pictures.append(_picture(folder, machine, shape, own, times))
    if not any(one.fingerprint.machine != machines.CPU for one in several):
        missing.append("a record of several GPUs beside one of them")
    return ParallelSection(_measured(several, repository), ReportTable(_MODEL_HEAD, modelled), missing, pictures)


def _fitted(own: Sequence[Record], newest: Sequence[Record], machine: str) -> Model | str:
    """The model of one machine and shape; documents are not part of it."""
    of_one = [one for one in own if one.key.documents is None]
    alone_ms = {
        one.key.num_keys: one.latency_ms
        for one in newest
        if one.key.mode == _ALONE and one.latency_ms is not None and one.fingerprint.machine == machine
        if of_one and model.shape(one.key) == model.shape(of_one[0].key) and one.key.batch == 1
    }
    return model.fit(of_one, alone_ms)


def _times(fitted: Model) -> list[ModelledTime]:
    ranks, lengths = MODELLED
    return [fitted.at(ranks, tokens) for tokens in lengths]


def _packed(key: Key) -> bool:
    return key.documents is not None


def _size(key: Key) -> tuple[int, int]:
    return key.num_keys, key.ranks


def _measured(several: Sequence[Record], repository: Repository) -> ReportTable:
    head = (
        "machine", "shape", "tokens", "documents", "GPUs", "ms", "forward, ms", "one GPU, ms", "the slowest, ms",
        "share of ideal", "waiting, ms", "waiting, share", "GB that arrive", "imbalance", "peak, MiB", "when", "commit",
    )  # fmt: skip
    rows = []
    for one in several:
        assert one.shared is not None
        assert one.latency_ms is not None
        alone, commit = one.shared.one_rank_ms, repository.commit(one.fingerprint.commit)
        rows.append(
            [
                Cell(one.fingerprint.machine),
                Cell(model.shape(one.key), CODE),
                number(f"{one.key.num_keys:,}"),
                number("1" if one.key.documents is None else str(len(one.key.documents))),
                number(str(one.key.ranks)),
                number(digits(one.latency_ms)),
                number(None if one.shared.forward_ms is None else digits(one.shared.forward_ms)),
                number(None if alone is None else digits(alone)),
                number(None if one.shared.slowest_rank_ms is None else digits(one.shared.slowest_rank_ms)),
                number(None if one.share_of_ideal is None else _share(one.share_of_ideal)),
                number(digits(one.shared.exposed_ms)),
                number(None if one.exposed_share is None else _share(one.exposed_share)),
                number(digits(one.shared.received_gb)),
                number(_share(one.shared.imbalance)),
                number(None if one.peak_mem_mib is None else digits(one.peak_mem_mib)),
                when(one.fingerprint.utc),
                Cell(commit.text, CODE, commit.href),
            ]
        )
    return ReportTable(head, rows)


_MODEL_HEAD = (
    "machine", "shape", "tokens", "GPUs", "ms, modelled", "share of ideal, modelled", "waiting, modelled",
    "GB that arrive, modelled", "from the record of",
)  # fmt: skip


def _modelled_row(machine: str, shape: str, fitted: Model, at: ModelledTime) -> list[Cell]:
    return [
        Cell(machine),
        Cell(shape, CODE),
        number(f"{at.tokens:,}"),
        number(str(at.ranks)),
        number(digits(at.latency_ms)),
        number(_share(at.share_of_ideal)),
        number(_share(at.exposed_share)),
        number(f"{at.received_gb:.3g}"),
        Cell(f"{fitted.basis.key.ranks} GPUs at {fitted.tokens:,} tokens"),
    ]


def _share(x: float) -> str:
    return percent(x).lstrip("+")


def _picture(
    folder: ReportFolder, machine: str, shape: str, own: Sequence[Record], times: Sequence[ModelledTime]
) -> Picture:
    """Three panels over the length: share of ideal, waiting and bytes, a line per number of GPUs."""
    lines: dict[str, list[_Values]] = {}
    for one in own:
        assert one.shared is not None
        name = f"{one.key.ranks} GPUs" + (", packed documents" if _packed(one.key) else "")
        values = (one.key.num_keys, _percent(one.share_of_ideal), _percent(one.exposed_share), one.shared.received_gb)
        lines.setdefault(name, []).append(values)
    styles = {name: {**style.nth(i), "linestyle": "-"} for i, name in enumerate(lines)}  # dashes are the model's
    if times:
        name = f"{MODELLED[0]} GPUs, model, not measured"
        styles[name] = {**style.nth(len(lines)), "linestyle": "--", "markerfacecolor": "none"}
        lines[name] = [
            (at.tokens, _percent(at.share_of_ideal), _percent(at.exposed_share), at.received_gb) for at in times
        ]
    title = f"One sequence over several GPUs, {machine}, {shape}"
    legend = style.legend_inch(lines)

    def draw(figure: Figure) -> None:
        axes: list[Axes] = list(figure.subplots(len(_PANELS), 1, sharex=True))
        for i, (axis, unit) in enumerate(zip(axes, _PANELS, strict=True), 1):
            for name, points in lines.items():
                drawn = [(point[0], y) for point in points if (y := point[i]) is not None]
                axis.plot([x for x, _ in drawn], [y for _, y in drawn], label=style.drawable(name), **styles[name])
            axis.set_ylim(bottom=0)
            axis.set_ylabel(unit)
            axis.grid(True, axis="y", **style.GRID)
        axes[0].axhline(100, color=style.GREY, linewidth=0.8)
        axes[0].set_ylim(top=max(105.0, axes[0].get_ylim()[1]))
        labels = style.over_lengths(axes[-1], [point[0] for points in lines.values() for point in points], {})
        style.headline(figure, title)
        style.frame(figure, bottom=labels + legend)
        style.legend_below(figure, axes)

    return folder.picture(title, (machine, "parallel", shape), 5.2 + legend, draw)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
