"""`convert`: bring records of earlier versions into today's form, which takes a fortieth of the room.

A run's figures stay; its samples go into a compressed file beside it, which git ignores. JUnit XML below laws/ and the
heartbeats of training runs below train/ become what they show in small. What has today's form is left alone, so that
converting twice changes nothing. Damaged lines are named and stay where they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import conversion, evidence, jsonl, run_file, whole
from benchmarks.commands import options

SUMMARY = "bring records of earlier versions into today's form"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--out."""
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Convert; the last line of stdout is JSON. 1 where a line was damaged."""
    results: Path = arguments.out
    files = records = 0
    damaged: list[str] = []
    for path in sorted((results / "runs").glob(run_file.PATTERN)):
        if path.is_file() and conversion.is_old(path):
            done = conversion.convert(path)
            files, records = files + 1, records + done.records
            damaged += [f"{path}:{line.line}: {line.why}" for line in done.damaged]
    for path in sorted(results.glob("laws/*.xml")):
        try:
            shown = json.dumps(evidence.of_junit(path), indent=1) + "\n"
        except ValueError as error:
            damaged.append(str(error))
            continue
        _replace(path, path.with_suffix(".json"), shown)
        files += 1
    for path in sorted(results.glob("train/**/heartbeat_rank*.jsonl")):
        lines = evidence.of_heartbeats(json.loads(line) for _, line in jsonl.lines(path))
        _replace(
            path, path.with_name(path.name.replace("heartbeat", "medians")), "".join(f"{line}\n" for line in lines)
        )
        files += 1
    for line in damaged:
        print(f"python -m benchmarks: damaged, left as it is: {line}", file=sys.stderr)
    print(json.dumps({"files": files, "records": records, "damaged": len(damaged)}))
    return 1 if damaged else 0


def _replace(old: Path, new: Path, text: str) -> None:
    whole.replace(new, text.encode())
    old.unlink()
