"""What a repro observed: facts only, no judgement. None is "not looked at", () is "looked, and found nothing"."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
