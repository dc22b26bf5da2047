"""`comment`: the newest comparison as Markdown, a table and a picture, for the comment on a pull request."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.ab import result
from benchmarks.commands import options
from nsa.io import atomic_write

SUMMARY = "write the newest comparison as Markdown, for a pull request"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which comparison, and where to."""
    parser.add_argument(
        "--since", default="", metavar="UTC", help="only comparisons that began then or later, as 2026-01-02T03:04:05Z"
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="(default: printed)")
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Write it; nothing where there is no such comparison."""
    from benchmarks.report import markdown  # imports what draws pages, which --help need not

    found = [one for one in result.read(arguments.out)[0] if one.utc >= arguments.since]
    if not found:
        print(f"comment: no comparison in {arguments.out}{arguments.since and f' since {arguments.since}'}")
        return 0
    text = markdown.text(found)
    if arguments.file is None:
        print(text)
    else:
        atomic_write(arguments.file, text.encode())
        print(f"comment: {arguments.file}")
    return 0
