"""What came of the mutants of `python -m tests.mutants`: one line each, behind a line that says what was run."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from harness import jsonl, schema
from harness.fingerprint import Fingerprint
from nsa.io import append_line, read_lines

FOLDER = "mutants"
"""Below results/."""
WANTED = 0.95
"""The share of an area's mutants that must be seen."""


class MutantOutcome(str, Enum):
    """What became of a mutant."""

    KILLED = "KILLED"
    """A test failed, an incident was red, or neither could be started."""
    SURVIVED = "SURVIVED"
    TIMEOUT = "TIMEOUT"
    """The tests did not end, and without the mutant they did soon: it was seen."""
    ERROR = "ERROR"
    """Nothing is known of it: the tests fail without it, or it cannot be applied."""
    EQUIVALENT = "EQUIVALENT"
    """It survived, as its file says; it counts in no rate."""


SEEN = (MutantOutcome.KILLED, MutantOutcome.TIMEOUT)


@dataclass(frozen=True)
class Header:
    """The first line of a file."""

    fingerprint: Fingerprint
    tree_sha256: str
    """Hash of every file that was copied: a run goes on only over the same tree."""
    planned: Mapping[str, int]
    """Area -> mutants of the whole set, whichever of them this run was asked for."""


@dataclass(frozen=True)
class MutantResult:
    """One mutant. A file holds hundreds: a field that is as always is not written."""

    id: str
    area: str
    outcome: MutantOutcome
    duration_s: float
    killed_by: str | None = None
    """The first test that failed, or the incident that was red; what else is to be said of other outcomes."""
    drawn: bool = False
    """Whether a tool drew it, or a person wrote it."""


@dataclass(frozen=True)
class KillRate:
    """How an area stands."""

    area: str
    total: int
    """Without the equivalent ones; those that were not tried yet are not in it."""
    seen: int
    drawn: int
    drawn_seen: int
    outcomes: Mapping[MutantOutcome, int]

    @property
    def share(self) -> float:
        """Of the mutants that were seen; 1 where there is none."""
        return self.seen / self.total if self.total else 1.0

    @property
    def errors(self) -> int:
        """Of which nothing is known."""
        return self.outcomes.get(MutantOutcome.ERROR, 0)

    @property
    def enough(self) -> bool:
        """Whether the area is as it should be."""
        return self.share >= WANTED and not self.errors


def rates(lines: Sequence[MutantResult]) -> list[KillRate]:
    """One for each area, by name."""
    found = []
    for area in sorted({line.area for line in lines}):
        own = [line for line in lines if line.area == area and line.outcome is not MutantOutcome.EQUIVALENT]
        drawn = [line for line in own if line.drawn]
        found.append(
            KillRate(
                area,
                len(own),
                sum(line.outcome in SEEN for line in own),
                len(drawn),
                sum(line.outcome in SEEN for line in drawn),
                Counter(line.outcome for line in lines if line.area == area),
            )
        )
    return found


def not_tried(begin: Header, rates: Sequence[KillRate]) -> dict[str, int]:
    """Area -> how many of its mutants have no line; an area that was tried as a whole is left out."""
    tried = {rate.area: rate.total for rate in rates}
    left = {area: planned - tried.get(area, 0) for area, planned in begin.planned.items()}
    return {area: count for area, count in left.items() if count > 0}


def create(results: Path, begin: Header) -> Path:
    """A new file with its first line."""
    path = jsonl.create(results / FOLDER, begin.fingerprint)
    append_line(path, _json(begin))
    return path


def append(path: Path, line: MutantResult) -> None:
    """Add one mutant, on the disk when this returns."""
    append_line(path, _json(line))


def read(path: Path) -> tuple[Header, list[MutantResult]]:
    """What was run and what came of it. Raises ValueError or TypeError where a line is no such thing.

    A mutant that stands there twice counts as the last line says; an incomplete last line is left out.
    """
    first, *rest = [line for _, line in read_lines(path)]
    begin = schema.build(Header, json.loads(first), "begin")
    found: dict[str, MutantResult] = {}
    for number, text in enumerate(rest, start=1):
        try:
            line = schema.build(MutantResult, json.loads(text), "line")
        except ValueError:
            if number < len(rest):
                raise
            break
        found[line.id] = line
    return begin, list(found.values())


def newest(results: Path, tree_sha256: str) -> Path | None:
    """The last file of a run over this very tree; None where there is none."""
    for path in sorted((results / FOLDER).glob("*.jsonl"), reverse=True):
        try:
            if read(path)[0].tree_sha256 == tree_sha256:
                return path
        except (ValueError, TypeError):
            continue
    return None


def _json(value: Header | MutantResult) -> str:
    always = {field.name: field.default for field in dataclasses.fields(value)}
    told = {name: x for name, x in dataclasses.asdict(value).items() if x != always[name]}
    return json.dumps(told, allow_nan=False, separators=(",", ":"))
