"""The command line of the mutants: which small faults in the product do the tests and incidents see?

    python -m tests.mutants run                  all of them; `--jobs N` at a time
    python -m tests.mutants run --area train     of these areas; --only ID, --shard 2/8 likewise
    python -m tests.mutants run --resume         go on with the newest run over these very files
    python -m tests.mutants judge                what all shards over the newest tree say together
    python -m tests.mutants list                 every mutant and what must see it
    python -m tests.mutants check                is every mutant still what it says? Nothing is run
    python -m tests.mutants draw --count 50 --seed 7     let cosmic-ray draw some into drawn.toml

Exit code of `run` and `judge`: 0 where 95 % of each area's mutants were seen, 1 where not or where nothing is known of
one (its tests fail without it; for `judge` also: it was not tried), 2 for a wrong argument, 130 where the run was
interrupted, which keeps what it finished. A shard holds parts of areas: its exit code is 1 for the unknown alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness import environment
from harness.arguments import Parser
from harness.interrupt import INTERRUPTED
from harness.repository import ROOT
from tests.mutants import standing
from tests.mutants.standing import Area, Planned

MOST_JOBS = 8


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    top = Parser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)  # of another tree, for the tests
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="try them")
    listed = commands.add_parser("list", help="show them")
    for command in (run, listed):
        command.add_argument("--area", nargs="+", metavar="NAME", help="of these areas (default: all)")
        command.add_argument("--only", nargs="+", metavar="ID", help="these (default: all)")
        command.add_argument("--shard", type=_shard, metavar="K/N", help="the K-th of N equal parts")
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    run.add_argument("--jobs", type=int, default=jobs, metavar="N", help=f"mutants at a time (default here: {jobs})")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on with the newest run over these very files; what ended in ERROR is tried again",
    )
    judge = commands.add_parser("judge", help="what all shards say together")
    for command in (run, judge):
        command.add_argument("--out", type=Path, metavar="DIR", help="(default: results in the tree)")
    commands.add_parser("check", help="is every mutant what it says?")
    draw = commands.add_parser("draw", help="draw some with cosmic-ray")
    draw.add_argument("--count", type=int, default=50, metavar="N", help="(default: 50)")
    draw.add_argument("--seed", type=int, required=True, metavar="N", help="the same seed draws the same from one tree")
    return top


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    found = int(number), int(count)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


def _chosen(arguments: argparse.Namespace, areas: dict[str, Area]) -> list[Planned]:
    """The mutants that the arguments name. ValueError for a name that is none."""
    planned = standing.plan(areas)
    for given, known, what in (
        (arguments.area, {one.area for one in planned}, "area"),
        (arguments.only, {one.mutant.id for one in planned}, "mutant"),
    ):
        if unknown := set(given or ()) - known:
            raise ValueError(f"no {what} is called {sorted(unknown)[0]!r}; `list` shows all")
    chosen = [one for one in planned if arguments.area is None or one.area in arguments.area]
    chosen = [one for one in chosen if arguments.only is None or one.mutant.id in arguments.only]
    return standing.shard(chosen, *arguments.shard) if arguments.shard else chosen


def _run(arguments: argparse.Namespace) -> int:
    """Try, record, judge; the last line of stdout is JSON."""
    from benchmarks.history import mutants
    from harness import (
        fingerprint,
        machines,  # PyTorch, which `check` need not import
    )
    from tests.mutants import console, tree, trials

    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1; got {arguments.jobs}")
    _refuse_faults(arguments.root)
    areas, _ = standing.read(arguments.root)
    chosen, results = _chosen(arguments, areas), arguments.out or arguments.root / "results"
    names = tree.sources(arguments.root)
    digest = tree.sha256(arguments.root, names)
    planned = dict(Counter(one.area for one in standing.plan(areas) if one.mutant.equivalent is None))
    path = mutants.newest(results, digest) if arguments.resume else None
    before = mutants.read(path)[1] if path else []
    lines = [
        line for line in before if line.outcome is not mutants.MutantOutcome.ERROR
    ]  # nothing is known of the others
    if path is None:
        here = machines.recognise(machines.visible_gpu())
        path = mutants.create(results, mutants.Header(fingerprint.take(here.id, here.device), digest, planned))
    done = {line.id for line in lines}
    left = [one for one in chosen if one.mutant.id not in done]
    print(
        f"{len(left)} mutants of {len({one.area for one in left})} areas, {len(done)} done before -> {path}", flush=True
    )
    begin = time.perf_counter()
    with console.Progress(len(left)) as progress:
        for line in trials.run(arguments.root, names, left, arguments.jobs):
            mutants.append(path, line)
            lines.append(line)
            progress.finished(line)
    wanted = {one.mutant.id for one in chosen}
    shown = sorted((line for line in lines if line.id in wanted), key=lambda line: (line.area, line.id))
    rates = mutants.rates(shown)
    red = [rate.area for rate in rates if rate.errors or (arguments.shard is None and not rate.enough)]
    print("\n" + console.table(shown))
    summary = {"mutants": len(shown), "seen": {rate.area: round(rate.share, 4) for rate in rates}, "red": red}
    print(json.dumps({**summary, "seconds": round(time.perf_counter() - begin, 1), "records": str(path)}), flush=True)
    return 1 if red else 0


def _judge(results: Path) -> int:
    """The last line of stdout is JSON."""
    from benchmarks.history import mutants
    from benchmarks.report.further_pages.mutants import read
    from tests.mutants import console

    found, damaged = read(results)
    if damaged or not found:
        raise ValueError("\n  ".join(damaged) or f"{results} holds no records of mutants")
    begin, lines = found[0].begin, sorted(found[0].lines, key=lambda line: (line.area, line.id))
    rates = mutants.rates(lines)
    missing = mutants.not_tried(begin, rates)
    red = sorted({rate.area for rate in rates if not rate.enough} | set(missing))
    print(console.table(lines))
    print(json.dumps({"commit": begin.fingerprint.commit, "not_tried": sum(missing.values()), "red": red}), flush=True)
    return 1 if red else 0


def _refuse_faults(root: Path) -> None:
    if faults := standing.check(root):
        raise ValueError("\n  ".join(["the standing set is damaged:", *faults]))


def _draw(arguments: argparse.Namespace) -> int:
    from tests.mutants import draw  # cosmic-ray, which nothing else here needs

    path = draw.write(arguments.root, arguments.count, arguments.seed)
    print(f'{path}: look at each; one that no test can see gets `equivalent = "why"`')
    return 0


def _check(root: Path) -> int:
    faults = standing.check(root)
    for fault in faults:
        print(fault)
    if not faults:
        planned = standing.plan(standing.read(root)[0])
        print(f"{len(planned)} mutants of {len({one.area for one in planned})} areas are what they say")
    return 1 if faults else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = parser().parse_args(argv)
    try:
        environment.check()
        if arguments.command == "run":
            return _run(arguments)
        if arguments.command == "judge":
            return _judge(arguments.out or arguments.root / "results")
        if arguments.command == "draw":
            return _draw(arguments)
        if arguments.command == "check":
            return _check(arguments.root)
        from tests.mutants import console

        areas, _ = standing.read(arguments.root)
        print(console.listing(_chosen(arguments, areas), areas))
        return 0
    except OSError as error:
        print(
            f"python -m tests.mutants: {error.filename}: {error.strerror}; --out names another folder", file=sys.stderr
        )
        return 2
    except (ValueError, ImportError) as error:
        print(f"python -m tests.mutants: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m tests.mutants: interrupted; `--resume` goes on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    for asked in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a cancelled job, also in a shell's background, where SIGINT is ignored
        signal.signal(asked, signal.default_int_handler)
    sys.exit(main())
