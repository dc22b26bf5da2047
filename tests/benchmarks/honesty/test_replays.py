"""Outputs that are remembered, recognised, late or not there: each is refused by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.correctness import anti_cheat
from benchmarks.timing import cross_check, cuda_graphs
from nsa import nsa_attention
from tests.benchmarks.honesty.cheats import Remembering, accepted, measured, refused, unless_checked

RECOGNISED = "the timed inputs are recognised, or results remembered"
REMEMBERED = "is to the bit what the call before returned: it was remembered, or a graph reads stale addresses"


def test_output_remembered_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(measured(monkeypatch, Remembering(lambda q: tuple(q.shape))), REMEMBERED)
    monkeypatch.setattr(anti_cheat.OtherInputs, "require_new", lambda *_: None)
    refused(measured(monkeypatch, Remembering(lambda q: tuple(q.shape))), "o: error")  # no longer by name


def some_values(k: Tensor) -> tuple[float, ...]:
    """A checksum of the inputs that a change of one value does not alter."""
    return tuple(k.flatten()[100:2000:100].abs().tolist())


class Recogniser:
    """Has the answer for the inputs that every run shares at hand."""

    def __init__(self) -> None:
        self._known: tuple[float, ...] = ()
        self._answer: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if self._answer is None:
            self._known, self._answer = some_values(k), nsa_attention(q, k, *arguments, **options)
        if some_values(k) == self._known:
            return self._answer.clone()
        found: Tensor = nsa_attention(q, k, *arguments, **options)
        return found


def test_timed_inputs_recognised_by_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(measured(monkeypatch, unless_checked(Recogniser()), length=256), RECOGNISED)
    monkeypatch.setattr(cross_check, "require_same_pace", lambda _: None)
    refused(measured(monkeypatch, unless_checked(Recogniser()), length=256), REMEMBERED)
    monkeypatch.setattr(cross_check, "require_computed_anew", lambda _: None)
    accepted(measured(monkeypatch, unless_checked(Recogniser()), length=256))


def test_the_one_changed_value_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that computes the first row alone, because nothing else ever changed."""
    kept: list[Tensor] = []

    def first_row_alone(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if not kept or not torch.equal(kept[1], q[:, 1:]):
            kept[:] = [nsa_attention(q, k, v, gates, *arguments, **options), q[:, 1:].clone()]
        return kept[0].clone()

    accepted(measured(monkeypatch, unless_checked(first_row_alone), length=256))  # it computes all, and gains nothing
    assert len({tuple(place.tolist()) for place in touched_places()}) > 20
    monkeypatch.setattr(anti_cheat.secrets, "randbelow", lambda _: 0)
    refused(measured(monkeypatch, unless_checked(first_row_alone), length=256), RECOGNISED)


def touched_places() -> Iterator[Tensor]:
    """Where a touch has changed a tensor, in 40 tries."""
    x = torch.ones(16, 16)
    for _ in range(40):
        touch = anti_cheat.Touch([x])
        touch()
        yield (x < 0).nonzero()[0]
        touch.undo()
        assert bool((x > 0).all())


def test_calls_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right at first, as where it is checked, and then while calls follow one another fast."""
    kept: list[Any] = [0.0, None]

    def rushed(*arguments: Any, **options: Any) -> Tensor:
        if kept[1] is None or time.monotonic() - kept[0] > 0.02:
            kept[1] = nsa_attention(*arguments, **options)
        kept[0] = time.monotonic()
        return kept[1].clone()

    refused(measured(monkeypatch, unless_checked(rushed), length=512), REMEMBERED)


def test_work_moved_to_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def later(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
        o = torch.zeros(*q.shape[:3], v.shape[3])

        def compute() -> None:
            time.sleep(0.15)
            o.copy_(nsa_attention(q, k, v, *arguments, **options))

        threads.append(threading.Thread(target=compute))
        threads[-1].start()
        return o

    try:
        refused(measured(monkeypatch, unless_checked(later)), "changed after the call had returned: another thread")
        monkeypatch.setattr(cross_check.Observer, "require_settled", lambda _: None)
        refused(measured(monkeypatch, unless_checked(later)), "o: error")  # no longer by name
    finally:
        for thread in threads:
            thread.join()


class Deferred:
    """No tensor, but it can become one."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute(), name)


def test_an_object_that_computes_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def deferred(*arguments: Any, **options: Any) -> Any:
        return Deferred(lambda: nsa_attention(*arguments, **options))

    refused(measured(monkeypatch, unless_checked(deferred)), "Deferred, not a plain tensor: what it holds may be")


@pytest.mark.parametrize(("give", "said"), [(torch.clone, REMEMBERED), (lambda x: x, "that the call has not written")])
def test_a_graph_with_stale_addresses(
    give: Callable[[Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU a graph is stood in for by what it replays: the outputs of the call that it was made of."""

    def capture(call: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        outputs = call()
        return lambda: tuple(give(x) for x in outputs)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    refused(measured(monkeypatch, nsa_attention, launch="graph"), said)
    monkeypatch.setattr(cuda_graphs, "capture", lambda call: call)
    accepted(measured(monkeypatch, nsa_attention, launch="graph"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_what_a_call_has_not_written_is_told_from_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 4, dtype=dtype)
    anti_cheat.poison([x])
    x[1] = 0
    with pytest.raises(anti_cheat.IncorrectError, match="output 0 holds 8 values, of 12, that the call has"):
        anti_cheat.require_written([x])
    x.fill_(torch.nan if dtype.is_floating_point else 1)
    anti_cheat.require_written([x, torch.zeros(3, dtype=torch.bool)])


def test_blocks_may_stay_the_same_for_other_inputs() -> None:
    outputs = anti_cheat.OtherInputs()
    for _ in range(2):
        outputs.require_new([torch.arange(4), torch.zeros(4), torch.rand(4)])
    same = torch.rand(4)
    outputs.require_new([same])
    with pytest.raises(anti_cheat.IncorrectError, match="output 0 for other inputs is to the bit"):
        outputs.require_new([same.clone()])


def test_a_host_that_is_held_up_is_asked_again() -> None:
    cross_check.require_same_pace([(9.0, 1.0), (9.0, 1.0), (1.2, 1.0)])
    cross_check.require_same_pace([(0.1, 0.06)])
    with pytest.raises(anti_cheat.IncorrectError, match=r"a call takes 1\.6 ms, on the timed ones 1 ms"):
        cross_check.require_same_pace([(9.0, 1.0), (1.6, 1.0)])
