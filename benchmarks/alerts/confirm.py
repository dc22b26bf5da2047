"""Does an alert hold? A paired re-run of its worst cases, then a search for the commit, both by `compare`.

SLOWER confirms it, SAME or FASTER in every case ends it as not reproduced, and UNDECIDED leaves it as it was. Where
several commits are suspect, those that run the same on the device as the good or the slow one are not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.ab import bisect
from benchmarks.ab.device_code import DeviceCode
from benchmarks.ab.result import CompareVerdict, ComparisonResult
from benchmarks.alerts.commits import owner
from benchmarks.cases.key import Key
from benchmarks.history.alerts import Alert, AlertCase, AlertEvent, AlertState

MOST_CASES = 4
"""That are measured again: they show the cause, and 19 would take the machine for an hour."""
Compare = Callable[[str, str, Sequence[str]], Sequence[ComparisonResult]]
"""(good commit, other commit, cases by name) -> a result for each case."""
Compile = Callable[[str, Key], DeviceCode]
"""(commit, case) -> what it runs on the device."""


def worst(alert: Alert) -> list[str]:
    """The cases to measure again: the slowest of each mode, then the slowest of the rest."""
    names = list(dict.fromkeys(case.case for case in alert.cases))
    first = dict.fromkeys(name.partition("/")[0] for name in names)
    of_modes = [next(name for name in names if name.partition("/")[0] == mode) for mode in first]
    return [*of_modes, *(name for name in names if name not in of_modes)][:MOST_CASES]


def confirm(alert: Alert, compare: Compare, utc: Callable[[], str]) -> tuple[AlertEvent, ComparisonResult | None]:
    """What a paired re-run says; and the result that shows the slowdown most, None where none does."""
    last = alert.history[-1]
    if not alert.suspects:
        why = "no commit between the last fast and the first slow run changes nsa/: the code is the same"
        return replace(last, utc=alert.after(utc()), state=AlertState.NOT_REPRODUCED, why=why, cases=()), None
    if alert.good is None:
        why = "cannot be measured again: no fast commit is known"
        return replace(last, utc=alert.after(utc()), why=why, cases=()), None
    found = compare(alert.good, alert.suspects[-1], worst(alert))
    counts = Counter(one.verdict for one in found)
    if not found:
        return replace(
            last, utc=alert.after(utc()), why="cannot be measured again: today's suite has none of its cases", cases=()
        ), None
    message = f"{alert.suspects[-1][:10]} beside {alert.good[:10]}: " + ", ".join(
        f"{count} {verdict.value}" for verdict, count in counts.most_common()
    )
    slower = [one for one in found if one.verdict is CompareVerdict.SLOWER]
    event = replace(last, utc=alert.after(utc()), good=alert.good, suspects=alert.suspects, owner=alert.owner, cases=())
    if slower:
        cases = tuple(map(_case, slower))
        return replace(event, state=AlertState.CONFIRMED, why=message, cases=cases), max(slower, key=_change)
    if set(counts) <= {CompareVerdict.SAME, CompareVerdict.FASTER}:
        return replace(event, state=AlertState.NOT_REPRODUCED, why=message), None
    return replace(event, why=f"not decided: {message}"), None


def _case(one: ComparisonResult) -> AlertCase:
    return AlertCase(one.key.name, one.fingerprint.device, _change(one), one.interval, one.utc, "compare")


def _change(one: ComparisonResult) -> float:
    assert one.change is not None, "what is SLOWER was measured"
    return one.change


@dataclass
class _Search:
    """Answers what a commit is beside the good one; by its device code where that is enough."""

    alert: Alert
    shown: ComparisonResult
    """The slow commit beside the good one, on the case that is asked."""
    compare: Compare
    compile: Compile | None
    """None where the case is not decided by what runs on a GPU."""
    equal: int = 0
    """Commits that were not measured."""

    def __post_init__(self) -> None:
        self._ends: tuple[DeviceCode, DeviceCode] | None = None

    def ask(self, commit: str) -> CompareVerdict:
        assert self.alert.good is not None
        if self.compile is not None and (known := self._by_code(self.compile, commit)) is not None:
            self.equal += 1
            return known
        (found,) = self.compare(self.alert.good, commit, [self.shown.key.name])
        return found.verdict

    def _by_code(self, compile_: Compile, commit: str) -> CompareVerdict | None:
        assert self.alert.good is not None
        if self._ends is None:
            self._ends = (
                compile_(self.alert.good, self.shown.key),
                compile_(self.alert.suspects[-1], self.shown.key),
            )
        good, bad = self._ends
        if good.sha256 is None or good.same(bad):  # what makes it slow is not in its kernels
            return None
        here = compile_(commit, self.shown.key)
        if here.same(good):
            return CompareVerdict.SAME
        return CompareVerdict.SLOWER if here.same(bad) else None


def find_commit(
    alert: Alert, shown: ComparisonResult, compare: Compare, compile_: Compile | None, utc: Callable[[], str]
) -> AlertEvent:
    """Fewer suspects of a confirmed alert, asked by halves. `shown`: its slow commit beside the good one."""
    search = _Search(alert, shown, compare, compile_)
    found = bisect.first_slow(alert.suspects, search.ask)
    first = alert.suspects.index(found.commits[0])
    good = alert.suspects[first - 1] if first else alert.good
    asked = Counter(verdict.value for verdict in found.verdicts.values())
    message = ", ".join(f"{count} {name}" for name, count in asked.items())
    left = "found" if len(found.commits) == 1 else f"{len(found.commits)} commits are left"
    why = f"bisect on {shown.key.name}: {left}, asked {len(found.verdicts)} ({message})"
    if search.equal:
        why += f"; {search.equal} of them have the same kernels as the good or the slow commit and were not measured"
    return replace(
        alert.history[-1],
        utc=alert.after(utc()), state=AlertState.CONFIRMED, why=why, good=good, suspects=found.commits,
        owner=owner(found.commits), cases=(),
    )  # fmt: skip
