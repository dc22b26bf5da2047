"""Which outcome an exception means, whichever process it ended."""

from __future__ import annotations

import re
import subprocess

import torch

from benchmarks.baselines import NotPresentError, UnsupportedError
from benchmarks.cases.key import NSA
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.correctness.verify import IncorrectError, NonFiniteError
from benchmarks.timing.clocks import Clocks
from benchmarks.timing.cuda_graphs import CannotCaptureError
from benchmarks.timing.device_clock import UnjoinedWorkError


class ThrottledError(Exception):
    """Most samples were taken while the device was too hot or short of power."""

    def __init__(self, reason: str, clocks: Clocks) -> None:
        self.clocks = clocks
        super().__init__(reason)


class MemoryChildError(Exception):
    """The child of a memory case has no figure: what became of it, why, and its comparison with the oracle, if any."""

    def __init__(self, outcome: CaseOutcome, reason: str, correctness: Correctness | None = None) -> None:
        self.outcome, self.correctness = outcome, correctness
        super().__init__(reason)


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def classify(error: Exception, implementation: str) -> tuple[CaseOutcome, str]:
    """The outcome that an exception of this implementation means, and one line that says why, as it can be printed.

    What a baseline cannot import is not installed; NSA is always here, and an import that fails in it is its fault.
    """
    outcome, reason = _classified(error, implementation)
    return outcome, "".join(one for one in _COLOUR.sub("", reason) if one.isprintable() or one == "\n")


def _classified(error: Exception, implementation: str) -> tuple[CaseOutcome, str]:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, (IncorrectError, UnjoinedWorkError)):
        return CaseOutcome.INCORRECT, str(error)
    if isinstance(error, MemoryChildError):
        return error.outcome, str(error)
    if isinstance(error, ThrottledError):
        return CaseOutcome.THROTTLED, str(error)
    if isinstance(error, NonFiniteError):
        return CaseOutcome.NONFINITE, str(error)
    if isinstance(error, NotPresentError):
        return CaseOutcome.NOT_PRESENT, str(error)
    if isinstance(error, ImportError) and implementation != NSA:
        return CaseOutcome.NOT_PRESENT, text
    if isinstance(error, UnsupportedError):
        return CaseOutcome.UNSUPPORTED, str(error)
    if isinstance(error, CannotCaptureError):
        return CaseOutcome.UNSUPPORTED, text
    if isinstance(error, subprocess.TimeoutExpired):
        return CaseOutcome.STALLED, f"no answer within {error.timeout:.0f} s"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return CaseOutcome.OUT_OF_MEMORY, text
    if type(error).__module__.startswith("triton.") and type(error).__name__ in ("CompilationError", "OutOfResources"):
        return CaseOutcome.COMPILE_ERROR, text
    if isinstance(error, ValueError) and "cannot serve this call" in text:
        return CaseOutcome.UNSUPPORTED, text
    return CaseOutcome.CRASHED, text
