"""One lane of the soak, in a child of its own: train a profile in one precision, and prefill the model now and then."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa import NSAConfig
from nsa.train import sentinels, series
from regression.evidence import Bound, Evidence
from regression.incident import Step
from regression.profiles import PROFILES
from regression.resources import clock_s, memory_mib
from regression.training import COMPUTE, Run, Trainer

LEAST_ROUNDS = 4
"""However short the soak: 28 steps, well past the fifth."""
ERROR = 1e-3
"""Of prefill against training's forward, relative, in float32; lower precisions may choose other blocks."""
FALL = 0.25
MIB_PER_ROUND = 4.0


@dataclass
class _Seen:
    """What the lane has seen so far."""

    rounds: int = 0
    targets: int = 0
    """Tokens predicted."""
    loss_sum: float = 0.0
    """Over these."""
    tokens_per_s: list[float] = field(default_factory=list)
    """Of each round."""
    memory: list[float] = field(default_factory=list)
    """After each round, MiB."""
    errors: list[float] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)


def run(step: Step, *, profile: str, precision: str, prefill: str, seconds: float) -> Evidence:
    """Rounds over all shapes until the seconds have passed, and at least LEAST_ROUNDS."""
    chosen = PROFILES[profile] if step.device == "cuda" else PROFILES[profile].shrunken
    trainer = Trainer(Run(steps=1, model=chosen.model, precision=precision, device=step.device, lr=2e-4))
    seen, end = _Seen(), time.monotonic() + seconds
    while seen.rounds < LEAST_ROUNDS or time.monotonic() < end:
        _round(trainer, chosen.shapes, seen, step)
        _check_prefill(trainer, prefill, chosen.seq_len, seen, step)
        step(trainer.done)
        seen.rounds += 1
    return _evidence(trainer, seen)


def _round(trainer: Trainer, shapes: tuple[tuple[int, int], ...], seen: _Seen, step: Step) -> None:
    """One optimiser step of each shape."""
    begin, tokens = clock_s(trainer.run.device), 0
    for batch_size, seq_len in shapes:
        trainer.run = dataclasses.replace(trainer.run, batch_size=batch_size, seq_len=seq_len)
        loss, targets = trainer.step(), batch_size * (seq_len - 1)
        seen.targets += targets
        seen.loss_sum += loss * targets
        tokens += batch_size * seq_len
        if alarm := trainer.non_finite(loss):
            seen.nonfinite.append(f"{alarm.why} at step {trainer.done} of {batch_size} × {seq_len}")
        step(trainer.done, loss=loss, optimizer_steps=trainer.done - trainer.skipped)
    seen.tokens_per_s.append(tokens / (clock_s(trainer.run.device) - begin))
    seen.memory.append(memory_mib(trainer.run.device))


@torch.no_grad()
def _check_prefill(trainer: Trainer, prefill: str, longest: int, seen: _Seen, step: Step) -> None:
    """Logits through the cache, in one call or token by token, against those of training's forward."""
    length = prefilled_tokens(trainer.run.model.nsa, longest)
    trainer.run = dataclasses.replace(trainer.run, batch_size=2, seq_len=length)
    tokens, compute = trainer.batch(), COMPUTE[trainer.run.precision]
    with torch.autocast(trainer.run.device, dtype=compute, enabled=compute != torch.float32):
        expected = trainer.model(tokens)
        cache = trainer.model.new_cache(batch_size=2, max_tokens=length)
        pieces = tokens.split(1 if prefill == "sequential" else length, dim=1)
        rows = []
        for piece in pieces:
            rows.append(trainer.model(piece, cache))
            step(trainer.done)  # token by token a long prefill takes longer than a step
        logits = torch.cat(rows, 1)
    if not logits.isfinite().all():
        seen.nonfinite.append(f"{prefill} prefill at step {trainer.done}")
    seen.errors.append(_distance(logits, expected))


def prefilled_tokens(config: NSAConfig, longest: int) -> int:
    """Past the window and the selected blocks, so that both leave keys out, where the profile is so long."""
    return min(longest, max(config.w, config.n_sel * config.l_sel) + config.l_sel)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _evidence(trainer: Trainer, seen: _Seen) -> Evidence:
    run = trainer.run
    held = [name for name, parameter in trainer.model.named_parameters() if not parameter.isfinite().all()]
    floor = sentinels.loss_floor_nats(run.model.vocab_size, seen.targets)
    skipped = f", {trainer.skipped} skipped, scale {trainer.scaler.get_scale():g}" if run.precision == "fp16" else ""
    slope, lost = series.steady_slope(seen.memory), series.fall(seen.tokens_per_s)
    unknown = [name for name, figure in (("memory slope", slope), ("throughput", lost)) if figure is None]
    few = f"; unknown after so few rounds: {', '.join(unknown)}" if unknown else ""
    return Evidence(
        nonfinite=(*seen.nonfinite, *held),
        loss_nats=Bound(seen.loss_sum / seen.targets, floor),
        error=Bound(max(seen.errors), ERROR, "of prefill against forward") if run.precision == "fp32" else None,
        memory=None if slope is None else Bound(slope, MIB_PER_ROUND, "MiB per round"),
        slowdown=None if lost is None else Bound(lost, FALL, "of the throughput lost for good"),
        paths=(run.model.backend,),
        notes=(f"{trainer.done} steps in {seen.rounds} rounds{skipped}{few}",),
    )
