"""One lane of the soak, in a child of its own: train a profile in one precision, and prefill the model now and then.

The profiles are the two of the field reports, and what is left of them on a CPU.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from nsa import NSAConfig
from nsa.model import BASE_125M, ModelConfig
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.distributed import Ranks
from nsa.train.monitoring import monitors
from nsa.train.monitoring.health import Health, StepMetrics
from nsa.train.trainer import COMPUTE, Trainer
from regression import training
from regression.contract import Bound, Evidence, Step
from regression.detectors.host_cost import clock_s
from regression.detectors.memory import memory_mib

LEAST_ROUNDS = 4
"""However short the soak: 28 steps, well past the fifth."""
ERROR = 1e-3
"""Of prefill against training's forward, relative, in float32; lower precisions may choose other blocks."""
FALL = 0.25
MIB_PER_ROUND = 4.0
SHRUNK_TOKENS = 16
"""A CPU trains on lengths so many times shorter."""


@dataclass(frozen=True)
class Profile:
    """A model and the largest batch that it is trained on."""

    model: ModelConfig
    batch_size: int
    seq_len: int

    @property
    def shrunken(self) -> Profile:
        """Of the same proportions, small enough for a CPU: fewer layers, narrower, shorter, smaller blocks."""
        model = replace(
            self.model,
            dim=48,
            n_layers=2,
            n_heads=6,
            num_kv_heads=2,
            d_k=8,
            d_v=8,
            nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=32),
        )
        return replace(self, model=model, seq_len=self.seq_len // SHRUNK_TOKENS)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(batch, tokens) of one round: long, short, long again; one row, more rows; a length that no block divides."""
        b, s = self.batch_size, self.seq_len
        return ((b, s), (b, s // 4), (2 * b, s // 2), (b, s), (1, s - 7), (4 * b, 17), (b, 3 * s // 4))


# 125M on random bytes; the reports name the lengths, batches and layers, and no other width for the 3090
PROFILES = {"3090": Profile(BASE_125M, 1, 1024), "a100": Profile(BASE_125M, 2, 2048)}


@dataclass
class _LaneState:
    """What the lane has measured so far."""

    health: Health
    rounds: int = 0
    loss_sum: float = 0.0
    """Over all targets, which the trainer counts."""
    tokens_per_s: list[float] = field(default_factory=list)
    """Of each round."""
    memory: list[float] = field(default_factory=list)
    """After each round, MiB."""
    errors: list[float] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)


def run(step: Step, *, profile: str, precision: str, prefill: str, seconds: float) -> Evidence:
    """Rounds over all shapes until the seconds have passed, and at least LEAST_ROUNDS."""
    chosen = PROFILES[profile] if step.device == "cuda" else PROFILES[profile].shrunken
    with tempfile.TemporaryDirectory() as folder:  # in which nothing is written
        own = training.settings(Path(folder), step.device, model=chosen.model, precision=precision, steps=1, lr=2e-4)
    trainer, end = Trainer(own, torch.device(step.device), Ranks()), time.monotonic() + seconds
    backend = chosen.model.backend
    state = _LaneState(Health(random_vocab_size=None, fp16=precision == "fp16", warmup_steps=0, fused_backend=backend))
    while state.rounds < LEAST_ROUNDS or time.monotonic() < end:
        _round(trainer, chosen.shapes, state, step)
        _check_prefill(trainer, prefill, chosen.seq_len, state, step)
        step(trainer.done)
        state.rounds += 1
    return _evidence(trainer, state)


def _tokens(trainer: Trainer, batch_size: int, seq_len: int) -> SyntheticBatches:
    """Random tokens of another shape, which no step has seen before."""
    shape = replace(trainer.settings.train, batch_size=batch_size, seq_len=seq_len, seed=trainer.done)
    return SyntheticBatches(replace(trainer.settings, train=shape), Shard())


def _round(trainer: Trainer, shapes: tuple[tuple[int, int], ...], state: _LaneState, step: Step) -> None:
    device = trainer.device
    begin, tokens = clock_s(device.type), 0
    for batch_size, seq_len in shapes:
        stepped = trainer.step([_tokens(trainer, batch_size, seq_len).next().to(device)])
        loss, targets = float(stepped.loss), int(stepped.targets)
        trainer.tokens_seen += targets
        state.loss_sum += loss * targets
        tokens += batch_size * seq_len
        for alarm in state.health.step(StepMetrics(trainer.done, loss, float(stepped.grad_norm), targets, None, None)):
            state.nonfinite.append(f"{alarm.why} at step {trainer.done} of {batch_size} × {seq_len}")
        step(trainer.done, loss=loss, optimizer_steps=trainer.done - state.health.skipped)
    state.tokens_per_s.append(tokens / (clock_s(device.type) - begin))
    state.memory.append(memory_mib(device.type))


@torch.no_grad()
def _check_prefill(trainer: Trainer, prefill: str, longest: int, state: _LaneState, step: Step) -> None:
    """Logits through the cache, in one call or token by token, against those of training's forward."""
    length = prefilled_tokens(trainer.settings.model.nsa, longest)
    tokens = _tokens(trainer, 2, length).next().tokens.to(trainer.device)
    compute = COMPUTE[trainer.settings.runtime.precision]
    with torch.autocast(trainer.device.type, dtype=compute, enabled=compute != torch.float32):
        expected = trainer.lm(tokens)
        cache = trainer.lm.new_cache(batch_size=2, max_tokens=length)
        pieces = tokens.split(1 if prefill == "sequential" else length, dim=1)
        rows = []
        for piece in pieces:
            rows.append(trainer.lm(piece, cache))
            step(trainer.done)  # token by token a long prefill takes longer than a step
        logits = torch.cat(rows, 1)
    if not logits.isfinite().all():
        state.nonfinite.append(f"{prefill} prefill at step {trainer.done}")
    state.errors.append(_distance(logits, expected))


def prefilled_tokens(config: NSAConfig, longest: int) -> int:
    """Past the window and the selected blocks, so that both leave keys out, where the profile is so long."""
    return min(longest, max(config.w, config.n_sel * config.l_sel) + config.l_sel)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _evidence(trainer: Trainer, state: _LaneState) -> Evidence:
    settings = trainer.settings
    precision = settings.runtime.precision
    held = [name for name, parameter in trainer.lm.named_parameters() if not parameter.isfinite().all()]
    floor = monitors.loss_floor_nats(settings.model.vocab_size, trainer.tokens_seen)
    skips = f", {state.health.skipped} skipped, scale {trainer.scaler.get_scale():g}"
    skipped = skips if precision == "fp16" else ""
    slope, lost = monitors.steady_slope(state.memory), monitors.fall(state.tokens_per_s)
    unknown = [name for name, figure in (("memory slope", slope), ("throughput", lost)) if figure is None]
    few = f"; unknown after so few rounds: {', '.join(unknown)}" if unknown else ""
    return Evidence(
        nonfinite=(*state.nonfinite, *held),
        loss_nats=Bound(state.loss_sum / trainer.tokens_seen, floor),
        error=Bound(max(state.errors), ERROR, "of prefill against forward") if precision == "fp32" else None,
        memory=None if slope is None else Bound(slope, MIB_PER_ROUND, "MiB per round"),
        slowdown=None if lost is None else Bound(lost, FALL, "of the throughput lost for good"),
        paths=(settings.model.backend,),
        notes=(f"{trainer.done} steps in {state.rounds} rounds{skipped}{few}",),
    )
