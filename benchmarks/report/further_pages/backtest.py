"""How often `compare`'s calls are right and the commit is found, as `backtest` found it on recorded pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ab import backtest
from benchmarks.ab.backtest import Backtest, Share
from benchmarks.report.table import NBSP, Cell, ReportTable, number, version


@dataclass(frozen=True)
class BacktestSection:
    """One machine's backtest on the page."""

    machine: str
    sentence: str
    shares: ReportTable
    missed: str
    """Which goals are missed; empty where none is."""
    commit: str
    command: str


def read(results: Path) -> tuple[list[Backtest], list[str]]:
    """The backtest of every machine, and what is wrong with a file that is none."""
    found: list[Backtest] = []
    damaged: list[str] = []
    for machine in backtest.machines(results):
        try:
            loaded = backtest.load(results, machine)
        except ValueError as error:
            damaged.append(str(error))
        else:
            found += [loaded] if loaded else []
    return found, damaged


def show(one: Backtest) -> BacktestSection:
    """Its table."""
    changed = sum(event.change != 0 for event in one.events)
    missed = [share.name for share in one.shares if not share.met]
    return BacktestSection(
        machine=one.machine,
        sentence=(
            f"{len(one.events)} histories of eight commits, made of {one.recorded} recorded pairs of processes of"
            f" {one.cases} cases: in {changed} one commit changed a case by real work of known length, in"
            f" {len(one.events) - changed} none did. Each pair of a case was used {one.uses:.1f} times on average."
        ),
        shares=_table(one.shares),
        missed=", ".join(missed),
        commit=version(one.commit, bool(one.dirty)),
        command=one.command,
    )


def _table(shares: Sequence[Share]) -> ReportTable:
    rows = [
        [
            Cell(share.name),
            number(f"{share.hits} of {share.trials}"),
            number("none" if share.share is None else _percent(share.share)),
            number(f"at least {_percent(share.least)}"),
            number("" if share.goal is None else f"at least {_percent(share.goal)}"),
            Cell("" if share.goal is None else _judged(share)),
        ]
        for share in shares
    ]
    return ReportTable(("what", "histories", "share", "95 % bound", "goal", "reached"), rows)


def _judged(share: Share) -> str:
    if not share.met or share.goal is None:
        return "no"
    return "yes" if share.least >= share.goal else "yes, but its bound is below"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}{NBSP}%"
