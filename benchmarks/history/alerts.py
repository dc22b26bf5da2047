"""Alerts: a slowdown's cause, its cases and what became of it. One file each, results/alerts/<id>.jsonl.

A file holds a line per event and is only appended to, so that two writers, and two runners whose files are merged, lose
nothing of each other. What an alert is now follows from all of its lines, in whatever order they stand.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from harness import jsonl, schema
from nsa.io import append_lines

_ID = re.compile(r"[a-z0-9-]+-[0-9A-Za-z.]+")


class AlertState(str, Enum):
    """Where an alert is in its life."""

    NEW = "new"
    """Seen by two runs or by one comparison; a paired re-run must still show it."""
    CONFIRMED = "confirmed"
    """A paired re-run was SLOWER."""
    ACCEPTED = "accepted"
    """A person accepted the level, with a reason."""
    FIXED = "fixed"
    """The level is back."""
    NOT_REPRODUCED = "not_reproduced"
    """A paired re-run was SAME or FASTER, or no commit between the runs changes the code."""


OPEN = (AlertState.NEW, AlertState.CONFIRMED)


@dataclass(frozen=True)
class AlertCase:
    """One case that became slower."""

    case: str
    """The key's name."""
    device: str
    """The GPU's or the CPU's own name."""
    change: float
    """Of the latency: 0.1 is 10 % slower than the level before."""
    interval: tuple[float, float] | None
    """Where the change lies with 95 %; None where that is not known."""
    utc: str
    """Of the run or comparison that showed it."""
    source: str
    """ "runs" or "compare"."""

    @property
    def name(self) -> tuple[str, str]:
        """What tells two cases of one machine apart."""
        return self.device, self.case


@dataclass(frozen=True)
class AlertEvent:
    """One line: a new state, new cases, or fewer suspect commits."""

    utc: str
    alert: str
    """The alert's id."""
    machine: str
    """Its id, as a fingerprint has it."""
    state: AlertState
    why: str
    good: str | None
    """The last commit that was fast; None where it is not known."""
    suspects: tuple[str, ...]
    """Commits of which one is the cause, oldest first."""
    owner: str
    """Who wrote the commit, as git has it; "unknown: 3 commits" where several are suspect."""
    cases: tuple[AlertCase, ...] = ()
    """Those that are new, or were measured again."""

    def __post_init__(self) -> None:
        if not self.utc.endswith("Z"):
            raise ValueError(f"utc must end with Z; got {self.utc!r}")
        datetime.datetime.fromisoformat(self.utc.removesuffix("Z"))  # raises ValueError
        if not _ID.fullmatch(self.alert) or not self.alert.startswith(f"{self.machine}-"):
            raise ValueError(f"alert must be the machine's name, '-' and a commit or a time; got {self.alert!r}")


@dataclass(frozen=True)
class Alert:
    """What all lines of a file say together."""

    history: tuple[AlertEvent, ...]
    """Oldest first; at least one of them names a case."""

    @property
    def id(self) -> str:
        return self.history[0].alert

    @property
    def machine(self) -> str:
        return self.history[0].machine

    @property
    def state(self) -> AlertState:
        return self.history[-1].state

    @property
    def why(self) -> str:
        """Why it is in its state; of an accepted one the reason that a person gave."""
        return self.history[-1].why

    @property
    def is_open(self) -> bool:
        """Whether somebody has to do something about it."""
        return self.state in OPEN

    def after(self, utc: str) -> str:
        """The time of a next event: not before the last one's, also where that machine's clock is ahead."""
        return max(utc, self.history[-1].utc)

    @property
    def opened(self) -> str:
        """UTC."""
        return self.history[0].utc

    @property
    def cause(self) -> AlertEvent:
        """The event whose suspects count: of those confirmed the one with the fewest, else the newest."""
        confirmed = [event for event in self.history if event.state is AlertState.CONFIRMED]
        return min(reversed(confirmed), key=lambda event: len(event.suspects), default=self.history[-1])

    @property
    def good(self) -> str | None:
        return self.cause.good

    @property
    def suspects(self) -> tuple[str, ...]:
        """Oldest first; none where no commit between the runs changes nsa/."""
        return self.cause.suspects

    @property
    def owner(self) -> str:
        return self.cause.owner

    @property
    def cases(self) -> tuple[AlertCase, ...]:
        """As they were measured last, the slowest first."""
        newest = {case.name: case for event in self.history for case in event.cases}
        return tuple(sorted(newest.values(), key=lambda case: (-case.change, case.name)))

    @property
    def commands(self) -> tuple[str, ...]:
        """What repeats it, typed in the repository's root on that machine; none without two commits."""
        if not (self.good and self.suspects):
            return ()
        machine, (good, last), cases = ("--gpu", self.machine), (self.good, self.suspects[-1]), self.cases
        compare = ("compare", good, last, *machine, "--cases", ",".join(dict.fromkeys(case.case for case in cases)))
        bisect = ("bisect", good, last, *machine, "--case", cases[0].case)
        asked = (compare, bisect) if len(self.suspects) > 1 else (compare,)
        return tuple(shlex.join(("python", "-m", "benchmarks", *words)) for words in asked)


def folder(results: Path) -> Path:
    """Where the files are."""
    return results / "alerts"


def read(results: Path) -> tuple[list[Alert], list[str]]:
    """Every alert, the newest first, and every line that is none."""
    found: list[Alert] = []
    damaged: list[str] = []
    for path in sorted(folder(results).glob("*.jsonl")):
        events, wrong = jsonl.read(path, AlertEvent)
        damaged += wrong
        damaged += [f"{path.name}: an event of {event.alert}" for event in events if event.alert != path.stem]
        if (alert := _alert(path.stem, events)) is not None:
            found.append(alert)
        elif not wrong:
            damaged.append(f"{path.name}: no event names a case")
    return sorted(found, key=lambda alert: (alert.opened, alert.id), reverse=True), damaged


def _alert(name: str, events: Iterable[AlertEvent]) -> Alert | None:
    """None where no event of this alert names a case. Of one moment the later line counts."""
    own = dict.fromkeys(event for event in events if event.alert == name)
    ordered = sorted(own, key=lambda event: event.utc)
    return Alert(tuple(ordered)) if any(event.cases for event in ordered) else None


def append(results: Path, event: AlertEvent, wanted: Callable[[Alert | None], bool]) -> bool:
    """Add an event if it is wanted beside what the file says while no one else writes. Whether it was added.

    Raises DiskFullError, with the file as it was.
    """
    path = folder(results) / f"{event.alert}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    added = False

    def choose(lines: Iterator[bytes]) -> list[str]:
        nonlocal added
        added = wanted(_alert(event.alert, filter(None, map(_event, lines))))
        return [json.dumps(asdict(event), allow_nan=False, separators=(",", ":"))] if added else []

    append_lines(path, choose)
    return added


def _event(line: bytes) -> AlertEvent | None:
    """None for a damaged line, which `read` names."""
    try:
        return schema.build(AlertEvent, json.loads(line.decode()), "event")
    except (ValueError, TypeError, RecursionError):
        return None
