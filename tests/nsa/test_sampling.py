"""Drawing a token: the right frequencies, the right cuts, and the same for every row whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.sampling import NOT_FINITE, Sampling, draw

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 2.0])
EVENLY = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000


def shares(sampling: Sampling, logits: Tensor = LOGITS) -> Tensor:
    """How often each token is drawn when the random numbers lie evenly."""
    drawn = draw(logits.expand(len(EVENLY), -1), sampling, EVENLY)
    return torch.bincount(drawn, minlength=logits.shape[0]) / len(EVENLY)


def wanted(logits: Tensor, kept: list[int]) -> Tensor:
    out = torch.zeros_like(logits)
    out[kept] = logits[kept].softmax(-1)
    return out


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    found = shares(Sampling(temperature))
    torch.testing.assert_close(found, (LOGITS / temperature).softmax(-1), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.4}, [1, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.8}, [1, 4]),  # of three tokens these are 0.84; of five they are 0.75
    ],
)
def test_only_the_likeliest_are_drawn(options: dict[str, Any], kept: list[int]) -> None:
    torch.testing.assert_close(shares(Sampling(**options)), wanted(LOGITS, kept), rtol=0, atol=2e-4)


def test_a_sum_that_reaches_top_p_exactly_takes_no_further_token() -> None:
    """Four tokens of a quarter each, whose sums are exact."""
    assert shares(Sampling(top_p=0.5), torch.zeros(4)).tolist() == [0.5, 0.5, 0, 0]


def test_temperature_0_takes_the_likeliest_and_the_lower_of_two() -> None:
    assert shares(Sampling(0)).tolist() == [0, 1, 0, 0, 0]
    assert shares(Sampling(1e-300), LOGITS[:4]).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_a_token_of_probability_0_is_never_drawn(u: float) -> None:
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 100:800] = torch.randn(700, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"top_p": 0.9}, {"top_k": 900}):
        (token,) = draw(logits, Sampling(**options), torch.tensor([u], dtype=torch.float64)).tolist()
        assert 100 <= token < 800


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_cannot_be_drawn_from_is_said(temperature: float, bad: float) -> None:
    logits = torch.stack((LOGITS, torch.full_like(LOGITS, bad)))
    first, second = draw(logits, Sampling(temperature), torch.tensor([0.5, 0.5], dtype=torch.float64)).tolist()
    assert first != NOT_FINITE
    assert second == NOT_FINITE


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be finite and at least 0; got -1.0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": "1"}, ValueError, "temperature must be finite and at least 0; got '1'"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1; got 0"),
        ({"top_p": 0.0}, ValueError, r"top_p must be above 0 and at most 1; got 0\.0"),
        ({"top_p": 1.1}, ValueError, r"top_p must be above 0 and at most 1; got 1\.1"),
        ({"seed": 1.0}, TypeError, r"seed must be an int; got 1\.0"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Sampling(**wrong)
