"""How often `compare` is right, as `calibrate` found it: false alarms with identical code, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.ab import backtest, calibration, open_bounds
from benchmarks.ab.calibration import LONG, Calibration, CalibrationRate, CaseCalibration
from benchmarks.ab.result import Rules
from benchmarks.report import style
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.table import NAME, NBSP, Cell, ReportTable, digits, number, version


@dataclass(frozen=True)
class ClassSection:
    """One class of cases of one machine."""

    name: str
    sentence: str
    rates: ReportTable
    rules: ReportTable
    cases: ReportTable
    missed: str
    """What is to be found on each case, and where it is not; empty where it is wherever it was tried."""
    unjudged: str
    """What was not tried, and on which cases; empty where all was."""
    picture: Picture


@dataclass(frozen=True)
class CalibrationSection:
    """One machine's calibration on the page."""

    machine: str
    device: str
    classes: tuple[ClassSection, ...]
    pairs: int
    minutes: str
    when: str
    commit: str
    command: str
    bounds: tuple[str, ...]
    """Of those that are not met, how many tests and pairs they want."""
    other_device: str | None
    """What the newest figures under this name are of, where that is another device; else None."""


def read(results: Path) -> tuple[list[Calibration], list[str]]:
    """The calibration of every machine, and what is wrong with a file that is none."""
    found: list[Calibration] = []
    damaged: list[str] = []
    for file in sorted((results / "calibration").glob("*.json")):
        if backtest.is_backtest(file):
            continue
        try:
            loaded = calibration.load(results, file.stem)
        except ValueError as error:
            damaged.append(str(error))
        else:
            found += [loaded] if loaded else []
    return found, damaged


def show(folder: ReportFolder, one: Calibration, devices: Mapping[str, str]) -> CalibrationSection:
    """Its tables and its pictures. `devices`: what the newest figures of each machine are of."""
    where = one.fingerprint
    newest = devices.get(where.machine, where.device)
    return CalibrationSection(
        machine=where.machine,
        device=where.device,
        classes=tuple(_class(folder, one, of_class.name, of_class.rules) for of_class in one.classes),
        pairs=one.pairs,
        minutes=f"{one.seconds / 60:.0f}",
        when=where.utc,
        commit=version(where.commit, where.dirty),
        command=one.command,
        bounds=tuple(missed.text for missed in open_bounds.find(one)),
        other_device=None if newest == where.device else newest,
    )


def _class(folder: ReportFolder, one: Calibration, name: str, rules: Rules) -> ClassSection:
    rates, cases = one.rates(name), [case for case in one.cases if case.kind == name]
    false, goals = rates[0], open_bounds.goals(one.fingerprint.machine, name)
    found = " ".join(
        f"A slowdown of {_share(rate.slowdown)} was found in {rate.slower} of {rate.comparisons}"
        f" ({_share(rate.least_power)} at least)."
        for rate in rates[1:]
    )
    return ClassSection(
        name=name,
        sentence=(
            f"{len(cases)} cases, each in {_pairs(one, cases)} pairs of processes. Identical code was called faster or"
            f" slower in {false.slower + false.faster} of {false.comparisons}"
            f" comparisons ({_share(false.most_alarms)} at most, with 95 % confidence). {found}"
        ),
        rates=_rates(rates),
        rules=_rules(rules),
        cases=_cases(cases),
        missed=_missed(cases, goals),
        unjudged=_unjudged(cases, goals),
        picture=_picture(folder, one, name),
    )


def _pairs(one: Calibration, cases: Sequence[CaseCalibration]) -> str:
    """How many pairs of processes each case has: "23", or "23 to 131"."""
    counts = {one.pairs if case.pairs is None else case.pairs for case in cases}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _missed(cases: Sequence[CaseCalibration], goals: Mapping[float, float]) -> str:
    names = [case.case for case in cases if not _reaches(case, goals)]
    wanted = " and ".join(f"{_share(slowdown)} in {_share(share)}" for slowdown, share in goals.items())
    if not names:
        return ""
    return f"A slowdown of {wanted} of the comparisons should be found; it is found less often on {', '.join(names)}."


def _reaches(case: CaseCalibration, goals: Mapping[float, float]) -> bool:
    """Every goal that could be tried."""
    return all(rate.power >= goals.get(rate.slowdown, 0.0) for rate in case.rates if rate.comparisons)


def _unjudged(cases: Sequence[CaseCalibration], goals: Mapping[float, float]) -> str:
    """Cases of which nobody knows whether a slowdown of a goal is found: none so small could be injected."""
    untried = []
    for slowdown in goals:
        names = [case.case for case in cases if not any(r.slowdown == slowdown and r.comparisons for r in case.rates)]
        if names:
            untried.append(f"No slowdown of {_share(slowdown)} could be injected into {', '.join(names)}.")
    return " ".join(untried)


def _rules(rules: Rules) -> ReportTable:
    rows = [
        ("smallest change that is called", _share(rules.smallest_change)),
        ("change that SAME rules out", _share(rules.equal_within)),
        ("noise between pairs (standard deviation)", _share(rules.noise.sd)),
        ("degrees of freedom that this noise counts for", f"{rules.noise.df:.3g}"),
        ("analyses after so many pairs", ", ".join(map(str, rules.interim_analyses))),
        ("largest p of a call", f"{rules.largest_p:g}"),
    ]
    return ReportTable(("rule", "value"), [[Cell(name), number(value)] for name, value in rows])


def _cases(cases: Sequence[CaseCalibration]) -> ReportTable:
    levels = [level for level in calibration.LEVELS if level]
    head = ("case", "ms", "noise", "false alarms", *(f"{_share(level)} found" for level in levels))
    rows = []
    for case in sorted(cases, key=lambda one: one.case):
        rates = {rate.slowdown: rate for rate in case.rates}
        false = rates[0.0]
        cells = [digits(case.latency_ms), _share(case.noise), f"{false.slower + false.faster} of {false.comparisons}"]
        cells += [
            f"{rates[level].slower} of {rates[level].comparisons}" if level in rates else "cannot be injected"
            for level in levels
        ]
        rows.append([Cell(case.case, NAME), *map(number, cells)])
    return ReportTable(head, rows)


def _rates(rates: Sequence[CalibrationRate]) -> ReportTable:
    verdicts = ("SLOWER", "FASTER", "SAME", "UNDECIDED")
    head = ("injected slowdown", "as measured", "comparisons", *verdicts, "called SLOWER", "95 % bound")
    rows = []
    for rate in rates:
        counts = (rate.comparisons, rate.slower, rate.faster, rate.same, rate.undecided)
        bound = f"at least {_share(rate.least_power)}" if rate.slowdown else f"at most {_share(rate.most_alarms)}"
        cells = (_share(rate.slowdown), _share(rate.injected), *map(str, counts), _share(rate.power), bound)
        rows.append([number(cell) for cell in cells])
    return ReportTable(head, rows)


def _picture(folder: ReportFolder, one: Calibration, name: str) -> Picture:
    """Power over the injected slowdown, from the false alarms at 0."""
    machine, rates = one.fingerprint.machine, one.rates(name)
    title = f"How often compare says SLOWER ({machine}, {name})"

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        x, powers = range(len(rates)), [rate.power for rate in rates]
        below = [rate.power - rate.least_power for rate in rates]
        above = [calibration.bounds(rate.slower, rate.comparisons)[1] - rate.power for rate in rates]
        axis.errorbar(x, powers, yerr=[below, above], capsize=4, linewidth=2, **style.nth(0))
        for place, power in zip(x, powers, strict=True):
            right, rise, across, side = (8, -6, "left", "top") if power > 0.5 else (-8, 6, "right", "bottom")
            axis.annotate(_share(power), (place, power), (right, rise), textcoords="offset points", ha=across, va=side)
        axis.set_xticks(x, ["identical code", *(f"{_share(rate.slowdown)} slower" for rate in rates[1:])])
        axis.set_xlim(-0.7, len(rates) - 0.4)
        axis.set_ylim(-0.03, 1.05)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set_ylabel("share called SLOWER")
        axis.grid(True, axis="y", **style.GRID)
        style.headline(figure, title)
        style.frame(figure, bottom=0.4)

    return folder.picture(title, ("calibration", machine, "long" if name == LONG else "short"), 3.2, draw)


def _share(share: float) -> str:
    return f"{100 * share:.3g}{NBSP}%"
