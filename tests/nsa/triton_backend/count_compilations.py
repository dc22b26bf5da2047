"""How often each kernel is compiled as lengths come and go, printed as JSON: {kernel: compilations}.

Run as a process of its own, without Triton's interpreter, with the compute capability, G, Dk, Dv and queries/keys of
each call: `python -m tests.nsa.triton_backend.count_compilations 90 16 128 128 1/2049 1/2064`. `fault` instead of the
first of these lets the selected forward know its lengths, `hopper/`'s too.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from nsa.triton_backend import hopper, selected
from nsa.triton_backend.ahead_of_time import Heads, call, recorded


def main() -> None:
    architecture, group, dk, dv = map(int, sys.argv[1:5])
    calls = sys.argv[5:]
    if calls[0] == "fault":
        for forward in (selected._forward, *([hopper.selected._forward] if hopper.AVAILABLE else [])):
            for parameter in forward.params:
                parameter.do_not_specialize = False
        calls = calls[1:]
    with recorded(architecture) as launches:
        for lengths in calls:
            queries, keys = map(int, lengths.split("/"))
            call(Heads(group, dk, dv), queries, keys, backward=queries == keys)
    print(json.dumps(Counter(launch.name for launch in launches)))


if __name__ == "__main__":
    main()
