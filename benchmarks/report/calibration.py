"""How often `compare` is right, as `calibrate` found it: false alarms with identical code, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.ab import calibration
from benchmarks.ab.calibration import Calibration, CalibrationRate
from benchmarks.report import style
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.table import NBSP, Cell, ReportTable, number, version

_Z = 1.96  # two-sided 95 %


@dataclass(frozen=True)
class CalibrationSection:
    """One machine's calibration on the page."""

    machine: str
    device: str
    sentence: str
    rates: ReportTable
    rules: ReportTable
    picture: Picture
    when: str
    commit: str
    command: str


def read(results: Path) -> tuple[list[Calibration], list[str]]:
    """The calibration of every machine, and what is wrong with a file that is none."""
    found: list[Calibration] = []
    damaged: list[str] = []
    for file in sorted((results / "calibration").glob("*.json")):
        try:
            loaded = calibration.load(results, file.stem)
        except ValueError as error:
            damaged.append(str(error))
        else:
            found += [loaded] if loaded else []
    return found, damaged


def show(folder: ReportFolder, one: Calibration) -> CalibrationSection:
    """Its tables and its picture."""
    where = one.fingerprint
    false = one.rates[0]
    return CalibrationSection(
        machine=where.machine,
        device=where.device,
        sentence=(
            f"Identical code was called faster or slower in {false.slower + false.faster} of {false.comparisons}"
            f" comparisons: a false-alarm rate of {_share(false.alarms)}. "
            + " ".join(f"A slowdown of {_share(r.slowdown)} was found in {_share(r.power)}." for r in one.rates[1:])
        ),
        rates=_rates(one.rates),
        rules=_rules(one),
        picture=_picture(folder, one),
        when=where.utc,
        commit=version(where.commit, where.dirty),
        command=one.command,
    )


def _rules(one: Calibration) -> ReportTable:
    rows = [
        *((name, str(value)) for name, value in vars(one.rules).items()),
        ("pairs of processes", str(one.pairs)),
        ("cases", str(len(one.cases))),
        ("spread between pairs of identical code", _share(one.noise)),
    ]
    return ReportTable(("rule or basis", "value"), [[Cell(name), number(value)] for name, value in rows])


def _rates(rates: Sequence[CalibrationRate]) -> ReportTable:
    verdicts = ("SLOWER", "FASTER", "SAME", "UNDECIDED")
    head = ("injected slowdown", "as measured", "comparisons", *verdicts, "called SLOWER", "95 % interval")
    rows = []
    for rate in rates:
        low, high = wilson(rate.slower, rate.comparisons)
        counts = (rate.comparisons, rate.slower, rate.faster, rate.same, rate.undecided)
        share = (_share(rate.power), f"{_share(low)} to {_share(high)}")
        cells = (_share(rate.slowdown), _share(rate.injected), *map(str, counts), *share)
        rows.append([number(cell) for cell in cells])
    return ReportTable(head, rows)


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, Journal of the American Statistical Association 22, 1927)."""
    share, weight = hits / trials, _Z**2 / trials
    middle = (share + weight / 2) / (1 + weight)
    half = _Z * math.sqrt(share * (1 - share) / trials + weight / trials / 4) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def _picture(folder: ReportFolder, one: Calibration) -> Picture:
    """Power over the injected slowdown, from the false alarms at 0."""
    machine = one.fingerprint.machine
    title = f"How often compare says SLOWER ({machine})"

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        x = range(len(one.rates))
        intervals = [wilson(rate.slower, rate.comparisons) for rate in one.rates]
        below = [rate.power - low for rate, (low, _) in zip(one.rates, intervals, strict=True)]
        above = [high - rate.power for rate, (_, high) in zip(one.rates, intervals, strict=True)]
        powers = [rate.power for rate in one.rates]
        axis.errorbar(x, powers, yerr=[below, above], capsize=4, linewidth=2, **style.nth(0))
        for place, power in zip(x, powers, strict=True):
            right, rise, across, side = (8, -6, "left", "top") if power > 0.5 else (-8, 6, "right", "bottom")
            axis.annotate(_share(power), (place, power), (right, rise), textcoords="offset points", ha=across, va=side)
        axis.set_xticks(x, ["identical code", *(f"{_share(rate.slowdown)} slower" for rate in one.rates[1:])])
        axis.set_xlim(-0.7, len(one.rates) - 0.4)
        axis.set_ylim(-0.03, 1.05)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set_ylabel("share called SLOWER")
        axis.grid(True, axis="y", **style.GRID)
        style.headline(figure, title)
        style.frame(figure, bottom=0.4)

    return folder.picture(title, ("calibration", machine), 3.2, draw)


def _share(share: float) -> str:
    return f"{100 * share:.3g}{NBSP}%"
