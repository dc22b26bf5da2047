"""Figures of one version of nsa/ under two conditions: what an upgrade itself does to the latency.

After a hard change (`conditions`) `run` measures a few cases of an earlier commit again: its records say so (`Anchor`)
and are no points of the working tree's series. Runs that measured the same sources on both sides serve as well. The
ratio of both figures bridges the series of that very case; the other cases of its class take the mean ratio of the
class, with an interval that must hold for a further case (a prediction interval, from the spread between the cases).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases.key import Key
from benchmarks.history.conditions import Conditions, hard

CLASSES = {"prefill-forward": 2, "prefill-forward-backward": 2, "decode": 2, "train-step": 1}
"""Modes whose cases share a ratio, and how many of each are measured as anchors. A part of the forward pass is one
kernel and shares none: an upgrade may slow it alone."""
NOISE = 0.01
"""Of one process's figure beside another day's, relative: at least this, as few processes show too little of it."""
Z = 1.96
"""Half a 95 % interval, in standard deviations."""
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""The same of Student's t, for 1 to 10 degrees of freedom."""

Series = tuple[str, str, str, str]
"""What tells a series: its case, the path that ran, the whole key, and what recorded inputs follow."""


@dataclass(frozen=True)
class Figure:
    """One process's latency of one case."""

    series: Series
    mode: str
    conditions: Conditions
    utc: str
    """Of its run."""
    commit: str | None
    nsa_sha256: str
    """Which sources were measured."""
    latency_ms: float
    interval_ms: tuple[float, float] | None

    @property
    def noise(self) -> float:
        """Standard deviation of log(latency) from one process to another."""
        if self.interval_ms is None:
            return NOISE
        low_ms, high_ms = self.interval_ms
        return max(NOISE, (high_ms - low_ms) / 2 / Z / self.latency_ms)


@dataclass(frozen=True)
class AnchorRatio:
    """The same sources on the same case under two conditions."""

    series: Series
    mode: str
    commit: str
    """The commit of these sources; "unknown" where no run says it."""
    old: Conditions
    new: Conditions
    log_ratio: float
    """log(latency under new / latency under old)."""
    noise: float
    """Standard deviation of `log_ratio`."""


def ratios(figures: Iterable[Figure]) -> list[AnchorRatio]:
    """Every pair of figures of the same sources under two hard conditions, the later of which began later."""
    measured: dict[tuple[Series, str], dict[Conditions, list[Figure]]] = {}
    for one in sorted(figures, key=lambda figure: figure.utc):
        measured.setdefault((one.series, one.nsa_sha256), {}).setdefault(one.conditions, []).append(one)
    found = []
    for (series, _), by_conditions in measured.items():
        sides = list(by_conditions.values())  # by their first run
        for number, new in enumerate(sides):
            for old in sides[:number]:
                if hard(old[0].conditions) != hard(new[0].conditions):
                    found.append(_ratio(series, old, new))
    return found


def _ratio(series: Series, old: Sequence[Figure], new: Sequence[Figure]) -> AnchorRatio:
    steps = [statistics.median(math.log(one.latency_ms) for one in side) for side in (old, new)]
    noise = math.hypot(*(statistics.mean(one.noise for one in side) / math.sqrt(len(side)) for side in (old, new)))
    commit = next((one.commit for one in (*new, *old) if one.commit), "unknown")
    return AnchorRatio(series, new[0].mode, commit, old[0].conditions, new[0].conditions, steps[1] - steps[0], noise)


@dataclass(frozen=True)
class Bridge:
    """What a change of conditions did to one series."""

    offset: float
    """To take off the log of a latency under the new conditions, so that it compares with the oldest of the series."""
    uncertainty: float
    """Half the 95 % interval of `offset`."""
    old: Conditions
    """Whose offset this one stands on."""
    commits: tuple[str, ...]
    """Whose sources were measured under both."""
    cases: int
    """Anchor cases of the same class whose mean this is; 0 where this very case was measured."""


@dataclass(frozen=True)
class SeriesAnchors:
    """The ratios of a machine, as one series can use them."""

    ratios: Mapping[Conditions, Sequence[AnchorRatio]]
    """All of the machine, by the new conditions."""
    series: Series
    mode: str

    def bridge(self, offsets: Mapping[Conditions, float], new: Conditions, noise: float = NOISE) -> Bridge | None:
        """From the conditions of a part of the series, with the offsets that these have, to `new`; None without any.

        `noise`: of the series from run to run, relative, which its anchors share where it is more than `NOISE`.
        """
        noisier = max(1.0, noise / NOISE)
        usable = [one for one in self.ratios.get(new, ()) if one.old in offsets]
        own = [one for one in usable if one.series == self.series]
        if own:
            offset = statistics.mean(one.log_ratio + offsets[one.old] for one in own)
            of_mean = noisier * math.sqrt(sum(one.noise**2 for one in own)) / len(own)
            return Bridge(offset, Z * of_mean, own[-1].old, _commits(own), 0)
        return self._of_class(usable, offsets, noisier)

    def _of_class(
        self, usable: Sequence[AnchorRatio], offsets: Mapping[Conditions, float], noisier: float
    ) -> Bridge | None:
        """The mean of at least two other cases of the class: one alone does not show how much cases differ."""
        by_class: dict[str, dict[Series, list[float]]] = {}
        for one in usable:
            by_class.setdefault(one.mode, {}).setdefault(one.series, []).append(one.log_ratio + offsets[one.old])
        means = {mode: [statistics.mean(of) for of in cases.values()] for mode, cases in by_class.items()}
        ours = means.get(self.mode, [])
        if len(ours) < 2 or self.mode not in CLASSES:
            return None
        free = sum(len(of_mode) - 1 for of_mode in means.values())
        squares = sum((x - statistics.mean(of_mode)) ** 2 for of_mode in means.values() for x in of_mode)
        same = [one for one in usable if one.mode == self.mode]
        spread = max(math.sqrt(squares / free), noisier * statistics.mean(one.noise for one in same))
        uncertainty = student_t(free) * spread * math.sqrt(1 + 1 / len(ours))
        return Bridge(statistics.mean(ours), uncertainty, same[-1].old, _commits(same), len(ours))


def _commits(of: Iterable[AnchorRatio]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.commit for one in of))


def student_t(free: int) -> float:
    """Half a 95 % interval in standard errors, for so many degrees of freedom, at least 1; within 1 %."""
    return _T[free - 1] if free <= len(_T) else Z + 2.5 / free


def by_new_conditions(found: Iterable[AnchorRatio]) -> dict[Conditions, list[AnchorRatio]]:
    """As `SeriesAnchors` wants them."""
    grouped: dict[Conditions, list[AnchorRatio]] = {}
    for one in found:
        grouped.setdefault(one.new, []).append(one)
    return grouped


def cases(keys: Sequence[Key]) -> list[Key]:
    """Which of NSA's cases are measured as anchors: of each class the smallest and the largest, in the keys' order."""
    chosen: list[Key] = []
    for mode, count in CLASSES.items():
        of_mode = sorted((key for key in keys if key.mode == mode), key=_size)
        chosen += [*of_mode[: count - 1], *of_mode[-1:]] if len(of_mode) > 1 else of_mode
    return [key for key in keys if key in chosen]


def _size(key: Key) -> tuple[int, int, str]:
    return key.batch * key.num_keys, key.heads, key.name
