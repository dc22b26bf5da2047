"""`calibrate`: how often `compare` is right on this machine, and the thresholds that it uses here from then on.

Identical code is measured against itself in many pairs of processes, with 1, 3 and 10 % of real work injected into one
side. When it is interrupted, or its minutes are over, the same command goes on where it stopped. `--cases` adds pairs
of some cases, `--stored` judges what is on record of any machine anew; the last lines say which bounds are still open.
Exit code 1 where a pair could not be measured, or some case has fewer pairs than a calibration needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.ab import calibration, calibration_samples, checkout, open_bounds
from benchmarks.ab.calibration import Calibration, CalibrationRate
from benchmarks.ab.calibration_samples import CalibrationPair
from benchmarks.ab.child import THREADS
from benchmarks.ab.open_bounds import OpenBound
from benchmarks.ab.result import Rules
from benchmarks.ab.starter import PairStarter
from benchmarks.cases.key import NSA, Key
from benchmarks.commands import options
from benchmarks.timing import gpu_watch
from benchmarks.workloads.suite import RANDOM
from harness import fingerprint, machines
from harness.fingerprint import Fingerprint
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
        help=f"a quarter of the cases and {LEAST_PAIRS} pairs: preliminary thresholds",
    )
    options.add_cases(parser, default="all that are calibrated on this machine")
    parser.add_argument(
        "--stored",
        action="store_true",
        help="measure nothing: judge the pairs that are on record of --gpu NAME, which need not be this machine",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help="pairs of processes that each case is to have in all, with those already recorded"
        f" (default: {_PAIRS}, with --quick {LEAST_PAIRS})",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no further pair after so many minutes (default: no limit)"
    )
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Measure the pairs that are missing, judge all of them; the last line of stdout is JSON."""
    if arguments.stored and (arguments.cases or arguments.quick or arguments.pairs or arguments.minutes is not None):
        raise ValueError("--stored judges all pairs on record: leave out --cases, --quick, --pairs and --minutes")
    if arguments.pairs is None:
        arguments.pairs = LEAST_PAIRS if arguments.quick else _PAIRS
    if arguments.pairs < LEAST_PAIRS:
        raise ValueError(f"--pairs must be at least {LEAST_PAIRS}; got {arguments.pairs}")
    if arguments.minutes is not None and not arguments.minutes >= 0:
        raise ValueError(f"--minutes must be 0 or more; got {arguments.minutes}")
    if arguments.quick and arguments.cases:
        raise ValueError(
            "--cases adds pairs to a calibration of all cases, which --quick is not: leave one of them out"
        )
    options.check_writable(arguments.out / "calibration")
    begin = time.perf_counter()
    try:
        identity, pairs, command = _stored(arguments) if arguments.stored else _measured(arguments)
    except calibration_samples.LostPairError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    print("\n".join(_stages(pairs)))
    fewest = min(calibration_samples.counts(pairs).values(), default=0)
    if fewest < LEAST_PAIRS:
        print(f"{fewest} of at least {LEAST_PAIRS} pairs: the same command goes on with them", file=sys.stderr)
        return 1
    classes, cases = calibration.calibrate(calibration.timings(pairs), Rules.of_device(_device(identity)))
    seconds = round(sum(pair.seconds for pair in pairs), 1)
    found = Calibration(identity, classes, cases, fewest, seconds, command)
    path = calibration.save(arguments.out, found)
    for one in classes:
        print("\n".join(["", f"{one.name}:", *map(_line, found.rates(one.name))]))
    print("\n".join(["", *(_open(bound, pairs, found) for bound in open_bounds.find(found))]))
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


def _stored(arguments: argparse.Namespace) -> tuple[Fingerprint, list[CalibrationPair], str]:
    """What is on record, and the fingerprint and the command that its calibration had."""
    known = None if arguments.gpu is None else calibration.load(arguments.out, arguments.gpu)
    if known is None:
        raise ValueError(
            f"--stored: --gpu must name a machine whose calibration is in {arguments.out / 'calibration'};"
            f" got {arguments.gpu}"
        )
    pairs, damaged = calibration_samples.read(arguments.out, arguments.gpu)
    if damaged:
        print(calibration_samples.left_out(damaged), file=sys.stderr)
    names = [one.case for one in pairs[0].cases] if pairs else []  # the first are of every case
    rules = Rules.of_device(_device(known.fingerprint))
    if not pairs or calibration_samples.identity(known.fingerprint, names, rules) != pairs[0].identity:
        file = calibration_samples.path(arguments.out, arguments.gpu)
        raise ValueError(f"--stored: the newest pairs in {file} are not of the machine state that was calibrated")
    return known.fingerprint, pairs, known.command


def _device(of: Fingerprint) -> str:
    return "cpu" if of.machine == machines.CPU else "cuda"


def _measured(arguments: argparse.Namespace) -> tuple[Fingerprint, list[CalibrationPair], str]:
    """All pairs of this machine state, after those that were missing are measured."""
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    identity = dataclasses.replace(fingerprint.take(machine.id, machine.device), threads=THREADS)  # of the workers
    if arguments.quick:
        _keep_better(arguments, identity)
    return identity, _pairs(arguments, machine, identity), _command(arguments, machine)


def _keep_better(arguments: argparse.Namespace, identity: Fingerprint) -> None:
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
    words += ["--cases", ",".join(arguments.cases)] if arguments.cases else []
    elsewhere = [] if arguments.out == options.RESULTS else ["--out", str(arguments.out)]
    return shlex.join(["python", "-m", "benchmarks", "calibrate", *words, *elsewhere])


def _pairs(arguments: argparse.Namespace, machine: Machine, identity: Fingerprint) -> list[CalibrationPair]:
    every, rules = keys(machine), Rules.of_device(machine.device)
    every = quick_part(every) if arguments.quick else every
    cases = options.chosen(every, arguments.cases)
    word = calibration_samples.identity(identity, [key.name for key in every], rules)
    pairs, damaged = calibration_samples.read(arguments.out, machine.id, word)
    if damaged:
        print(calibration_samples.left_out(damaged), file=sys.stderr)
    counts = calibration_samples.counts(pairs)
    there, of_all = (min(counts[key.name] for key in some) for some in (cases, every))
    if arguments.cases and of_all < LEAST_PAIRS:
        raise ValueError(
            f"--cases adds pairs to a calibration of all {len(every)} cases, of which one has {of_all} pairs in this"
            f" state of the machine, and {LEAST_PAIRS} are wanted: leave --cases out first"
        )
    print(f"{len(cases)} cases, {arguments.pairs} pairs of processes, of which {there} are there", flush=True)
    if there >= arguments.pairs:
        return pairs
    watch = gpu_watch.begin(machine)
    begin, new, old = time.perf_counter(), list[CalibrationPair](), tuple(pairs)
    with (
        checkout.sources([checkout.WORKING_TREE] * 2) as (base, head),
        PairStarter(base, head, machine.device) as starter,
    ):
        measuring = calibration_samples.measure(
            arguments.out, machine.id, starter, cases, rules, word, old, arguments.pairs
        )
        for pair in measuring:
            pairs.append(pair)
            new.append(pair)
            print(_progress(there + len(new), arguments.pairs, [one.seconds for one in new]), flush=True)
            if arguments.minutes is not None and time.perf_counter() - begin > 60 * arguments.minutes:
                break
            if watch is not None:  # noise of other work is not this machine's; what was measured is kept
                watch.require_alone()
        between_s = time.perf_counter() - begin - sum(pair.seconds for pair in new)
    print(f"{between_s / len(new):.1f} s beside each pair: sources are copied, other processes and heat looked for")
    return pairs


def _stages(pairs: Sequence[CalibrationPair]) -> list[str]:
    """One line about the pairs of as many cases as the newest one that tells its stages; none where none does."""
    telling = [pair for pair in pairs if pair.stages_s]
    alike = [pair for pair in telling if len(pair.cases) == len(telling[-1].cases)]
    if not alike:
        return []
    names = dict.fromkeys(name for pair in alike for name in pair.stages_s)
    medians = {name: statistics.median(pair.stages_s.get(name, 0.0) for pair in alike) for name in names}
    parts = [f"{name} {seconds:.1f}" for name, seconds in sorted(medians.items(), key=lambda one: -one[1])]
    total = statistics.median(pair.seconds for pair in alike)
    cases = len(alike[-1].cases)
    return [f"A pair of {cases} cases: {total:.1f} s ({', '.join(parts)}; medians of {len(alike)} pairs)"]


def _open(bound: OpenBound, pairs: Sequence[CalibrationPair], of: Calibration) -> str:
    """What would meet a bound, how long that takes, and the command."""
    minutes = bound.further * open_bounds.pair_s(pairs, len(bound.cases)) / 60
    words = ["--gpu", of.fingerprint.machine, "--pairs", str(bound.pairs)]
    words += ["--cases", ",".join(bound.cases)] if len(bound.cases) < len(of.cases) else []
    command = shlex.join(["python", "-m", "benchmarks", "calibrate", *words])
    more = "" if all(pair.stages_s for pair in pairs) else " or more"
    return f"{bound.text}, {max(1, round(minutes))} min{more}: {command}"


def _progress(done: int, wanted: int, seconds: Sequence[float]) -> str:
    left_s = (wanted - done) * sum(seconds) / len(seconds)
    return f"[{done:>{len(str(wanted))}}/{wanted}] {seconds[-1]:.0f} s for a pair, {left_s / 60:.0f} min left"


def _line(rate: CalibrationRate) -> str:
    what = f"{rate.injected:.1%} injected" if rate.slowdown else "identical code"
    bound = f"at most {rate.most_alarms:.1%} false" if rate.slowdown == 0 else f"at least {rate.least_power:.1%} found"
    counts = f"{rate.slower:>4} SLOWER {rate.faster:>4} FASTER {rate.same:>4} SAME {rate.undecided:>4} UNDECIDED"
    return f"  {what:<16} {counts} of {rate.comparisons} ({bound}, with 95 % confidence)"
