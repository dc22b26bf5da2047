"""`results`: write the tables and the picture of docs/results.md from the records."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.commands import options
from harness.repository import ROOT

SUMMARY = "write the tables of docs/results.md from the records"
DOCUMENT = ROOT / "docs" / "results.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--out, --document."""
    options.add_out(parser)
    parser.add_argument("--document", type=Path, metavar="FILE", default=DOCUMENT, help=f"(default: {DOCUMENT})")


def main(arguments: argparse.Namespace) -> int:
    """Write what has changed."""
    from benchmarks.report import results_document  # matplotlib takes a second to import, which --help need not

    if not arguments.document.is_file():
        raise ValueError(f"--document: there is no file {arguments.document}")
    changed = results_document.write(arguments.out, arguments.document)
    print(f"{arguments.document}: {'written anew' if changed else 'as the records have it'}")
    return 0
