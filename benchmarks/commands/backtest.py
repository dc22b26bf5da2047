"""`backtest`: are `compare`'s calls right, and is the commit found, over histories made of recorded pairs?

Nothing is measured: the pairs are those that `calibrate` left in results/calibration/<machine>.pairs.jsonl, so that any
machine can do it. Exit code 1 where a share misses its goal.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from benchmarks.ab import backtest, calibration, calibration_samples, replay
from benchmarks.ab.backtest import Backtest, Share
from benchmarks.ab.result import Rules
from benchmarks.commands import accept, calibrate, options
from harness import machines, repository
from harness.arguments import machine_id

SUMMARY = "try compare, its alerts and the search for a commit on histories made of recorded pairs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose pairs, and how the histories are drawn."""
    parser.add_argument(
        "--gpu",
        required=True,
        type=machine_id,
        metavar="NAME",
        help="the machine that the pairs are of, by the name that its records have; need not be this",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which commit changes which case (default: 0)")
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Play the histories, keep what came of them; the last line of stdout is JSON."""
    options.check_writable(arguments.out / "calibration")
    pairs, damaged = calibration_samples.read(arguments.out, arguments.gpu)
    if damaged:
        print(calibration_samples.left_out(damaged), file=sys.stderr)
    counts = calibration_samples.counts(pairs)
    if len(pairs) < calibrate.LEAST_PAIRS:
        file = calibration_samples.path(arguments.out, arguments.gpu)
        raise ValueError(
            f"--gpu {arguments.gpu}: {file} must hold {calibrate.LEAST_PAIRS} pairs of one machine state, and has"
            f" {len(pairs)}; python -m benchmarks calibrate --gpu {arguments.gpu} measures them on that machine"
        )
    measured = calibration.timings(pairs)
    device = "cpu" if arguments.gpu == machines.CPU else "cuda"
    found = Backtest(
        arguments.gpu,
        pairs[-1].identity,
        len(pairs),
        len(measured),
        arguments.seed,
        accept.utc_now(),
        repository.commit(),
        repository.dirty(),
        _command(arguments),
        tuple(replay.replay(measured, Rules.of_device(device), arguments.seed)),
        counts.total(),
    )
    path = backtest.save(arguments.out, found)
    print(f"{len(found.events)} histories; each recorded pair of a case was used {found.uses:.1f} times on average")
    print("\n".join(map(_line, found.shares)))
    missed = [one.name for one in found.shares if not one.met]
    shares = {one.name: one.share for one in found.shares}
    print(json.dumps({"events": len(found.events), "shares": shares, "missed": missed, "backtest": str(path)}))
    return 1 if missed else 0


def _command(arguments: argparse.Namespace) -> str:
    words = ["--gpu", arguments.gpu, "--seed", str(arguments.seed)]
    elsewhere = [] if arguments.out == options.RESULTS else ["--out", str(arguments.out)]
    return shlex.join(["python", "-m", "benchmarks", "backtest", *words, *elsewhere])


def _line(one: Share) -> str:
    goal = "" if one.goal is None else f", wanted {one.goal:.0%}: {'met' if one.met else 'MISSED'}"
    return f"  {one.name:<34} {one.hits:>4} of {one.trials:<4} (at least {one.least:.1%}, with 95 % confidence{goal})"
