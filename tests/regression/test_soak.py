"""A lane of the soak passes, and sees a loss that is not finite, one that is too good, and a prefill that differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from nsa import KVCache
from nsa.layer import PerBranch
from nsa.train.trainer import StepResult, Trainer
from regression import soak_lane
from regression.contract import Evidence, ReproVerdict, verdict
from regression.soak_lane import PROFILES, Profile
from regression.training import TINY
from tests.regression.nonfinite_gradients import fill_gradients_of_one_weight


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Profile(TINY, 1, 36)
    monkeypatch.setattr(soak_lane, "PROFILES", {"3090": SimpleNamespace(shrunken=tiny)})
    monkeypatch.setattr(soak_lane, "FALL", 1.0)  # the throughput of a few steps is noise


def soaked(precision: str = "fp32", prefill: str = "sequential") -> Evidence:
    def step(n: int, **figures: float) -> None:
        steps.append(n)

    steps: list[int] = []
    step.device = "cpu"  # type: ignore[attr-defined]
    found = soak_lane.run(step, profile="3090", precision=precision, prefill=prefill, seconds=0.0)  # type: ignore[arg-type]
    assert max(steps) == 28, "four rounds of seven shapes: past step 5"
    return found


@pytest.mark.parametrize(
    ("precision", "prefill"), [("fp32", "sequential"), ("bf16", "batched"), ("fp16", "sequential")]
)
def test_passes(precision: str, prefill: str) -> None:
    assert verdict(soaked(precision, prefill)) is ReproVerdict.PASSED


def test_what_few_rounds_cannot_tell_is_unknown() -> None:
    found = soaked()
    assert (found.memory, found.slowdown) == (None, None)
    assert "unknown after so few rounds: memory slope, throughput" in found.notes[0]


@pytest.mark.parametrize("profile", list(PROFILES.values()))
def test_a_prefill_leaves_the_window_and_the_selected_blocks(profile: Profile) -> None:
    for one in (profile, profile.shrunken):
        config, tokens = one.model.nsa, soak_lane.prefilled_tokens(one.model.nsa, one.seq_len)
        assert tokens == one.seq_len or tokens > max(config.w, config.n_sel * config.l_sel)
        assert tokens >= min(one.seq_len, config.w + config.l_sel)


def _turned(change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = Trainer.step

    def turned(self: Trainer, *given: Any) -> StepResult:
        stepped = healthy(self, *given)
        return replace(stepped, loss=change(stepped.loss))

    monkeypatch.setattr(Trainer, "step", turned)


def test_not_finite_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _turned(lambda loss: loss * float("nan"), monkeypatch)
    assert verdict(soaked()) is ReproVerdict.NONFINITE


def test_gradients_that_the_scaler_hides_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_gradients_of_one_weight(monkeypatch, float("nan"))
    found = soaked("fp16", "batched")
    assert verdict(found) is ReproVerdict.NONFINITE
    assert "28 skipped" in "; ".join(found.notes)


def test_too_good_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _turned(lambda loss: loss - 0.1, monkeypatch)
    assert verdict(soaked()) is ReproVerdict.TOO_GOOD


def test_a_prefill_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that forgets its first token on the way."""
    healthy = KVCache.stage

    def forgetful(cache: KVCache, k: PerBranch, v: PerBranch) -> object:
        cache._v[:, :, 0] = 0
        return healthy(cache, k, v)

    monkeypatch.setattr(KVCache, "stage", forgetful)
    assert verdict(soaked()) is ReproVerdict.WRONG
