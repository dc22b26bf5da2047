"""Arguments that several subcommands take, and what their values mean."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.cases.key import NSA, Key
from benchmarks.workloads import suite
from harness import arguments, environment, forced, machines
from harness.arguments import time_s
from harness.machines import Machine

RESULTS = environment.read().results


def add_out(parser: argparse.ArgumentParser) -> None:
    """--out."""
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"(default: {RESULTS})")


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """--gpu, also known as --require."""
    parser.add_argument(
        "--gpu",
        "--require",
        dest="gpu",
        type=arguments.machine_id,
        metavar="NAME",
        help=f"refuse any other machine: {', '.join(machines.known_ids())}, or the name that records have. 'gpu' is one"
        " that is not listed, 'cpu' measures the CPU also where there is a GPU (default: what is found)",
    )


def add_forced(parser: argparse.ArgumentParser) -> None:
    """--force-arch and --memory-gb."""
    parser.add_argument(
        "--force-arch",
        choices=forced.ARCHITECTURES,
        help="run the tables and kernels of this older architecture on a newer GPU: results and peak memory under a"
        " name of its own, nothing is timed (default: the GPU's own)",
    )
    parser.add_argument(
        "--memory-gb",
        type=int,
        metavar="N",
        help="with --force-arch: let each process allocate no more than N GB (default: all)",
    )


def add_cases(parser: argparse.ArgumentParser, default: str = "every mode but memory") -> None:
    """--cases."""
    parser.add_argument(
        "--cases",
        type=lambda text: text.split(","),
        metavar="A,B",
        help=f"modes ({', '.join(suite.MODES)}) or patterns of case names, such as 'decode/*/nsa' (default: {default})",
    )


def add_budget(parser: argparse.ArgumentParser) -> None:
    """--budget."""
    parser.add_argument(
        "--budget",
        type=time_s,
        metavar="TIME",
        help="measure for about so long (20m, 90s, 1h30m): first the cases not measured for longest, then those that"
        " tell most per second. The rest are listed as unmeasured; seven nightly runs reach each (default: no limit)",
    )


def chosen(
    keys: Sequence[Key],
    patterns: Sequence[str] | None,
    whole: Sequence[Key] = (),
    not_offered: Mapping[str, str] = MappingProxyType({}),
) -> list[Key]:
    """The keys that the patterns name. Raises ValueError for a pattern that names none.

    `whole` is the suite of which `keys` are the quick part: it tells a wrong name from a case that is not quick, and
    `not_offered` (`suite.not_offered`) from one that this checkout cannot have.
    """
    if patterns is None:
        return [key for key in keys if key.mode in suite.DEFAULT_MODES]
    for pattern in patterns:
        if any(named(key, pattern) for key in keys):
            continue
        if any(named(key, pattern) for key in whole):
            raise ValueError(f"--cases: {pattern!r} is not in the quick suite; leave out --quick to run it")
        for case, reason in not_offered.items():
            if any(fnmatch.fnmatchcase(name, pattern) for name in (case, f"{case}/{NSA}")):
                raise ValueError(f"--cases: {case} is not offered: {reason}")
        modes = ", ".join(dict.fromkeys(key.mode for key in keys))
        raise ValueError(f"--cases: no case here is named {pattern!r}; modes: {modes}; --list prints the names")
    return [key for key in keys if any(named(key, pattern) for pattern in patterns)]


def nsa_cases(machine: Machine, patterns: Sequence[str] | None, *, quick: bool = False) -> list[Key]:
    """NSA's cases that two versions of it can be compared on: the quick suite, or what the patterns name in the whole.

    With `quick`, what they name in the quick suite. The host's time is compared only where it is named, since it is
    uneven and no calibration injects work there. Raises ValueError where no such case is named.
    """
    shapes, on_gpu = suite.table(machine.suite), machine.device == "cuda"
    few, whole = (suite.planned(shapes, quick=part, backend="auto", on_gpu=on_gpu) for part in (True, False))
    planned = few if quick or patterns is None else whole
    left_out = suite.IN_CHILDREN if patterns else (*suite.IN_CHILDREN, *suite.HOSTED)
    named_keys = chosen(planned, patterns, whole, suite.not_offered(shapes, on_gpu=on_gpu))
    keys = [key for key in named_keys if key.implementation == NSA and key.mode not in left_out]
    if not keys:
        raise ValueError(f"--cases: {','.join(patterns or ())!r} names no case of NSA that is timed")
    return keys


def named(key: Key, pattern: str) -> bool:
    """Whether a pattern of `--cases` means this key: its mode, its case, or its case and implementation."""
    return key.mode == pattern or any(fnmatch.fnmatchcase(name, pattern) for name in (key.case, key.name))


def name_refused(refused: Iterable[str]) -> None:
    """Say on stderr what did not come along."""
    for refusal in refused:
        print(f"python -m benchmarks: refused {refusal}", file=sys.stderr)


def check_writable(folder: Path) -> None:
    """Before hours of measuring, not after. Raises ValueError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--out: cannot write in {folder}: {error.strerror}. Make it writable, or name another folder"
        ) from error
