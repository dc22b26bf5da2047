"""Which outcome an exception means, whichever process it ended."""

from __future__ import annotations

import subprocess

import torch

from benchmarks.baselines import NotPresentError, UnsupportedError
from benchmarks.cases.key import NSA
from benchmarks.cases.outcome import Correctness, Outcome
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

    def __init__(self, outcome: Outcome, reason: str, correctness: Correctness | None = None) -> None:
        self.outcome, self.correctness = outcome, correctness
        super().__init__(reason)


def classify(error: Exception, implementation: str) -> tuple[Outcome, str]:
    """The outcome that an exception of this implementation means, and one line that says why.

    What a baseline cannot import is not installed; NSA is always here, and an import that fails in it is its fault.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, (IncorrectError, UnjoinedWorkError)):
        return Outcome.INCORRECT, str(error)
    if isinstance(error, MemoryChildError):
        return error.outcome, str(error)
    if isinstance(error, ThrottledError):
        return Outcome.THROTTLED, str(error)
    if isinstance(error, NonFiniteError):
        return Outcome.NONFINITE, str(error)
    if isinstance(error, NotPresentError):
        return Outcome.NOT_PRESENT, str(error)
    if isinstance(error, ImportError) and implementation != NSA:
        return Outcome.NOT_PRESENT, text
    if isinstance(error, UnsupportedError):
        return Outcome.UNSUPPORTED, str(error)
    if isinstance(error, CannotCaptureError):
        return Outcome.UNSUPPORTED, text
    if isinstance(error, subprocess.TimeoutExpired):
        return Outcome.STALLED, f"no answer within {error.timeout:.0f} s"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return Outcome.OUT_OF_MEMORY, text
    if type(error).__module__.startswith("triton.") and type(error).__name__ in ("CompilationError", "OutOfResources"):
        return Outcome.COMPILE_ERROR, text
    if isinstance(error, ValueError) and "cannot serve this call" in text:
        return Outcome.UNSUPPORTED, text
    return Outcome.CRASHED, text
