"""`samples`: every sample of a run and the clocks beside it, a JSON line per record, from the file beside the run's.

The records keep quantiles; the samples lie where they were measured, and for a while in CI's artefacts.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
from pathlib import Path

from benchmarks.history import conversion, samples

SUMMARY = "print the raw samples of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which run and which cases."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a file of results/runs, as `run` printed it")
    parser.add_argument("--case", default="*", metavar="NAME", help="a pattern of case names (default: all)")


def main(arguments: argparse.Namespace) -> int:
    """Print them. ValueError where they are missing, or no case is named so."""
    if not arguments.run.is_file():
        raise ValueError(f"RUN must be a file of results/runs; there is none at {arguments.run}")
    if arguments.run.suffix != ".jsonl":
        raise ValueError(f"RUN must be the run's own file, which ends with .jsonl; got {arguments.run}")
    if conversion.is_old(arguments.run):
        raise ValueError(f"{arguments.run} holds its samples itself: `python -m benchmarks convert`, then ask again")
    shown = 0
    for raw in samples.read_raw(arguments.run):
        if fnmatch.fnmatchcase(raw.name, arguments.case):
            print(json.dumps(dataclasses.asdict(raw), separators=(",", ":")))
            shown += 1
    if not shown:
        if arguments.case == "*":
            raise ValueError(f"no samples are kept of {arguments.run}")
        raise ValueError(f"--case: no samples of {arguments.run.name} are named {arguments.case!r}")
    return 0
