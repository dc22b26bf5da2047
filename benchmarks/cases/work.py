"""One piece of work to time: an implementation on a case, its inputs made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from benchmarks.cases.outcome import Correctness

Call = Callable[[], tuple[Tensor, ...]]
"""What is timed; it returns every output."""


class Recheck(Protocol):
    """The oracle's second question, on other inputs than those that were timed."""

    def __call__(self, call: Call, seed: int, rows_share: float = 1.0) -> Correctness:
        """Compare what `call`, a graph of the work's own or that itself, returns for inputs of this seed.

        `rows_share`: of the rows that are compared with the second implementation where there is time, so many.
        Raises unless all is green.
        """


@dataclass(frozen=True)
class Work:
    """One implementation on one case, its inputs made."""

    check: Callable[[int], Correctness]
    """Compares with the oracle on rows that an int, the seed, draws; raises unless it is green."""
    call: Call
    """What is timed; it returns what must be finite."""
    tokens: int
    """Query tokens of one call, over all sequences."""
    flops: float | None = None
    """Floating-point operations that one call needs at least, a multiply-add being two; None where unknown."""
    bytes_moved: float | None = None
    """Bytes that one call must read and write at least; None where unknown."""
    refusals: Callable[[], AbstractContextManager[None]] = nullcontext
    """Names the implementation's own refusals, which the first call meets."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What a call reads and must leave as it is, by name."""
    recheck: Recheck | None = None
    """Overwrites the inputs with ones that no call has seen, runs what was timed, and compares what that returns."""
    redraw: Callable[[int], object] | None = None
    """Overwrites the inputs with those of a seed, `row_sampling.TIMED_SEED` being that of the timed ones."""
    copy: Callable[[], Work] | None = None
    """Makes the same work on a copy of its inputs, for cold calls to alternate with; None where there is no point."""
    following: Callable[[], Sequence[Work]] | None = None
    """Makes the same work of the decode steps that follow, on the same keys, for warm calls to go through in turn: no
    step then finds just what it reads itself in the caches. None where every call is of the same step."""
    replays: bool = False
    """Whether `call` replays a CUDA graph of its own, and is timed as it is."""
