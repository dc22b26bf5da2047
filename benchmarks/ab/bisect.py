"""The first slow commit between a good and a bad one, asked by halves; commits that give no answer are passed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.ab.result import CompareVerdict

Ask = Callable[[str], CompareVerdict]
"""What a commit is beside the good one."""


@dataclass(frozen=True)
class Suspects:
    """Where the slowdown came in: one commit, or several where those between gave no answer."""

    commits: tuple[str, ...]
    """Oldest first; the last one is slow."""
    verdicts: dict[str, CompareVerdict]
    """What was asked, in that order."""


def first_slow(commits: Sequence[str], ask: Ask) -> Suspects:
    """Search the commits after the good one, oldest first, of which the last one is known to be slow."""
    verdicts: dict[str, CompareVerdict] = {}
    begin, end = 0, len(commits) - 1  # the first slow one is in commits[begin : end + 1], and commits[end] is slow
    while open_ := [i for i in range(begin, end) if commits[i] not in verdicts]:
        middle = min(open_, key=lambda i: abs(2 * i - begin - end + 1))
        verdict = verdicts[commits[middle]] = ask(commits[middle])
        if verdict is CompareVerdict.SLOWER:
            end = middle
        elif verdict in (CompareVerdict.SAME, CompareVerdict.FASTER):
            begin = middle + 1
    return Suspects(tuple(commits[begin : end + 1]), verdicts)
