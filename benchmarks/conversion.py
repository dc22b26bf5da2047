"""Files of versions 1 and 2 in today's form: the records in small, their samples compressed beside them."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import jsonl, old_records, raw_samples, run_file, whole
from benchmarks.records import Record
from benchmarks.run_file import Damaged
from benchmarks.samples import RawSamples


@dataclass(frozen=True)
class Converted:
    """What came of a file."""

    records: int
    damaged: list[Damaged]


def is_old(path: Path) -> bool:
    """Whether the file begins with a record of version 1 or 2, damaged or not, and not with a run line."""
    first = next((line for _, line in jsonl.lines(path)), run_file.RUN_PREFIX)
    return not first.startswith(run_file.RUN_PREFIX)


def convert(path: Path) -> Converted:
    """Replace an old file by what it holds: first its samples, then the file, each in one step.

    Damaged lines come last, as they stood. A file without a single record is left as it is.
    """
    records: list[Record] = []
    raws: list[RawSamples] = []
    damaged: list[Damaged] = []
    torn: list[bytes] = []
    for number, line in jsonl.lines(path):
        try:
            record, raw = old_records.read(line)
        except (ValueError, TypeError, RecursionError) as error:
            damaged.append(Damaged(path, number, f"{type(error).__name__}: {error}"))
            torn.append(line)
            continue
        records.append(record)
        if raw is not None:
            raws.append(raw)
    if not records:
        return Converted(0, damaged)
    if raws:
        members = (json.dumps(asdict(raw), allow_nan=False, separators=(",", ":")) + "\n" for raw in raws)
        whole.replace(raw_samples.path(path), gzip.compress("".join(members).encode(), mtime=0))
    lines = [*(line.encode() for line in run_file.lines_of(records)), *torn]
    whole.replace(path, b"".join(line + b"\n" for line in lines))
    return Converted(len(records), damaged)
