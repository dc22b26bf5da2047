"""`import`: bring records back from a folder that `export` wrote, also after flashinfer-bench's tools rewrote it.

Every record comes along once; what is there already adds nothing. A trace that holds no record of ours, or says
something else than its record, is refused by name. Exit code 1 where something was refused.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.commands import options
from benchmarks.history import merge, run_file
from benchmarks.history.records import Record
from benchmarks.traces import dataset
from harness import jsonl
from harness.fingerprint import Fingerprint

SUMMARY = "bring records back from what `export` wrote"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From where, and into which folder of results."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `export` wrote")
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Import; the last line of stdout is JSON."""
    records, refused = dataset.read(arguments.folder)
    options.check_writable(arguments.out)
    merged = merge.MergeResult(refused=refused)
    if records:
        with tempfile.TemporaryDirectory() as apart:
            _write_runs(records, Path(apart))
            merge.merge(Path(apart), arguments.out, merged)
    options.name_refused(merged.refused)
    told = {"new_records": merged.new_lines, "known_records": merged.known_lines, "refused": len(merged.refused)}
    print(json.dumps(told))
    return 1 if merged.refused else 0


def _write_runs(records: Iterable[Record], results: Path) -> None:
    """A file for each run, as `run` writes it."""
    runs: dict[Fingerprint, list[Record]] = {}
    for record in records:
        runs.setdefault(record.fingerprint, []).append(record)
    for fingerprint, of_run in runs.items():
        path = jsonl.create(results / "runs" / fingerprint.machine, fingerprint)
        path.write_text("".join(f"{line}\n" for line in run_file.lines_of(of_run)), encoding="utf-8")
