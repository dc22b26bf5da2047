"""The parameters of the inputs `recorded`, searched for by measuring what NSA selects on the inputs they make."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.atlas.record import LAGS, UNIONS
from benchmarks.cases import recorded
from benchmarks.cases.recorded import KINDS, TIME_SCALES, Law
from benchmarks.selection import sampling
from benchmarks.selection.sampling import STRETCHES
from benchmarks.selection.targets import Target

Vector = NDArray[np.float64]
TOLERANCE = 0.1
"""Within which each curve must follow its target: relative, of shares their difference."""
_ENOUGH = 0.5
"""Share of the tolerance within which a search ends: other seeds differ by what is left."""
_SEED = 20
_HEAD_TOKENS = 2**19
"""Of all key/value heads that are measured. In short sequences popularity differs from head to head, by 28 % at 8k, so
that it takes 64 to tell it."""
_NAMES = (
    *(f"jaccard {lag}" for lag in LAGS), *(f"union {count}" for count in UNIONS),
    *(f"distance {2**i}" for i in range(12)), "popularity",
)  # fmt: skip
"""Of the deviations; 0 where a length has none."""
_FEW_STRETCHES = 16
"""Where popularity is left open."""
_SMOOTH = 0.1
"""What unequal weights of the time scales cost: where the target leaves them open, they stay alike."""
_DIGITS = 4
_WALKS = len(TIME_SCALES) + 1
_FIXED = _WALKS + 2
_FOLLOWED = 3
_LEAST = 0.01
"""Of what keys follow, to begin with: at 0 a root has no slope."""


@dataclass(frozen=True)
class Fit:
    """A law and what is left between its curves and the target's."""

    kind: str
    law: Law
    deviations: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The name and size of the largest deviation."""
        return max(self.deviations.items(), key=lambda item: abs(item[1]))


def fit_all(targets: Mapping[str, Sequence[Target]], evaluations: int) -> Iterator[Fit]:
    """Each kind at each length, from today's law, so that a second fit changes nothing."""
    for kind in KINDS:
        for target in targets[kind]:
            yield fit(kind, target, evaluations, recorded.law(kind, target.num_keys))


def fit(kind: str, target: Target, evaluations: int, begin: Law) -> Fit:
    """The fit that is found from `begin` on with so many measurements."""
    stretches = STRETCHES if target.curves.popularity is not None else _FEW_STRETCHES
    heads = max(1, _HEAD_TOKENS // target.num_keys)

    def measured(law: Law) -> dict[str, float]:
        return sampling.of_law(law, target.num_keys, heads, _SEED, stretches).deviations(target.curves)

    def residuals(x: Vector) -> Vector:
        found = measured(_law(x, target))
        misses = np.array([found.get(name, 0.0) for name in _NAMES]) / TOLERANCE
        return np.concatenate([misses, _SMOOTH * (x[:_WALKS] - x[:_WALKS].mean())])

    def enough(found: Vector) -> bool:
        return bool(np.abs(found[:-_WALKS]).max() < _ENOUGH)

    x = _parameters(begin, target)
    steps = np.array([0.3] * (_WALKS + 1) + [0.1] * (x.size - _WALKS - 1))
    law = _law(search(residuals, x, steps, evaluations, enough), target)
    return Fit(kind, law, measured(law))


class _EndedError(Exception):
    """The search is to end."""


def search(
    residuals: Callable[[Vector], Vector], begin: Vector, steps: Vector, evaluations: int,
    enough: Callable[[Vector], bool],
) -> Vector:  # fmt: skip
    """The place of the least sum of squares that so many evaluations find, or the first that is `enough`.

    `steps`: by how much a parameter is moved to measure a slope, and its unit. What is measured is made of choices of
    blocks, so that it has steps itself and a smaller move would show none.
    """
    best, least, asked = begin, math.inf, 0

    def watched(x: Vector) -> Vector:
        nonlocal best, least, asked
        if asked == evaluations:
            raise _EndedError
        found, asked = residuals(x), asked + 1
        if (cost := float(found @ found)) < least:
            best, least = x.copy(), cost
        if enough(found):
            raise _EndedError
        return found

    def slopes(x: Vector) -> Vector:
        here = watched(x)
        return np.column_stack([(watched(x + move) - here) / move.sum() for move in np.diag(steps)])

    with suppress(_EndedError):
        least_squares(watched, begin, slopes, x_scale=steps)
    return best


def _parameters(law: Law, target: Target) -> Vector:
    """Logarithms of the weights and of the spread, the root of the share apart, and where the target has distances the
    roots of what keys follow."""
    logarithms = [math.log(max(x, 10**-_DIGITS)) for x in (*law.weights, law.spread)]
    roots = [math.sqrt(law.apart), *(math.sqrt(max(x, _LEAST)) for x in law.followed)]
    return np.array([*logarithms, *roots[: 1 + _FOLLOWED * bool(target.curves.distance)]])


def _law(x: Vector, target: Target) -> Law:
    weights = np.exp(x[:_WALKS] - x[:_WALKS].max())
    weights = np.round(weights / weights.sum(), _DIGITS)
    weights[-1] += 1 - weights.sum()
    followed = np.zeros(_FOLLOWED)
    followed[: len(x) - _FIXED] = x[_FIXED:] ** 2
    followed = np.round(followed / max(followed.sum() / 0.9, 1.0), _DIGITS)
    spread = round(math.exp(min(float(x[_WALKS]), 2.0)), _DIGITS)
    apart = round(min(float(x[_WALKS + 1]) ** 2, 0.9), _DIGITS)
    rounded = tuple(round(float(weight), _DIGITS) for weight in weights)
    return Law(target.num_keys, rounded, tuple(map(float, followed)), spread, apart, target.source)


def table(fits: Sequence[Fit], atlas: str | None) -> str:
    """The fits as tables/recorded.json; `atlas` names the file of results/atlas, None the study."""
    laws = {kind.replace("-", "_"): [dataclasses.asdict(one.law) for one in fits if one.kind == kind] for kind in KINDS}
    return json.dumps({"atlas": atlas, **laws}, indent=1) + "\n"
