"""Time to the first step: from the start of a new process to the end of its first training step.

What a person waits for: the interpreter, PyTorch, the model, what is compiled or read from caches, one step. The first
process finds empty caches of Triton's and Inductor's kernels, the others what it left there; its time is kept apart.
`python -m benchmarks.first_step '{...}'` is the process, which sends an event behind its first step and then compares
the model with the oracle; the time is this side's.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.errors import MemoryChildError, classify
from benchmarks.timing import device_clock
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads.prepare import prepare
from harness import schema
from harness.guard import send_event
from harness.isolate import Child

FAILED = 3
"""Exit code of a process that tells what went wrong."""
STEPPED = "first_step"
_FEWER = 4
"""Processes than the plan wants samples of others, since each takes seconds: 6 in a full run, which are enough for an
interval, and 2 in a quick one, whose record says that they are few."""


@dataclass(frozen=True)
class FirstSteps:
    """What the processes of one case took."""

    empty_cache_s: float
    """Of the first process, whose caches were empty."""
    samples_ms: tuple[float, ...]
    """Of the others, which found what it had compiled."""
    correctness: Correctness
    """Of the last one's model."""


def measure(key: Key, device: str, plan: SamplingPlan, deadline_s: float, seed: int) -> FirstSteps:
    """The first steps of one key, each in a process of its own; the seed draws what is compared.

    Raises MemoryChildError with what a process said, or subprocess.TimeoutExpired at the deadline of one.
    """
    task = {"key": dataclasses.asdict(key), "device": device, "seed": seed}
    taken_s, correctness = list[float](), None
    with tempfile.TemporaryDirectory(prefix="nsa-first-step-") as caches:
        environment = {
            "TRITON_CACHE_DIR": str(Path(caches, "triton")),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(caches, "inductor")),
        }
        for _ in range(1 + max(plan.min_samples - _FEWER, 1)):
            seconds, correctness = _one(task, environment, deadline_s)
            taken_s.append(seconds)
    assert correctness is not None
    return FirstSteps(taken_s[0], tuple(seconds * 1e3 for seconds in taken_s[1:]), correctness)


def _one(task: Mapping[str, Any], environment: Mapping[str, str], deadline_s: float) -> tuple[float, Correctness]:
    """(seconds to the first step, what was compared after it) of one process."""
    begin = time.perf_counter()
    with Child("benchmarks.first_step", task, environment, stdout=subprocess.PIPE) as child:
        stepped_s = None
        while stepped_s is None and child.running and (left_s := begin + deadline_s - time.perf_counter()) > 0:
            if any(event.get("event") == STEPPED for event in child.events(min(left_s, 1.0))):
                stepped_s = time.perf_counter() - begin
        said = child.communicate(max(begin + deadline_s - time.perf_counter(), 0.0)).decode()
        status, log = child.wait(), child.log_tail()
    if status not in (0, FAILED) or not said.strip():
        raise MemoryChildError(CaseOutcome.CRASHED, (log.strip() or f"exit code {status}").splitlines()[-1])
    answer = json.loads(said.splitlines()[-1])
    found = answer["correctness"]
    correctness = None if found is None else schema.build(Correctness, found, "correctness")
    if status == FAILED or stepped_s is None or correctness is None:
        raise MemoryChildError(CaseOutcome(answer["outcome"]), answer["reason"], correctness)
    return stepped_s, correctness


def main() -> int:
    """Make the first step, say so, and compare."""
    task = json.loads(sys.argv[1])
    key = Key(**task["key"])
    try:
        work = prepare(dataclasses.replace(key, mode="train-loop"), task["device"])
        work.call()
        if task["device"] == "cuda":
            device_clock.wait()
        send_event(task["events"], STEPPED)
        correctness = work.check(task["seed"])
    except Exception as error:
        outcome, reason = classify(error, key.implementation)
        _print({"correctness": getattr(error, "correctness", None), "outcome": outcome.value, "reason": reason})
        return FAILED
    _print({"correctness": correctness})
    return 0


def _print(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer, allow_nan=False, default=dataclasses.asdict))


if __name__ == "__main__":
    sys.exit(main())
