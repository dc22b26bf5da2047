"""What a child tells the runner: one line of JSON per event, each in one write."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any


def tell(fd: int, event: str, **facts: Any) -> None:
    """Write one event. NaN is written as null: None is what is not known to be finite."""
    line = json.dumps({"event": event, "at": time.monotonic(), **facts}, separators=(",", ":"), allow_nan=False) + "\n"
    data = line.encode()
    while data:
        data = data[os.write(fd, data) :]


@dataclass(frozen=True)
class Heartbeat:
    """The `step` that a repro calls; see `regression.incident.Step`."""

    fd: int
    device: str
    backends: tuple[str, ...]

    def __call__(self, n: int, **figures: float) -> None:
        finite = {name: value if abs(value) < float("inf") else None for name, value in figures.items()}
        tell(self.fd, "step", n=n, figures=finite)
