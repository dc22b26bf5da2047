"""One run from start to end: preflight, resume, data, files, watchdog, and the loop over its steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.io import append_line, atomic_write, read_json_lines, to_json
from nsa.train import checkpoint, distributed, memory_estimate, preflight, profile, run_folder
from nsa.train.data import loader
from nsa.train.data.loader import SYNTHETIC, Loader, Shard
from nsa.train.data.packing import Batch
from nsa.train.distributed import Ranks
from nsa.train.loop import Loop, Outcome
from nsa.train.metrics import MetricsLogger
from nsa.train.monitoring import watchdog
from nsa.train.monitoring.watchdog import StopRequest, Watchdog
from nsa.train.profile import Environment
from nsa.train.run_folder import RunWriter, attempts_file, environment_record, utc
from nsa.train.settings import Settings
from nsa.train.trainer import Trainer

CHECKPOINTS = "checkpoints"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line says beside the settings."""

    resume: bool = False
    """Go on from the newest intact checkpoint."""
    allow_toy: bool = False
    """Start a run that would only be wasted."""


@dataclass(frozen=True)
class _Start:
    """A trainer at the step from which this attempt goes on."""

    trainer: Trainer
    position: dict[str, Any] | None
    """Of the data; None from the start."""
    refused: tuple[str, ...]
    """Checkpoints that are damaged."""


def run(settings: Settings, environment: Environment, options: Options, variables: Mapping[str, str]) -> Outcome:
    """Train to the end, or to a signal.

    Raises RefusedError, NoFirstBatchError, InUseError, DamagedCheckpointError, StoppedError, LostRankError.
    """
    device = preflight.device_of(settings)
    folder = Path(settings.out_dir)
    with ExitStack() as stack:
        own = stack.enter_context(
            distributed.process_group(variables, device.type == "cuda", settings.runtime.context_parallel)
        )
        stack.enter_context(distributed.detect_lost_ranks(own, 0))
        device = torch.device("cuda", own.local_rank) if device.type == "cuda" else device
        say = _speaker(own)
        if own.first:
            stack.enter_context(run_folder.folder_lock(folder))
        # a new run may not write into another's folder; the first rank asks that for all, before it writes
        resume = options.resume or not own.first
        plan = preflight.plan_before_start(settings, ranks=own.ranks, resume=resume)
        decision = preflight.check(plan, allow_toy=options.allow_toy)
        distributed.barrier(own)  # the folder is there, and is ours
        _introduce(settings, environment, decision, say)
        start = _start(settings, device, own, options, say)
        batches = _data(settings, own, start.position, device, say)
        stack.callback(batches.close)
        held_out = _held_out(settings, own, batches)
        attempt = _count_attempt(folder, start)
        files = RunWriter(folder, settings, rank=own.rank, attempt=attempt, done=start.trainer.done)
        stack.callback(files.close)
        facts = {"preflight": decision.record(), "attempt": attempt, "first_batch_s": batches.first_wait_s}
        _write_environment(settings, environment, start.trainer, batches.source, facts)
        stacks = folder / f"stacks_rank{own.rank}.txt"
        stack.callback(watchdog.dump_on_signal(stacks))
        guard = stack.enter_context(_watchdog(settings, stacks, files, own))
        stop_request = stack.enter_context(StopRequest())
        stack.enter_context(_compilations_said(device, say))
        metrics = MetricsLogger(start.trainer, batches.source, files, say)
        checkpoints, toy = folder / CHECKPOINTS, options.allow_toy
        return Loop(start.trainer, batches, held_out, metrics, guard, stop_request, checkpoints, allow_toy=toy).run()


def _start(settings: Settings, device: torch.device, own: Ranks, options: Options, say: Say) -> _Start:
    """The model, from the newest intact checkpoint if a resume is asked for."""
    found = checkpoint.newest_intact(Path(settings.out_dir) / CHECKPOINTS) if options.resume else None
    trainer = Trainer(settings, device, own)
    if found is None:
        return _Start(trainer, None, ())
    for reason in found.refused:
        say(f"refused: {reason}")
    position = trainer.restore(found.state)
    say(f"resumed after step {trainer.done} from {found.path}")
    return _Start(trainer, position, found.refused)


def _data(settings: Settings, own: Ranks, position: dict[str, Any] | None, device: torch.device, say: Say) -> Loader:
    """This rank's batches. ValueError if another rank trains on random tokens and this one does not."""
    batches = Loader(
        settings, Shard(own.data_rank, own.data_ranks), position=position, pin=device.type == "cuda", say=say
    )
    random = batches.source == SYNTHETIC
    if distributed.any_rank(random, own, device) and not random:
        raise ValueError(f"data.dataset must answer every rank or none; rank {own.rank} has {batches.source}")
    say(f"data: {batches.source}, first batch after {batches.first_wait_s:.1f} s")
    return batches


def _held_out(settings: Settings, own: Ranks, batches: Loader) -> list[Batch]:
    if not settings.train.val_every:
        return []
    return loader.held_out_batches(settings, Shard(own.data_rank, own.data_ranks), batches.source)


def _write_environment(
    settings: Settings, environment: Environment, trainer: Trainer, source: str, facts: Mapping[str, Any]
) -> None:
    """env.json, the first rank's."""
    if not trainer.own.first:
        return
    own = {"parameters": trainer.num_parameters, "ranks": trainer.own.ranks, "data_source": source}
    record = environment_record(settings, environment, trainer.device, **own, **facts)
    atomic_write(Path(settings.out_dir) / "env.json", to_json(record, indent=2) + "\n")


def _watchdog(settings: Settings, stacks: Path, files: RunWriter, own: Ranks) -> Watchdog:
    def stalled(why: str) -> None:
        files.beat({"event": "stalled", "why": why})
        print(f"rank {own.rank} stalled: {why}; the stacks are in {stacks}", file=sys.stderr, flush=True)

    return Watchdog(
        stacks,
        floor_s=settings.telemetry.stall_floor_s,
        first_s=settings.telemetry.first_step_deadline_s,
        on_stall=stalled,
    )


def _compilations_said(device: torch.device, say: Say) -> AbstractContextManager[None]:
    """Says which kernels Triton compiles, and that they can be compiled ahead: a first step may take a minute."""
    if device.type != "cuda":
        return nullcontext()
    try:
        from nsa.triton_backend import compile_log
    except ImportError:  # there is no Triton, and nothing is compiled
        return nullcontext()
    return compile_log.reported(say)


def _speaker(own: Ranks) -> Say:
    return (lambda text: print(text, flush=True)) if own.first else (lambda text: None)


def _introduce(settings: Settings, environment: Environment, decision: preflight.Decision, say: Say) -> None:
    say(profile.table(settings))
    for note in (*settings.notes, *environment.notes):
        say(f"note: {note}")
    size = f"{memory_estimate.num_parameters(settings):,} parameters, {settings.tokens_per_step:,} tokens per step"
    say(f"{settings.profile}: {size} -> {settings.out_dir}")
    for refusal in decision.overridden:
        say(f"overridden by --allow-toy: {refusal}")


def _count_attempt(folder: Path, start: _Start) -> int:
    """The number of this attempt at the run, counted from 1, the same on every rank."""
    own, path = start.trainer.own, attempts_file(folder)
    attempt = 1 + sum(1 for _ in read_json_lines(path))
    distributed.barrier(own)
    if own.first:
        record = {"attempt": attempt, "utc": utc(), "after_step": start.trainer.done, "ranks": own.ranks}
        append_line(path, to_json({**record, "refused": start.refused}))
    distributed.barrier(own)
    return attempt
