"""The parameters of the inputs `recorded`, searched for by measuring what NSA selects on the inputs they make."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.atlas.record import LAGS, UNIONS
from benchmarks.cases import recorded
from benchmarks.cases.recorded import KINDS, TIME_SCALES, Law
from benchmarks.selection import sampling, search
from benchmarks.selection.sampling import STRETCHES
from benchmarks.selection.search import Vector
from benchmarks.selection.targets import Target

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
"""Of the deviations, the same at every length, so that one length's slopes serve the next; 0 where one has none."""
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
    """Each kind at each length; a length begins with the slopes that the one before it ended with."""
    for kind in KINDS:
        slopes: Vector | None = None
        for target in targets[kind]:
            found, slopes = fit(kind, target, evaluations, recorded.law(kind, target.num_keys), slopes)
            yield found


def fit(
    kind: str, target: Target, evaluations: int, begin: Law, slopes: Vector | None = None
) -> tuple[Fit, Vector | None]:
    """(the fit, the slopes at its end); from `begin`, today's law, so that a second fit changes nothing."""
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
    end = search.least_squares(residuals, x, steps, slopes=slopes, evaluations=evaluations, enough=enough)
    law = _law(end.x, target)
    return Fit(kind, law, measured(law)), end.slopes


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
