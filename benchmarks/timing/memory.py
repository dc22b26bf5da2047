"""Peak memory above what stood before the call: PyTorch's allocator on a GPU, a fresh child process on the CPU.

On Linux the child resets the kernel's high-water mark of its resident set after the inputs are made, so that the
peak is exact, however short; with glibc told to give freed memory back, what the call frees counts once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.history.key import Key
from benchmarks.history.records import Gate, Outcome
from harness import schema
from harness.fingerprint import ROOT

MIB = 2**20
FAILED = 3
"""Exit code of a child that tells what went wrong; Python itself exits with 1 and 2."""
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_HIGH_WATER = "5"
_MMAP_THRESHOLD_BYTES = 2**16


class ChildError(Exception):
    """The child has no figure: what became of it, and why; its comparison with the oracle, where there is one."""

    def __init__(self, outcome: Outcome, reason: str, gate: Gate | None = None) -> None:
        self.outcome, self.gate = outcome, gate
        super().__init__(reason)


@dataclass(frozen=True)
class PeakMemory:
    """What one call needed, and how that was read."""

    mib: float
    source: str


def of_cuda(call: Callable[[], object]) -> PeakMemory:
    """Outputs, saved tensors and scratch of one call on the current GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return PeakMemory((torch.cuda.max_memory_allocated() - before) / MIB, "cuda_allocator")


def of_this_process(call: Callable[[], object]) -> PeakMemory:
    """The same on the CPU, for a process that has done nothing large before. OSError where it is not Linux."""
    _CLEAR_REFS.write_text(_RESET_HIGH_WATER)
    before = _high_water_mib()
    call()
    return PeakMemory(_high_water_mib() - before, "rss_high_water")


def _high_water_mib() -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024  # the kernel's "kB" are KiB


def in_child(key: Key, deadline_s: float, seed: int) -> tuple[Gate, PeakMemory]:
    """Gate and peak of one key from `python -m benchmarks.timing.memory_child`; the seed draws what is compared.

    Raises ChildError, or subprocess.TimeoutExpired at the deadline.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.timing.memory_child", json.dumps(dataclasses.asdict(key)), str(seed)],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        cwd=ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES)},
    )
    if done.returncode == -signal.SIGKILL:
        raise ChildError(Outcome.OUT_OF_MEMORY, "the child was killed (SIGKILL), as Linux does when memory runs out")
    if done.returncode not in (0, FAILED):
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ChildError(Outcome.CRASHED, last)
    answer = json.loads(done.stdout.splitlines()[-1])
    gate = None if answer["gate"] is None else schema.build(Gate, answer["gate"], "gate")
    if gate is None or done.returncode == FAILED:
        raise ChildError(Outcome(answer["outcome"]), answer["reason"], gate)
    return gate, PeakMemory(**answer["peak"])
