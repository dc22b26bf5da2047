"""Rank statistics of a series: they find a step, a drift and a slope, and nothing in noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.train import monitors


def noise(n: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [100 + draw.gauss(0, 2) for _ in range(n)]


def test_a_step_is_found_where_it_is() -> None:
    found = monitors.change_point([*noise(40, 1), *(x - 10 for x in noise(60, 2))])
    assert found is not None
    assert abs(found.index - 40) <= 2
    assert found.p_value < 1e-6
    assert found.relative == pytest.approx(-0.1, abs=0.02)


def test_noise_has_no_change() -> None:
    """Of 200 series without a change about one in 20 splits at p < 0.05, and none at the level that alarms."""
    p_values = [found.p_value for seed in range(200) if (found := monitors.change_point(noise(60, seed)))]
    assert sum(p < 0.05 for p in p_values) <= 20
    assert min(p_values) > 1e-3


@pytest.mark.parametrize("series_of", [[], [1.0], [1.0, 2.0, 3.0]])
def test_too_short_to_split(series_of: list[float]) -> None:
    assert monitors.change_point(series_of) is None


def test_a_constant_series_does_not_split() -> None:
    found = monitors.change_point([5.0] * 50)
    assert found is not None
    assert found.p_value == 1


@given(st.floats(-3, 3), st.integers(2, 1000))
def test_slope_of_a_line(rise: float, n: int) -> None:
    """Also through thinning, in units of the points that came in."""
    assert monitors.slope([7 + rise * i for i in range(n)]) == pytest.approx(rise, abs=1e-9)


def test_slope_ignores_wild_points() -> None:
    points = [float(i) for i in range(100)]
    points[10:35] = [1e6] * 25
    assert monitors.slope(points) == pytest.approx(1, abs=0.1)


def test_slope_of_one_point_is_unknown() -> None:
    assert monitors.slope([3.0]) is None


@given(st.integers(0, 2000))
def test_thinned_to_few(n: int) -> None:
    thinned, stride = monitors.thin([float(i) for i in range(n)])
    assert len(thinned) <= monitors.MAX_POINTS
    assert n - stride < len(thinned) * stride <= n


@pytest.mark.parametrize(("n", "known"), [(3, False), (21, False), (22, True), (300, True)])
def test_a_fall_that_chance_could_always_explain_is_unknown(n: int, known: bool) -> None:
    fallen = [100.0 + 0.01 * i for i in range(n // 2)] + [50.0 + 0.01 * i for i in range(n - n // 2)]
    assert (monitors.fall(fallen) is not None) == known
    if known:
        assert monitors.fall(fallen) == pytest.approx(0.5, abs=0.1)
