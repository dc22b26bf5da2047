"""`calibrate`: how often `compare` is right on this machine, and the thresholds that it uses here from then on.

Identical code is measured against itself in many pairs of processes, with 1, 3 and 10 % of real work injected into one
side. It takes about 40 minutes on two quiet cores; when it is interrupted, the same command goes on where it stopped.
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
from benchmarks.cases.key import NSA, Key
from benchmarks.commands import options
from harness import fingerprint, machines
from nsa import NSAConfig

SUMMARY = "measure false-alarm rate and power of compare on this CPU, and set its thresholds"

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


def keys() -> list[Key]:
    """The cases: prefill, whose calls differ by 2 % from one to the next on a shared host.

    Decode waits for memory, which the host's other guests use as well: its calls differ by 7 %. What `compare` could
    have seen there is in each of its answers.
    """
    config = dataclasses.asdict(NSAConfig())
    return [
        Key(mode, NSA, "torch", "float32", 1, tokens, tokens, heads, num_kv_heads, dim, dim, config)
        for mode, tokens, heads, num_kv_heads, dim in _SHAPES
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many comparisons, and where they are written."""
    parser.add_argument(
        "--comparisons", type=int, default=200, metavar="N", help="at least so many of each size (default: 200)"
    )
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Measure the pairs that are missing, judge all of them; the last line of stdout is JSON."""
    if arguments.comparisons < 2:
        raise ValueError(f"--comparisons must be at least 2; got {arguments.comparisons}")
    options.check_writable(arguments.out / "calibration")
    identity = dataclasses.replace(fingerprint.take(machines.CPU, "cpu"), threads=THREADS)
    begin = time.perf_counter()
    try:
        pairs = _pairs(arguments, identity)
    except calibration_samples.LostPairError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    groups = calibration.split(pairs, Rules().min_pairs)
    rules, rates = calibration.calibrate(groups, Rules())
    found = Calibration(
        identity,
        rules,
        rates,
        tuple(key.name for key in keys()),
        len(pairs),
        calibration.noise(pairs),
        f"python -m benchmarks calibrate --comparisons {arguments.comparisons} --out {shlex.quote(str(arguments.out))}",
    )
    path = calibration.save(arguments.out, found)
    print("\n".join(["", *map(_line, rates), "", f"Thresholds and rates: {path}"]))
    summary = {
        "false_alarms": rates[0].alarms,
        "power": {f"{rate.slowdown:g}": rate.power for rate in rates[1:]},
        "comparisons": rates[0].comparisons,
        "smallest_change": rules.smallest_change,
        "equal_within": rules.equal_within,
        "seconds": round(time.perf_counter() - begin, 1),
        "calibration": str(path),
    }
    print(json.dumps(summary))
    return 0


def _pairs(arguments: argparse.Namespace, identity: fingerprint.Fingerprint) -> list[CalibrationPair]:
    cases, rules = keys(), Rules()
    word = calibration_samples.identity(identity, [key.name for key in cases], rules)
    wanted = rules.min_pairs * calibration.groups_for(arguments.comparisons, len(cases))
    pairs = calibration_samples.read(arguments.out, machines.CPU, word)[:wanted]
    print(f"{len(cases)} cases, {wanted} pairs of processes, of which {len(pairs)} are there", flush=True)
    if len(pairs) == wanted:
        return pairs
    new: list[float] = []
    with checkout.sources([checkout.WORKING_TREE] * 2) as sources:
        for pair in calibration_samples.measure(
            arguments.out, machines.CPU, sources, cases, rules, word, wanted - len(pairs)
        ):
            pairs.append(pair)
            new.append(pair.seconds)
            print(_progress(len(pairs), wanted, new), flush=True)
    return pairs


def _progress(done: int, wanted: int, seconds: Sequence[float]) -> str:
    left_s = (wanted - done) * sum(seconds) / len(seconds)
    return f"[{done:>{len(str(wanted))}}/{wanted}] {seconds[-1]:.0f} s for a pair, {left_s / 60:.0f} min left"


def _line(rate: CalibrationRate) -> str:
    what = f"{rate.injected:.1%} injected" if rate.slowdown else "identical code"
    said = f"SLOWER {rate.slower}, FASTER {rate.faster}, SAME {rate.same}, UNDECIDED {rate.undecided}"
    share = f"{rate.power:.1%} found" if rate.slowdown else f"{rate.alarms:.1%} false alarms"
    return f"{what:<16} {rate.comparisons:>4} comparisons: {share:<20} ({said})"
