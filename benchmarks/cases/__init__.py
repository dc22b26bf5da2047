"""What is timed: each mode prepares one piece of work from a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.records import Gate

NSA = "nsa"
"""The implementation's name in a key; any other is a baseline's."""


@dataclass(frozen=True)
class Work:
    """One implementation on one case, its inputs made."""

    check: Callable[[], Gate]
    """Compares with the oracle; raises unless it is green."""
    call: Callable[[], tuple[Tensor, ...]]
    """What is timed; it returns what must be finite."""
    tokens: int
    """Query tokens of one call, over all sequences."""
