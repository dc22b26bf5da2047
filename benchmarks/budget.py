"""Which cases a limited time is spent on, and which are left for another night.

First the cases that were measured longest ago, until a seventh of the time of all cases is planned: seven nights
measure each case, however little it tells. Then those that tell the most per second: whose comparisons are least known
to find a slowdown, which the changed sources reach, and which were measured longest ago. What a case costs is known
from its records.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from benchmarks.ab.calibration import Calibration
from benchmarks.cases.key import NSA, Key
from benchmarks.history.store import CaseVisit

NIGHTS = 7
"""Within which each case is measured."""
UNKNOWN_COST_S = 15.0
"""Of one implementation of a case, where neither it nor another of its mode has a record with its time."""
REACHED = 4.0
"""How much more a case tells that runs changed sources."""
LEAST_UNKNOWN = 0.05
"""What a case tells whose comparisons find every slowdown: something still, its machine may change."""
SLOWDOWN = 0.03
"""Whose power counts."""
_DAY_S = 86400.0


@dataclass(frozen=True)
class BudgetCase:
    """A case with all that is measured of it, NSA and baselines."""

    case: str
    keys: tuple[Key, ...]
    cost_s: float
    last_utc: str
    """When it was last measured, in this machine's records; "" where it never was."""
    unknown: float = 1.0
    """1 less the share of slowdowns that comparisons of it are known to find."""
    reached: bool = True
    """Whether it runs sources that have changed since it was measured."""

    def information(self, now_utc: str) -> float:
        """What measuring it tells, without a unit; one that never was counts as if `NIGHTS` days ago."""
        days = _days(self.last_utc, now_utc) if self.last_utc else NIGHTS
        return max(self.unknown, LEAST_UNKNOWN) * (REACHED if self.reached else 1.0) * min(max(days, 0.1), NIGHTS)


@dataclass(frozen=True)
class BudgetPlan:
    """What is measured, in this order, and what is not."""

    chosen: tuple[BudgetCase, ...]
    left_out: tuple[BudgetCase, ...]
    needed_s: float
    """Per night, with which each case is measured within `NIGHTS` nights."""
    budget_s: float

    @property
    def enough(self) -> bool:
        """Whether each case is measured within `NIGHTS` nights."""
        return self.budget_s >= self.needed_s


def choose(cases: Sequence[BudgetCase], budget_s: float, now_utc: str) -> BudgetPlan:
    """Spend the budget; at least one case is chosen."""
    share_s = sum(case.cost_s for case in cases) / NIGHTS
    left_s, chosen = budget_s, list[BudgetCase]()
    for case in sorted(cases, key=lambda one: (one.last_utc, one.case)):
        rotated_s = sum(one.cost_s for one in chosen)
        if rotated_s >= share_s or (chosen and case.cost_s > left_s):
            break
        chosen.append(case)
        left_s -= case.cost_s
    taken = {case.case for case in chosen}
    rest = [case for case in cases if case.case not in taken]
    for case in sorted(rest, key=lambda one: (-one.information(now_utc) / one.cost_s, one.case)):
        if case.cost_s <= left_s:
            chosen.append(case)
            left_s -= case.cost_s
    taken = {case.case for case in chosen}
    left_out = tuple(case for case in cases if case.case not in taken)
    return BudgetPlan(tuple(chosen), left_out, share_s + max((case.cost_s for case in cases), default=0.0), budget_s)


def cases(
    keys: Iterable[Key],
    visits: Mapping[str, Sequence[CaseVisit]],
    calibrated: Calibration | None,
    nsa_sha256: str | None = None,
) -> list[BudgetCase]:
    """The keys by case, with what is known of each from this machine's records.

    `nsa_sha256`: of the sources that are measured; None where all cases are known to be reached.
    """
    by_case: dict[str, list[Key]] = {}
    for key in keys:
        by_case.setdefault(key.case, []).append(key)
    by_mode: dict[str, list[float]] = {}
    for name, of_key in visits.items():
        by_mode.setdefault(name.partition("/")[0], []).extend(_costs(of_key))
    found = []
    for case, of_case in by_case.items():
        own = visits.get(f"{case}/{NSA}", ())
        last = max((visit.utc for visit in own), default="")
        sources = {visit.nsa_sha256 for visit in own if visit.utc == last}
        cost_s = sum(_cost_s(visits.get(key.name, ()), by_mode.get(key.mode, ())) for key in of_case)
        reached = nsa_sha256 is None or sources != {nsa_sha256}
        found.append(BudgetCase(case, tuple(of_case), cost_s, last, unknown_power(calibrated, case), reached))
    return found


def _cost_s(own: Sequence[CaseVisit], of_mode: Sequence[float]) -> float:
    """The median of its last three, else of its mode."""
    known = _costs(own)[-3:] or of_mode
    return statistics.median(known) if known else UNKNOWN_COST_S


def _costs(found: Sequence[CaseVisit]) -> list[float]:
    return [visit.case_s for visit in found if visit.case_s]


def unknown_power(calibrated: Calibration | None, case: str) -> float:
    """1 less the power that its calibration is sure of, or, where it was not calibrated, that of its mode; else 1."""
    if calibrated is None:
        return 1.0
    powers: dict[str, float] = {}
    for one in calibrated.cases:
        known = [rate.least_power for rate in one.rates if rate.slowdown == SLOWDOWN]
        powers[one.case] = known[0] if known else 0.0
    if (own := powers.get(f"{case}/{NSA}")) is not None:
        return 1.0 - own
    of_mode = [power for name, power in powers.items() if name.partition("/")[0] == case.partition("/")[0]]
    return 1.0 - statistics.fmean(of_mode) if of_mode else 1.0


def message(plan: BudgetPlan) -> str:
    """What a person reads before it begins: how much of it is measured, and the names of the rest."""
    count, planned_s = len(plan.chosen), sum(case.cost_s for case in plan.chosen)
    if planned_s > plan.budget_s:  # `choose` takes one case at least
        lines = [
            f"the budget of {minutes(plan.budget_s)} suffices for no case; 1 case is measured all the same, about"
            f" {minutes(planned_s)}"
        ]
    elif plan.left_out:
        total = count + len(plan.left_out)
        lines = [f"{count} of {total} cases fit in the budget of {minutes(plan.budget_s)}"]
    else:
        return f"the budget of {minutes(plan.budget_s)} suffices for all {count} cases"
    if plan.left_out:
        lines[0] += f"; UNMEASURED: {', '.join(case.case for case in plan.left_out)}"
    if not plan.enough:
        lines.append(f"each case within {NIGHTS} nights needs {minutes(plan.needed_s)} a night")
    return "\n".join(lines)


def minutes(time_s: float) -> str:
    """20 min; below two minutes in seconds."""
    return f"{time_s:.0f} s" if time_s < 120 else f"{time_s / 60:.0f} min"


def _days(then_utc: str, now_utc: str) -> float:
    then, now = (datetime.fromisoformat(utc.replace("Z", "+00:00")) for utc in (then_utc, now_utc))
    return (now - then).total_seconds() / _DAY_S
