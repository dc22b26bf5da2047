"""`report`: the pages from the records."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.commands import options

if TYPE_CHECKING:
    from benchmarks.report.pages import Report

SUMMARY = "build the pages from the records"
OVERDUE_DAYS = 2.0
SLOWER = "slower"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--out, --repository-url, --overdue-days, --no-script, --fail-on."""
    options.add_out(parser)
    parser.add_argument(
        "--repository-url",
        metavar="URL",
        help="where commits are shown, such as https://github.com/owner/name (default: git's origin)",
    )
    parser.add_argument(
        "--overdue-days",
        type=float,
        default=OVERDUE_DAYS,
        metavar="N",
        help="a machine whose newest run is older is red (default: %(default)g)",
    )
    parser.add_argument("--no-script", action="store_true", help="pictures in place of interactive charts, no script")
    parser.add_argument(
        "--fail-on",
        choices=[SLOWER],
        help="exit with 1 where a case is slower, seen by two runs and not accepted; the last lines name them",
    )


def main(arguments: argparse.Namespace) -> int:
    """Build the pages."""
    options.check_writable(arguments.out / "report")
    report = _build(
        arguments.out, arguments.repository_url, overdue_days=arguments.overdue_days, script=not arguments.no_script
    )
    print(f"The page: {report.index}")
    slower = report.answers.slower if arguments.fail_on == SLOWER else []
    for row in slower:
        since = f" since {row.since.text}" if row.since else ""
        print(f"SLOWER {row.machine}: {row.mode}, {row.heads}, {row.size}, {row.further}: {row.change}{since}")
    return 1 if slower else 0


def build_page(results: Path) -> Path:
    """Where the pages of a folder of results start, made as `report` makes them by default."""
    return _build(results).index


def _build(
    results: Path, repository_url: str | None = None, *, overdue_days: float = OVERDUE_DAYS, script: bool = True
) -> Report:
    from benchmarks.report import links, pages  # matplotlib takes a second to import, which --help need not

    if script and importlib.util.find_spec("plotly") is None:
        print("plotly is not installed: the pages have pictures in place of interactive charts", file=sys.stderr)
        script = False
    repository = links.Repository(repository_url or links.of_checkout())
    try:
        return pages.build(results, pages.ReportSettings(script, repository, overdue_days))
    except OSError as error:
        error.filename = error.filename or str(results / "report")  # a write that fails does not say where
        raise
