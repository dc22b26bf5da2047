"""The command line of the regression suite.

    python -m regression list               every incident: symptom, cause, detector, since when it is caught
    python -m regression run                all of them: each fault must be caught, the product must be free of it
    python -m regression run dup-blocks     this one
    python -m regression run --soak 30      train the profiles of the field reports for 30 minutes instead

Exit code: 0 where all is as expected; 1 where it is not; 2 for a wrong argument, an unknown NSA_* variable, or where
nothing could be checked (a fault that no run entered, for one); 130 where the run was interrupted, which keeps what it
finished.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import environment, forced
from harness.arguments import Parser
from harness.interrupt import INTERRUPTED
from regression import listing

JOBS_ON_CPU, MOST_JOBS_ON_GPU = 2, 4
CORES_PER_GPU_JOB = 2  # one compiles kernels while the other launches them


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    results = environment.read().results
    top = Parser(prog="python -m regression", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show every incident")
    run = commands.add_parser("run", help="replay the incidents")
    run.add_argument("ids", nargs="*", metavar="id", help="incidents (default: all)")
    run.add_argument("-k", dest="text", metavar="TEXT", help="incidents whose id contains this; 'A or B' for more")
    run.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="auto", help="(default: a GPU if there is one)"
    )
    run.add_argument(
        "--force-arch",
        choices=forced.ARCHITECTURES,
        help="run the kernels of this older architecture on a newer GPU; the records have a name of their own",
    )
    run.add_argument(
        "--memory-gb", type=int, metavar="N", help="with --force-arch: let each process allocate no more (default: all)"
    )
    run.add_argument("--jobs", type=int, metavar="N", help="children at a time (default: 2 on a CPU, up to 4 on a GPU)")
    run.add_argument("--out", type=Path, default=results, metavar="DIR", help=f"(default: {results})")
    run.add_argument("--junitxml", type=Path, metavar="PATH", help="write JUnit XML here")
    run.add_argument("--soak", type=float, metavar="MINUTES", help="train instead, for this long")
    run.add_argument("--inject", metavar="ID", help=argparse.SUPPRESS)  # for the suite's own test: must come out red
    return top


def run(arguments: argparse.Namespace) -> int:
    """Replay, record, judge; the last line of stdout is JSON."""
    from regression import session  # imports PyTorch, which `list --help` need not

    if arguments.inject is not None:
        listing.known(arguments.inject)
    if arguments.text is not None:
        if arguments.ids:
            raise ValueError("-k chooses incidents by a part of their id; give no whole ones beside it")
        arguments.ids = listing.containing(arguments.text)
    ids = arguments.ids or ([arguments.inject] if arguments.inject else listing.IDS)
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1; got {arguments.jobs}")
    if arguments.soak is not None and not arguments.soak > 0:
        raise ValueError(f"--soak must be above 0 minutes; got {arguments.soak}")
    if arguments.soak is not None and (arguments.ids or arguments.inject or arguments.junitxml):
        raise ValueError("--soak trains instead of replaying incidents; it takes neither ids nor --junitxml")
    machine = session.find(arguments.device, forced.enter(arguments.force_arch, arguments.memory_gb))
    if arguments.soak is not None:
        return session.soak(machine, arguments.soak, arguments.out)
    incidents = listing.load([listing.known(incident_id) for incident_id in dict.fromkeys(ids)])
    jobs = arguments.jobs or default_jobs(machine.device)
    return session.replay(machine, incidents, arguments.inject, jobs, arguments.out, arguments.junitxml)


def default_jobs(device: str) -> int:
    """Children at a time: as many as leave each one's pace its own."""
    if device == "cpu":
        return JOBS_ON_CPU
    return max(1, min(MOST_JOBS_ON_GPU, (os.cpu_count() or 1) // CORES_PER_GPU_JOB))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = parser().parse_args(argv)
    try:
        environment.check()
        if arguments.command == "list":
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            print(listing.table(listing.load(listing.IDS), width))
            return 0
        return run(arguments)
    except ValueError as error:
        print(f"python -m regression: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        from nsa.io import cannot_write  # imports PyTorch, as `run` has by now

        print(f"python -m regression: {cannot_write(error, '--out') or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m regression: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a cancelled job also ends its children, and keeps records
    sys.exit(main())
