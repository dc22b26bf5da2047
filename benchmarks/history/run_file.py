"""The file of one run: results/runs/<machine>/<utc>-<commit>.jsonl.

A run line says what the records after it share: fingerprint and command. A record line (`record_line`) holds one record
in compact form. Lines are only ever appended. Files of versions 1 and 2 are read as well: there each line stands alone.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases.key import Key
from benchmarks.history import record_line, samples
from benchmarks.history.record_line import RecordLine
from benchmarks.history.records import Record, check_untimed
from benchmarks.history.samples import RawSamples
from harness import jsonl, schema
from harness.fingerprint import Fingerprint
from nsa.io import append_bytes, append_line, append_lines, read_lines

VERSION = 3
RUN_PREFIX = b'{"schema_version":'
"""What a run line begins with, and no record."""
_RECORD_PREFIX = b'{"key":'
PATTERN = "*/*.jsonl"
"""Files of runs, below results/runs."""


@dataclass(frozen=True)
class DamagedLine:
    """A line that is no record."""

    path: Path
    line: int
    """Counted from 1."""
    why: str


@dataclass(frozen=True)
class Run:
    """A run line."""

    schema_version: int
    fingerprint: Fingerprint
    command: str | None = None
    """What measures a case of this run again, with the case's name behind it; None where each record has its own."""

    def command_of(self, key: Key) -> str | None:
        """The command for one case."""
        return None if self.command is None else case_command(self.command, key)


def case_command(command: str, key: Key) -> str:
    """A run's command for one of its cases, as typed in a shell in the repository's root."""
    return f"{command} {shlex.quote(glob.escape(key.name))}"


def create(results: Path, fingerprint: Fingerprint, command: str | None = None) -> Path:
    """A new file with its run line."""
    path = jsonl.create(results / "runs" / fingerprint.machine, fingerprint)
    append_line(path, _run_line(Run(VERSION, fingerprint, command)))
    return path


def append(path: Path, record: Record) -> None:
    """Add a record, on the disk when this returns: a killed run keeps what it finished. Raises DiskFullError.

    A record of another run than the last one in this file gets a run line of its own, in the same step.
    """

    def lines(before: Iterable[bytes]) -> list[str]:
        run = _last_run(before)
        if run is not None and run.fingerprint == record.fingerprint:
            return [_record_line(record, run)]
        run = Run(VERSION, record.fingerprint)
        return [_run_line(run), _record_line(record, run)]

    append_lines(path, lines)


def append_samples(path: Path, raw: RawSamples) -> None:
    """Add all samples of one record to the file beside the run's. Raises DiskFullError, with that file as it was."""
    append_bytes(samples.raw_path(path), samples.encode_raw(raw))


def _last_run(lines: Iterable[bytes]) -> Run | None:
    """The run that a further record would belong to."""
    run = None
    for line in lines:
        if not line.startswith(_RECORD_PREFIX):
            with suppress(ValueError, TypeError, RecursionError):  # damaged; readers name it
                run = None
                run = _run(line)
    return run


def _run_line(run: Run) -> str:
    """One line of JSON; the version comes first, so that no record looks like it."""
    return json.dumps(dataclasses.asdict(run), allow_nan=False, separators=(",", ":"))


def _record_line(record: Record, run: Run) -> str:
    """The command is left out where the run line says it."""
    return record_line.encode(record, with_command=record.command != run.command_of(record.key))


def full_line(record: Record) -> str:
    """All of a record as one line of JSON, which tells any two apart; no file holds it."""
    return json.dumps(dataclasses.asdict(record.fingerprint)) + record_line.encode(record, with_command=True)


def lines_of(records: Iterable[Record]) -> list[str]:
    """A file's lines for these records, with a run line where another run begins."""
    records = list(records)
    command = _shared_command(records)
    lines: list[str] = []
    run: Run | None = None
    for record in records:
        if run is None or run.fingerprint != record.fingerprint:
            run = Run(VERSION, record.fingerprint, command)
            lines.append(_run_line(run))
        lines.append(_record_line(record, run))
    return lines


def _shared_command(records: Iterable[Record]) -> str | None:
    """What the commands of all records begin with, before the name of the case; None where there is no such thing."""
    begins = set()
    for record in records:
        command = record.command.rpartition(" ")[0]
        begins.add(command if case_command(command, record.key) == record.command else None)
    return begins.pop() if len(begins) == 1 else None


def read(path: Path) -> Iterator[Record | DamagedLine]:
    """Every record of a file in order, and every line that is none, by name."""
    return (found.record() if isinstance(found, StoredRecord) else found for found in entries(path))


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record in a file, read and checked; most questions need no more of it than this."""

    number: int
    """Of its line, counted from 1."""
    key: Key
    fingerprint: Fingerprint
    figures: Record | RecordLine
    """What was measured: the names are a record's."""
    run: Run | None
    """None in a file of an earlier version."""

    def record(self) -> Record:
        """All of it."""
        if isinstance(self.figures, Record):
            return self.figures
        command = self.run.command_of(self.key) if self.run else None
        return record_line.record(self.figures, self.key, self.fingerprint, command)


def entries(path: Path) -> Iterator[StoredRecord | DamagedLine]:
    """Every record of a file in order, and every line that is none, by name."""
    try:
        lines = list(read_lines(path))
    except OSError as error:
        yield DamagedLine(path, 1, f"{type(error).__name__}: cannot be read: {error.strerror}")
        return
    yield from parsed(lines, path)


def parsed(lines: Iterable[tuple[int, bytes]], path: Path) -> Iterator[StoredRecord | DamagedLine]:
    """The same of numbered lines that are those of a run, wherever they come from; `path` names them."""
    run: Run | None = None
    for number, line in lines:
        try:
            if not line.startswith(_RECORD_PREFIX):
                run = None  # what follows a damaged run line is of no known run
                run = _run(line)
            elif run is None:
                old, _ = record_line.decode_old(line)
                yield StoredRecord(number, old.key, old.fingerprint, old, None)
            else:
                key, found = record_line.decode(line)
                check_untimed(found, run.fingerprint)
                yield StoredRecord(number, key, run.fingerprint, found, run)
        except (ValueError, TypeError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
            yield DamagedLine(path, number, f"{type(error).__name__}: {error}")


def split(read_lines: Iterable[Record | DamagedLine]) -> tuple[list[Record], list[DamagedLine]]:
    """The records, and the damaged lines."""
    records: list[Record] = []
    damaged: list[DamagedLine] = []
    for found in read_lines:
        (records if isinstance(found, Record) else damaged).append(found)  # type: ignore[arg-type]
    return records, damaged


def read_all(results: Path) -> tuple[list[Record], list[DamagedLine]]:
    """All runs under results/runs, oldest file first."""
    paths = sorted((results / "runs").glob(PATTERN), key=lambda path: path.name)
    return split(found for path in paths for found in read(path))


def _run(line: bytes) -> Run:
    """A run line. Raises ValueError or TypeError saying what is wrong with it."""
    data = json.loads(line.decode())
    if not isinstance(data, dict):
        raise TypeError(f"a line must be a JSON object; got {type(data).__name__}")
    if data.get("schema_version") != VERSION:
        raise ValueError(f"schema_version of a run line must be {VERSION}; got {data.get('schema_version')!r}")
    return schema.build(Run, data, "run")
