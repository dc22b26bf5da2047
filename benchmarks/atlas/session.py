"""What one call of `atlas` does: train, measure, ask. Each gives what the last line of stdout says of it.

It needs what training needs (nsa.train, PyYAML), which the other commands of the benches do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.atlas import choices, corpus, observe, record, task_record, training, twins
from benchmarks.atlas.corpus import Corpus
from benchmarks.atlas.observe import Measured
from benchmarks.atlas.record import Atlas, Trained
from benchmarks.atlas.training import State
from harness import fingerprint
from harness.machines import Machine
from nsa.config import NSAConfig
from nsa.model import DecoderLM
from nsa.train import tasks
from nsa.train.data import loader
from nsa.train.data.loader import Shard
from nsa.train.data.packing import Batch
from nsa.train.tasks import Plan
from nsa.train.trainer import COMPUTE

TOKENS_EACH, MOST_SEQUENCES = 2**17, 16
"""Held-out tokens that are read at each length; one sequence at least, and no more than so many."""


def train(folder: Path, seq_lens: Sequence[int], minutes: float, given: Sequence[str], profile: str) -> dict[str, Any]:
    """Train at each length for its share of the minutes; `given` are settings, KEY=VALUE. Raises ValueError."""
    settings = _settings(given)
    for seq_len in seq_lens:
        stands = training.train(folder, seq_len, minutes / len(seq_lens), settings, profile)
        print(f"step {stands.step}, {stands.tokens:,} tokens, {stands.minutes:.1f} minutes in all", flush=True)
    return {"step": stands.step, "tokens": stands.tokens, "minutes": round(stands.minutes, 2)}


def measure(folder: Path, lengths: Sequence[int], seed: int, machine: Machine, out: Path) -> dict[str, Any]:
    """Measure what the model in a folder selects; write the record. A length beyond the GPU's memory is left out.

    Raises ValueError where there is no model, or a length is too short or longer than the held-out text.
    """
    device = torch.device(machine.device)
    lm, stands = training.load(folder, device)
    text = corpus.prepare(folder)
    for length in lengths:  # before the first minute is spent
        observe.check_length(length, lm.config.nsa)
        _count(text, length)
    compute = COMPUTE[stands.settings.runtime.precision]
    found: list[Measured] = []
    left_out: list[int] = []
    for length in lengths:
        sequences = _held_out(stands, text, length, device)
        try:
            with torch.no_grad(), torch.autocast(device.type, compute, enabled=compute != torch.float32):
                found.append(observe.measure(lm, sequences, seed=seed))
        except torch.OutOfMemoryError:
            left_out.append(length)
            print(f"{length} tokens: left out, the GPU's memory does not hold them", flush=True)
            continue
        near = record.band(found[-1].curves, lambda head: head.jaccard["1"])
        print(f"{length} tokens: loss {found[-1].loss:.4f}; Jaccard of neighbours {near.median:.2f}", flush=True)
    if not found:
        raise ValueError(f"--lengths: none of {', '.join(map(str, lengths))} fits in the GPU's memory")
    path = record.write(out, _atlas(found, stands, text, lm, machine))
    for one in found:
        if one.choices is not None:
            choices.write(out, path, one.choices)
    return {"atlas": str(path), "loss": round(found[0].loss, 4), "left_out": left_out}


def ask(name: str, plan: Plan, texts: int, machine: Machine, out: Path) -> dict[str, Any]:
    """Train NSA and its dense twin on a task, ask both, write the record. Raises ValueError for a length too short."""
    task = tasks.TASKS[name]
    here = fingerprint.take(machine.id, machine.device)
    device = torch.device(machine.device)
    done = twins.compare(task, tasks.model(task, NSAConfig()), plan, here, device, texts=texts)
    for one in done.results:
        print(f"{one.task}, {one.length} tokens: NSA {one.nsa.share:.1%}, dense {one.dense.share:.1%}: {one.verdict}")
    return {"tasks": str(task_record.write(out, done))}


def _held_out(stands: State, text: Corpus, length: int, device: torch.device) -> list[Batch]:
    """Held-out text in sequences of one length, each once."""
    train = dataclasses.replace(stands.settings.train, seq_len=length, batch_size=1)
    source = loader.open_source(dataclasses.replace(stands.settings, train=train), Shard(), held_out=True)
    return [source.next().to(device) for _ in range(_count(text, length))]


def _count(text: Corpus, length: int) -> int:
    """Sequences to read: no more than the held-out text has. ValueError where it has none."""
    count = min(max(1, TOKENS_EACH // length), MOST_SEQUENCES, text.held_out_bytes // length)
    if not count:
        raise ValueError(f"--lengths: the held-out text has {text.held_out_bytes:,} bytes, fewer than {length}")
    return count


def _atlas(found: Sequence[Measured], stands: State, text: Corpus, lm: DecoderLM, machine: Machine) -> Atlas:
    here = fingerprint.take(machine.id, machine.device)
    trained = Trained(
        tokens=stands.tokens,
        minutes=round(stands.minutes, 2),
        loss=round(found[0].loss, 5),
        seq_lens=stands.seq_lens,
        text=text.described,
        seed=stands.settings.train.seed,
    )
    model = {**dataclasses.asdict(lm.config), "parameters": lm.num_parameters()}
    samples = tuple(sample for one in found for sample in one.samples)
    return Atlas(record.SCHEMA, here, here.commit, model, trained, tuple(one.curves for one in found), samples)


def _settings(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE by dotted name. ValueError where one is not."""
    found = {}
    for assignment in given:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set must be like train.lr=1e-4; got {assignment!r}")
        found[name] = yaml.safe_load(value)
    return found
