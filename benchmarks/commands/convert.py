"""`convert`: bring records of earlier versions into the current format; those of a GPU take a fortieth of the room.

A run's figures stay; its samples go into a compressed file beside it, which git ignores. JUnit XML below laws/ and the
heartbeats of finished training runs below train/ become summaries. What has the current format is left alone, so that
converting twice changes nothing. Damaged lines are named; in the file of a run they stand behind its records then.
Exit code 1 where there were any.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.commands import options
from benchmarks.history import conversion, merge
from nsa.io import atomic_write, read_lines

SUMMARY = "bring records of earlier versions into the current format"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--out."""
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Convert; the last line of stdout is JSON. 1 where something could not be converted."""
    results: Path = arguments.out
    if not results.is_dir():
        raise ValueError(f"--out: there is no folder {results}")
    options.check_writable(results)
    refused: list[str] = []
    files = records = 0
    for path in merge.plain_files(results, (merge.RUNS,), refused):
        if conversion.is_old(path):
            done = conversion.convert(path)
            files, records = files + 1, records + done.records
            refused += [f"{path}:{line.line}: {line.why}" for line in done.damaged]
    for path in merge.plain_files(results, ("laws/*.xml",), refused):
        files += _summarized(path, path.with_suffix(".json"), _junit, refused)
    for path in merge.plain_files(results, ("train/**/heartbeat_rank*.jsonl",), refused):
        files += _summarized(path, path.with_name(path.name.replace("heartbeat", "medians")), _heartbeats, refused)
    for line in refused:
        print(f"python -m benchmarks: kept as it is: {line}", file=sys.stderr)
    print(json.dumps({"files": files, "records": records, "refused": len(refused)}))
    return 1 if refused else 0


def _summarized(path: Path, target: Path, summarize: Callable[[Path], str], refused: list[str]) -> bool:
    """Replace a file by its summary. False where it cannot be read, or another summary is there already."""
    try:
        text = summarize(path)
    except ValueError as error:
        refused.append(str(error))
        return False
    if target.exists() and target.read_text(encoding="utf-8") != text:
        refused.append(f"{path}: {target.name} is there already, with other content; move one of them away")
        return False
    atomic_write(target, text.encode())
    path.unlink()
    return True


def _junit(path: Path) -> str:
    return json.dumps(conversion.summarize_junit(path), indent=1) + "\n"


def _heartbeats(path: Path) -> str:
    """ValueError naming the first line that is damaged."""
    found = []
    for number, line in read_lines(path):
        try:
            found.append(json.loads(line, parse_constant=_no_number))
            if not isinstance(found[-1], dict):
                raise TypeError("a line must be a JSON object")
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {type(error).__name__}: {error}") from error
    return "".join(f"{line}\n" for line in conversion.summarize_heartbeats(found))


def _no_number(name: str) -> None:
    """NaN and infinity are no JSON; a step that was not finite has no figure."""
