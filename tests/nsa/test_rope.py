"""RoPE: what it does to one pair, and that scores depend on the distance only."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa.rope import rotate, rotation


def at(x: Tensor, position: int) -> Tensor:
    """One vector [D], rotated to a position."""
    return rotate(x.view(1, 1, 1, -1), rotation(torch.tensor([position]), x.numel())).flatten()


def test_one_pair_turns_by_its_position() -> None:
    turned = at(torch.tensor([1.0, 0.0], dtype=torch.float64), 3)
    assert turned.tolist() == pytest.approx([math.cos(3), math.sin(3)], rel=1e-15)


def test_second_pair_turns_slower_by_the_base() -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)  # channel 1 is paired with channel 3
    assert at(x, 7).tolist() == pytest.approx([0, math.cos(0.07), 0, math.sin(0.07)], abs=1e-15)


@given(head_dim=st.integers(1, 17), t=st.integers(0, 4096), s=st.integers(0, 4096), shift=st.integers(0, 61_000))
def test_scores_depend_on_the_distance_only(head_dim: int, t: int, s: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q, k = torch.randn(2, head_dim, generator=generator, dtype=torch.float64)
    near, far = at(q, t) @ at(k, s), at(q, t + shift) @ at(k, s + shift)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-9)


def test_scores_do_depend_on_the_distance() -> None:
    q, k = torch.ones(2, 8, dtype=torch.float64)
    assert at(q, 5) @ at(k, 5) != pytest.approx((at(q, 5) @ at(k, 3)).item())


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(9, dtype=torch.float64)
    assert torch.equal(at(x, 0), x)


def test_an_odd_head_keeps_its_last_channel() -> None:
    x = torch.randn(7)
    turned = at(x, 100)
    assert turned[6] == x[6]
    assert (turned[:6] != x[:6]).all()


def test_far_positions_keep_float32_precision() -> None:
    x = torch.randn(64)
    error = (at(x, 65_535) - at(x.double(), 65_535)).abs().max()
    assert error <= 4 * torch.finfo(torch.float32).eps * x.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 3, 8).to(dtype)
    cos_sin = rotation(torch.arange(5) + 1000, 8)
    assert torch.equal(rotate(x, cos_sin), rotate(x.float(), cos_sin).to(dtype))


def test_each_row_takes_its_own_position() -> None:
    x = torch.randn(2, 4, 3, 8)
    positions = torch.tensor([0, 1, 0, 9])
    together = rotate(x, rotation(positions, 8))
    for i, position in enumerate(positions):
        assert torch.equal(together[:, i : i + 1], rotate(x[:, i : i + 1], rotation(position.view(1), 8)))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"positions must be an integer tensor of shape \[S\] or \[B, S\]; got torch.float32 \[3\]"
    ):
        rotation(torch.ones(3), 8)
    with pytest.raises(ValueError, match=r"positions must be .* got list"):
        rotation([0, 1], 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cos and sin must have shape \[3, 4\], .*; got \[\[1, 4\], \[1, 4\]\]"):
        rotate(torch.ones(1, 3, 1, 8), rotation(torch.arange(1), 8))
