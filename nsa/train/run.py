"""One run from start to end: preflight, data, resume, the loop, and every way in which it may stop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.train import checkpoint, distributed, feed, files, plan, preflight, profile, watchdog
from nsa.train.account import Account
from nsa.train.batches import SYNTHETIC, Share
from nsa.train.distributed import Ranks
from nsa.train.environment import Environment
from nsa.train.feed import Feed
from nsa.train.loop import Loop, Outcome
from nsa.train.packing import Batch
from nsa.train.settings import Settings
from nsa.train.telemetry import Telemetry, environment_record, utc
from nsa.train.trainer import Trainer
from nsa.train.watchdog import Terminated, Watchdog

CHECKPOINTS = "checkpoints"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line says beside the settings."""

    resume: bool = False
    """Go on from the newest checkpoint that is whole."""
    allow_toy: bool = False
    """Start a run that would only be wasted."""


@dataclass(frozen=True)
class _Begun:
    """A trainer at the step from which this life goes on."""

    trainer: Trainer
    position: dict[str, Any] | None
    """Of the data; None from the start."""
    refused: tuple[str, ...]
    """Checkpoints that are damaged."""


def run(settings: Settings, environment: Environment, options: Options, variables: Mapping[str, str]) -> Outcome:
    """Train to the end, or to a signal.

    Raises RefusedError, NoFirstBatchError, InUseError, DamagedCheckpointError, StoppedError, LostRankError.
    """
    device = plan.device_of(settings)
    folder = Path(settings.out_dir)
    with ExitStack() as stack:
        own = stack.enter_context(distributed.joined(variables, device.type == "cuda"))
        stack.enter_context(distributed.noticing_lost_ranks(own, 0))
        device = torch.device("cuda", own.local_rank) if device.type == "cuda" else device
        say = _speaker(own)
        if own.first:
            stack.enter_context(files.locked(folder))
        looked_at = options.resume or not own.first  # the first rank asks whose folder it is, before it writes there
        decision = preflight.check(plan.of(settings, ranks=own.ranks, resume=looked_at), allow_toy=options.allow_toy)
        distributed.barrier(own)  # the folder is there, and is ours
        _introduce(settings, environment, decision, say)
        begun = _begin(settings, device, own, options, say)
        batches = _data(settings, own, begun.position, device, say)
        stack.callback(batches.close)
        held_out = _held_out(settings, own, batches)
        life = _begin_life(folder, begun)
        telemetry = Telemetry(folder, settings, rank=own.rank, life=life, done=begun.trainer.done)
        stack.callback(telemetry.close)
        facts = {"preflight": decision.record(), "life": life, "first_batch_s": batches.first_wait_s}
        _write_environment(settings, environment, begun.trainer, batches.source, facts)
        stacks = folder / f"stacks_rank{own.rank}.txt"
        stack.callback(watchdog.dump_on_signal(stacks))
        guard = stack.enter_context(_guard(settings, stacks, telemetry, own))
        asked = stack.enter_context(Terminated())
        account = Account(begun.trainer, batches.source, telemetry, say)
        checkpoints, toy = folder / CHECKPOINTS, options.allow_toy
        return Loop(begun.trainer, batches, held_out, account, guard, asked, checkpoints, allow_toy=toy).run()


def _begin(settings: Settings, device: torch.device, own: Ranks, options: Options, say: Say) -> _Begun:
    """The model, from the newest checkpoint that is whole if a resume is asked for."""
    found = checkpoint.newest_whole(Path(settings.out_dir) / CHECKPOINTS) if options.resume else None
    trainer = Trainer(settings, device, own)
    if found is None:
        return _Begun(trainer, None, ())
    for reason in found.refused:
        say(f"refused: {reason}")
    position = trainer.restore(found.state)
    say(f"resumed after step {trainer.done} from {found.path}")
    return _Begun(trainer, position, found.refused)


def _data(settings: Settings, own: Ranks, position: dict[str, Any] | None, device: torch.device, say: Say) -> Feed:
    """This rank's batches. ValueError if another rank trains on random tokens and this one does not."""
    batches = Feed(settings, Share(own.rank, own.ranks), position=position, pin=device.type == "cuda", say=say)
    random = batches.source == SYNTHETIC
    if distributed.any_rank(random, own, device) and not random:
        raise ValueError(f"data.dataset must answer every rank or none; rank {own.rank} has {batches.source}")
    say(f"data: {batches.source}, first batch after {batches.first_wait_s:.1f} s")
    return batches


def _held_out(settings: Settings, own: Ranks, batches: Feed) -> list[Batch]:
    if not settings.train.val_every:
        return []
    return feed.held_out(settings, Share(own.rank, own.ranks), batches.source)


def _write_environment(
    settings: Settings, environment: Environment, trainer: Trainer, source: str, facts: Mapping[str, Any]
) -> None:
    """env.json, the first rank's."""
    if not trainer.own.first:
        return
    own = {"parameters": trainer.num_parameters, "ranks": trainer.own.ranks, "data_source": source}
    record = environment_record(settings, environment, trainer.device, **own, **facts)
    files.replace(Path(settings.out_dir) / "env.json", files.as_json(record, indent=2) + "\n")


def _guard(settings: Settings, stacks: Path, telemetry: Telemetry, own: Ranks) -> Watchdog:
    def stalled(why: str) -> None:
        telemetry.beat({"event": "stalled", "why": why})
        print(f"rank {own.rank} stalled: {why}; the stacks are in {stacks}", file=sys.stderr, flush=True)

    return Watchdog(
        stacks,
        floor_s=settings.telemetry.stall_floor_s,
        first_s=settings.telemetry.first_step_deadline_s,
        on_stall=stalled,
    )


def _speaker(own: Ranks) -> Say:
    return (lambda text: print(text, flush=True)) if own.first else (lambda text: None)


def _introduce(settings: Settings, environment: Environment, decision: preflight.Decision, say: Say) -> None:
    say(profile.table(settings))
    for note in (*settings.notes, *environment.notes):
        say(f"note: {note}")
    size = f"{plan.num_parameters(settings):,} parameters, {settings.tokens_per_step:,} tokens per step"
    say(f"{settings.profile}: {size} -> {settings.out_dir}")
    for refusal in decision.overridden:
        say(f"overridden by --allow-toy: {refusal}")


def _begin_life(folder: Path, begun: _Begun) -> int:
    """The number of this life of the run, counted from 1, the same on every rank."""
    own, path = begun.trainer.own, folder / "lives.jsonl"
    life = 1 + sum(1 for _ in files.json_lines(path))
    distributed.barrier(own)
    if own.first:
        record = {"life": life, "utc": utc(), "after_step": begun.trainer.done, "ranks": own.ranks}
        files.append_line(path, files.as_json({**record, "refused": begun.refused}))
    distributed.barrier(own)
    return life
