"""The record of a run: one line of JSON per repro under results/regression/<machine>/, appended and never changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.history import schema
from benchmarks.history.fingerprint import Fingerprint
from nsa.io import append_line, read_lines
from regression.evidence import Evidence
from regression.runner import Finding, Pace
from regression.soak import Soaked
from regression.verdict import Aspect, Verdict

SCHEMA_VERSION = 1
FOLDER = "regression"


@dataclass(frozen=True)
class Entry:
    """One repro on one commit and machine."""

    fingerprint: Fingerprint
    incident: str
    part: str
    """"faulty": the fault under its detector; "product": the same detector on the product; "soak": a lane of it."""
    device: str
    """"cpu" or "cuda"."""
    injected: str | None
    """The incident whose fault was put into the product on purpose; None in an honest run."""
    expects: Verdict
    verdict: Verdict
    ok: bool
    """As expected, or skipped because the machine lacks GPUs."""
    reason: str | None
    """Why it is not as it should be or was skipped; None for a green one."""
    aspects: tuple[Aspect, ...]
    """Did it end, is it finite, does it see the future, ...: each judged by itself."""
    evidence: Evidence
    pace: Pace
    command: str
    """What reproduces it, typed in the repository's root."""
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))


def entry(finding: Finding, fingerprint: Fingerprint) -> Entry:
    """The record of a finding."""
    repro = finding.repro
    inject = f" --inject {repro.inject}" if repro.inject else ""
    return Entry(
        fingerprint=fingerprint,
        incident=repro.incident.id,
        part=repro.part,
        device=repro.device,
        injected=repro.inject,
        expects=repro.expects,
        verdict=finding.verdict,
        ok=finding.ok,
        reason=finding.reason,
        aspects=finding.aspects,
        evidence=finding.evidence,
        pace=finding.pace,
        command=f"python -m regression run {repro.incident.id} --device {repro.device}{inject}",
    )


def soak_entry(soaked: Soaked, device: str, minutes: float, fingerprint: Fingerprint) -> Entry:
    """The record of a lane of the soak."""
    return Entry(
        fingerprint=fingerprint,
        incident=soaked.lane.name,
        part="soak",
        device=device,
        injected=None,
        expects=Verdict.PASSED,
        verdict=soaked.verdict,
        ok=soaked.verdict is Verdict.PASSED,
        reason=soaked.reason,
        aspects=soaked.aspects,
        evidence=soaked.evidence,
        pace=soaked.pace,
        command=f"python -m regression run --soak {minutes:g} --device {device}",
    )


def create(results: Path, fingerprint: Fingerprint) -> Path:
    """A new, empty file <utc>-<commit>.jsonl; -2, -3, ... where another run has the name."""
    folder = results / FOLDER / fingerprint.machine
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{fingerprint.utc.replace('-', '').replace(':', '')}-{(fingerprint.commit or 'nocommit')[:10]}"
    number = 1
    while True:
        path = folder / (f"{stem}.jsonl" if number == 1 else f"{stem}-{number}.jsonl")
        try:
            path.touch(exist_ok=False)  # atomic: two processes cannot both make it
        except FileExistsError:
            number += 1
        else:
            return path


def append(path: Path, record: Entry) -> None:
    """Add one record, on the disk when this returns."""
    append_line(path, record.to_json())


def read(paths: Iterable[Path]) -> tuple[list[Entry], list[str]]:
    """Every record in order; for each line that is none, where it stands and what is wrong with it."""
    entries: list[Entry] = []
    damaged: list[str] = []
    for path in paths:
        for number, line in read_lines(path):
            try:
                entries.append(from_json(line.decode()))
            except (ValueError, TypeError, RecursionError) as error:
                damaged.append(f"{path}:{number}: {type(error).__name__}: {error}")
    return entries, damaged


def from_json(line: str) -> Entry:
    """Read one line back. Raises ValueError or TypeError saying what is wrong with it."""
    data = json.loads(line)
    if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"a record must be an object with schema_version {SCHEMA_VERSION}; got {line[:80]!r}")
    return schema.build(Entry, data, "entry")


def read_all(results: Path) -> tuple[list[Entry], list[str]]:
    """All runs under results/regression, oldest file first."""
    return read(sorted((results / FOLDER).glob("*/*.jsonl"), key=lambda path: path.name))
