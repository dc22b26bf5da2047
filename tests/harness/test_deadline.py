"""The silence that is allowed follows the child's own pace."""

from __future__ import annotations

import pytest

from harness import isolate
from harness.isolate import Deadline


def paced(*steps_s: float, floor_s: float = 5.0, import_s: float = 1.0) -> Deadline:
    """One that imported, then made these steps."""
    made, at = Deadline(floor_s), 100.0
    made.imported(at, import_s)
    for step_s in steps_s:
        at += step_s
        made.step(at)
    return made


def test_before_the_import_it_follows_the_imports_of_others() -> None:
    assert Deadline(5.0).allowed_s == isolate.IMPORT_FLOOR_S
    assert Deadline(5.0, known_import_s=10.0).allowed_s == 300


def test_first_step_has_the_allowance_of_a_compilation() -> None:
    assert paced().allowed_s == 30
    assert paced(import_s=4.0).allowed_s == 120


def test_fast_steps_have_the_floor() -> None:
    assert paced(0.1, 0.1, 0.1).allowed_s == 5


def test_slow_steps_are_given_ten_times_their_median() -> None:
    """Steps of 51 s, which a fixed watchdog of 180 s nearly took for a hang, may be silent for 510 s."""
    assert paced(60, 51, 51, 51).allowed_s == 510


def test_uneven_steps_are_given_three_times_the_longest() -> None:
    assert paced(0.1, 0.1, 0.1, 0.1, 40).allowed_s == 120


def test_a_slow_machine_is_given_twice_its_import() -> None:
    assert paced(0.1, 0.1, import_s=20.0).allowed_s == 40


def test_longest_silence_is_between_beats() -> None:
    assert paced().longest_s is None
    assert paced(3.0).longest_s == pytest.approx(3)
    assert paced(3.0, 1.0, 7.0).longest_s == pytest.approx(7)
