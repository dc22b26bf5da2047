"""`accept`: take the level that cases have now as their baseline, with the reason why, for everyone to read.

The only way for a baseline to move. Afterwards it prints how every case stands: slower or faster than accepted, new,
missing. A level whose runs are mostly not to be trusted (`reservations`: a busy CPU, unmet precision, few samples) is
refused unless `--despite` says why it is right all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.cases.key import NSA
from benchmarks.commands import options
from benchmarks.history import accepted, memory, reservations, trend
from benchmarks.history.accepted import Acceptance, Standing, State
from benchmarks.history.records import Record
from benchmarks.history.store import LatencySeries, Store
from harness import jsonl, machines, repository

SUMMARY = "move baselines to the level that cases have now, with a reason"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cases, and why."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--case",
        dest="cases",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="modes or patterns of case names as `run` prints them, such as 'decode/*' or 'decode/*/nsa'",
    )
    which.add_argument(
        "--first",
        action="store_true",
        help="every case of this machine that has no baseline yet and whose figures are trustworthy; names the others",
    )
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why the new level is right")
    parser.add_argument(
        "--despite",
        metavar="TEXT",
        help="take figures that are not trustworthy (busy CPU, unmet precision, few samples), and why that is right",
    )
    options.add_gpu(parser)
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Append one acceptance per case; the last line of stdout is JSON."""
    if not arguments.reason.strip():
        raise ValueError("--reason must say why the baseline moves; got an empty one")
    if arguments.despite is not None and not arguments.despite.strip():
        raise ValueError("--despite must say why figures that are not trustworthy are right; got an empty text")
    machine = arguments.gpu or machines.machine(None, machines.visible_gpu()).id
    store = Store(arguments.out)
    history = store.history(machine)
    chosen = _first(history, machine, arguments.out) if arguments.first else _chosen(history, arguments.cases, machine)
    doubts = {} if arguments.despite is not None else _doubts(store, machine, chosen)
    if arguments.first:
        chosen = _settled(chosen, doubts)
    elif doubts:
        raise ValueError(f"--case: {next(iter(doubts.values()))}")
    peaks_mib = {one.name: one.now_mib for one in memory.trends(store.visits(machine))}
    moved = [
        dataclasses.replace(acceptance, peak_mem_mib=peaks_mib.get(acceptance.case))
        for acceptance in _acceptances(machine, chosen, arguments.reason, arguments.despite, arguments.out)
    ]
    for acceptance in moved:
        jsonl.append(accepted.path(arguments.out), acceptance)
        print(f"{acceptance.case}: {_ms(acceptance.previous_ms)} -> {_ms(acceptance.latency_ms)}")
    standings = accepted.standings(machine, history, accepted.current(arguments.out))
    print("\n" + "\n".join(map(_line, standings)))
    summary = {
        "accepted": [acceptance.case for acceptance in moved],
        "states": dict(Counter(standing.state.value for standing in standings)),
        "missing": [standing.case for standing in standings if standing.state is State.MISSING],
        "new": [standing.case for standing in standings if standing.state is State.NEW],
        "baselines": str(accepted.path(arguments.out)),
    }
    print(json.dumps(summary))
    return 0


def _chosen(history: Sequence[LatencySeries], patterns: Sequence[str], machine: str) -> list[LatencySeries]:
    for pattern in patterns:
        if not any(options.named(series.newest.key, pattern) for series in history):
            raise ValueError(f"--case: no case of NSA that {machine} has measured is named {pattern!r}")
    return [series for series in history if any(options.named(series.newest.key, pattern) for pattern in patterns)]


def _first(history: Sequence[LatencySeries], machine: str, results: Path) -> list[LatencySeries]:
    """The series of cases without a baseline. ValueError where there is none."""
    known = accepted.current(results)
    chosen = [
        series
        for series in history
        if (machine, series.points[-1].fingerprint.device, series.newest.key.name) not in known
    ]
    if not chosen:
        raise ValueError(f"--first: {machine} has measured no case of NSA that has no baseline yet")
    return chosen


def _settled(chosen: Sequence[LatencySeries], doubts: Mapping[str, str]) -> list[LatencySeries]:
    """Those with nothing against them; names the others. ValueError where none is left."""
    against = dict(doubts)
    for series in chosen:
        if trend.of(series).confirmation_wanted:
            against.setdefault(series.newest.identity, f"the last run of {series.newest.key.name} is not confirmed")
    for why in against.values():
        print(f"not accepted: {why}")
    settled = [series for series in chosen if series.newest.identity not in against]
    if not settled:
        raise ValueError("--first: no case can be accepted; the lines above say why")
    return settled


def _doubts(store: Store, machine: str, chosen: Sequence[LatencySeries]) -> dict[str, str]:
    """By `Record.identity`, what is against a level that half of its runs or more saw under a reservation."""
    seen: dict[str, list[Record]] = {}
    begins = {one.newest.identity: one.points[trend.of(one).level_begin].utc for one in chosen}
    for record in store.records(machine, implementation=NSA, since=min(begins.values())):
        begin = begins.get(record.identity)
        if begin is not None and record.latency_ms is not None and record.fingerprint.utc >= begin:
            seen.setdefault(record.identity, []).append(record)
    doubts = {}
    for identity, records in seen.items():
        doubted = [record for record in records if reservations.of(record)]
        if 2 * len(doubted) >= len(records):
            newest = doubted[-1]
            doubts[identity] = (
                f"{len(doubted)} of the {len(records)} run(s) in the level of {newest.key.name} are not"
                f" trustworthy: {'; '.join(reservations.of(newest).values())}. Measure it again on an idle machine:"
                f" {newest.command}; or take it with --despite TEXT, which says why it is right all the same"
            )
    return doubts


def _acceptances(
    machine: str, chosen: Sequence[LatencySeries], reason: str, despite: str | None, results: Path
) -> list[Acceptance]:
    """ValueError for a case whose last run is an unconfirmed change."""
    baselines, utc, who = accepted.current(results), utc_now(), _who()
    found = []
    for series in chosen:
        key, last = series.newest.key, series.points[-1].fingerprint
        now = trend.of(series)
        if now.confirmation_wanted:
            change = now.changes[-1].change
            raise ValueError(
                f"--case: the last run of {key.name} differs by {change:+.1%} from its level of {now.level_ms:.4g} ms;"
                f" a second run must confirm it first: {series.newest.command}"
            )
        previous = baselines.get((machine, last.device, key.name))
        previous_ms = previous.latency_ms if previous else None
        path = series.newest.correctness.path if series.newest.correctness else None
        level = (now.level_ms, last.commit, previous_ms, path, last, despite)
        found.append(Acceptance(utc, who, reason, machine, last.device, key.name, *level))
    return found


def utc_now() -> str:
    """UTC, as records have it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _who() -> str:
    """As git names the author of a commit, else as the system names the user. Raises ValueError if neither does."""
    if author := repository.git("var", "GIT_AUTHOR_IDENT"):
        return author.rsplit(" ", 2)[0]  # behind it stand seconds and time zone
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # a container's user without a name
        raise ValueError("an acceptance names who made it: git config user.name NAME; user.email EMAIL") from error


def _ms(latency_ms: float | None) -> str:
    return "none" if latency_ms is None else f"{latency_ms:.4g} ms"


def _line(standing: Standing) -> str:
    asked = "  (the last run differs: run it again)" if standing.unconfirmed else ""
    asked += "".join(f"  ({why})" for why in standing.differences)
    levels = f"{_ms(standing.accepted_ms)} accepted, {_ms(standing.level_ms)} now"
    return f"{standing.state.value:<14} {standing.case:<58} {levels}{asked}"
