"""The child process of a memory case: make the inputs, one call, its peak, then the oracle on the same inputs.

The oracle comes after the peak, because what it allocates would hide the call's; the figure leaves this process only
if the oracle is green. Usage: python -m benchmarks.timing.memory_child '{"key": {...}, "seed": 1}'; the last line of
stdout is JSON: {"gate", "peak"}, or with the exit code `memory.FAILED` {"gate", "outcome", "reason"}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from benchmarks import runner
from benchmarks.correctness.verify import joined
from benchmarks.history.key import Key
from benchmarks.history.records import Gate
from benchmarks.timing import memory
from benchmarks.timing.memory import PeakMemory
from benchmarks.workloads import attention

_WARM_UP_TOKENS = 128  # loads the libraries and starts the threads, too small to show


def main() -> int:
    """Answer for the key and the seed of the task in the first argument."""
    task = json.loads(sys.argv[1])
    key = Key(**task["key"])
    try:
        gate, peak = _measured(key, task["seed"])
    except Exception as error:
        outcome, reason = runner.classify(error, key.implementation)
        _print({"gate": getattr(error, "gate", None), "outcome": outcome.value, "reason": reason})
        return memory.FAILED
    _print({"gate": gate, "peak": peak})
    return 0


def _measured(key: Key, seed: int) -> tuple[Gate, PeakMemory]:
    small = dataclasses.replace(key, num_queries=_WARM_UP_TOKENS, num_keys=_WARM_UP_TOKENS)
    attention.prepare(small, "cpu").call()
    work = attention.prepare(key, "cpu")
    peak = memory.of_this_process(work.call)
    before = work.check(seed)
    assert work.recheck is not None
    return joined(before, work.recheck(work.call, seed)), peak


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer, allow_nan=False, default=dataclasses.asdict))


if __name__ == "__main__":
    sys.exit(main())
