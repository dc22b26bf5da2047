"""What a later process finds in Triton's cache, printed as JSON: {"compiled": [names], "found": [names]}.

Run as a process of its own, without Triton's interpreter, with the arguments of `nsa.warm`. Triton's launcher, keys and
cache are the real ones, and nothing of `nsa.warm.precompile` takes part: only the driver of a GPU that is not
there and the launch itself are left out.
"""

from __future__ import annotations

import json
import sys
from functools import partialmethod
from typing import Any
from unittest import mock

import triton
from triton.runtime.jit import JITFunction

from nsa.triton_backend import ahead_of_time, decode, dispatch
from nsa.triton_backend import architecture as served
from nsa.triton_backend.compile_log import Compilation, listening
from nsa.warm import __main__ as command


def main() -> None:
    options = command._parser().parse_args()
    architecture, sms = command._gpu(options)
    seen: list[Compilation] = []
    run: Any = JITFunction.run
    with (
        mock.patch.object(triton.runtime.driver, "_active", ahead_of_time._Driver(architecture)),
        mock.patch.object(JITFunction, "run", partialmethod(_without_launch, run)),
        mock.patch.object(dispatch, "_why_not_here", return_value=None),
        mock.patch.object(served, "of_gpu", return_value=architecture),
        mock.patch.object(decode, "num_sms", return_value=sms or ahead_of_time.SMS[architecture]),
        listening(seen.append),
    ):
        for workload in reversed(command._wanted(options)):  # in another order than they were compiled
            workload.call()
    names = {found: sorted(one.name for one in seen if one.was_there is found) for found in (False, True)}
    print(json.dumps({"compiled": names[False], "found": names[True]}))


def _without_launch(self: JITFunction, run: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    return run(self, *args, grid=grid, warmup=True, **options)


if __name__ == "__main__":
    sys.exit(main())
