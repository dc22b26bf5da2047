"""`atlas`: what a trained model selects, and whether it answers as well as its dense twin (results/atlas/).

    atlas train      train the model of the atlas for --minutes, from its newest checkpoint in --folder
    atlas measure    measure what it selects on held-out text, at each of --lengths
    atlas tasks      train NSA and its dense twin on a --task by equal steps, and ask both
    atlas            train, then measure

The text is the Python sources of this machine. Every call goes on where the one before ended: `--minutes 8` three times
is a model of 24 minutes. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.atlas import record
from benchmarks.commands import options
from harness import machines

SUMMARY = "what a trained model selects, and whether it answers as well as its dense twin"
TRAINED_AT = (8192, 32768)
MEASURED_AT = (8192, 32768, 65536, 131072)
ASKED_AT = (8192, 32768)
TASKS = ("needle", "tracking")
"""Of nsa.train.tasks."""
PROFILE = "h200_125m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is done, with which model, for how long."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("all", "train", "measure", "tasks"),
        default="all",
        help="(default: all, which is train and measure)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("artifacts/atlas"),
        metavar="DIR",
        help="where `train` keeps text and checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=_positive,
        default=8.0,
        metavar="N",
        help="train: for so long, shared evenly by --seq-lens (default: %(default)g)",
    )
    parser.add_argument(
        "--seq-lens",
        type=_lengths,
        default=TRAINED_AT,
        metavar="A,B",
        help="train: tokens of a sequence, one phase after the other (default: 8192,32768)",
    )
    parser.add_argument(
        "--profile", default=PROFILE, metavar="NAME|FILE", help="train: a profile of nsa.train (default: %(default)s)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="train: any setting of nsa.train"
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="A,B",
        help="measure, tasks: tokens (default: 8192,32768,65536,131072; tasks: 8192,32768)",
    )
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="tasks: which (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=_count,
        default=3000,
        metavar="N",
        help="tasks: optimiser steps of each model (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=_count,
        default=2**17,
        metavar="N",
        help="tasks: tokens of an optimiser step (default: %(default)s)",
    )
    parser.add_argument(
        "--texts",
        type=_count,
        default=512,
        metavar="N",
        help="tasks: questions for each model at each length (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="draws what the model writes, and the questions of the tasks (default: %(default)s)",
    )
    options.add_gpu(parser)
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Train, measure or ask; write the record."""
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    options.check_writable(arguments.out / record.FOLDER)
    folder: Path = arguments.folder.absolute()
    from benchmarks.atlas import session  # needs what training needs, which no other command does
    from nsa.train.tasks import Plan

    summary: dict[str, Any] = {}
    if arguments.action in ("all", "train"):
        summary |= session.train(folder, arguments.seq_lens, arguments.minutes, arguments.set, arguments.profile)
    if arguments.action in ("all", "measure"):
        lengths = arguments.lengths or MEASURED_AT
        summary |= session.measure(folder, lengths, arguments.seed, machine, arguments.out)
    if arguments.action == "tasks":
        lengths = arguments.lengths or ASKED_AT
        plan = Plan(lengths, arguments.steps, arguments.tokens_per_step, arguments.seed)
        summary |= session.ask(arguments.task, plan, arguments.texts, machine, arguments.out)
    print(json.dumps(summary))
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    """8192,32768, ascending. Raises ArgumentTypeError."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or list(found) != sorted(set(found)) or found[0] < 1:
        raise argparse.ArgumentTypeError(f"must be ascending lengths such as 8192,32768; got {text!r}")
    return found


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0; got {text!r}")
    return int(text)
