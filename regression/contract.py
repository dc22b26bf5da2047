"""The contract of one incident: its description, what a repro of it observed, and the verdict on that.

Each `regression/incidents/<id with underscores>.py` exports

    INCIDENT = Incident(id="step5-stall", ..., expects=ReproVerdict.SLOW)
    def faulty(step: Step) -> Evidence: ...            # the fault, under the detector: its verdict must be `expects`
    def product(step: Step) -> Evidence: ...           # the same detector on the product: PASSED
    def inject() -> AbstractContextManager[None]: ...  # puts the fault into the product, in this process

`faulty` and `product` run in a child process each. They call `step(n)` after every unit of work; silence beyond a
deadline that is scaled from these steps is a stall. Only a machine without the GPUs that `needs` names may
skip it. `inject` opens `regression.injection.injected`, which counts what enters the fault: a run that never does is an
error, not a pass.

`Evidence` holds facts only, no judgement: None is "not looked at", () is "looked, and found nothing". `aspects` and
`verdict` are pure functions of it: one verdict per aspect that was looked at and one for all of them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class ReproVerdict(str, Enum):
    """How a repro, or one aspect of it, is judged."""

    PASSED = "PASSED"
    STALLED = "STALLED"
    """No sign of life before the deadline."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The allocator gave up, or memory grew beyond its bound."""
    CRASHED = "CRASHED"
    """An exception or an exit status that nobody asked for."""
    NONFINITE = "NONFINITE"
    """NaN or infinity where a number is due."""
    LEAK = "LEAK"
    """A row depends on a later token."""
    TOO_GOOD = "TOO_GOOD"
    """A loss below what the data's entropy allows."""
    WRONG = "WRONG"
    """Anything else that contradicts a promise."""
    SLOW = "SLOW"
    """More operators, host syncs or time than the bound."""
    SKIPPED = "SKIPPED"
    """Not run; the reason is given."""


@dataclass(frozen=True)
class Bound:
    """A figure and what is allowed for it; the unit is in the name of the field that holds it, or in `of`."""

    value: float | None
    """None where it is not finite."""
    limit: float
    of: str = ""
    """What was measured, in words: "operators per token", "MiB per step"."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.limit):
            raise ValueError(f"limit must be finite; got {self.limit}")
        if self.value is not None and not math.isfinite(self.value):
            object.__setattr__(self, "value", None)

    @property
    def exceeded(self) -> bool:
        """Above the limit, or not finite."""
        return self.value is None or self.value > self.limit

    def __str__(self) -> str:
        value = "not finite" if self.value is None else f"{self.value:.4g}"
        return f"{value} of at most {self.limit:.4g}" + (f" {self.of}" if self.of else "")


@dataclass(frozen=True)
class Evidence:
    """Facts of one run of a faulty variant or of the product. At least one must be given to pass."""

    nonfinite: tuple[str, ...] | None = None
    """Names of outputs, gradients or losses that hold NaN or infinity."""
    future_seen: tuple[str, ...] | None = None
    """Rows that changed although only later tokens did: "window, S = 17: rows 3 to 9"."""
    wrong: tuple[str, ...] | None = None
    """Promises that were broken, in words: "row 3 lists block 2 twice"."""
    loss_nats: Bound | None = None
    """The loss, with the entropy floor of its data (less its sampling error) as the limit from *below*."""
    error: Bound | None = None
    """Distance from the oracle, and its budget."""
    ops: Bound | None = None
    """Operators of a forward or step, or per token."""
    host_syncs: Bound | None = None
    """Times the host waited for a value of the device."""
    slowdown: Bound | None = None
    """Times as slow as it should be, or the drop of the throughput."""
    silence_s: Bound | None = None
    """The longest gap between two signs of life."""
    memory: Bound | None = None
    """Peak, its growth per token, or its slope per step; `of` has the unit."""

    # How the process ended: filled in by the runner, or by a repro that runs children of its own.
    exception: str | None = None
    """Type and message of what was raised and not expected."""
    uncaught: bool = False
    """Nothing of this was observed by the repro: it died, by an exception or a signal, before it could say anything."""
    out_of_memory: str | None = None
    """The allocator's words."""
    exit_status: int | None = None
    """Of the child; negative is a signal."""
    stalled_after_s: float | None = None
    """Silence after which the runner ended it."""
    stacks: str | None = None
    """All threads, when it was ended."""
    skipped: str | None = None
    """Why it was not run."""

    # What the page shows beside the verdict.
    paths: tuple[str, ...] = ()
    """Backends or routes that ran, as recorded by the product: ("reference", "torch", "triton")."""
    notes: tuple[str, ...] = ()
    """Figures worth reading: "447,613 operators at S = 1024"."""


@dataclass(frozen=True)
class Aspect:
    """One thing that was looked at. That a run did not hang says nothing about its numbers."""

    name: str
    verdict: ReproVerdict
    why: str
    """What was found, with the figure; "" for PASSED without one."""


_FINDINGS = (("nonfinite", ReproVerdict.NONFINITE), ("future_seen", ReproVerdict.LEAK), ("wrong", ReproVerdict.WRONG))
_BOUNDS = (
    ("error", ReproVerdict.WRONG),
    ("ops", ReproVerdict.SLOW),
    ("host_syncs", ReproVerdict.SLOW),
    ("slowdown", ReproVerdict.SLOW),
    ("silence_s", ReproVerdict.STALLED),
    ("memory", ReproVerdict.OUT_OF_MEMORY),
)
ASPECTS = ("end", *(name for name, _ in _FINDINGS), "loss_nats", *(name for name, _ in _BOUNDS))
"""Names of all aspects."""
_SEVERITY = tuple(ReproVerdict)[1:]  # the enum's order: what ends a run, then what falsifies it, then what slows it


def aspects(evidence: Evidence) -> tuple[Aspect, ...]:
    """Every aspect that the evidence speaks of, each with its own verdict."""
    if evidence.skipped is not None:
        return (Aspect("skipped", ReproVerdict.SKIPPED, evidence.skipped),)
    found = [*_end(evidence)]
    for name, verdict in _FINDINGS:
        findings: tuple[str, ...] | None = getattr(evidence, name)
        if findings is not None:
            found.append(Aspect(name, verdict if findings else ReproVerdict.PASSED, _in_short(findings)))
    if evidence.loss_nats is not None:
        found.append(_loss(evidence.loss_nats))
    for name, verdict in _BOUNDS:
        bound: Bound | None = getattr(evidence, name)
        if bound is not None:
            found.append(Aspect(name, verdict if bound.exceeded else ReproVerdict.PASSED, str(bound)))
    return tuple(found) or (Aspect("nothing", ReproVerdict.WRONG, "no evidence: nothing was looked at"),)


def verdict(evidence: Evidence) -> ReproVerdict:
    """The gravest verdict of all aspects; PASSED only if something was looked at and all of it passed."""
    return gravest(aspects(evidence)).verdict


def gravest(judged: tuple[Aspect, ...]) -> Aspect:
    """The aspect that decides: the first of the gravest kind."""
    for kind in _SEVERITY:
        for aspect in judged:
            if aspect.verdict is kind:
                return aspect
    return judged[0]


def _in_short(findings: tuple[str, ...]) -> str:
    return "".join(findings[:1]) + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "")


def _end(evidence: Evidence) -> list[Aspect]:
    """How the process ended, where that was seen or is a fault."""
    if evidence.stalled_after_s is not None:
        return [Aspect("end", ReproVerdict.STALLED, f"no heartbeat for {evidence.stalled_after_s:.1f} s")]
    if evidence.out_of_memory is not None:
        return [Aspect("end", ReproVerdict.OUT_OF_MEMORY, evidence.out_of_memory)]
    if evidence.exception is not None:
        return [Aspect("end", ReproVerdict.CRASHED, evidence.exception)]
    if evidence.exit_status:
        return [Aspect("end", ReproVerdict.CRASHED, f"exit status {evidence.exit_status}")]
    return []


def _loss(loss: Bound) -> Aspect:
    """The one bound from below: value is the loss, limit the floor that the data's entropy sets."""
    if loss.value is None:
        return Aspect("loss_nats", ReproVerdict.NONFINITE, "the loss is not finite")
    too_good = loss.value < loss.limit
    return Aspect(
        "loss_nats",
        ReproVerdict.TOO_GOOD if too_good else ReproVerdict.PASSED,
        f"{loss.value:.4g} against a floor of {loss.limit:.4g} nats",
    )


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
    expects: ReproVerdict
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
        if self.expects in (ReproVerdict.PASSED, ReproVerdict.SKIPPED):
            raise ValueError(f"expects must be a fault; got {self.expects.value}")
        if self.expects is ReproVerdict.CRASHED and not self.says:
            raise ValueError("says must name the crash that is expected: anything can crash")
        if unknown := [name for name in self.fires if name not in ASPECTS]:
            raise ValueError(f"fires must be among {', '.join(ASPECTS)}; got {', '.join(unknown)}")
        if not re.fullmatch(r"\d{4}-\d\d", self.since):
            raise ValueError(f"since must be a month like 2026-11; got {self.since!r}")
        if not self.floor_s > 0:
            raise ValueError(f"floor_s must be above 0; got {self.floor_s}")
