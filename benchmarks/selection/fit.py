"""The parameters of the inputs `recorded`, searched for by measuring what NSA selects on the inputs they make."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.cases.recorded import KINDS, TIME_SCALES, Law
from benchmarks.selection import sampling
from benchmarks.selection.targets import Target

TOLERANCE = 0.1
"""Within which each curve must follow its target: relative, of shares their difference."""
_SEED = 20
_HEADS = 4
_STRETCHES = 8
_SMOOTH = 1e-3
"""What unequal weights of the time scales cost: where the target leaves them open, they stay alike."""
_DIGITS = 4
_START = (0.35, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1)
_WALKS = len(TIME_SCALES) + 1
_FIXED = _WALKS + 2
_FOLLOWED = 3


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
    """Each kind at each length; a length begins from what the one before it ended with."""
    for kind in KINDS:
        start: NDArray[np.float64] | None = None
        for target in targets[kind]:
            found, start = fit(kind, target, evaluations, start)
            yield found


def fit(
    kind: str, target: Target, evaluations: int, start: NDArray[np.float64] | None = None
) -> tuple[Fit, NDArray[np.float64]]:
    """(the fit, the parameters to begin the next one from), by Nelder and Mead's search, which repeats to the bit."""

    def measured(law: Law) -> dict[str, float]:
        return sampling.of_law(law, target.num_keys, _HEADS, _SEED, _STRETCHES).deviations(target.curves)

    def cost(x: NDArray[np.float64]) -> float:
        misses = sum((miss / TOLERANCE) ** 4 for miss in measured(_law(x, target)).values())
        return float(misses + _SMOOTH * np.var(x[:_WALKS]))

    first = _first(target) if start is None else start
    steps = np.array([0.7] * _WALKS + [0.2, 0.15] + [0.1] * (len(first) - _FIXED))
    simplex = np.vstack([first, first + np.diag(steps)])
    found = minimize(cost, first, method="Nelder-Mead", options={"maxfev": evaluations, "initial_simplex": simplex})
    law = _law(found.x, target)
    return Fit(kind, law, measured(law)), found.x


def _first(target: Target) -> NDArray[np.float64]:
    """Logarithms of the weights, the spread, the root of the share apart, and where the target has distances the roots
    of what keys follow."""
    distances = [0.1] * _FOLLOWED if target.curves.distance else []
    return np.array([*map(math.log, _START), 0.2, 0.3, *distances])


def _law(x: NDArray[np.float64], target: Target) -> Law:
    weights = np.exp(x[:_WALKS] - x[:_WALKS].max())
    weights = np.round(weights / weights.sum(), _DIGITS)
    weights[-1] += 1 - weights.sum()
    followed = np.zeros(_FOLLOWED)
    followed[: len(x) - _FIXED] = x[_FIXED:] ** 2
    followed = np.round(followed / max(followed.sum() / 0.9, 1.0), _DIGITS)
    spread = round(abs(float(x[_WALKS])), _DIGITS)
    apart = round(min(float(x[_WALKS + 1]) ** 2, 0.9), _DIGITS)
    rounded = tuple(round(float(weight), _DIGITS) for weight in weights)
    return Law(target.num_keys, rounded, tuple(map(float, followed)), spread, apart, target.source)


def table(fits: Sequence[Fit], atlas: str | None) -> str:
    """The fits as tables/recorded.json; `atlas` names the file of results/atlas, None the study."""
    laws = {kind.replace("-", "_"): [dataclasses.asdict(one.law) for one in fits if one.kind == kind] for kind in KINDS}
    return json.dumps({"atlas": atlas, **laws}, indent=1) + "\n"
