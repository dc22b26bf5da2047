"""A parent whose child stalls, as a process that can be killed: python -m tests.harness.stalled_parent."""

from __future__ import annotations

import threading

from harness.isolate import Child
from harness.watch import Deadline, watch


def main() -> None:
    """Watch the child for longer than any test lasts."""
    with Child("tests.harness.workers", {"function": "stalls"}) as child:
        watch(child, Deadline(600.0), threading.Event())


if __name__ == "__main__":
    main()
