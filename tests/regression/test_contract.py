"""The verdict is a function of the evidence; every fault has its own, and aspects are judged apart."""

from __future__ import annotations

from typing import Any

import pytest

from regression.contract import Bound, Evidence, ReproVerdict, aspects, verdict

OVER, UNDER = Bound(2.0, 1.0, "units"), Bound(1.0, 1.0, "units")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"nonfinite": ("loss",)}, ReproVerdict.NONFINITE),
        ({"future_seen": ("row 3",)}, ReproVerdict.LEAK),
        ({"wrong": ("row 3",)}, ReproVerdict.WRONG),
        ({"loss_nats": Bound(1.379, 2.77)}, ReproVerdict.TOO_GOOD),
        ({"loss_nats": Bound(float("nan"), 2.77)}, ReproVerdict.NONFINITE),
        ({"error": OVER}, ReproVerdict.WRONG),
        ({"error": Bound(float("inf"), 1.0)}, ReproVerdict.WRONG),
        ({"ops": OVER}, ReproVerdict.SLOW),
        ({"host_syncs": OVER}, ReproVerdict.SLOW),
        ({"slowdown": OVER}, ReproVerdict.SLOW),
        ({"silence_s": OVER}, ReproVerdict.STALLED),
        ({"memory": OVER}, ReproVerdict.OUT_OF_MEMORY),
        ({"exception": "KeyError: 'k'"}, ReproVerdict.CRASHED),
        ({"out_of_memory": "CUDA out of memory"}, ReproVerdict.OUT_OF_MEMORY),
        ({"wrong": (), "exit_status": -11}, ReproVerdict.CRASHED),
        ({"wrong": (), "stalled_after_s": 31.0}, ReproVerdict.STALLED),
        ({"skipped": "needs 1 GPU"}, ReproVerdict.SKIPPED),
        ({}, ReproVerdict.WRONG),
        ({"exit_status": 0, "notes": ("n",), "paths": ("torch",)}, ReproVerdict.WRONG),
    ],
)
def test_each_fault_has_its_verdict(facts: dict[str, Any], expected: ReproVerdict) -> None:
    assert verdict(Evidence(**facts)) is expected


def test_passes_where_something_was_looked_at_and_all_is_well() -> None:
    looked = Evidence(
        nonfinite=(),
        future_seen=(),
        wrong=(),
        loss_nats=Bound(2.8, 2.77),
        error=UNDER,
        ops=UNDER,
        host_syncs=UNDER,
        slowdown=UNDER,
        silence_s=UNDER,
        memory=UNDER,
        exit_status=0,
    )
    assert verdict(looked) is ReproVerdict.PASSED
    assert len(aspects(looked)) == 10


def test_aspects_are_judged_apart() -> None:
    """It did not hang, and it is not finite."""
    judged = {aspect.name: aspect.verdict for aspect in aspects(Evidence(silence_s=UNDER, nonfinite=("dq",)))}
    assert judged == {"silence_s": ReproVerdict.PASSED, "nonfinite": ReproVerdict.NONFINITE}


def test_the_gravest_decides() -> None:
    assert verdict(Evidence(ops=OVER, wrong=("w",), future_seen=("f",))) is ReproVerdict.LEAK
    assert verdict(Evidence(nonfinite=("n",), stalled_after_s=3.0)) is ReproVerdict.STALLED


def test_a_limit_must_be_finite() -> None:
    with pytest.raises(ValueError, match="limit must be finite; got nan"):
        Bound(1.0, float("nan"))
