"""`report`: the page from the records."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.commands import options

SUMMARY = "build the page from the records"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--out."""
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Build the page."""
    options.check_writable(arguments.out / "report")
    print(f"The page: {build_page(arguments.out)}")
    return 0


def build_page(results: Path) -> Path:
    """Where the page is."""
    from benchmarks.report.pages import build  # matplotlib takes a second to import, which --help need not

    try:
        return build(results)
    except OSError as error:
        error.filename = error.filename or str(results / "report")  # a write that fails does not say where
        raise
