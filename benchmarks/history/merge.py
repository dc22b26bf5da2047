"""Results of several runners into one folder: every undamaged line comes along, and none is dropped.

Runs, regressions, verdicts, alerts and accepted levels are files of lines that are only appended to: two versions of
one file differ by whole lines. Raw samples, training runs and JUnit XML (`convert` makes laws/*.json of it) do not come
along; pages are built again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ab.result import ComparisonResult
from benchmarks.history import conversion, incidents, laws, mutants, plausible, run_file
from benchmarks.history.accepted import Acceptance
from benchmarks.history.alerts import AlertEvent
from benchmarks.history.records import Record
from benchmarks.history.run_file import DamagedLine
from harness import machines, schema
from harness.fingerprint import Fingerprint
from nsa.io import append_line, atomic_write, read_lines

RUNS = "runs/*/*.jsonl"
LINES = ("regression/*/*.jsonl", "verdicts/*.jsonl", "baselines/accepted.jsonl", "mutants/*.jsonl", "alerts/*.jsonl")
REPLACED = ("calibration/*.json", "laws/*.json")
PATTERNS = (RUNS, *LINES, *REPLACED)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass
class MergeResult:
    """What came of a merge."""

    new_files: int = 0
    new_lines: int = 0
    known_lines: int = 0
    """Lines that were there already."""
    refused: list[str] = field(default_factory=list)
    """Each thing that did not come along: where it stands, and why."""


def merge(source: Path, results: Path, merged: MergeResult) -> None:
    """Bring what `source` (a results folder, or one that holds such folders) has into `results`.

    Raises ValueError where `source` is no folder or holds no results at all, OSError where `results` cannot be written.
    """
    if not source.is_dir():
        raise ValueError(f"a folder of results is needed; {source} is none")
    folders = [folder for folder in (source, *sorted(source.iterdir())) if _holds_results(folder)]
    if not folders:
        raise ValueError(f"{source} holds no results: no {', no '.join(PATTERNS)} in it or one folder below")
    results.mkdir(parents=True, exist_ok=True)
    with _exclusive(results):
        for folder in folders:
            for path in plain_files(folder, (RUNS,), merged.refused):
                _merge_run(path, results / path.relative_to(folder), merged)
            for path in plain_files(folder, LINES, merged.refused):
                _merge_lines(path, results / path.relative_to(folder), merged)
            for path in plain_files(folder, REPLACED, merged.refused):
                _merge_whole(path, results / path.relative_to(folder), merged)


def _holds_results(folder: Path) -> bool:
    return folder.is_dir() and any(next(folder.glob(pattern), None) for pattern in PATTERNS)


def plain_files(folder: Path, patterns: tuple[str, ...], refused: list[str]) -> Iterator[Path]:
    """Plain files with plain names; what comes from elsewhere may be a link that leads anywhere, and is refused."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            parts = path.relative_to(folder).parts
            if path.resolve() != folder.resolve() / path.relative_to(folder) or not path.is_file():
                refused.append(f"{path}: is no plain file")
            elif not all(_NAME.fullmatch(part) for part in parts):
                refused.append(f"{path}: a name must be of letters, digits, '.', '_' and '-'")
            else:
                yield path


def _merge_run(path: Path, target: Path, merged: MergeResult) -> None:
    """The records that the target lacks; files of earlier versions are converted on the way."""
    if target.exists() and conversion.is_old(target):
        conversion.convert(target)
    ours = run_file.split(run_file.read(target))[0] if target.exists() else []
    known = set(map(run_file.full_line, ours))
    fresh: list[Record] = []
    for found in run_file.entries(path):
        if isinstance(found, DamagedLine):
            merged.refused.append(f"{path}:{found.line}: {found.why}")
        elif found.fingerprint.machine != path.parent.name:
            wrong = f"a record of {found.fingerprint.machine!r} must not lie in {path.parent.name}/"
            merged.refused.append(f"{path}:{found.number}: {wrong}")
        elif (line := run_file.full_line(record := found.record())) in known:
            merged.known_lines += 1
        elif (why := impossible(record)) is not None:
            merged.refused.append(f"{path}:{found.number}: {why}")
        else:
            known.add(line)
            fresh.append(record)
    if target.exists():
        for record in fresh:
            run_file.append(target, record)
    elif fresh:
        atomic_write(target, "".join(f"{line}\n" for line in run_file.lines_of(fresh)).encode())
        merged.new_files += 1
    merged.new_lines += len(fresh)


def impossible(record: Record) -> str | None:
    """What no record can hold and this one does, by case and field; None where it is sound."""
    where = f"{record.key.name}: record"
    return plausible.objection(dataclasses.asdict(record), where) or _of_another(record.fingerprint, where)


def _of_another(fingerprint: Fingerprint, where: str) -> str | None:
    capped_w = fingerprint.gpu_settings.capped_w if fingerprint.gpu_settings else None
    why = plausible.not_of_device(fingerprint.machine, fingerprint.device, fingerprint.cpu, capped_w)
    return None if why is None else f"{where}.{why}"


def _merge_lines(path: Path, target: Path, merged: MergeResult) -> None:
    known = {line for _, line in read_lines(target)} if target.exists() else set()
    fresh = []
    for number, raw in read_lines(path):
        line = raw.rstrip(b"\r")  # a copy that went through another system
        if line in known:
            merged.known_lines += 1
        elif (why := why_damaged(line, path)) is not None:
            merged.refused.append(f"{path}:{number}: {why}")
        else:
            known.add(line)
            fresh.append(line)
    if not fresh:
        return
    if target.exists():
        for line in fresh:
            append_line(target, line.decode())
    else:
        atomic_write(target, b"".join(line + b"\n" for line in fresh))
        merged.new_files += 1
    merged.new_lines += len(fresh)


def why_damaged(line: bytes, path: Path) -> str | None:
    """What is wrong with a line of one of `LINES`, whose folder says what it must be; None where it is sound."""
    kind = incidents.FOLDER if path.parent.parent.name == incidents.FOLDER else path.parent.name
    try:
        found = json.loads(line.decode())
        if not isinstance(found, dict):
            raise TypeError("a line must be a JSON object")
        if kind == incidents.FOLDER:
            incidents.require_sound(found, path.parent.name)
        else:
            _KINDS[kind](found)
        return plausible.objection(found, "line")
    except (ValueError, TypeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"


def _comparison(found: dict[str, Any]) -> None:
    _require_own_device(schema.build(ComparisonResult, found, "result").fingerprint)


def _acceptance(found: dict[str, Any]) -> None:
    schema.build(Acceptance, found, "acceptance")


def _alert(found: dict[str, Any]) -> None:
    schema.build(AlertEvent, found, "event")


def _mutant(found: dict[str, Any]) -> None:
    if "fingerprint" in found:
        _require_own_device(schema.build(mutants.Header, found, "line").fingerprint)
    else:
        schema.build(mutants.MutantResult, found, "line")


def _require_own_device(fingerprint: Fingerprint) -> None:
    if why := _of_another(fingerprint, "line"):
        raise ValueError(why)


_KINDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "verdicts": _comparison,
    "baselines": _acceptance,
    "mutants": _mutant,
    "alerts": _alert,
}
"""What a line must be, by the folder; those of incidents lie one folder deeper."""


def _merge_whole(path: Path, target: Path, merged: MergeResult) -> None:
    content = path.read_bytes()
    if why := _impossible_file(path, content):
        merged.refused.append(f"{path}: {why}")
        return
    if not target.exists() or (
        path.suffix == ".json" and _calibrated_utc(content) > _calibrated_utc(target.read_bytes())
    ):
        atomic_write(target, content)
        merged.new_files += 1
    elif path.suffix == ".json" and _calibrated_utc(content) < _calibrated_utc(target.read_bytes()):
        return
    elif target.read_bytes() != content:
        merged.refused.append(f"{path}: differs from {target}; remove the one that is not wanted")


def _impossible_file(path: Path, content: bytes) -> str | None:
    """The same of a file that is one JSON value; what is none is its reader's to refuse."""
    try:
        found = json.loads(content)
        if why := plausible.objection(found, "file"):
            return why
    except (ValueError, RecursionError):
        return None
    if path.parent.name != laws.FOLDER:
        return _of_another_device(found)
    try:
        laws.require_sound(content)
    except ValueError as error:
        return f"is no summary of tests: {error}"
    name = laws.NAME.fullmatch(path.stem)
    if name and name["forced"] and name["machine"] == machines.CPU:
        return "its name says that it was forced, which a CPU cannot be"
    return None


def _of_another_device(calibration: Any) -> str | None:
    """Of a calibration; None of a file that says no machine."""
    found = calibration.get("fingerprint") if isinstance(calibration, dict) else None
    if not isinstance(found, dict):
        return None
    try:
        return _of_another(schema.build(Fingerprint, found, "fingerprint"), "file")
    except (ValueError, TypeError) as error:
        return str(error)


def _calibrated_utc(calibration: bytes) -> str:
    """When a machine was calibrated, or its backtest made, UTC; the newest counts. "" where the file does not say."""
    try:
        found = json.loads(calibration)
        return str(found["utc"] if "utc" in found else found["fingerprint"]["utc"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


@contextmanager
def _exclusive(results: Path) -> Iterator[None]:
    """Two merges into one folder exclude each other, else both would add the same line."""
    with (results / ".merging").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
