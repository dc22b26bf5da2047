"""`merge`: join the results of several runners, from branches or downloaded artefacts, and build the pages again.

Every whole line comes along once; damaged lines are refused by name and stay where they are. Exit code 1 where
something was refused, 0 otherwise; merging the same folders again adds nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.commands import options
from benchmarks.commands.report import build_page
from benchmarks.history import merge

SUMMARY = "join the results of several runners"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From where, and into which folder."""
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="a results folder, or one that holds such folders"
    )
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Merge; the last line of stdout is JSON."""
    options.check_writable(arguments.out)
    merged = merge.MergeResult()
    for folder in arguments.folders:
        merge.merge(folder, arguments.out, merged)
    options.name_refused(merged.refused)
    page = build_page(arguments.out)
    print(
        json.dumps(
            {
                "new_files": merged.new_files,
                "new_lines": merged.new_lines,
                "known_lines": merged.known_lines,
                "refused": len(merged.refused),
                "page": str(page),
            }
        )
    )
    return 1 if merged.refused else 0
