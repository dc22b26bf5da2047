"""What Triton compiles in this process, as it happens: by the hook that Triton calls when it has looked for a kernel.

Triton 3.4 and later have that hook; with an earlier one nothing is heard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton

ADVICE = "`python -m nsa.warm` compiles kernels ahead, and a later process finds them"


@dataclass(frozen=True)
class Compilation:
    """One kernel that Triton was asked for and did not have in memory."""

    name: str
    """Module and function; "nsa.triton_backend.topk._topk"."""
    seconds: float
    was_there: bool
    """Whether its cache on the disk held it, so that nothing was compiled."""


@contextmanager
def listening(heard: Callable[[Compilation], object]) -> Iterator[None]:
    """Call `heard` after each kernel that is compiled or read from the disk; one that listened before still does."""
    knobs = getattr(getattr(triton, "knobs", None), "compilation", None)
    if knobs is None or not hasattr(knobs, "listener"):
        yield
        return
    before = knobs.listener

    def listener(**event: Any) -> None:
        if before is not None:
            before(**event)
        times = event["times"]
        stages_us = sum(us for _, us in times.lowering_stages)
        seconds = (times.ir_initialization + stages_us + times.store_results) / 1e6
        heard(Compilation(_name(event["src"]), seconds, bool(event["cache_hit"])))

    knobs.listener = listener
    try:
        yield
    finally:
        knobs.listener = before


def _name(source: Any) -> str:
    function = getattr(source, "fn", None)
    module = getattr(function, "__module__", None)
    return f"{module}.{source.name}" if module else str(source.name)


@contextmanager
def reported(say: Callable[[str], object]) -> Iterator[None]:
    """Say which kernels are compiled: a line as each is done, and with the first one how to have it done ahead."""
    lock, count, total_s = threading.Lock(), 0, 0.0

    def heard(one: Compilation) -> None:
        nonlocal count, total_s
        if one.was_there:
            return
        with lock:
            count, total_s = count + 1, total_s + one.seconds
            advice = f" ({ADVICE})" if count == 1 else ""
            say(f"compiled {one.name} in {one.seconds:.1f} s; {count} kernels in {total_s:.1f} s so far{advice}")

    with listening(heard):
        yield
