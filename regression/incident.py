"""The contract of one incident.

Each `regression/<id with underscores>.py` exports

    INCIDENT = Incident(id="step5-stall", ..., expects=Verdict.SLOW)
    def faulty(step: Step) -> Evidence: ...            # the fault, under the detector: its verdict must be `expects`
    def product(step: Step) -> Evidence: ...           # the same detector on the product: PASSED
    def inject() -> AbstractContextManager[None]: ...  # puts the fault into the product, in this process

`faulty` and `product` run in a child process each. They call `step(n)` after every unit of work; silence beyond a
deadline that is scaled from these steps is a stall. Only a machine without the GPUs that `needs` names is a lawful
skip. `inject` opens `regression.injection.injected`, which counts what enters the fault: a run that never does is an
error, not a pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from regression.verdict import ASPECTS, Verdict


class Needs(str, Enum):
    """The least that a repro runs on."""

    CPU = "CPU"
    GPU = "1 GPU"
    TWO_GPUS = "2 GPUs"


class Step(Protocol):
    """The heartbeat, and where to run."""

    device: str
    """"cpu" or "cuda"."""
    backends: tuple[str, ...]
    """NSA's backends to prove on this device, by name; on a CPU "triton" runs in the interpreter: tiny shapes."""

    def __call__(self, n: int, **figures: float) -> None:
        """Unit of work n is done. `figures` (loss, tokens_per_s, memory_mib) stand in the record."""


@dataclass(frozen=True)
class Incident:
    """One row of the list."""

    id: str
    """Lower case with dashes; the file's name with underscores."""
    symptom: str
    """As it was reported, in a few words."""
    cause: str
    """What really happened, in a few words."""
    detector: str
    """What catches it, in a few words."""
    expects: Verdict
    """Of the faulty variant, exactly."""
    fires: tuple[str, ...] = ()
    """Aspects of the faulty variant's evidence that must be red, each by itself; () leaves it to `expects`."""
    says: str = ""
    """Words in the reason for that verdict, so that another fault of the same kind is not taken for this one."""
    since: str = "2026-11"
    """Month since which it is caught."""
    needs: Needs = Needs.CPU
    floor_s: float = 30.0
    """Silence that never counts as a stall, however fast the steps were."""
    alone: bool = False
    """It measures time: nothing else of the run may share the machine with it."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.id):
            raise ValueError(f"id must be of a-z, 0-9 and single dashes; got {self.id!r}")
        if self.expects in (Verdict.PASSED, Verdict.SKIPPED):
            raise ValueError(f"expects must be a fault; got {self.expects.value}")
        if self.expects is Verdict.CRASHED and not self.says:
            raise ValueError("says must name the crash that is expected: anything can crash")
        if unknown := [name for name in self.fires if name not in ASPECTS]:
            raise ValueError(f"fires must be among {', '.join(ASPECTS)}; got {', '.join(unknown)}")
        if not re.fullmatch(r"\d{4}-\d\d", self.since):
            raise ValueError(f"since must be a month like 2026-11; got {self.since!r}")
        if not self.floor_s > 0:
            raise ValueError(f"floor_s must be above 0; got {self.floor_s}")
