"""How often `compare` is right on a machine, as `calibrate` found it: results/calibration/<machine>.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import schema
from benchmarks.fingerprint import Fingerprint
from benchmarks.judgements import Rules
from nsa.io import atomic_write


@dataclass(frozen=True)
class Rate:
    """What `compare` answered where the slowdown was known."""

    slowdown: float
    """Wanted: 0.0 is identical code, 0.03 is 3 % more work."""
    injected: float
    """Measured: median share of the time that the injected work took beside the call."""
    comparisons: int
    slower: int
    faster: int
    same: int
    undecided: int

    @property
    def alarms(self) -> float:
        """Share of FASTER and SLOWER: with identical code the false-alarm rate."""
        return (self.slower + self.faster) / self.comparisons

    @property
    def power(self) -> float:
        """Share of SLOWER: of an injected slowdown, how often it was found."""
        return self.slower / self.comparisons


@dataclass(frozen=True)
class Calibration:
    """One calibration of one machine."""

    fingerprint: Fingerprint
    rules: Rules
    """What `compare` uses on this machine from now on."""
    rates: tuple[Rate, ...]
    """Ascending by slowdown, the first is 0. Each comparison was judged with thresholds chosen on the others."""
    cases: tuple[str, ...]
    """Names of the keys that were measured."""
    pairs: int
    """Pairs of processes, each of them in one comparison per case only."""
    noise: float
    """Median over the cases of the spread (1.4826 MAD) between pairs of identical code."""
    command: str


def path(results: Path, machine: str) -> Path:
    """Where a machine's calibration is."""
    return results / "calibration" / f"{machine}.json"


def load(results: Path, machine: str) -> Calibration | None:
    """The machine's calibration; None where there is none. ValueError naming the file where it is damaged."""
    file = path(results, machine)
    if not file.exists():
        return None
    try:
        return schema.build(Calibration, json.loads(file.read_text()), "calibration")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no calibration: {error}; run calibrate again or remove it") from error


def save(results: Path, calibration: Calibration) -> Path:
    """Replace the machine's calibration in one step, on the disk when this returns."""
    file = path(results, calibration.fingerprint.machine)
    text = json.dumps(dataclasses.asdict(calibration), allow_nan=False, indent=1) + "\n"
    atomic_write(file, text)
    return file
