"""The table of verdicts: a row per machine and case, the worst first, with what the first page answers from it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from benchmarks.cases.outcome import FAULTS, CaseOutcome
from benchmarks.history import judgement, trend
from benchmarks.history.accepted import Acceptance
from benchmarks.history.judgement import CaseState, Judgement
from benchmarks.history.records import Record
from benchmarks.history.speedup import BaselineComparison
from benchmarks.history.trend import SeriesTrend
from benchmarks.report import labels
from benchmarks.report.links import Link, Repository
from benchmarks.report.style import in_short
from benchmarks.report.table import percent

NEAR_RUNS, FAR_RUNS = 7, 30
"""A row says how the newest run differs from the median of so many before it."""
SPARKLINE_POINTS = 60
"""More runs than this are drawn as medians of neighbours."""
NOT_LATELY = 30
"""A case that so many runs of its mode have left out is not judged."""
_KINDS = {
    CaseState.WRONG: "bad",
    CaseState.SLOWER: "bad",
    CaseState.MAYBE_SLOWER: "warn",
    CaseState.FASTER: "good",
    CaseState.FIXED: "good",
}


@dataclass(frozen=True)
class NewestFigure:
    """The newest figure of a case, and how it stands."""

    text: str
    """"1.23M tokens/s"."""
    utc: str
    commit: Link
    reservations: tuple[str, ...]
    near: float | None
    """Change of the latency against the median of the last 7 runs; likewise below."""
    far: float | None
    accepted: float | None
    dense: tuple[float, str] | None
    """How many times as fast as the fastest dense baseline of the same run NSA is, and which one that is."""
    share_of_limit: float | None
    sparkline: tuple[float, ...]
    """Throughputs, oldest first."""


@dataclass(frozen=True)
class VerdictRow:
    """One case on one machine."""

    machine: str
    device: str
    mode: str
    heads: str
    size: str
    further: str
    dtype: str
    inputs: str
    href: str
    """Its chart, at the run in question."""
    judgement: Judgement
    since: Link | None
    since_utc: str
    difference: Link | None
    value: NewestFigure | None
    """None where no run has a figure."""

    @property
    def state(self) -> str:
        return self.judgement.state.value

    @property
    def kind(self) -> str:
        """How it is coloured."""
        return _KINDS.get(self.judgement.state, "")

    @property
    def change(self) -> str:
        """ "6.1 % slower", "" where nothing changed."""
        change = self.judgement.change
        if change is None:
            return ""
        return percent(abs(change)).lstrip("+") + (" slower" if change > 0 else " faster")

    @property
    def order(self) -> tuple[int, float, str, str, str]:
        """The worst first."""
        states = list(CaseState)
        by_change = -abs(self.judgement.change or 0.0)
        return states.index(self.judgement.state), by_change, self.machine, self.mode, self.size


def rows(
    machine: str,
    followed: Sequence[SeriesTrend],
    here: Sequence[BaselineComparison],
    baselines: Mapping[tuple[str, str, str], Acceptance],
    pages: Mapping[str, str],
    repository: Repository,
) -> list[VerdictRow]:
    """Every case of a machine that was timed. `pages`: identity of a series -> where its chart is; `here`: the newest
    comparisons, of which those without a figure count as well."""
    failed = {c.nsa.key.name: c.nsa for c in here if c.nsa.outcome is not CaseOutcome.PASSED}
    kept = trend.newest_paths(one.series for one in followed)
    newest = [one for one in followed if any(one.series is series for series in kept)]
    runs = _runs_of_modes(followed)
    found = []
    for one in newest:
        key, device = one.series.newest.key, one.series.newest.fingerprint.device
        accepted = baselines.get((machine, device, key.name))
        level_ms = judgement.accepted_ms(accepted, one)
        said = judgement.judge(one, level_ms, accepted)
        newer = sum(utc > one.series.points[-1].utc for utc in runs[device, key.mode])
        if newer >= NOT_LATELY:
            said = Judgement(CaseState.NOT_JUDGED, why=f"not in the last {newer} runs of this mode")
        if (without_figure := failed.pop(key.name, None)) is not None:
            said = _not_passed(without_figure)
        value = _value(one, level_ms, repository)
        found.append(_row(one.series.newest, said, pages[one.series.newest.identity], one, value, repository))
    found += [_row(record, _not_passed(record), "", None, None, repository) for record in failed.values()]
    return found


def _runs_of_modes(followed: Sequence[SeriesTrend]) -> dict[tuple[str, str], set[str]]:
    """UTC of every run, by device and mode."""
    runs: dict[tuple[str, str], set[str]] = {}
    for one in followed:
        name = (one.series.newest.fingerprint.device, one.series.newest.key.mode)
        runs.setdefault(name, set()).update(point.utc for point in one.series.points)
    return runs


def _not_passed(record: Record) -> Judgement:
    state = CaseState.WRONG if record.outcome in FAULTS else CaseState.NOT_JUDGED
    return Judgement(state, why=f"{record.outcome.value}: {record.reason}")


def _row(
    newest: Record,
    said: Judgement,
    href: str,
    one: SeriesTrend | None,
    value: NewestFigure | None,
    repository: Repository,
) -> VerdictRow:
    key = newest.key
    since, since_utc, difference = None, "", None
    if one is not None and said.since is not None:
        old, new = judgement.commits(one, said.since)
        since, difference = repository.commit(new), repository.difference(old, new)
        since_utc = one.series.points[said.since].utc
        href += f"&run={since_utc}"
    return VerdictRow(
        machine=newest.fingerprint.machine,
        device=newest.fingerprint.device,
        mode=labels.mode(key),
        heads=key.what,
        size=labels.size(key),
        further=labels.details(newest),
        dtype=key.dtype,
        inputs=key.inputs,
        href=href,
        judgement=said,
        since=since,
        since_utc=since_utc,
        difference=difference,
        value=value,
    )


def _value(one: SeriesTrend, level_ms: float | None, repository: Repository) -> NewestFigure:
    points = one.series.points
    newest = points[-1]
    dense = min(((ms, name) for name, ms in newest.dense_ms.items()), default=None)
    return NewestFigure(
        text=f"{in_short(labels.throughput(newest))} {labels.unit(newest)}",
        utc=newest.utc,
        commit=repository.commit(newest.fingerprint.commit),
        reservations=newest.reservations,
        near=judgement.against(one, NEAR_RUNS),
        far=judgement.against(one, FAR_RUNS),
        accepted=newest.latency_ms / level_ms - 1 if level_ms else None,
        dense=(dense[0] / newest.latency_ms, dense[1]) if dense else None,
        share_of_limit=newest.share_of_limit,
        sparkline=_thinned([labels.throughput(point) for point in points]),
    )


def _thinned(values: Sequence[float]) -> tuple[float, ...]:
    """At most `SPARKLINE_POINTS`."""
    step = -(-len(values) // SPARKLINE_POINTS)
    return tuple(statistics.median(values[first : first + step]) for first in range(0, len(values), step))


@dataclass(frozen=True)
class LastRun:
    """The newest run of a machine."""

    machine: str
    device: str
    utc: str
    days: int
    """Since it began."""
    overdue: bool


def last_run(machine: str, device: str, utc: str, now: datetime, overdue_days: float) -> LastRun:
    """`now`: aware, in UTC."""
    age = now - datetime.fromisoformat(utc.removesuffix("Z")).replace(tzinfo=timezone.utc)
    return LastRun(machine, device, utc, max(age.days, 0), age.total_seconds() > overdue_days * 86400)


@dataclass(frozen=True)
class Answers:
    """Of the first screen."""

    rows: Sequence[VerdictRow]
    """The worst first."""

    def of_state(self, *states: CaseState) -> list[VerdictRow]:
        """Rows in one of these states, the worst first."""
        return [row for row in self.rows if row.judgement.state in states]

    @property
    def faults(self) -> list[VerdictRow]:
        """Cases on which NSA is wrong or broken."""
        return self.of_state(CaseState.WRONG)

    @property
    def slower(self) -> list[VerdictRow]:
        """Seen by two runs, and not accepted."""
        return self.of_state(CaseState.SLOWER)

    @property
    def maybe_slower(self) -> list[VerdictRow]:
        return self.of_state(CaseState.MAYBE_SLOWER)

    @property
    def unjudged(self) -> list[VerdictRow]:
        return self.of_state(CaseState.NOT_JUDGED, CaseState.NEW)

    @property
    def news(self) -> list[VerdictRow]:
        """What is neither the same as before nor without a verdict."""
        quiet = (CaseState.SAME, CaseState.NOT_JUDGED, CaseState.NEW)
        return [row for row in self.rows if row.judgement.state not in quiet]

    @property
    def unjudged_why(self) -> list[tuple[str, int]]:
        """Reasons, without what is different in each, and how many cases each holds."""
        return Counter(row.judgement.why.partition(":")[0] for row in self.unjudged).most_common()

    @property
    def since(self) -> list[tuple[VerdictRow, int]]:
        """The commits that made cases slower: a row of each, and how many cases; the one with most first."""
        found: dict[str, list[VerdictRow]] = {}
        for row in self.slower or self.maybe_slower:
            if row.since is not None:
                found.setdefault(row.since.text, []).append(row)
        return [(same[0], len(same)) for same in sorted(found.values(), key=lambda same: -len(same))]

    @property
    def shares(self) -> list[float]:
        """Of the limit, ascending."""
        return sorted(row.value.share_of_limit for row in self.rows if row.value and row.value.share_of_limit)

    @property
    def ratios(self) -> list[float]:
        """Times as fast as the best dense baseline, ascending."""
        return sorted(row.value.dense[0] for row in self.rows if row.value and row.value.dense)
