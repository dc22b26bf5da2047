"""A run of the suite on one repro, as a process that can be killed: python -m tests.regression.stalled_run <part>."""

from __future__ import annotations

import sys

from regression import listing, runner
from tests.regression import repros


def main() -> None:
    """Run the part and print its verdict."""
    listing.module_of = lambda _id: repros.__name__
    for finding in runner.run([runner.Repro(repros.INCIDENT, sys.argv[1], "cuda")], gpus=1, jobs=1):
        print(finding.verdict.value)


if __name__ == "__main__":
    main()
