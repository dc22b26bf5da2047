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
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.atlas import corpus, observe, record, training, twins
from benchmarks.atlas import task_record as tasks_kept
from benchmarks.atlas.observe import Measured
from benchmarks.atlas.record import Atlas, Trained
from benchmarks.atlas.training import State
from benchmarks.commands import options
from harness import fingerprint, machines
from harness.machines import Machine
from nsa.config import NSAConfig
from nsa.model import DecoderLM
from nsa.train import loader, tasks
from nsa.train.data import Batch
from nsa.train.loader import Shard
from nsa.train.tasks import Plan
from nsa.train.trainer import COMPUTE

SUMMARY = "what a trained model selects, and whether it answers as well as its dense twin"
TRAINED_AT = (8192, 32768)
MEASURED_AT = (8192, 32768, 65536, 131072)
ASKED_AT = (8192, 32768)
TOKENS_EACH = 2**17
"""Held-out tokens that are read at each length, one sequence at least."""


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
        help="of the model that `train` makes: text, checkpoints (default: %(default)s)",
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
        "--profile", default=training.PROFILE, metavar="NAME|FILE", help="train: of nsa.train (default: %(default)s)"
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
    parser.add_argument(
        "--task", choices=sorted(tasks.TASKS), default=tasks.NEEDLE.name, help="tasks: which (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2000,
        metavar="N",
        help="tasks: optimiser steps of each model (default: %(default)s)",
    )
    parser.add_argument("--tokens-per-step", type=int, default=2**17, metavar="N", help="tasks: (default: %(default)s)")
    parser.add_argument(
        "--texts",
        type=int,
        default=512,
        metavar="N",
        help="tasks: asked of each model at each length (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of what the model writes, and of the tasks (default: %(default)s)",
    )
    options.add_gpu(parser)
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Train, measure or ask; write the record."""
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    options.check_writable(arguments.out / record.FOLDER)
    folder: Path = arguments.folder.absolute()
    summary: dict[str, Any] = {}
    if arguments.action == "tasks":
        summary |= _ask(arguments, machine)
    if arguments.action in ("all", "train"):
        summary |= _train(arguments, folder)
    if arguments.action in ("all", "measure"):
        summary |= _measure(arguments, folder, machine)
    print(json.dumps(summary))
    return 0


def _train(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    given = _settings(arguments.set)
    each = arguments.minutes / len(arguments.seq_lens)
    for seq_len in arguments.seq_lens:
        stands = training.train(folder, seq_len, each, given, arguments.profile)
        print(f"step {stands.step}, {stands.tokens:,} tokens, {stands.minutes:.1f} minutes in all", flush=True)
    return {"step": stands.step, "tokens": stands.tokens, "minutes": round(stands.minutes, 2), "folder": str(folder)}


def _measure(arguments: argparse.Namespace, folder: Path, machine: Machine) -> dict[str, Any]:
    device = torch.device(machine.device)
    stands = training.state(folder)
    lm = training.load(folder, device)
    assert stands is not None  # `load` has found its checkpoint
    lengths = arguments.lengths or MEASURED_AT
    for length in lengths:  # before the first minute is spent
        observe.check_length(length, lm.config.nsa)
    compute = COMPUTE[stands.settings.runtime.precision]
    found: list[Measured] = []
    left_out: list[int] = []
    for length in lengths:
        sequences = _held_out(stands, corpus.prepare(folder), length, device)
        try:
            with torch.no_grad(), torch.autocast(device.type, compute, enabled=compute != torch.float32):
                found.append(observe.measure(lm, sequences, seed=arguments.seed))
        except torch.OutOfMemoryError:
            left_out.append(length)
            print(f"{length} tokens: left out, the GPU's memory does not hold them", flush=True)
            continue
        print(_said(found[-1]), flush=True)
    if not found:
        raise ValueError(f"--lengths: none of {', '.join(map(str, lengths))} fits in the GPU's memory")
    path = record.write(arguments.out, _atlas(found, stands, corpus.prepare(folder).said, lm, machine))
    return {"atlas": str(path), "loss": round(found[0].loss, 4), "left_out": left_out}


def _held_out(stands: State, text: corpus.Corpus, length: int, device: torch.device) -> list[Batch]:
    """Held-out text in sequences of one length, as many as `TOKENS_EACH` and the text hold, each of them once."""
    count = min(max(1, TOKENS_EACH // length), text.held_out_bytes // length)
    if not count:
        raise ValueError(f"--lengths: the held-out text has {text.held_out_bytes:,} bytes, fewer than {length}")
    train = dataclasses.replace(stands.settings.train, seq_len=length, batch_size=1)
    source = loader.open_source(dataclasses.replace(stands.settings, train=train), Shard(), held_out=True)
    return [source.next().to(device) for _ in range(count)]


def _atlas(found: list[Measured], stands: State, text: str, lm: DecoderLM, machine: Machine) -> Atlas:
    here = fingerprint.take(machine.id, machine.device)
    trained = Trained(
        stands.tokens,
        round(stands.minutes, 2),
        round(found[0].loss, 5),
        stands.seq_lens,
        text,
        stands.settings.train.seed,
    )
    model = {**dataclasses.asdict(lm.config), "parameters": lm.num_parameters()}
    samples = tuple(sample for one in found for sample in one.samples)
    return Atlas(record.SCHEMA, here, here.commit, model, trained, tuple(one.curves for one in found), samples)


def _said(one: Measured) -> str:
    """A length in a line."""
    near = record.band(one.curves, lambda head: head.jaccard["1"])
    return f"{one.curves.seq_len} tokens: loss {one.loss:.4f}; Jaccard of neighbouring rows {near.median:.2f}"


def _ask(arguments: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    task = tasks.TASKS[arguments.task]
    lengths = arguments.lengths or ASKED_AT
    plan = Plan(lengths, arguments.steps, arguments.tokens_per_step, arguments.seed)
    here = fingerprint.take(machine.id, machine.device)
    device = torch.device(machine.device)
    done = twins.compare(task, tasks.model(task, NSAConfig()), plan, here, device, texts=arguments.texts)
    for one in done.results:
        print(f"{one.task}, {one.length} tokens: NSA {one.nsa.share:.1%}, dense {one.dense.share:.1%}: {one.verdict}")
    return {"tasks": str(tasks_kept.write(arguments.out, done))}


def _settings(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE by dotted name."""
    found = {}
    for assignment in given:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set must be like train.lr=1e-4; got {assignment!r}")
        found[name] = yaml.safe_load(value)
    return found


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
