"""`fit-inputs`: fit the inputs `recorded` to the curves of an atlas, or of the study that came before the first one.

Writes benchmarks/cases/tables/recorded.json, from which benches, laws and the tuner draw their inputs. Figures on the
new inputs are not comparable with those on the old ones. Exit code 1, and nothing written, where a curve is missed by
more than the tolerance.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.atlas import record
from benchmarks.cases.recorded import TABLE
from benchmarks.selection import fit, targets
from nsa.io import atomic_write

SUMMARY = "fit the inputs `recorded` to what a trained model selects"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which curves, and how long to search."""
    parser.add_argument(
        "--atlas",
        type=Path,
        metavar="FILE",
        help="a file of results/atlas, which is committed with the table (default: the study's few figures)",
    )
    parser.add_argument(
        "--evaluations",
        type=int,
        default=200,
        metavar="N",
        help="selections to measure per length and kind at most, some 5 s each on a core (%(default)s)",
    )
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="what is written (%(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Fit, say how well, write. ValueError for a file that is no atlas."""
    if arguments.evaluations < 1:
        raise ValueError(f"--evaluations must be at least 1; got {arguments.evaluations}")
    try:
        found = targets.of_study() if arguments.atlas is None else targets.of_atlas(record.read(arguments.atlas))
    except OSError as error:
        raise ValueError(f"--atlas: {arguments.atlas}: {error.strerror}") from error
    fits, missed = [], False
    for one in fit.fit_all(found, arguments.evaluations):
        name, off = one.worst
        missed |= abs(off) > fit.TOLERANCE
        print(f"{one.kind} at {one.law.num_keys} tokens: {name} off by {off:+.1%}", flush=True)
        fits.append(one)
    if missed:
        print(f"not written: a curve is off by more than {fit.TOLERANCE:.0%}; more --evaluations may help")
        return 1
    atomic_write(arguments.table, fit.table(fits, arguments.atlas and arguments.atlas.name))
    print(arguments.table)
    return 0
