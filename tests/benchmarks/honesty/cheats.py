"""Implementations that cheat, measured as NSA is, and what a refusal looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import records
from benchmarks.history.records import Record
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import attention
from nsa import nsa_attention
from tests.benchmarks.synthetic import FINGERPRINT, key

PLAN = SamplingPlan(min_samples=5, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)

Attend = Callable[..., Any]


def measured(
    monkeypatch: pytest.MonkeyPatch,
    attend: Attend,
    mode: str = "prefill-forward",
    *,
    device: str = "cpu",
    **changes: Any,
) -> Record:
    """The record of an implementation that stands in for NSA, on rows that are the same each time: which fault is named
    may depend on them, as a rounded query may choose another block. On the CPU: tests beside this one may use the GPU.
    """
    monkeypatch.setattr(attention, "nsa_attention", attend)
    record = runner.measure(key(mode, **changes), device, PLAN, FINGERPRINT, "command", seed=1).record
    if device == "cuda" and "another process keeps the GPU busy" in (record.reason or ""):
        pytest.skip("needs a GPU to itself: another process keeps this one busy")
    return record


def caught(record: Record, outcome: CaseOutcome, said: str) -> None:
    """The record has this outcome, says so, and holds no number."""
    assert (record.outcome, said in (record.reason or "")) == (outcome, True), record.reason
    assert all(getattr(record, name) is None for name in records.NUMBERS)


def refused(record: Record, said: str) -> None:
    """The record is INCORRECT and says this."""
    caught(record, CaseOutcome.INCORRECT, said)


def accepted(record: Record) -> None:
    """The record passed: what a guard that is taken away lets through."""
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)


def unless_checked(cheat: Attend) -> Attend:
    """NSA where the check looks, the cheat where it is timed."""

    def attend(*arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if return_aux:
            return nsa_attention(*arguments, return_aux=True, **options)
        return cheat(*arguments, **options)

    return attend


class Remembering:
    """Returns what it returned before for inputs that have the same word."""

    def __init__(self, word: Callable[[Tensor], object], give: Callable[[Tensor], Tensor] = torch.clone) -> None:
        self._word, self._give = word, give
        self._memory: dict[object, Tensor] = {}
        self.computed = 0

    def __call__(self, q: Tensor, *arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if return_aux:
            return nsa_attention(q, *arguments, return_aux=True, **options)
        word = self._word(q)
        if word not in self._memory:
            self.computed += 1
            self._memory[word] = nsa_attention(q, *arguments, **options)
        return self._give(self._memory[word])
