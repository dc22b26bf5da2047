"""The worker of `compare` asks the oracle before and after what it times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.ab import worker
from benchmarks.ab.worker import Worker
from benchmarks.correctness import row_sampling
from benchmarks.timing.rotating_inputs import RotatingInputs
from benchmarks.workloads import attention
from nsa import nsa_attention
from tests.benchmarks.synthetic import key


def timed_wrong(*arguments: Any, return_aux: bool = False, **options: Any) -> Any:
    """Right where it is checked, wrong where it is timed."""
    found = nsa_attention(*arguments, return_aux=return_aux, **options)
    return found if return_aux else found * 1.01


def test_compare_asks_the_oracle_again_about_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def played() -> list[Any]:
        child = Worker()
        asked = {"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True}
        outcomes = [child.answer(asked)["outcome"]]
        child.answer({"slowdowns": []})
        assert child.answer({"sample": 2})["sample_ms"][0] > 0
        finished = child.answer({"finish": True, "other_inputs": True})
        return [*outcomes, finished["outcome"], finished["reason"]]

    assert played() == ["PASSED", "PASSED", None]
    monkeypatch.setattr(attention, "nsa_attention", timed_wrong)
    *outcomes, reason = played()
    assert outcomes == ["PASSED", "INCORRECT"]
    assert "rows against float64" in reason


def test_base_is_not_asked_about_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where that takes a third of a pair; what calls did to their inputs is looked at all the same."""
    rechecked: list[float] = []
    monkeypatch.setattr(RotatingInputs, "recheck", lambda self, seed, share: rechecked.append(share))
    monkeypatch.setattr(worker.integrity, "require_intact", lambda: None)
    child = Worker()
    child.answer({"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True})
    for other_inputs, shares in ((False, []), (True, [1.0])):
        assert child.answer({"finish": True, "other_inputs": other_inputs})["outcome"] == "PASSED"
        assert rechecked == shares, "all rows on a CPU"


def test_compare_sees_benches_that_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sampling, "new_seed", lambda: 1)
    child = Worker()
    child.answer({"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True})
    child.answer({"slowdowns": []})
    found = child.answer({"finish": True, "other_inputs": True})
    assert (found["outcome"], "replaced while the benches ran" in found["reason"]) == ("INCORRECT", True)


def test_compare_times_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> Any:
        found = nsa_attention(*arguments, **options)
        return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01

    monkeypatch.setattr(attention, "nsa_attention", wrong)
    asked = {"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True}
    assert Worker().answer(asked)["outcome"] == "INCORRECT"


def test_compare_sees_inputs_that_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, k: Any, *arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if not return_aux:
            k.mul_(1.0001)
        return nsa_attention(q, k, *arguments, return_aux=return_aux, **options)

    monkeypatch.setattr(attention, "nsa_attention", attend)
    child = Worker()
    child.answer({"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True})
    child.answer({"slowdowns": []})
    found = child.answer({"finish": True, "other_inputs": True})
    assert (found["outcome"], "changed its inputs: k" in found["reason"]) == ("INCORRECT", True)
