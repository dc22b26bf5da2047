"""The least-squares search: it finds the place, counts what it asks, and begins from what a similar one knew."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.selection import search
from benchmarks.selection.search import Place, Vector

STEPS = np.array([0.1, 0.1])


class Curves:
    """Three residuals of two parameters, 0 at (1, 2); how often they were asked for."""

    def __init__(self, bend: float = 1.0) -> None:
        self.asked, self._bend = 0, bend

    def __call__(self, x: Vector) -> Vector:
        self.asked += 1
        a, b = np.exp(self._bend * (x[0] - 1)) - 1, x[1] - 2
        return np.array([a + b, a - 2 * b, a * b])


def found(curves: Curves, evaluations: int = 100, slopes: Vector | None = None, below: float = 1e-6) -> Place:
    return search.least_squares(
        curves, np.zeros(2), STEPS, slopes=slopes, evaluations=evaluations, enough=lambda r: bool(abs(r).max() < below)
    )


def test_it_finds_the_place_and_stops_there() -> None:
    curves = Curves()
    end = found(curves)
    assert end.x == pytest.approx([1, 2], abs=1e-5)
    assert end.cost < 1e-11
    assert curves.asked < 30
    assert np.array_equal(found(Curves()).x, end.x), "it repeats to the bit"


def test_it_asks_no_more_often_than_it_may() -> None:
    for most in (1, 2, 3, 7):
        curves = Curves()
        end = found(curves, most)
        assert curves.asked == most
        assert end.cost <= Curves()(np.zeros(2)) @ Curves()(np.zeros(2))


def test_slopes_of_a_similar_function_spare_their_measurement() -> None:
    begin = found(Curves(bend=1.2), evaluations=3).slopes
    assert begin is not None
    with_them, without = Curves(), Curves()
    loose = 0.05
    found(with_them, slopes=begin, below=loose)
    found(without, below=loose)
    assert with_them.asked < without.asked


def test_where_nothing_is_better_it_gives_up() -> None:
    curves = Curves()
    end = search.least_squares(
        lambda x: curves(x) + 5, np.array([1.0, 2.0]), STEPS, evaluations=1000, enough=lambda _: False
    )
    assert curves.asked < 200
    assert np.isfinite(end.x).all()
