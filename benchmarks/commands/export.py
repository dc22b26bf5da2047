"""`export`: cases and records in the format of another bench, flashinfer-bench's FlashInfer Trace.

Definitions and Workloads are those of every suite, Traces those of the records. Parts of NSA, train steps and memory
have no place there, nor have records of cases that were not evaluated: they are counted. `import` brings records back.
Exit code 1 where a record was damaged; the others are written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.commands import options
from benchmarks.history import run_file
from benchmarks.traces.dataset import Dataset
from benchmarks.workloads import suite
from nsa.io import cannot_write

SUMMARY = "write cases and records as flashinfer-bench reads them"
FORMATS = ("flashinfer-bench",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, and where to."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=f"(default: {FORMATS[0]})")
    parser.add_argument(
        "--results", type=Path, default=options.RESULTS, metavar="DIR", help=f"the records (default: {options.RESULTS})"
    )


def main(arguments: argparse.Namespace) -> int:
    """Export; the last line of stdout is JSON. 1 where a line of the records is damaged."""
    dataset = Dataset()
    for name in suite.names():
        for key in suite.planned(suite.table(name), quick=False, backend="auto", on_gpu=name != "cpu"):
            dataset.add_case(key)
    records, damaged = run_file.read_all(arguments.results)
    for record in records:
        dataset.add_record(record)
    try:
        dataset.write(arguments.folder)
    except OSError as error:
        raise ValueError(cannot_write(error, "FOLDER") or f"FOLDER: {error.filename}: {error.strerror}") from error
    options.name_refused(f"{line.path}:{line.line}: {line.why}" for line in damaged)
    told = {
        "definitions": len(dataset.definitions),
        "workloads": sum(map(len, dataset.workloads.values())),
        "traces": sum(map(len, dataset.traces.values())),
        "left_out": dict(sorted(dataset.left_out.items())),
        "damaged": len(damaged),
        "folder": str(arguments.folder),
    }
    print(json.dumps(told))
    return 1 if damaged else 0
