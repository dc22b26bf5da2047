"""Refuse a training run that cannot end well, before it takes GPUs for a day.

Fields are named as in a profile (`runtime.precision`, `train.save_every`). Every refusal says which field, what came
and what is wanted. `allow_toy` lets a run through that would only be wasted, never one that cannot work, and what it
overrode stands in the decision's record.

A `Plan` holds what is asked of a run: `plan_before_start` estimates it (memory, disk, the folder, the device) and
`plan_while_running` knows how long the run takes. `check` decides.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa.train import memory_estimate
from nsa.train.settings import MIB, PRECISIONS, Settings

LONG_STEPS = 5000
LONG_HOURS = 1.0
USABLE_MEMORY = 0.9
"""Share of a device's memory that a run may plan for; the rest is the context's and the allocator's."""
MOST_LOST = 10
"""A long run saves at least so many times: whatever stops it takes at most a tenth of it."""
OWN_FILES = {"heartbeat_rank0.jsonl", "checkpoints", "training.csv", "metrics.json"}
"""What a run leaves in its folder."""


@dataclass(frozen=True)
class Plan:
    """What preflight asks of a run. Raises ValueError or TypeError naming the field."""

    steps: int
    """Optimiser steps."""
    precision: str
    """Compute type: "fp32", "bf16" or "fp16"."""
    fp32_master_weights: bool = True
    """Whether the parameters and the optimiser's state are float32 and only the compute is in `precision`."""
    grad_scaler: bool = False
    """Whether the loss is scaled so that small fp16 gradients do not underflow."""
    gradient_checkpointing: bool = False
    save_every: int = 0
    """Steps between two checkpoints; 0 for none."""
    predicted_hours: float | None = None
    """None where nothing was measured."""
    peak_mem_mib: float | None = None
    """Estimated peak on one device, MiB = 2**20 bytes; None where there is no estimate."""
    device_mem_mib: float | None = None
    """Memory of one device; None where it is not known."""
    use_flash: bool = True
    """Whether fused attention may run."""
    checkpoints_mib: float | None = None
    """All checkpoints that are kept, and one being written; None where nobody has counted."""
    free_disk_mib: float | None = None
    """Where they go; None where it is not known."""
    out_dir_taken: str | None = None
    """Why the output folder is not this run's: what is in it; None for a free one."""
    data_trouble: str | None = None
    """What the data answered in place of a batch; None where they gave one, or were not asked."""
    on_gpu: bool = True
    """Whether the run is for a GPU."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("save_every", 0)):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"train.{name} must be an int; got {count!r} ({type(count).__name__})")
            if count < least:
                raise ValueError(f"train.{name} must be at least {least}; got {count}")
        for name in ("fp32_master_weights", "grad_scaler", "gradient_checkpointing", "use_flash"):
            switch = getattr(self, name)
            if not isinstance(switch, bool):
                raise TypeError(f"runtime.{name} must be true or false; got {switch!r} ({type(switch).__name__})")
        if self.precision not in PRECISIONS:
            raise ValueError(f"runtime.precision must be one of {', '.join(PRECISIONS)}; got {self.precision!r}")
        for name in ("predicted_hours", "peak_mem_mib", "device_mem_mib", "checkpoints_mib", "free_disk_mib"):
            figure = getattr(self, name)
            if figure is not None and not (math.isfinite(figure) and figure > 0):
                raise ValueError(f"{name} must be finite and above 0, or None where it is unknown; got {figure}")

    @property
    def is_long(self) -> bool:
        """Whether a mistake costs hours."""
        return self.steps >= LONG_STEPS or (self.predicted_hours or 0) >= LONG_HOURS

    @property
    def length(self) -> str:
        """In words: "50,000 steps, 24.5 h"."""
        hours = "" if self.predicted_hours is None else f", {self.predicted_hours:.1f} h"
        return f"{self.steps:,} steps{hours}"


@dataclass(frozen=True)
class Refusal:
    """One field that stands against the run."""

    field: str
    came: str
    wanted: str
    why: str
    overridable: bool = True
    """Whether allow_toy lets it through."""

    def __str__(self) -> str:
        return f"{self.field} must be {self.wanted}; got {self.came}: {self.why}"


@dataclass(frozen=True)
class Decision:
    """A run that may start, and what was overridden to let it."""

    plan: Plan
    overridden: tuple[Refusal, ...] = ()

    def record(self) -> Mapping[str, object]:
        """For the run's own files: JSON values only."""
        return {"long": self.plan.is_long, "allow_toy": [str(refusal) for refusal in self.overridden]}


class RefusedError(ValueError):
    """The run may not start; `refusals` has every reason."""

    def __init__(self, plan: Plan, refusals: tuple[Refusal, ...]) -> None:
        self.refusals = refusals
        reasons = "".join(f"\n  {refusal}" for refusal in refusals)
        hint = "" if any(not refusal.overridable for refusal in refusals) else "\n  --allow-toy runs it all the same"
        super().__init__(f"preflight refuses this run ({plan.length}):{reasons}{hint}")


def refusals(plan: Plan) -> tuple[Refusal, ...]:
    """Everything that stands against this run, in the order of a profile."""
    found = _half_precision(plan)
    if plan.is_long:
        found += _long_run(plan)
    return (*found, *_surroundings(plan))


def check(plan: Plan, *, allow_toy: bool = False) -> Decision:
    """Let the run start, or raise RefusedError. With `allow_toy` only what cannot work at all is refused."""
    found = refusals(plan)
    if found and not (allow_toy and all(refusal.overridable for refusal in found)):
        raise RefusedError(plan, found)
    return Decision(plan, overridden=found)


def _half_precision(plan: Plan) -> list[Refusal]:
    """fp16 without the two things that make it work, however short the run."""
    found = []
    if plan.precision == "fp16" and not plan.fp32_master_weights:
        why = "in fp16 AdamW's eps of 1e-8 rounds to 0 and g² underflows, so its first step is 0/0"
        found.append(Refusal("runtime.fp32_master_weights", "false", "true with fp16", why, overridable=False))
    if plan.precision == "fp16" and not plan.grad_scaler:
        why = "fp16 gradients below 6e-8 become 0"
        found.append(Refusal("runtime.grad_scaler", "false", "true with fp16", why, overridable=False))
    return found


def _long_run(plan: Plan) -> list[Refusal]:
    """What a run of hours needs."""
    found = []
    if plan.on_gpu and plan.precision == "fp32":  # a CPU has no tensor cores, and computes in float32 at its best
        wanted = "bf16, or fp16 with float32 master weights and a scaler"
        found.append(Refusal("runtime.precision", "fp32", wanted, "tensor cores stand still in fp32"))
    if not plan.gradient_checkpointing and (refusal := _memory(plan)):
        found.append(refusal)
    if not plan.use_flash:
        found.append(Refusal("runtime.use_flash", "false", "true", "unfused attention is for comparisons"))
    most = max(1, plan.steps // MOST_LOST)
    if not 0 < plan.save_every <= most:
        why = f"whatever stops the run takes {'a large part' if 0 < plan.save_every < plan.steps else 'all'} of it"
        found.append(Refusal("train.save_every", str(plan.save_every), f"between 1 and {most}", why))
    return found


def _memory(plan: Plan) -> Refusal | None:
    """Without gradient checkpointing an estimate must show that it is not needed."""
    if plan.peak_mem_mib is None or plan.device_mem_mib is None:
        why = "no estimate shows that the memory suffices without it"
    elif plan.peak_mem_mib > USABLE_MEMORY * plan.device_mem_mib:
        why = (
            f"the estimated peak of {plan.peak_mem_mib:,.0f} MiB is above {USABLE_MEMORY:.0%} of the device's "
            f"{plan.device_mem_mib:,.0f} MiB"
        )
    else:
        return None
    return Refusal("runtime.gradient_checkpointing", "false", "true", why)


def _surroundings(plan: Plan) -> list[Refusal]:
    """What no run can do without, however short: a folder, room in it, data."""
    found = []
    if plan.out_dir_taken is not None:
        why = "two runs in one folder spoil each other's files"
        wanted = "a new folder, or --resume"
        found.append(Refusal("train.out_dir", plan.out_dir_taken, wanted, why, overridable=False))
    needed, free = plan.checkpoints_mib, plan.free_disk_mib
    if needed is not None and free is not None and needed > free:
        came, wanted = f"{free:,.0f} MiB free", f"on a disk with {needed:,.0f} MiB free"
        found.append(Refusal("train.out_dir", came, wanted, "the checkpoints do not fit", overridable=False))
    if plan.data_trouble is not None:
        why = "a run without data trains nothing"
        found.append(Refusal("data.dataset", plan.data_trouble, "data that answer", why, overridable=False))
    return found


def device_of(settings: Settings) -> torch.device:
    """The device; ValueError if it is not there."""
    asked = settings.runtime.device
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("runtime.device must be one that is here; got cuda, and torch.cuda finds none (--device cpu)")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def plan_before_start(
    settings: Settings, *, ranks: int = 1, resume: bool = False, data_trouble: str | None = None
) -> Plan:
    """The plan of a run before it starts."""
    runtime, train = settings.runtime, settings.train
    folder = Path(settings.out_dir)
    return Plan(
        steps=train.steps,
        precision=runtime.precision,
        fp32_master_weights=runtime.fp32_master_weights,
        grad_scaler=runtime.precision == "fp16",
        gradient_checkpointing=runtime.gradient_checkpointing is not False,
        save_every=train.save_every,
        peak_mem_mib=memory_estimate.peak_mem_mib(settings, ranks),
        device_mem_mib=None if runtime.device == "cpu" else _device_mem_mib(),
        use_flash=runtime.use_flash,
        checkpoints_mib=(train.keep_checkpoints + 1) * memory_estimate.checkpoint_mib(settings),
        free_disk_mib=max(shutil.disk_usage(_standing(folder)).free / MIB, 1e-3),
        out_dir_taken=None if resume else _taken(folder),
        data_trouble=data_trouble,
        on_gpu=_on_gpu(settings),
    )


def plan_while_running(settings: Settings, predicted_hours: float) -> Plan:
    """The plan of a run that has begun, whose length is known now, and whose memory has sufficed."""
    return Plan(
        steps=settings.train.steps,
        precision=settings.runtime.precision,
        fp32_master_weights=settings.runtime.fp32_master_weights,
        grad_scaler=settings.runtime.precision == "fp16",
        gradient_checkpointing=True,
        save_every=settings.train.save_every,
        predicted_hours=predicted_hours,
        use_flash=settings.runtime.use_flash,
        on_gpu=_on_gpu(settings),
    )


def _on_gpu(settings: Settings) -> bool:
    """Also where a profile for GPUs is only checked, on a machine that has none."""
    return settings.runtime.device == "cuda" or (settings.runtime.device == "auto" and torch.cuda.is_available())


def _device_mem_mib() -> float | None:
    return torch.cuda.get_device_properties(0).total_memory / MIB if torch.cuda.is_available() else None


def _standing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return folder if folder.is_dir() else _standing(folder.parent)


def _taken(folder: Path) -> str | None:
    found = sorted(name for name in OWN_FILES if (folder / name).exists())
    return f"{folder}, which holds {', '.join(found)}" if found else None
