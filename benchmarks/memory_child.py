"""The child process of a memory case: make the inputs, one call, its peak, then the oracle on the same inputs.

The oracle comes after the peak, because what it allocates would hide the call's; the figure leaves this process only
if the oracle is green. Usage: python -m benchmarks.memory_child '<key as JSON>'; the last line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from benchmarks import memory
from benchmarks.cases import attention
from benchmarks.records import Key

_WARM_UP_TOKENS = 128  # loads the libraries and starts the threads, too small to show


def main() -> None:
    """Answer for the key in the first argument."""
    key = Key(**json.loads(sys.argv[1]))
    small = dataclasses.replace(key, num_queries=_WARM_UP_TOKENS, num_keys=_WARM_UP_TOKENS)
    attention.prepare(small, "cpu").call()
    work = attention.prepare(key, "cpu")
    peak = memory.of_this_process(work.call)
    gate = work.check()
    print(json.dumps({"gate": dataclasses.asdict(gate), "peak": dataclasses.asdict(peak)}, allow_nan=False))


if __name__ == "__main__":
    main()
