"""What tests of children ask: how one ended, and which processes still run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from harness.isolate import Child
from harness.watch import ChildEnd, Deadline, watch
from tests.harness import workers

FLOOR_S = 1.0


def watched(function: str) -> tuple[ChildEnd, list[Mapping[str, Any]]]:
    """How the worker ended, and what it sent."""
    sent: list[Mapping[str, Any]] = []
    with Child(workers.__name__, {"function": function}) as child:
        outcome = watch(child, Deadline(FLOOR_S), threading.Event(), sent.append)
    return outcome, sent


def alive(pids: list[int]) -> list[int]:
    """Which of them still run; a zombie that nobody has reaped yet runs no more."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if runs(pid)]


def until(true: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
