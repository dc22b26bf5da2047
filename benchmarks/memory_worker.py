"""A memory case in a guarded child: make the inputs, one call, its peak, then the oracle on the same inputs.

The oracle comes after the peak, because what it allocates would hide the call's; the figure leaves that process only
if the oracle is green. `python -m benchmarks.memory_worker '{"key": {...}, "seed": 1}'` is the child; the last line of
its stdout is JSON: {"correctness", "peak"}, or with the exit code `FAILED` {"correctness", "outcome", "reason"}.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.correctness import integrity, known_answer
from benchmarks.correctness.verify import joined
from benchmarks.errors import MemoryChildError, classify
from benchmarks.timing import memory
from benchmarks.timing.memory import PeakMemory
from benchmarks.workloads import attention
from harness import schema
from harness.isolate import Child

FAILED = 3
"""Exit code of a child that tells what went wrong; Python itself exits with 1 and 2."""
_CHILD = "benchmarks.memory_worker"
_MMAP_THRESHOLD_BYTES = 2**16
_WARM_UP_TOKENS = 128  # loads the libraries and starts the threads, too small to show


def measure(key: Key, deadline_s: float, seed: int) -> tuple[Correctness, PeakMemory]:
    """Correctness and peak of one key from a guarded child; the seed draws what is compared.

    Raises MemoryChildError, or subprocess.TimeoutExpired at the deadline.
    """
    status, printed, log = _run_child({"key": dataclasses.asdict(key), "seed": seed}, deadline_s)
    if status == -signal.SIGKILL:
        raise MemoryChildError(
            CaseOutcome.OUT_OF_MEMORY, "the child was killed (SIGKILL), as Linux does when memory runs out"
        )
    if status not in (0, FAILED):
        raise MemoryChildError(CaseOutcome.CRASHED, (log.strip() or f"exit code {status}").splitlines()[-1])
    answer = json.loads(printed.splitlines()[-1])
    found = answer["correctness"]
    correctness = None if found is None else schema.build(Correctness, found, "correctness")
    if correctness is None or status == FAILED:
        raise MemoryChildError(CaseOutcome(answer["outcome"]), answer["reason"], correctness)
    return correctness, PeakMemory(**answer["peak"])


def _run_child(task: Mapping[str, Any], deadline_s: float) -> tuple[int, str, str]:
    """Exit status, stdout and the end of stderr of the child."""
    kept = {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES)}
    with Child(_CHILD, task, kept, stdout=subprocess.PIPE) as child:
        printed = child.communicate(deadline_s).decode()
        return child.wait(), printed, child.log_tail()


def main() -> int:
    """Answer for the key and the seed of the task in the first argument."""
    task = json.loads(sys.argv[1])
    key = Key(**task["key"])
    try:
        correctness, peak = _measured(key, task["seed"])
    except Exception as error:
        outcome, reason = classify(error, key.implementation)
        _print({"correctness": getattr(error, "correctness", None), "outcome": outcome.value, "reason": reason})
        return FAILED
    _print({"correctness": correctness, "peak": peak})
    return 0


def _measured(key: Key, seed: int) -> tuple[Correctness, PeakMemory]:
    small = dataclasses.replace(key, num_queries=_WARM_UP_TOKENS, num_keys=_WARM_UP_TOKENS)
    attention.prepare(small, "cpu").call()
    work = attention.prepare(key, "cpu")
    peak = memory.of_this_process(work.call)
    before = work.check(seed)
    assert work.recheck is not None
    found = joined(before, work.recheck(work.call, seed))
    known_answer.require_known_answers()
    integrity.require_intact()
    return found, peak


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer, allow_nan=False, default=dataclasses.asdict))


if __name__ == "__main__":
    sys.exit(main())
