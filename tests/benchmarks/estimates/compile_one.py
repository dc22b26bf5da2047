"""Compile and count the selected forward of 16 heads of 128 for sm80, and print what was found as JSON.

Run as a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import json
from unittest import mock

from benchmarks.estimates import kernels


def main() -> None:
    with mock.patch.object(kernels, "COUNTED", ("selected._forward",)):
        (found,) = kernels.compiled((80,), ((16, 128, 128),))
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    main()
