"""Levels that a person accepted for a case, and why: results/baselines/accepted.jsonl. The newest one counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.history import trend
from benchmarks.history.store import LatencySeries
from harness import fingerprint, jsonl
from harness.fingerprint import Fingerprint


@dataclass(frozen=True)
class Acceptance:
    """One case's baseline moved."""

    utc: str
    who: str
    """git's user.name and user.email, or the login."""
    reason: str
    machine: str
    """Its id, as a fingerprint has it."""
    device: str
    """The GPU's or the CPU's own name."""
    case: str
    """The key's name: "decode/8x2x64/b4/s16384/float32/nsa"."""
    latency_ms: float
    """The accepted level: median of the process medians since the last change."""
    commit: str | None
    """Of the newest run in that level."""
    previous_ms: float | None = None
    """The level that it replaces; None for a new case."""
    path: str | None = None
    """What ran, as the implementation recorded it; None in a line that was written before this was kept."""
    fingerprint: Fingerprint | None = None
    """Of the newest run in that level: under which conditions it holds; None as for `path`."""

    despite: str | None = None
    """Why it holds although most of its runs are not trustworthy; None where they are."""
    peak_mem_mib: float | None = None
    """The accepted peak of memory, of the newest run in that level; None where none was measured, and in lines that
    were written before this was kept."""

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("reason must say why the baseline moves; got an empty one")
        if not self.latency_ms > 0:
            raise ValueError(f"latency_ms must be above 0; got {self.latency_ms}")


def path(results: Path) -> Path:
    """The file, shared by all machines."""
    return results / "baselines" / "accepted.jsonl"


def read(results: Path) -> tuple[list[Acceptance], list[str]]:
    """Every acceptance, oldest first, and every line that is none."""
    return jsonl.read(path(results), Acceptance)


def current(results: Path) -> dict[tuple[str, str, str], Acceptance]:
    """The newest acceptance by (machine, device, case)."""
    return {(entry.machine, entry.device, entry.case): entry for entry in read(results)[0]}


class State(str, Enum):
    """A case beside the baseline that was accepted for it."""

    AT_BASELINE = "AT_BASELINE"
    SLOWER = "SLOWER"
    FASTER = "FASTER"
    NOT_COMPARABLE = "NOT_COMPARABLE"
    """Measured under other conditions than what was accepted, or by another path."""
    NEW = "NEW"
    """Measured, and never accepted."""
    MISSING = "MISSING"
    """Accepted, and not in the newest run that it could be in."""


@dataclass(frozen=True)
class Standing:
    """Where one case of one machine stands."""

    case: str
    device: str
    state: State
    level_ms: float | None
    """Now; None where it is missing."""
    accepted_ms: float | None
    """None where it is new."""
    unconfirmed: bool
    """The last run differs from the level; another run must say which is right."""
    differences: tuple[str, ...] = ()
    """Why it is NOT_COMPARABLE: "driver 555 -> 560"."""


def standings(
    machine: str,
    history: Iterable[LatencySeries],
    baselines: Mapping[tuple[str, str, str], Acceptance],
    smallest: float = trend.SMALLEST_CHANGE,
) -> list[Standing]:
    """Every case of a machine that is measured or accepted: slow drifts too, which no single step would show.

    A case is missing where the newest run of its mode on its device has not measured it; so it is after a quick run
    that leaves it out, until the next whole one.
    """
    series = trend.newest_paths(history)
    newest = _newest_runs(series)
    found, seen = [], set()
    for one in series:
        key, device = one.newest.key, one.newest.fingerprint.device
        seen.add((machine, device, key.name))
        accepted = baselines.get((machine, device, key.name))
        if accepted and one.points[-1].utc < newest[device, key.mode]:
            found.append(Standing(key.name, device, State.MISSING, None, accepted.latency_ms, False))
            continue
        now = trend.of(one)
        level_ms, accepted_ms = now.level_ms, accepted.latency_ms if accepted else None
        why = _differences(accepted, one) if accepted else ()
        state = State.NOT_COMPARABLE if why else _state(level_ms, accepted_ms, smallest)
        found.append(Standing(key.name, device, state, level_ms, accepted_ms, now.confirmation_wanted, why))
    removed = [entry for name, entry in baselines.items() if entry.machine == machine and name not in seen]
    missing = [Standing(entry.case, entry.device, State.MISSING, None, entry.latency_ms, False) for entry in removed]
    return found + missing


def _differences(accepted: Acceptance, now: LatencySeries) -> tuple[str, ...]:
    """Between what was accepted and the newest run; none known for a line that does not hold its conditions."""
    if accepted.fingerprint is None:
        return ()
    ran = now.newest.correctness.path if now.newest.correctness else None
    path = [f"path {accepted.path} -> {ran}"] if accepted.path != ran else []
    return (*path, *fingerprint.differences(accepted.fingerprint, now.points[-1].fingerprint))


def _newest_runs(series: Iterable[LatencySeries]) -> dict[tuple[str, str], str]:
    """UTC of the newest run by (device, mode)."""
    newest: dict[tuple[str, str], str] = {}
    for one in series:
        name = (one.newest.fingerprint.device, one.newest.key.mode)
        newest[name] = max(newest.get(name, ""), one.points[-1].utc)
    return newest


def _state(level_ms: float, accepted_ms: float | None, smallest: float) -> State:
    if accepted_ms is None:
        return State.NEW
    if level_ms > accepted_ms * (1 + smallest):
        return State.SLOWER
    return State.FASTER if level_ms < accepted_ms / (1 + smallest) else State.AT_BASELINE
