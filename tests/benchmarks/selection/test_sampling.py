"""Stretches of rows have the curves of all rows, popularity too."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from benchmarks.cases import recorded
from benchmarks.cases.recorded import BLOCK, Law, Sizes, Topics, put_in
from benchmarks.selection import sampling
from benchmarks.selection.curves import Curves
from nsa import NSAConfig

TOKENS, HEADS = 32768, 2


@cache
def law() -> Law:
    """Neighbours choose much alike, and over the whole sequence no block is more popular than by chance."""
    weights = (0.1, 0.05, 0.05, 0.1, 0.7, 0.0, 0.0)
    return dataclasses.replace(
        recorded.law("recorded", TOKENS), weights=weights, followed=(0.0, 0.0, 0.0), spread=0.0, apart=0.0
    )


@cache
def of(stretches: int) -> Curves:
    return sampling.of_law(law(), TOKENS, HEADS, 3, stretches)


@cache
def of_every_row() -> Curves:
    generator = torch.Generator().manual_seed(3)
    topics = Topics(law(), Sizes(1, TOKENS, TOKENS, HEADS, 64), generator)  # the same as of the stretches
    q, k = (torch.randn(1, TOKENS, HEADS, 64, generator=generator) for _ in range(2))
    put_in(q, topics.of_queries(torch.arange(TOKENS)))
    put_in(k, topics.of_key_blocks(), BLOCK)
    return sampling.of_tensors(q, k, NSAConfig())


def test_stretches_have_the_curves_of_all_rows() -> None:
    found = of(sampling.STRETCHES).deviations(of_every_row())
    assert max(map(abs, found.values())) < 0.05


def test_of_few_stretches_popularity_would_be_far_too_high() -> None:
    few, wanted = of(8).popularity, of_every_row().popularity
    assert few is not None
    assert few / wanted > 1.3  # type: ignore[operator]
    assert of(sampling.STRETCHES).popularity == pytest.approx(wanted, rel=0.05)
