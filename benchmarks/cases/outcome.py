"""How a measurement ended, and what was compared with the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class CaseOutcome(str, Enum):
    """How a measurement ended."""

    PASSED = "PASSED"
    """Green against the oracle, then measured."""
    INCORRECT = "INCORRECT"
    """Further from the oracle than the error budget."""
    NONFINITE = "NONFINITE"
    """NaN or infinity in an output or a gradient."""
    STALLED = "STALLED"
    """No answer before the deadline."""
    CRASHED = "CRASHED"
    """Any other error; the reason holds its type and message."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    COMPILE_ERROR = "COMPILE_ERROR"
    """A kernel could not be compiled or does not fit the device."""
    UNSUPPORTED = "UNSUPPORTED"
    """The implementation is there and refuses this case."""
    THROTTLED = "THROTTLED"
    """The device lowered its clocks while it was measured."""
    NOT_PRESENT = "NOT_PRESENT"
    """The implementation is not on this machine."""


FAULTS = (
    CaseOutcome.INCORRECT,
    CaseOutcome.NONFINITE,
    CaseOutcome.CRASHED,
    CaseOutcome.STALLED,
    CaseOutcome.COMPILE_ERROR,
)
"""Outcomes of NSA that make a run fail; a case too large for the device or unknown to it does not."""


@dataclass(frozen=True)
class OracleCheck:
    """One comparison with the oracle."""

    name: str
    """What was compared: "o", "block_indices", "dq", ..."""
    error: float | None
    """Relative to the size of the truth: Euclidean, or for blocks of their best score; None where it is not finite."""
    budget: float
    """What is allowed: a multiple of the error of PyTorch in the same dtype, both against float64."""

    @property
    def passed(self) -> bool:
        return self.error is not None and math.isfinite(self.budget) and self.error <= self.budget


@dataclass(frozen=True)
class Correctness:
    """What was compared with the oracle, on the inputs that are timed, in the same process."""

    rows_checked: int
    """Query rows compared, over all sequences."""
    checks: tuple[OracleCheck, ...]
    path: str
    """What ran, as the implementation recorded it: the backend of NSA, or the baseline's name."""
    seed: int | None = None
    """Of the rows that were drawn and of the inputs after the last sample; None in records that drew none."""
    rows_compared: int | None = None
    """Query rows of those inputs that were compared with the oracle or with a second implementation, over all
    sequences; None in records from before there was one, and where a loss stands for all rows."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)
