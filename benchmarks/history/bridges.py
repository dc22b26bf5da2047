"""Where conditions change along a series, and across which of these changes its figures can be compared all the same.

Three things bridge a change, the first that is there:

- where only soft conditions changed, dense attention of the same runs: what its time shows of the change is taken out
  of NSA's, as far as NSA's own time shows it too;
- where a hard one changed, the same sources measured under both conditions (`anchors`). A step of the series within the
  interval of that ratio is the upgrade's doing; a larger one is NSA's, and as uncertain as the ratio;
- where an earlier record does not know a condition and all that both know is equal, dense attention again: what it
  shows at most of an unrecorded change is the uncertainty.

Without any of them the series is cut, and starts anew.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.history import conditions
from benchmarks.history.anchors import NOISE, AnchorRatio, SeriesAnchors, Z
from benchmarks.history.conditions import Conditions
from harness import fingerprint
from harness.fingerprint import Fingerprint

NEAR = 5
"""Runs on each side of a change that tell what it did."""
_SMALLEST_SIGMA = 0.002
_SIGMA_OF_FEW = 0.01  # at least, while fewer differences of neighbours than this tell the noise:
_FEW = 5


@dataclass(frozen=True)
class Break:
    """Here conditions begin that no run had before."""

    index: int
    differences: tuple[str, ...]
    """From the run before: "driver 555 -> 560"."""
    bridged: bool = False
    """Whether the series goes on all the same."""
    ratio: float | None = None
    """What the change did to the latency, as measured: 1.03 is 3 % longer; None over a soft change and a cut."""
    uncertainty: float = 0.0
    """Half the 95 % interval of log(ratio): a step of the series across this break that is smaller is no change."""
    commits: tuple[str, ...] = ()
    """Whose sources were measured on both sides; none where a dense baseline tells."""
    cases: int = 0
    """Anchor cases of the same class that tell it; 0 where this very case does."""


@dataclass(frozen=True)
class _Link:
    """How the runs under one set of conditions join those before."""

    offset: float
    """To take off the log of their latencies."""
    parent: int
    """The group of runs that they are compared with."""
    uncertainty: float = 0.0
    ratio: float | None = None
    commits: tuple[str, ...] = ()
    cases: int = 0


class JoinedSeries:
    """A series whose runs under different conditions were made comparable, as far as something tells how."""

    def __init__(
        self,
        logs: Sequence[float],
        fingerprints: Sequence[Fingerprint],
        dense_ms: Sequence[Mapping[str, float]],
        anchors: SeriesAnchors | None = None,
    ) -> None:
        """Columns of equal length, oldest run first; `logs` of the latencies."""
        self._logs, self._dense_ms, self._anchors = logs, dense_ms, anchors
        self._groups = conditions.groups(fingerprints)
        self._conditions = [fingerprints[group[0]].conditions for group in self._groups]
        self._group_of = [0] * len(logs)
        self._links: list[_Link | None] = []
        self._parts: list[list[int]] = []  # of groups
        self.offsets = [0.0] * len(logs)
        """What to take off each point's log to compare it with the others of its part."""
        self.breaks: list[Break] = []
        for number, group in enumerate(self._groups):
            for i in group:
                self._group_of[i] = number
            self._join(number, fingerprints)

    @property
    def parts(self) -> list[list[int]]:
        """Indices of the points that can be compared with one another."""
        return [sorted(i for number in part for i in self._groups[number]) for part in self._parts]

    def _join(self, number: int, fingerprints: Sequence[Fingerprint]) -> None:
        group = self._groups[number]
        ways = (self._over_soft, self._by_anchors, self._over_unrecorded)
        tried = ((how(number, part), part) for how in ways for part in reversed(self._parts))  # the newest part first
        link, part = next(((link, part) for link, part in tried if link is not None), (None, None))
        if part is None:
            self._parts.append([number])
        else:
            part.append(number)
        self._links.append(link)
        for i in group:
            self.offsets[i] = link.offset if link else 0.0
        if group[0]:
            found = tuple(fingerprint.differences(fingerprints[group[0] - 1], fingerprints[group[0]]))
            told = (link.ratio, link.uncertainty, link.commits, link.cases) if link else ()
            self.breaks.append(Break(group[0], found, link is not None, *told))

    def _before(self, number: int, groups: Sequence[int]) -> list[int]:
        """The last runs of these groups before this one began."""
        begin = self._groups[number][0]
        return sorted(i for other in groups for i in self._groups[other] if i < begin)[-NEAR:]

    def _over_soft(self, number: int, part: Sequence[int]) -> _Link | None:
        wanted = conditions.hard(self._conditions[number])
        alike = [other for other in part if conditions.hard(self._conditions[other]) == wanted]
        before, after = self._before(number, alike), self._groups[number][:NEAR]
        steps = self._dense_steps(before, after)
        if not steps:
            return None
        return _Link(self._shown_by_dense(before, after, steps), self._group_of[before[-1]])

    def _over_unrecorded(self, number: int, part: Sequence[int]) -> _Link | None:
        here = self._conditions[number]
        if not all(conditions.may_be_same(self._conditions[other], here) for other in part):
            return None
        before, after = self._before(number, part), self._groups[number][:NEAR]
        steps = self._dense_steps(before, after)
        if not steps:
            return None
        shown = self._shown_by_dense(before, after, steps)
        uncertainty = max(Z * NOISE, *(abs(step) for step, _ in steps.values()))
        told = _Link(shown, self._group_of[before[-1]], uncertainty, math.exp(shown))
        return self._with_own_step(told, before, after, self._noise(part))

    def _by_anchors(self, number: int, part: Sequence[int]) -> _Link | None:
        if self._anchors is None:
            return None
        offsets = {self._conditions[other]: self.offsets[self._groups[other][0]] for other in part}
        noise = self._noise(part)
        found = self._anchors.bridge(offsets, self._conditions[number], noise)
        if found is None:
            return None
        parent = next(other for other in part if self._conditions[other] == found.old)
        before, after = self._before(number, part), self._groups[number][:NEAR]
        ratio = math.exp(found.offset - offsets[found.old])
        told = _Link(found.offset, parent, found.uncertainty, ratio, found.commits, found.cases)
        return self._with_own_step(told, before, after, noise)

    def _noise(self, part: Sequence[int]) -> float:
        return sigma([self._logs[i] - self.offsets[i] for i in sorted(i for one in part for i in self._groups[one])])

    def _with_own_step(self, told: _Link, before: Sequence[int], after: Sequence[int], noise: float) -> _Link:
        """The series' own step in place of what is told of it, where it lies within the interval: nothing else is seen.

        The interval holds the way from the link's parent to most of the runs before, and the noise of both medians.
        """
        way = min(self._path(told.parent, other) for other in self._well_seen(before))
        medians = Z * noise * math.sqrt(math.pi / 2 * (1 / len(before) + 1 / len(after)))
        own = self._own_step(before, after)
        within = abs(own - told.offset) <= math.hypot(told.uncertainty, way, medians)
        return replace(told, offset=own) if within else told

    def _own_step(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Of the series itself, as log of the latency."""
        level = statistics.median(self._logs[i] - self.offsets[i] for i in before)
        return statistics.median(self._logs[i] for i in after) - level

    def _dense_steps(self, before: Sequence[int], after: Sequence[int]) -> dict[str, tuple[float, float]]:
        """By baseline that ran on both sides: the step of the log of its latency, and that log after it."""
        names = {name for i in before for name in self._dense_ms[i]} & {n for i in after for n in self._dense_ms[i]}
        steps = {}
        for name in sorted(names):
            there = [math.log(self._dense_ms[i][name]) - self.offsets[i] for i in before if name in self._dense_ms[i]]
            now = statistics.median(math.log(self._dense_ms[i][name]) for i in after if name in self._dense_ms[i])
            steps[name] = now - statistics.median(there), now
        return steps

    def _shown_by_dense(
        self, before: Sequence[int], after: Sequence[int], steps: Mapping[str, tuple[float, float]]
    ) -> float:
        """What a change did to the log of the latency: NSA's own step, but no more of it than the fastest dense
        attention shows too."""
        dense, _ = min(steps.values(), key=lambda step: step[1])
        return shared_step(self._own_step(before, after), dense)

    def uncertainty(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Half the 95 % interval of a step from one level to another, of one part, that the bridges between them add.

        0 where two runs of each share their conditions: they are compared as they are.
        """
        if not any(link and link.uncertainty for link in self._links):
            return 0.0
        return min(self._path(a, b) for a in self._well_seen(before) for b in self._well_seen(after))

    def _well_seen(self, level: Sequence[int]) -> list[int]:
        """The groups that two runs of a level or more belong to; that of most runs where there is none."""
        here = [self._group_of[i] for i in level]
        return [group for group in set(here) if here.count(group) > 1] or [max(here, key=here.count)]

    def _path(self, a: int, b: int) -> float:
        """The uncertainties of all bridges between two groups, in quadrature; infinite where there is no way."""
        ways = []
        for group in (a, b):
            way, squares, at = {group: 0.0}, 0.0, group
            while (link := self._links[at]) is not None:
                squares, at = squares + link.uncertainty**2, link.parent
                way[at] = squares
            ways.append(way)
        return math.sqrt(min((ways[0][at] + ways[1][at] for at in ways[0].keys() & ways[1].keys()), default=math.inf))


def shared_step(ours: float, dense: float) -> float:
    """As much of our step as that of dense attention in the same runs shows too; 0 where they differ in sign."""
    return min(max(ours, min(dense, 0.0)), max(dense, 0.0))


def breaks(
    fingerprints: Sequence[Fingerprint], anchors: Mapping[Conditions, Sequence[AnchorRatio]] | None = None
) -> list[Break]:
    """Where conditions begin that no run of a machine had before, and how they differ from those of the run before.

    `bridged` where series that have a dense baseline, or an anchor in `anchors` (by its new conditions), go on.
    """
    found = []
    groups = conditions.groups(fingerprints)
    known = [fingerprints[group[0]].conditions for group in groups]
    for number, group in enumerate(groups[1:], start=1):
        told = tuple(fingerprint.differences(fingerprints[group[0] - 1], fingerprints[group[0]]))
        alike = any(conditions.may_be_same(other, known[number]) for other in known[:number])
        usable = [one for one in (anchors or {}).get(known[number], ()) if one.old in known[:number]]
        commits = () if alike else tuple(dict.fromkeys(one.commit for one in usable))
        found.append(Break(group[0], told, alike or bool(commits), commits=commits))
    return found


def sigma(logs: Sequence[float]) -> float:
    """Noise of one point, from the differences of neighbours, which a few changes of level do not widen."""
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    smallest = _SIGMA_OF_FEW if len(steps) < _FEW else _SMALLEST_SIGMA
    return max(smallest, 1.4826 * statistics.median(steps) / math.sqrt(2)) if steps else smallest
