"""What is kept of a run: records, and JUnit XML, which every CI shows.

A record is one line of JSON per repro under results/regression/<machine>/, appended and never changed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from harness import forced, jsonl, schema
from harness.fingerprint import Fingerprint
from nsa.io import append_line, atomic_write, read_lines
from regression.contract import Aspect, Evidence, ReproVerdict
from regression.runner import Finding, Pace, Repro
from regression.soak import LaneResult

SCHEMA_VERSION = 1
FOLDER = "regression"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 cannot hold the rest


@dataclass(frozen=True)
class LedgerEntry:
    """One repro on one commit and machine."""

    fingerprint: Fingerprint
    incident: str
    part: str
    """"faulty": the fault under its detector; "product": the same detector on the product; "soak": a lane of it."""
    device: str
    """"cpu" or "cuda"."""
    injected: str | None
    """The incident whose fault was put into the product on purpose; None in an honest run."""
    expects: ReproVerdict
    verdict: ReproVerdict
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


def entry(finding: Finding, fingerprint: Fingerprint) -> LedgerEntry:
    """The record of a finding."""
    repro = finding.repro
    inject = f" --inject {repro.inject}" if repro.inject else ""
    return LedgerEntry(
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
        command=f"python -m regression run {repro.incident.id} --device {repro.device}{_forced(fingerprint)}{inject}",
    )


def soak_entry(result: LaneResult, device: str, minutes: float, fingerprint: Fingerprint) -> LedgerEntry:
    """The record of a lane of the soak."""
    return LedgerEntry(
        fingerprint=fingerprint,
        incident=result.lane.name,
        part="soak",
        device=device,
        injected=None,
        expects=ReproVerdict.PASSED,
        verdict=result.verdict,
        ok=result.verdict is ReproVerdict.PASSED,
        reason=result.reason,
        aspects=result.aspects,
        evidence=result.evidence,
        pace=result.pace,
        command=f"python -m regression run --soak {minutes:g} --device {device}{_forced(fingerprint)}",
    )


def _forced(fingerprint: Fingerprint) -> str:
    """The options that had another GPU stand in for this one; "" where none did."""
    found = forced.of(fingerprint.machine)
    return "" if found is None else f" {' '.join(found.options)}"


def create(results: Path, fingerprint: Fingerprint) -> Path:
    """A new, empty file of one run."""
    return jsonl.create(results / FOLDER / fingerprint.machine, fingerprint)


def append(path: Path, record: LedgerEntry) -> None:
    """Add one record, on the disk when this returns."""
    append_line(path, record.to_json())


def read(paths: Iterable[Path]) -> tuple[list[LedgerEntry], list[str]]:
    """Every record in order; for each line that is none, where it stands and what is wrong with it."""
    entries: list[LedgerEntry] = []
    damaged: list[str] = []
    for path in paths:
        for number, line in read_lines(path):
            try:
                entries.append(from_json(line.decode()))
            except (ValueError, TypeError, RecursionError) as error:
                damaged.append(f"{path}:{number}: {type(error).__name__}: {error}")
    return entries, damaged


def from_json(line: str) -> LedgerEntry:
    """Read one line back. Raises ValueError or TypeError saying what is wrong with it."""
    data = json.loads(line)
    if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"a record must be an object with schema_version {SCHEMA_VERSION}; got {line[:80]!r}")
    return schema.build(LedgerEntry, data, "entry")


def read_all(results: Path) -> tuple[list[LedgerEntry], list[str]]:
    """All runs under results/regression, oldest file first."""
    return read(sorted((results / FOLDER).glob("*/*.jsonl"), key=lambda path: path.name))


def junit_must_be_writable(path: Path) -> None:
    """Raises OSError where `write_junit` would fail, before hours of work depend on it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; JUnit XML needs the path of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_junit(path: Path, findings: Sequence[Finding], missing: Sequence[Repro] = ()) -> None:
    """Write one test case per repro, an error for each not run; a file that was there is replaced as a whole."""
    suite = ElementTree.Element(
        "testsuite",
        name="regression",
        tests=str(len(findings) + len(missing)),
        failures=str(sum(not finding.ok for finding in findings)),
        errors=str(len(missing)),
        skipped=str(sum(finding.allowed_skip for finding in findings)),
        time=f"{sum(finding.pace.seconds for finding in findings):.3f}",
    )
    for finding in findings:
        suite.append(_case(finding))
    for repro in missing:
        case = ElementTree.SubElement(suite, "testcase", classname=f"regression.{repro.incident.id}", name=repro.part)
        ElementTree.SubElement(case, "error", message="not run: the suite was interrupted before its end")
    atomic_write(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _case(finding: Finding) -> ElementTree.Element:
    repro, evidence = finding.repro, finding.evidence
    case = ElementTree.Element(
        "testcase",
        classname=f"regression.{repro.incident.id}",
        name=repro.part,
        time=f"{finding.pace.seconds:.3f}",
    )
    if finding.allowed_skip:
        ElementTree.SubElement(case, "skipped", message=_clean(finding.reason or ""))
    elif not finding.ok:
        failure = ElementTree.SubElement(
            case, "failure", type=finding.verdict.value, message=_clean(f"{repro.incident.id}: {finding.reason}")
        )
        failure.text = _clean(evidence.stacks or evidence.exception or "")
    out = ElementTree.SubElement(case, "system-out")
    judged = {aspect.name: [aspect.verdict.value, aspect.why] for aspect in finding.aspects}
    out.text = _clean(json.dumps({"expects": repro.expects, "aspects": judged, "notes": evidence.notes}))
    return case


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
