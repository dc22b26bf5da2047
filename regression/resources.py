"""What this process holds and uses now."""

from __future__ import annotations

import time

import psutil
import torch

MIB = 2**20


def memory_mib(device: str) -> float:
    """Allocated on the current GPU, or resident of this process, in MiB."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / MIB
    return float(psutil.Process().memory_info().rss) / MIB


def clock_s(device: str) -> float:
    """Seconds of work: on a CPU the time that this process ran, which its neighbours change little."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
