"""A folder of Definitions, Workloads and Traces as flashinfer-bench lays it out, written whole or not at all.

definitions/<type>/<name>.json, workloads/<type>/<name>.jsonl and traces/<type>/<name>.jsonl.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases.key import Key
from benchmarks.history import merge
from benchmarks.history.records import Record
from benchmarks.traces import definition, trace
from benchmarks.traces.definition import KINDS, Json
from nsa.io import read_lines


@dataclass
class Dataset:
    """What a folder holds, by the name of its Definition."""

    definitions: dict[str, Json] = field(default_factory=dict)
    workloads: dict[str, dict[str, Json]] = field(default_factory=dict)
    """By identifier."""
    traces: dict[str, list[Json]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    """Records that the format has no place for, by why."""

    def add_case(self, key: Key) -> None:
        """A case with or without records; one that has no Definition is passed over."""
        if key.mode not in KINDS:
            return
        made, name = definition.definition(key), definition.name(key)
        if self.definitions.setdefault(name, made) != made:
            raise ValueError(f"two cases with other definitions have the name {name}")
        work = definition.workload(key)
        self.workloads.setdefault(name, {})[work["uuid"]] = work

    def add_record(self, record: Record) -> None:
        """A record, and its case."""
        if why := trace.why_left_out(record):
            self.left_out[why] += 1
            return
        self.add_case(record.key)
        self.traces.setdefault(definition.name(record.key), []).append(trace.encode(record))

    def write(self, folder: Path) -> None:
        """Into a folder that is new or empty; it appears when it is complete. Raises ValueError where it holds
        something, OSError where it cannot be written."""
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise ValueError(f"FOLDER must be new or an empty folder; {folder} is neither")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for name, made in self.definitions.items():
                below = made["op_type"]
                works = [{"definition": name, "workload": work} for work in self.workloads[name].values()]
                _write(partial / "definitions" / below / f"{name}.json", [json.dumps(made, indent=2)])
                _write(partial / "workloads" / below / f"{name}.jsonl", map(_line, works))
                if name in self.traces:
                    _write(partial / "traces" / below / f"{name}.jsonl", map(_line, self.traces[name]))
            partial.chmod(0o755)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _line(value: Json) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """The records of a folder's Traces, and what is wrong with the others, by file and line. Raises ValueError where
    there is no such folder."""
    if not (folder / "traces").is_dir():
        raise ValueError(f"FOLDER must hold a folder `traces`, as `export` writes it; {folder} does not")
    records: list[Record] = []
    refused: list[str] = []
    for path in merge.plain_files(folder, ("traces/**/*.jsonl",), refused):
        for number, line in read_lines(path):
            try:
                records.append(trace.decode(json.loads(line.decode())))
            except (ValueError, TypeError, RecursionError) as error:
                refused.append(f"{path}:{number}: {error}")
    return records, refused
