"""`calibrate`: how often `compare` is right on this machine, and the thresholds that it uses here from then on.

Identical code is measured against itself in many pairs of processes, with 1, 3 and 10 % of real work injected into one
side. When it is interrupted, or its minutes are over, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence

from benchmarks.ab import calibration, calibration_samples, checkout
from benchmarks.ab.calibration import Calibration, CalibrationRate
from benchmarks.ab.calibration_samples import CalibrationPair
from benchmarks.ab.child import THREADS
from benchmarks.ab.result import Rules
from benchmarks.ab.starter import PairStarter
from benchmarks.cases.key import NSA, Key
from benchmarks.commands import options
from benchmarks.timing import gpu_watch
from benchmarks.workloads.suite import RANDOM
from harness import fingerprint, machines
from harness.machines import Machine
from nsa import NSAConfig

SUMMARY = "measure false-alarm rate and power of compare on this machine, and set its thresholds"

_FORWARD, _BACKWARD = "prefill-forward", "prefill-forward-backward"
_SHAPES = (  # mode, tokens, heads, key/value heads, head size: 20 to 45 ms each on one core of 2024
    (_FORWARD, 384, 8, 2, 64),
    (_FORWARD, 384, 8, 4, 64),
    (_FORWARD, 384, 6, 3, 64),
    (_FORWARD, 448, 8, 2, 64),
    (_FORWARD, 448, 6, 2, 64),
    (_FORWARD, 512, 8, 2, 64),
    (_FORWARD, 512, 6, 2, 64),
    (_FORWARD, 512, 4, 2, 64),
    (_FORWARD, 512, 8, 1, 32),
    (_FORWARD, 512, 4, 1, 128),
    (_FORWARD, 576, 4, 1, 64),
    (_FORWARD, 640, 4, 1, 64),
    (_FORWARD, 704, 4, 1, 64),
    (_BACKWARD, 256, 8, 2, 64),
    (_BACKWARD, 320, 4, 2, 64),
    (_BACKWARD, 320, 8, 2, 32),
    (_BACKWARD, 384, 4, 2, 64),
    (_BACKWARD, 384, 4, 1, 64),
    (_BACKWARD, 448, 4, 1, 32),
    (_BACKWARD, 448, 2, 1, 64),
)


_MOST_QUERIES = 8_192
"""Of a case that is measured on a GPU: what takes longer says no more."""
LEAST_PAIRS = 12
"""Two halves, each with two tests of identical code."""
_PAIRS = 60
_QUICK_EVERY = 4
"""With --quick each fourth case is measured, of every mode the first."""


def keys(machine: Machine) -> list[Key]:
    """The cases, on random inputs: on a GPU those of the quick suite that do not take long, on a CPU prefill.

    On a CPU decode waits for memory, which the host's other guests use as well: its calls differ by 7 %. What
    `compare` could have seen there is in each of its answers.
    """
    if machine.device == "cuda":
        quick = options.nsa_cases(machine, None, quick=True)
        return [
            key
            for key in quick
            if key.inputs == RANDOM
            and not key.mode.startswith("part-")
            and key.batch * key.num_queries <= _MOST_QUERIES
        ]
    config = dataclasses.asdict(NSAConfig())
    return [
        Key(mode, NSA, "torch", "float32", 1, tokens, tokens, heads, num_kv_heads, dim, dim, config)
        for mode, tokens, heads, num_kv_heads, dim in _SHAPES
    ]


def quick_part(of: Sequence[Key]) -> list[Key]:
    """What `--quick` measures: each fourth case of every mode, the first at least; enough for first thresholds."""
    by_mode: dict[str, list[Key]] = {}
    for key in of:
        by_mode.setdefault(key.mode, []).append(key)
    return [key for one_mode in by_mode.values() for key in one_mode[::_QUICK_EVERY]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many pairs and minutes, and where they are written."""
    options.add_gpu(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a quarter of the cases and {LEAST_PAIRS} pairs: first thresholds, which know little of the noise",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"pairs of processes in all, those of before too (default: {_PAIRS}, with --quick {LEAST_PAIRS})",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no further pair after so many minutes (default: no limit)"
    )
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Measure the pairs that are missing, judge all of them; the last line of stdout is JSON."""
    if arguments.pairs is None:
        arguments.pairs = LEAST_PAIRS if arguments.quick else _PAIRS
    if arguments.pairs < LEAST_PAIRS:
        raise ValueError(f"--pairs must be at least {LEAST_PAIRS}; got {arguments.pairs}")
    if arguments.minutes is not None and not arguments.minutes >= 0:
        raise ValueError(f"--minutes must be 0 or more; got {arguments.minutes}")
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    options.check_writable(arguments.out / "calibration")
    identity = fingerprint.take(machine.id, machine.device)
    if arguments.quick:
        _keep_better(arguments, identity)
    if machine.device == "cpu":
        identity = dataclasses.replace(identity, threads=THREADS)
    begin = time.perf_counter()
    try:
        pairs = _pairs(arguments, machine, identity)
    except calibration_samples.LostPairError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    if len(pairs) < LEAST_PAIRS:
        print(f"{len(pairs)} of at least {LEAST_PAIRS} pairs: the same command goes on with them", file=sys.stderr)
        return 1
    classes, cases = calibration.calibrate(calibration.timings(pairs), Rules.of_device(machine.device))
    found = Calibration(
        identity,
        classes,
        cases,
        len(pairs),
        round(sum(pair.seconds for pair in pairs), 1),
        _command(arguments, machine),
    )
    path = calibration.save(arguments.out, found)
    for one in classes:
        print("\n".join(["", f"{one.name}:", *map(_line, found.rates(one.name))]))
    summary = {
        one.name: {
            "false_alarms": found.rates(one.name)[0].alarms,
            "power": {f"{rate.slowdown:g}": rate.power for rate in found.rates(one.name)[1:]},
            "comparisons": found.rates(one.name)[0].comparisons,
            "smallest_change": one.rules.smallest_change,
            "equal_within": one.rules.equal_within,
        }
        for one in classes
    }
    print(f"\nThresholds and rates: {path}")
    print(json.dumps({**summary, "seconds": round(time.perf_counter() - begin, 1), "calibration": str(path)}))
    return 0


def _keep_better(arguments: argparse.Namespace, identity: fingerprint.Fingerprint) -> None:
    """Raises ValueError where a calibration of more pairs would be replaced."""
    try:
        found = calibration.load(arguments.out, identity.machine)
    except ValueError:  # of an earlier rule
        return
    if found is not None and found.fingerprint.device == identity.device and found.pairs > arguments.pairs:
        file = calibration.path(arguments.out, identity.machine)
        raise ValueError(f"--quick: {file} is of {found.pairs} pairs; leave out --quick, or name another --out")


def _command(arguments: argparse.Namespace, machine: Machine) -> str:
    words = ["--gpu", machine.id, *["--quick"] * arguments.quick, "--pairs", str(arguments.pairs)]
    elsewhere = [] if arguments.out == options.RESULTS else ["--out", str(arguments.out)]
    return shlex.join(["python", "-m", "benchmarks", "calibrate", *words, *elsewhere])


def _pairs(arguments: argparse.Namespace, machine: Machine, identity: fingerprint.Fingerprint) -> list[CalibrationPair]:
    cases, rules = keys(machine), Rules.of_device(machine.device)
    cases = quick_part(cases) if arguments.quick else cases
    word = calibration_samples.identity(identity, [key.name for key in cases], rules)
    recorded, damaged = calibration_samples.read(arguments.out, machine.id, word)
    pairs = recorded[: arguments.pairs]
    if damaged:
        print(calibration_samples.left_out(damaged), file=sys.stderr)
    print(f"{len(cases)} cases, {arguments.pairs} pairs of processes, of which {len(pairs)} are there", flush=True)
    if len(pairs) == arguments.pairs:
        return pairs
    watch = gpu_watch.begin(machine)
    begin = time.perf_counter()
    numbers, new = range(len(pairs), arguments.pairs), list[float]()
    with (
        checkout.sources([checkout.WORKING_TREE] * 2) as (base, head),
        PairStarter(base, head, machine.device) as starter,
    ):
        for pair in calibration_samples.measure(arguments.out, machine.id, starter, cases, rules, word, numbers):
            pairs.append(pair)
            new.append(pair.seconds)
            print(_progress(len(pairs), arguments.pairs, new), flush=True)
            if arguments.minutes is not None and time.perf_counter() - begin > 60 * arguments.minutes:
                break
            if watch is not None:  # noise of other work is not this machine's; what was measured is kept
                watch.require_alone()
    return pairs


def _progress(done: int, wanted: int, seconds: Sequence[float]) -> str:
    left_s = (wanted - done) * sum(seconds) / len(seconds)
    return f"[{done:>{len(str(wanted))}}/{wanted}] {seconds[-1]:.0f} s for a pair, {left_s / 60:.0f} min left"


def _line(rate: CalibrationRate) -> str:
    what = f"{rate.injected:.1%} injected" if rate.slowdown else "identical code"
    bound = f"at most {rate.most_alarms:.1%} false" if rate.slowdown == 0 else f"at least {rate.least_power:.1%} found"
    counts = f"{rate.slower:>4} SLOWER {rate.faster:>4} FASTER {rate.same:>4} SAME {rate.undecided:>4} UNDECIDED"
    return f"  {what:<16} {counts} of {rate.comparisons} ({bound}, with 95 % confidence)"
