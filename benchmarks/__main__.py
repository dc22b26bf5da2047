"""The command line of the benches.

    python -m benchmarks run            recognise the machine, measure its suite, write records, build the page
    python -m benchmarks run --quick    the same on fewer shapes with fewer samples
    python -m benchmarks report         build the page again from the records

Exit code: 0 where NSA is right on every case; 1 where it is not; 2 for a wrong argument or another machine; 130 where
the run was interrupted, which keeps what it finished.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks import console, fingerprint, gpus, records, runner, suite, verdict
from benchmarks.records import Key
from nsa import backends

RESULTS = fingerprint.ROOT / "results"
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, write records, build the page")
    run.add_argument("--quick", action="store_true", help="fewer shapes and samples: under a minute on a CPU")
    run.add_argument(
        "--gpu",
        "--require",
        dest="gpu",
        choices=gpus.known_ids(),
        help="refuse any other machine; 'gpu' is one that is not listed, 'cpu' measures the CPU also where there is a"
        " GPU (default: what is found)",
    )
    run.add_argument(
        "--cases",
        type=lambda text: text.split(","),
        metavar="A,B",
        help=f"modes ({', '.join(suite.MODES)}) or patterns of case names, such as 'decode/*/nsa'"
        " (default: every mode but memory)",
    )
    run.add_argument("--backend", choices=backends.NAMES, default="auto", help="NSA's backend (default: auto)")
    run.add_argument("--list", action="store_true", help="print the names of the cases and measure nothing")
    report = commands.add_parser("report", help="build the page from the records")
    for command in (run, report):
        command.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="(default: results)")
    return top


def chosen(keys: Sequence[Key], patterns: Sequence[str] | None, whole: Sequence[Key] = ()) -> list[Key]:
    """The keys that the patterns name. Raises ValueError for a pattern that names none.

    `whole` is the suite of which `keys` are the quick part: it tells a wrong name from a case that is not quick.
    """
    if patterns is None:
        return [key for key in keys if key.mode in suite.DEFAULT_MODES]
    for pattern in patterns:
        if any(_named(key, pattern) for key in keys):
            continue
        if any(_named(key, pattern) for key in whole):
            raise ValueError(f"--cases: {pattern!r} is not in the quick suite; leave out --quick to run it")
        modes = ", ".join(dict.fromkeys(key.mode for key in keys))
        raise ValueError(f"--cases: no case here is named {pattern!r}; modes: {modes}; --list prints the names")
    return [key for key in keys if any(_named(key, pattern) for pattern in patterns)]


def _named(key: Key, pattern: str) -> bool:
    return key.mode == pattern or fnmatch.fnmatchcase(key.name, pattern)


def run(arguments: argparse.Namespace) -> int:
    """Measure; the last line of stdout is JSON."""
    machine = gpus.machine(arguments.gpu, gpus.visible_gpu())
    on_gpu = machine.device == "cuda"
    shapes = gpus.suite(machine.suite)
    quick, whole = (
        suite.planned(shapes, quick=part, backend=arguments.backend, on_gpu=on_gpu) for part in (True, False)
    )
    keys = chosen(quick if arguments.quick else whole, arguments.cases, whole)
    if arguments.list:
        print("\n".join(key.name for key in keys))
        return 0
    for folder in (arguments.out / "runs" / machine.id, arguments.out / "report"):
        _check_writable(folder)
    identity = fingerprint.take(machine.id, machine.device)
    path = records.create_run(arguments.out, identity)
    print(f"{machine.title}: {len(keys)} measurements -> {path}", flush=True)

    def command(key: Key) -> str:
        return f"python -m benchmarks run --gpu {machine.id} --backend {arguments.backend} --cases '{key.name}'"

    begin = time.perf_counter()
    done: list[records.Record] = []
    plan = runner.QUICK if arguments.quick else runner.FULL
    try:
        for record in runner.run(keys, machine.device, plan, identity, command):
            records.append(path, record)
            print(console.progress(record, len(done) + 1, len(keys), time.perf_counter() - begin, done), flush=True)
            done.append(record)
    except KeyboardInterrupt:
        return _interrupted(arguments.out, path, len(done), len(keys))
    page = _build_page(arguments.out)
    print("\n" + console.table(verdict.comparisons(done)))
    print(f"\nThe page: {page}")
    wrong = verdict.faults(done)
    summary = {
        "machine": machine.id,
        "outcomes": dict(Counter(record.outcome.value for record in done)),
        "faults": [record.key.name for record in wrong],
        "seconds": round(time.perf_counter() - begin, 1),
        "records": str(path),
        "page": str(page),
    }
    print(json.dumps(summary))
    return 1 if wrong else 0


def report(arguments: argparse.Namespace) -> int:
    """Build the page."""
    _check_writable(arguments.out / "report")
    print(f"The page: {_build_page(arguments.out)}")
    return 0


def _interrupted(results: Path, path: Path, done: int, total: int) -> int:
    print(f"python -m benchmarks: interrupted; {done} of {total} measurements are in {path}", file=sys.stderr)
    if done:
        print(f"The page: {_build_page(results)}")
    return INTERRUPTED


def _check_writable(folder: Path) -> None:
    """Before hours of measuring, not after. Raises ValueError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out: cannot write in {folder}: {error.strerror}") from error


def _build_page(results: Path) -> Path:
    from benchmarks.report import build  # matplotlib takes a second to import, which --help need not

    return build(results)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = parser().parse_args(argv)
    try:
        return (report if arguments.command == "report" else run)(arguments)
    except (gpus.WrongMachineError, ValueError) as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m benchmarks: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
