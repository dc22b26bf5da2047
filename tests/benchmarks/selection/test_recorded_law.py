"""What NSA selects on the inputs `recorded` follows the recorded curves within 10 %, and a fault is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from statistics import fmean

import pytest
import torch

from benchmarks.atlas.record import LAGS
from benchmarks.cases import inputs, recorded
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.recorded import Law, Topics
from benchmarks.selection import sampling, targets
from benchmarks.selection.fit import TOLERANCE
from harness.repository import ROOT
from nsa import NSAConfig

SMALL, LARGE = (8192, 16, 1, 64, "float32"), (65536, 4, 16, 128, "bfloat16")
"""Tokens, key/value heads, query heads of each, channels, dtype."""
HEADS = 64
"""On a GPU, of all seeds: popularity differs by a quarter from head to head."""


@cache
def target(kind: str, num_keys: int) -> targets.Target:
    """The one that the kind's law was fitted to."""
    return next(one for one in targets.of_table(ROOT / "results")[kind] if one.num_keys == num_keys)


def deviations(kind: str, size: tuple[int, int, int, int, str], device: str, seeds: int) -> dict[str, float]:
    """Of the mean over some seeds of drawn inputs; the choice is NSA's own."""
    tokens, num_kv_heads, group, dim, dtype = size
    key = Key(
        "prefill-forward", NSA, "auto", dtype, 1, tokens, tokens, num_kv_heads * group, num_kv_heads, dim, dim, None,
        inputs=kind,
    )  # fmt: skip
    found = []
    for seed in range(seeds):
        p = inputs.draw(key, device, seed)
        found.append(sampling.of_tensors(p.q, p.k, NSAConfig()).deviations(target(kind, tokens).curves))
        del p
    return {name: fmean(one[name] for one in found) for name in found[0]}


def worst(found: dict[str, float]) -> float:
    return max(map(abs, found.values()))


@pytest.mark.parametrize("kind", recorded.KINDS)
def test_the_choice_follows_the_recorded_curves(kind: str) -> None:
    assert worst(deviations(kind, SMALL, "cpu", seeds=2)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(8192, *LARGE[1:]), LARGE, (8192, 2, 6, 64, "bfloat16")], ids=str)
@pytest.mark.parametrize("kind", recorded.KINDS)
def test_the_choice_follows_the_recorded_curves_on_a_gpu(kind: str, size: tuple[int, int, int, int, str]) -> None:
    assert worst(deviations(kind, size, "cuda", seeds=HEADS // size[1])) < TOLERANCE


def test_the_kinds_bracket_one_another() -> None:
    """Neighbours choose least alike under p10 and most under p90, at every lag."""
    low, middle, high = (
        sampling.of_law(recorded.law(kind, 8192), 8192, 4, 1, 16).jaccard
        for kind in ("recorded-p10", "recorded", "recorded-p90")
    )
    assert all(low[lag] < middle[lag] < high[lag] for lag in LAGS)


def _no_walk(law: Law) -> Law:
    """Each token's topic is its own but for what never changes."""
    rest = sum(law.weights[1:-1])
    return dataclasses.replace(law, weights=(law.weights[0] + rest, *(0.0 for _ in law.weights[1:-1]), law.weights[-1]))


def _frozen(law: Law) -> Law:
    return dataclasses.replace(law, weights=(*(0.0 for _ in law.weights[:-1]), 1.0))


def _unequal(law: Law) -> Law:
    return dataclasses.replace(law, spread=law.spread + 0.6)


def _near(law: Law) -> Law:
    return dataclasses.replace(law, followed=(0.5, 0.4, 0.1))


@pytest.mark.parametrize("fault", [_no_walk, _frozen, _unequal, _near], ids=lambda fault: fault.__name__)
def test_another_law_is_seen(fault: Callable[[Law], Law], monkeypatch: pytest.MonkeyPatch) -> None:
    real = recorded.law
    monkeypatch.setattr(recorded, "law", lambda kind, num_keys: fault(real(kind, num_keys)))
    assert worst(deviations("recorded", SMALL, "cpu", seeds=1)) > TOLERANCE


def test_keys_without_topics_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Topics.of_key_blocks
    monkeypatch.setattr(Topics, "of_key_blocks", lambda topics: 0 * real(topics))
    assert worst(deviations("recorded", SMALL, "cpu", seeds=1)) > TOLERANCE


def test_a_table_that_is_wrong_is_named() -> None:
    law = recorded.law("recorded", 8192)
    for change, message in (
        ({"weights": law.weights[1:]}, "weights must be 7 shares that add up to 1"),
        ({"weights": (*law.weights[:-1], 0.9)}, "weights must be 7 shares that add up to 1"),
        ({"followed": (0.5, 0.5, 0.5)}, "followed must be 3 shares, together at most 1"),
        ({"spread": torch.nan}, "spread must be finite and at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(law, **change)  # type: ignore[arg-type]
