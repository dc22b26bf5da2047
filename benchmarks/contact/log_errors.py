"""The error that ended a command, in the log that it left: what the log mentions beside it decides nothing.

A log names a compiler or a driver for many reasons: a warning, a skipped test, what a test of another fault printed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.cases.outcome import FAULTS

_RED = re.compile(
    r"FAILED |ERROR |E  "  # pytest
    r"|\[.* RED: "  # regression.session.progress
    rf"|(\[.*\] )?\S+/nsa +({'|'.join(outcome.value for outcome in FAULTS)})\b"  # benchmarks.console.progress
)
_SAYS_WHY = re.compile(r"E  |.* - |(?!FAILED |ERROR )(?!.*(was ended by SIG|ended with code|exit status))")
"""A red line that does not match tells only that a process ended."""
_ABORTED = re.compile(r"LLVM ERROR: |.*Assertion .* failed\.?$|terminate called|  what\(\): |Fatal Python error: ")
"""The last words of a process that raises nothing."""
_TRACEBACK, _NOT_RAISED = "Traceback (most recent call last):", "Exception ignored in"
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_ERROR = re.compile(r"[\w.]*(Error|Exception)(:|$)|python -m \w+: |\S+: (fatal )?error: |ERROR: ")


def ending(log: str) -> list[str]:
    """The lines of the error that ended it, in their order; empty for an empty log.

    What the command itself calls red comes first; where that is a process that was aborted, its last words; else the
    last exception, with those that it was raised from, or a later line that has the form of an error; else the last
    line.
    """
    lines = [line.rstrip() for line in log.splitlines() if not line.startswith("{")]
    red, aborted = ([line for line in lines if of.match(line)] for of in (_RED, _ABORTED))
    if any(_SAYS_WHY.match(line) for line in red):
        return red
    return aborted or red or _last_error(lines) or [line for line in lines if line][-1:]


def _last_error(lines: Sequence[str]) -> list[str]:
    """First lines of messages: of an exception and those that it was raised from, or of a line like an error."""
    found: list[str] = []
    traceback = ignored = chained = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line == _TRACEBACK:
            traceback, ignored = True, before.startswith(_NOT_RAISED)
        elif traceback and line and not line.startswith(" "):
            found = found if ignored else [*(found if chained else []), line]
            traceback = chained = False
        elif line.startswith(_CHAINED):
            chained = True
        elif not traceback and _ERROR.match(line):
            found = [line]
    return found
