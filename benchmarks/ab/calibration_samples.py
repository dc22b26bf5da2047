"""Pairs of processes that measured identical code with slowdowns injected, one line each: what `calibrate` draws from.

A line is added when its pair is done, so that a calibration that was killed goes on where it stopped, also another
day and at another commit: both sides of a pair are the same code. Lines of another machine state have another identity
and are left alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.ab import trial
from benchmarks.ab.result import Rules
from benchmarks.ab.sequential import PairFailure
from benchmarks.ab.stages import StageClock
from benchmarks.ab.starter import PairStarter
from benchmarks.cases.key import Key
from harness import jsonl
from harness.fingerprint import Fingerprint

SLOWDOWNS = (0.01, 0.03, 0.1)
"""Injected into one side, beside 0."""
_CONDITIONS = ("machine", "device", "driver", "torch", "triton", "cpu", "threads")
"""What the noise between two processes of one code depends on."""
_MEASURED_AS = 2
"""To be raised where pairs are measured in another way: those of before are then left alone."""


@dataclass(frozen=True)
class CaseSamples:
    """One case in one pair: `trial.PairedSamples` with its name."""

    case: str
    base_ms: tuple[float, ...]
    head_ms: tuple[tuple[float, ...], ...]
    """Per sample: without a slowdown, then with each of `SLOWDOWNS`."""

    def __post_init__(self) -> None:
        sizes = {len(sample) for sample in self.head_ms}
        times_ms = [*self.base_ms, *(time_ms for sample in self.head_ms for time_ms in sample)]
        if sizes != {1 + len(SLOWDOWNS)} or len(self.base_ms) != len(self.head_ms) or min(times_ms) <= 0:
            raise ValueError(f"samples of {self.case} must be above 0, one of each slowdown beside each of BASE")

    @property
    def samples(self) -> trial.PairedSamples:
        return trial.PairedSamples(self.base_ms, self.head_ms)


@dataclass(frozen=True)
class CalibrationPair:
    """Every case in one pair of processes, or some (`trial.run` shares the cases between two of them)."""

    identity: str
    seconds: float
    cases: tuple[CaseSamples, ...]
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Where the seconds went (`stages`); of what runs side by side on a CPU the sum. Empty of earlier pairs."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {"taken": "cases"}


def path(results: Path, machine: str) -> Path:
    """The machine's file."""
    return results / "calibration" / f"{machine}.pairs.jsonl"


def identity(of: Fingerprint, cases: Sequence[str], rules: Rules) -> str:
    """One word for all that pairs must share to be judged together."""
    conditions = {name: str(getattr(of, name)) for name in _CONDITIONS}
    measured = [_MEASURED_AS, rules.min_samples, rules.max_samples, rules.target_standard_error, SLOWDOWNS]
    text = json.dumps([conditions, list(cases), measured], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(results: Path, machine: str, wanted: str | None = None) -> tuple[list[CalibrationPair], list[str]]:
    """The pairs of this identity, oldest first, and every line that is none ("cpu.pairs.jsonl:3: ...").

    `wanted` None: those of the identity that the newest pair has. A line that a crash has torn is none.
    """
    pairs, damaged = jsonl.read(path(results, machine), CalibrationPair)
    newest = pairs[-1].identity if pairs else None
    return [pair for pair in pairs if pair.identity == (wanted or newest)], damaged


def left_out(damaged: Sequence[str]) -> str:
    """What to say of damaged lines; "" without any."""
    if not damaged:
        return ""
    lines = "1 line is" if len(damaged) == 1 else f"{len(damaged)} lines are"
    return f"{lines} damaged and left out, the first: {damaged[0]}"


class LostPairError(Exception):
    """A case of a calibration could not be timed: a fault of the code, not of the machine."""


def counts(pairs: Sequence[CalibrationPair]) -> Counter[str]:
    """How many pairs each case has."""
    return Counter(one.case for pair in pairs for one in pair.cases)


def measure(
    results: Path,
    machine: str,
    starter: PairStarter,
    keys: Sequence[Key],
    rules: Rules,
    wanted: str,
    there: Sequence[CalibrationPair],
    pairs: int,
) -> Iterator[CalibrationPair]:
    """New pairs, until each case has so many with those that are there; each is in the file before it is yielded.

    A new pair is of the cases that lack some, so that none has more than it is to have. Raises LostPairError naming the
    case. The oracle is not asked: what is published of identical code are rates, not latencies.
    """
    found, number = counts(there), len(there)
    while lacking := [key for key in keys if found[key.name] < pairs]:
        begin, clock = time.perf_counter(), StageClock()
        timed = trial.run(starter, lacking, rules, number % 2, SLOWDOWNS, check=False, clock=clock)
        cases = tuple(_samples(key, result) for key, result in zip(lacking, timed, strict=True))
        pair = CalibrationPair(wanted, round(time.perf_counter() - begin, 1), cases, clock.seconds())
        jsonl.append(path(results, machine), pair)
        yield pair
        found.update(key.name for key in lacking)
        number += 1


def _samples(key: Key, result: trial.PairedSamples | PairFailure) -> CaseSamples:
    if isinstance(result, PairFailure):
        raise LostPairError(f"{key.name}: {result.reason}")
    return CaseSamples(key.name, _to_ns(result.base_ms), tuple(map(_to_ns, result.head_ms)))


def _to_ns(times_ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(x, 6) for x in times_ms)
