"""The first batch of a run: a loader that never answers ends in an error that names it, not in silence."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class NoFirstBatchError(TimeoutError):
    """The loader gave nothing before its deadline; the message names it and the seconds."""


@dataclass(frozen=True)
class FirstBatch(Generic[T]):
    """What came, from where, and how long it took: to be recorded with the run."""

    batch: T
    source: str
    """The loader's name, or the fallback's."""
    waited_s: float


@dataclass(frozen=True)
class Loader(Generic[T]):
    """Where batches come from, by the name under which it is recorded."""

    name: str
    fetch: Callable[[], T]
    """Gives the next batch; may block."""


def first_batch(loader: Loader[T], deadline_s: float, fallback: Loader[T] | None = None) -> FirstBatch[T]:
    """The first batch within the deadline; with a fallback, which is asked for on purpose, that one's instead.

    An error of the loader is raised as it is: a fallback is for silence alone. The thread that waits for a silent
    loader cannot be ended; it is a daemon and does not keep the process. Raises NoFirstBatchError.
    """
    if not deadline_s > 0:
        raise ValueError(f"deadline_s must be above 0; got {deadline_s}")
    begin = time.monotonic()
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=_fetch, args=(loader, answers), name=f"first batch of {loader.name}", daemon=True).start()
    try:
        batch, error = answers.get(timeout=deadline_s)
    except queue.Empty:
        if fallback is None:
            raise NoFirstBatchError(f"{loader.name} gave no batch within {deadline_s:g} s") from None
        return FirstBatch(fallback.fetch(), fallback.name, time.monotonic() - begin)
    if error is not None:
        raise error
    return FirstBatch(batch, loader.name, time.monotonic() - begin)  # type: ignore[arg-type]


def _fetch(loader: Loader[T], answers: queue.SimpleQueue[tuple[T | None, BaseException | None]]) -> None:
    try:
        answers.put((loader.fetch(), None))
    except BaseException as error:
        answers.put((None, error))
