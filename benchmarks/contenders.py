"""Contenders beside NSA: which are asked for, what each is, their cases, and the verdict on each case of a run.

This process imports none of them. A child is asked what a contender is, and `benchmarks.worker` measures each in a
process of its own, so that one that hangs, dies or changes its process costs its own figures and no other's.
`python -m benchmarks.contenders '{"name": "my-nsa"}'` is the child that is asked.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Event
from typing import Any

from benchmarks.baselines import BASELINES, ContenderError, contender
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import reservations
from benchmarks.history.records import Record
from benchmarks.history.speedup import speed_up
from benchmarks.workloads.suite import PREFILLS
from harness.guard import send_event
from harness.isolate import Child
from harness.watch import Deadline, watch

ALL = "all"
"""In place of names: every contender that an installed package offers."""
MODES = (*PREFILLS, "decode", "memory")
"""Modes that time one attention; the others time parts of ours, or a model."""
_CHILD = "benchmarks.contenders"
_KNOWN_IMPORT_S = 5.0
"""PyTorch's import on a busy machine: `watch` allows thirty times as much."""


@dataclass(frozen=True)
class Contender:
    """What this process knows of one."""

    name: str
    config: Mapping[str, Any] | None
    """Its settings where it is an NSA; None for dense attention."""


class Verdict(str, Enum):
    """On a contender on one case, beside NSA in the same run."""

    FASTER = "FASTER"
    """Correct, and the interval of its median lies below NSA's."""
    SLOWER = "SLOWER"
    """Correct, and it lies above."""
    UNDECIDED = "UNDECIDED"
    """Correct, but the intervals overlap, or one of the figures is not trustworthy."""
    OTHER_WORK = "OTHER WORK"
    """Correct with settings of its own: its time is of other work than NSA's beside it."""
    WRONG = "WRONG"
    """Not what the oracle or a law says, or not finite."""
    BROKEN = "BROKEN"
    """It raised, hung, died, or could not be compiled."""
    NOT_SERVED = "NOT SERVED"
    """It does not serve this case, or not on this machine."""
    NOT_MEASURED = "NOT MEASURED"
    """The device gave no figure, or NSA has none to compare with."""


_WITHOUT_FIGURE = {
    CaseOutcome.INCORRECT: Verdict.WRONG,
    CaseOutcome.NONFINITE: Verdict.WRONG,
    CaseOutcome.CRASHED: Verdict.BROKEN,
    CaseOutcome.STALLED: Verdict.BROKEN,
    CaseOutcome.COMPILE_ERROR: Verdict.BROKEN,
    CaseOutcome.UNSUPPORTED: Verdict.NOT_SERVED,
    CaseOutcome.NOT_PRESENT: Verdict.NOT_SERVED,
    CaseOutcome.OUT_OF_MEMORY: Verdict.NOT_MEASURED,
    CaseOutcome.THROTTLED: Verdict.NOT_MEASURED,
}


def asked(names: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """The contenders of these names, baselines of this repository too, and what is wrong with the others, by name.

    Raises ValueError for a name that nobody has, and for `ALL` where nothing is installed.
    """
    offered = list(contender.installed())
    if ALL in names:
        if not offered:
            raise ValueError(f"--contenders: no installed package has an entry point of the group {contender.GROUP!r}")
        names = [*(name for name in names if name != ALL), *offered]
    found: list[Contender] = []
    refused: list[str] = []
    for name in dict.fromkeys(names):
        if name not in offered and name not in BASELINES:
            known = [*offered, *BASELINES]
            near = "".join(f"; did you mean {match}?" for match in difflib.get_close_matches(name, known, n=1))
            raise ValueError(f"--contenders: {name!r} is none of {', '.join((ALL, *known))}{near}")
        try:
            found.append(_describe(name, is_offered=name in offered))
        except ContenderError as error:
            refused.append(str(error))
    return found, refused


def _describe(name: str, *, is_offered: bool) -> Contender:
    """What a contender is. Raises ContenderError."""
    if name in BASELINES or name == NSA:
        if is_offered:
            raise ContenderError(f"contender {name}: this is a name of the benches' own; rename the entry point")
        config = BASELINES[name].config
        return Contender(name, None if config is None else dataclasses.asdict(config))
    contender.only_entry(name)
    told: list[Mapping[str, Any]] = []
    with Child(_CHILD, {"name": name}) as child:
        end = watch(child, Deadline(floor_s=0.0, known_import_s=_KNOWN_IMPORT_S), Event(), told.append)
    answer = {event["event"]: event for event in told}
    if "described" in answer:
        return Contender(name, answer["described"]["config"])
    if "refused" in answer:
        raise ContenderError(answer["refused"]["reason"])
    if end.stalled_after_s is not None:
        raise ContenderError(f"contender {name}: its import gave no answer within {end.stalled_after_s:.0f} s")
    message = f": {lines[-1]}" if (lines := end.log_tail.splitlines()) else ""
    raise ContenderError(f"contender {name}: its import ended the process, status {end.status}{message}")


def with_contenders(keys: Sequence[Key], contenders: Sequence[Contender]) -> list[Key]:
    """The keys, with one of each contender before NSA's own in each case of `MODES`."""
    present = {(key.case, key.implementation) for key in keys}
    found: list[Key] = []
    for key in keys:
        if key.implementation == NSA and key.mode in MODES:
            found += [
                dataclasses.replace(key, implementation=one.name, config=one.config, backend_asked=None)
                for one in contenders
                if (key.case, one.name) not in present
            ]
        found.append(key)
    return found


def verdict(record: Record, nsa: Record | None) -> tuple[Verdict, str]:
    """On a contender's record beside NSA's of the same case and run, and one line that says why."""
    if record.outcome is not CaseOutcome.PASSED:
        return _WITHOUT_FIGURE[record.outcome], record.reason or record.outcome.value
    if record.latency_ms is None:  # a case of memory
        return Verdict.NOT_MEASURED, f"correct; it takes {record.peak_mem_mib:.4g} MiB"
    faster = None if nsa is None else speed_up(nsa, record)
    if nsa is None or faster is None:
        return Verdict.NOT_MEASURED, f"correct, {record.latency_ms:.4g} ms; NSA has no figure here"
    figures = f"{record.latency_ms:.4g} ms, NSA {nsa.latency_ms:.4g} ms: {1 / faster:.2f} times as fast as NSA"
    if record.key.config is not None and record.key.config != nsa.key.config:
        return Verdict.OTHER_WORK, f"{figures}, with {_changes(record.key.config, nsa.key.config)}"
    doubts = {**reservations.of(record), **reservations.of(nsa)}
    if doubts or record.interval_ms is None or nsa.interval_ms is None:
        return Verdict.UNDECIDED, f"{figures}; {'; '.join(doubts.values()) or 'too few samples for an interval'}"
    if record.interval_ms[1] < nsa.interval_ms[0]:
        return Verdict.FASTER, figures
    if record.interval_ms[0] > nsa.interval_ms[1]:
        return Verdict.SLOWER, figures
    return Verdict.UNDECIDED, f"{figures}; the intervals overlap"


def _changes(config: Mapping[str, Any], ours: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items() if ours is None or ours[name] != value)


def verdicts(records: Sequence[Record], contenders: Iterable[Contender]) -> dict[str, dict[str, tuple[Verdict, str]]]:
    """By contender and case, of the records of one run."""
    ours = {record.key.case: record for record in records if record.key.implementation == NSA}
    names = [one.name for one in contenders]
    return {
        name: {
            record.key.case: verdict(record, ours.get(record.key.case))
            for record in records
            if record.key.implementation == name
        }
        for name in names
    }


def main() -> None:
    """Import the contender that the task names, and say what it is."""
    task = json.loads(sys.argv[1])
    try:
        config = contender.load(task["name"]).config
    except ContenderError as error:
        send_event(task["events"], "refused", reason=str(error))
    else:
        send_event(task["events"], "described", config=None if config is None else dataclasses.asdict(config))


if __name__ == "__main__":
    main()
