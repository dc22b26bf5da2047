"""Peak memory above what stood before the call: PyTorch's allocator on a GPU, a fresh child process on the CPU.

On Linux the child resets the kernel's high-water mark of its resident set after the inputs are made, so that the
peak is exact, however short; with glibc told to give freed memory back, what the call frees counts once.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.history.key import Key
from benchmarks.history.records import Gate, Outcome
from harness import schema
from harness.isolate import Child

MIB = 2**20
FAILED = 3
"""Exit code of a child that tells what went wrong; Python itself exits with 1 and 2."""
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_HIGH_WATER = "5"
_MMAP_THRESHOLD_BYTES = 2**16
_CHILD = "benchmarks.timing.memory_child"


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
    """Gate and peak of one key from a guarded `memory_child`; the seed draws what is compared.

    Raises ChildError, or subprocess.TimeoutExpired at the deadline.
    """
    status, said, log = _run_child({"key": dataclasses.asdict(key), "seed": seed}, deadline_s)
    if status == -signal.SIGKILL:
        raise ChildError(Outcome.OUT_OF_MEMORY, "the child was killed (SIGKILL), as Linux does when memory runs out")
    if status not in (0, FAILED):
        raise ChildError(Outcome.CRASHED, (log.strip() or f"exit code {status}").splitlines()[-1])
    answer = json.loads(said.splitlines()[-1])
    gate = None if answer["gate"] is None else schema.build(Gate, answer["gate"], "gate")
    if gate is None or status == FAILED:
        raise ChildError(Outcome(answer["outcome"]), answer["reason"], gate)
    return gate, PeakMemory(**answer["peak"])


def _run_child(task: Mapping[str, Any], deadline_s: float) -> tuple[int, str, str]:
    """Exit status, stdout and the end of stderr of the child."""
    kept = {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES)}
    with Child(_CHILD, task, kept, stdout=subprocess.PIPE) as child:
        said = child.communicate(deadline_s).decode()
        return child.wait(), said, child.log_tail()
