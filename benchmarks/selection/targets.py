"""The curves that the inputs `recorded` are to follow: of an atlas, or of the study that came before the first one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.atlas import record
from benchmarks.atlas.record import Atlas, HeadCurves, LengthCurves
from benchmarks.cases import recorded
from benchmarks.cases.recorded import KINDS
from benchmarks.selection.curves import Curves
from harness import schema

STUDY = Path(__file__).with_name("study.json")
"""Figures of a study, which knows one curve per length and neither distances nor popularity."""
LENGTHS = (8192, 16384, 32768, 65536, 131072)
"""Tokens; a law is fitted at each."""
_FURTHEST = 2
_QUANTILES = {"recorded": 0.5, "recorded-p10": 0.1, "recorded-p90": 0.9}
"""Of how alike neighbouring queries choose, over layers and key/value heads."""


@dataclass(frozen=True)
class Target:
    """What a law is fitted to."""

    num_keys: int
    curves: Curves
    said: str
    """Which curves these are, and whether they were measured at this length."""
    origin: str
    """Where they are from."""

    @property
    def source(self) -> str:
        """Both, as a record says it."""
        return f"{self.said}; {self.origin}"


@dataclass(frozen=True)
class _StudyCurves:
    num_keys: int
    said: str
    jaccard: Mapping[str, float]
    union: Mapping[str, float]


@dataclass(frozen=True)
class _Study:
    source: str
    recorded: tuple[_StudyCurves, ...]
    recorded_p10: tuple[_StudyCurves, ...]
    recorded_p90: tuple[_StudyCurves, ...]


def of_study() -> dict[str, list[Target]]:
    """By kind of inputs, a target for each of LENGTHS up to 64k."""
    study = schema.build(_Study, json.loads(STUDY.read_bytes()), "study")
    curves = (study.recorded, study.recorded_p10, study.recorded_p90)
    return {
        kind: _at_lengths([_of_study(one, study.source) for one in known])
        for kind, known in zip(KINDS, curves, strict=True)
    }


def of_table(results: Path) -> dict[str, list[Target]]:
    """What today's table of laws was fitted to: the atlas that it names, below a folder of results, or the study.

    Raises ValueError or OSError where that atlas cannot be read.
    """
    named = recorded.table().atlas
    return of_study() if named is None else of_atlas(record.read(results / record.FOLDER / named))


def of_atlas(atlas: Atlas) -> dict[str, list[Target]]:
    """By kind of inputs, a target for each of LENGTHS, up to twice the atlas's longest.

    The curves of `recorded` are medians over layers and heads; those of the other kinds the tenth from the end, of
    Jaccard indices and unions alone: distances and popularity of other heads may not go with them.
    """
    commit = (atlas.commit or "unknown")[:10]
    source = f"atlas of {atlas.fingerprint.machine}, {atlas.fingerprint.utc[:10]}, commit {commit}"
    return {kind: _at_lengths([_of_atlas(one, kind, source) for one in atlas.lengths]) for kind in KINDS}


def _of_study(one: _StudyCurves, source: str) -> Target:
    jaccard, union = ({int(at): value for at, value in curve.items()} for curve in (one.jaccard, one.union))
    return Target(one.num_keys, Curves(jaccard, union, {}, None), one.said, source)


def _of_atlas(one: LengthCurves, kind: str, source: str) -> Target:
    quantile = _QUANTILES[kind]

    def over_heads(figure: Callable[[HeadCurves], float], at: float) -> float:
        return float(np.quantile([figure(head) for head in one.heads], at))

    jaccard = {int(lag): over_heads(lambda head, lag=lag: head.jaccard[lag], quantile) for lag in one.heads[0].jaccard}  # type: ignore[misc]
    union = {int(n): over_heads(lambda head, n=n: head.union[n], 1 - quantile) for n in one.heads[0].union}  # type: ignore[misc]
    distance: dict[int, float] = {}
    popularity = None
    if kind == "recorded":
        edges = min((head.distance for head in one.heads), key=len)
        distance = {int(edge): over_heads(lambda head, edge=edge: _nearer(head, edge), 0.5) for edge, _ in edges}  # type: ignore[misc]
        popularity = over_heads(lambda head: head.popularity, 0.5)
    said = "median" if kind == "recorded" else f"{kind.removeprefix('recorded-')} (Jaccard indices and unions)"
    return Target(one.seq_len, Curves(jaccard, union, distance, popularity), f"{said} over layers and heads", source)


def _nearer(head: HeadCurves, edge: float) -> float:
    return sum(share for upper, share in head.distance if upper <= edge)


def _at_lengths(known: Sequence[Target]) -> list[Target]:
    """Up to twice the longest that is known: a line drawn further meets curves that no selection has."""
    longest = max(one.num_keys for one in known)
    return [_at(known, num_keys) for num_keys in LENGTHS if num_keys <= _FURTHEST * longest]


def _at(known: Sequence[Target], num_keys: int) -> Target:
    """The curves at one length, on a line over the logarithm of the length through the two nearest that are known."""
    nearest = sorted(known, key=lambda one: abs(math.log2(one.num_keys / num_keys)))[:2]
    if nearest[0].num_keys == num_keys:
        return nearest[0]
    if len(nearest) == 1:
        said = f"as at {nearest[0].num_keys} tokens ({nearest[0].said})"
        return Target(num_keys, nearest[0].curves, said, nearest[0].origin)
    low, high = sorted(nearest, key=lambda one: one.num_keys)
    share = math.log2(num_keys / low.num_keys) / math.log2(high.num_keys / low.num_keys)
    between = "interpolated" if 0 < share < 1 else "extrapolated"

    def line(a: Mapping[int, float], b: Mapping[int, float], limits: tuple[float, float]) -> dict[int, float]:
        return {at: min(max(a[at] + share * (b[at] - a[at]), limits[0]), limits[1]) for at in a if at in b}

    curves = Curves(
        line(low.curves.jaccard, high.curves.jaccard, (0.01, 1.0)),
        _exp(line(_log(low.curves.union), _log(high.curves.union), (0.0, math.inf))),
        line(low.curves.distance, high.curves.distance, (0.0, 1.0)),
        _popularity(low.curves, high.curves, share),
    )
    known_at = f"{low.num_keys} and {high.num_keys} tokens"
    said = low.said if low.said == high.said else f"{low.said}; {high.said}"
    return Target(num_keys, curves, f"{between} from {known_at} ({said})", low.origin)


def _popularity(low: Curves, high: Curves, share: float) -> float | None:
    if low.popularity is None or high.popularity is None:
        return None
    return max(low.popularity * (high.popularity / low.popularity) ** share, 1.0)


def _log(curve: Mapping[int, float]) -> dict[int, float]:
    return {at: math.log(value) for at, value in curve.items()}


def _exp(curve: Mapping[int, float]) -> dict[int, float]:
    return {at: math.exp(value) for at, value in curve.items()}
