"""A loader that never answers ends in an error that names it; a fallback is taken only if asked for, and recorded."""

from __future__ import annotations

import threading
import time

import pytest

from nsa.train.loader import BatchFetcher, NoFirstBatchError, first_batch

SYNTHETIC = BatchFetcher("synthetic", lambda: 0)


@pytest.fixture
def silent() -> BatchFetcher[int]:
    """Waits for something that nobody gives."""
    return BatchFetcher("fineweb", lambda: int(threading.Event().wait(600)))


def broken() -> int:
    raise ConnectionRefusedError("no route")


def test_answers() -> None:
    got = first_batch(BatchFetcher("disk", lambda: 7), 5.0, SYNTHETIC)
    assert (got.batch, got.source) == (7, "disk")
    assert got.waited_s < 5


def test_silence_has_a_deadline_and_a_name(silent: BatchFetcher[int]) -> None:
    begin = time.monotonic()
    with pytest.raises(NoFirstBatchError, match=r"fineweb gave no batch within 0\.2 s"):
        first_batch(silent, 0.2)
    assert time.monotonic() - begin < 5


def test_fallback_is_recorded(silent: BatchFetcher[int]) -> None:
    got = first_batch(silent, 0.2, SYNTHETIC)
    assert (got.batch, got.source) == (0, "synthetic")
    assert got.waited_s >= 0.2


def test_an_error_is_no_silence() -> None:
    """The fallback does not hide it."""
    with pytest.raises(ConnectionRefusedError, match="no route"):
        first_batch(BatchFetcher("fineweb", broken), 5.0, SYNTHETIC)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_deadline_must_be_above_0(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="deadline_s must be above 0; got"):
        first_batch(SYNTHETIC, deadline_s)
