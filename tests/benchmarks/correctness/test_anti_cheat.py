"""Every way to look fast without doing the work that is asked for ends without a number, and is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.correctness import anti_cheat
from benchmarks.workloads import attention
from nsa import nsa_attention
from tests.benchmarks.honesty.cheats import PLAN, Attend, Remembering, caught, measured
from tests.benchmarks.synthetic import FINGERPRINT, key

MODES = ["prefill-forward", "decode"]
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@ON_BOTH
@pytest.mark.parametrize("mode", [*MODES, "prefill-forward-backward"])
def test_an_honest_implementation_is_let_through(mode: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = measured(monkeypatch, nsa_attention, mode, device=device)
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.correctness is not None
    fresh = [check.name for check in record.correctness.checks if check.name.endswith(", fresh inputs")]
    assert fresh[:2] == ["block_indices, fresh inputs", "o, fresh inputs"]
    assert ("dq, fresh inputs" in fresh) == (mode == "prefill-forward-backward")


@ON_BOTH
@pytest.mark.parametrize("mode", MODES)
def test_output_remembered_by_address(mode: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = measured(monkeypatch, Remembering(Tensor.data_ptr, torch.clone), mode, device=device)
    caught(copies, CaseOutcome.INCORRECT, "is to the bit what the call before returned: it was remembered")
    itself = measured(monkeypatch, Remembering(Tensor.data_ptr, lambda o: o), mode, device=device)
    caught(itself, CaseOutcome.INCORRECT, "that the call has not written: an output that was remembered")


WORDS: dict[str, Callable[[Tensor], object]] = {
    "version": lambda q: (q.data_ptr(), q._version),
    "content": lambda q: q.double().sum().item(),
}


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_output_remembered_by_version_or_content(
    word: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs change between calls, so that every sample holds the work."""
    remembering = Remembering(word, torch.clone)
    record = measured(monkeypatch, remembering, length=256)
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.samples is not None
    assert remembering.computed >= record.samples.count


def test_content_remembered_of_inputs_that_do_not_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anti_cheat.Touch, "__call__", lambda self: None)
    record = measured(monkeypatch, Remembering(WORDS["content"], torch.clone), length=256)
    caught(record, CaseOutcome.INCORRECT, "the timed inputs are recognised, or results remembered")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [lambda k: k.mul_(1.0001), lambda k: k.clamp_(-1, 1)], ids=["each time", "once"])
def test_inputs_changed_in_place(
    change: Callable[[Tensor], Tensor], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> Any:
        change(k)
        return nsa_attention(q, k, *arguments, **options)

    caught(measured(monkeypatch, attend, mode), CaseOutcome.INCORRECT, "the call changed its inputs: k")


class Lazy(torch.Tensor):
    """Computes when something is done with it."""

    compute: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(x: Any) -> Any:
            return x.compute() if isinstance(x, Lazy) else x

        with torch._C.DisableTorchFunctionSubclass():
            return function(*(real(x) for x in args), **{name: real(x) for name, x in (kwargs or {}).items()})


def test_output_computed_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, *arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if return_aux:
            return nsa_attention(q, *arguments, return_aux=True, **options)
        later = torch.empty(0).as_subclass(Lazy)
        later.compute = lambda: nsa_attention(q, *arguments, **options)
        return later

    caught(
        measured(monkeypatch, attend),
        CaseOutcome.INCORRECT,
        "output 0 is a tests.benchmarks.correctness.test_anti_cheat.Lazy, not a",
    )


def test_rows_that_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a buffer that an earlier call has filled with the right values, so that nothing looks wrong."""
    kept: list[Tensor] = []

    def attend(q: Tensor, *arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if return_aux:
            return nsa_attention(q, *arguments, return_aux=True, **options)
        o = nsa_attention(q, *arguments, **options)
        if not kept:
            kept.append(o.clone())
        kept[0][:, :-1] = o[:, :-1]
        return kept[0]

    caught(measured(monkeypatch, attend), CaseOutcome.INCORRECT, "output 0 holds 64 values, of 4096, that the call has")


@pytest.mark.parametrize("mode", [*MODES, "prefill-forward-backward"])
def test_another_path_in_the_timing_than_in_the_check(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        found = nsa_attention(*arguments, return_aux=return_aux, **options)
        return found if return_aux else found * 1.001

    caught(measured(monkeypatch, attend, mode), CaseOutcome.INCORRECT, "o: error")


@pytest.mark.parametrize("wrong", [1, 15])
def test_a_batch_of_which_one_sequence_is_not_computed(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        found = nsa_attention(*arguments, return_aux=return_aux, **options)
        if not return_aux:  # only what is timed, so that the recheck must see it
            found[wrong] = 123.0
        return found

    caught(measured(monkeypatch, attend, "decode", batch=16), CaseOutcome.INCORRECT, "o: error")


def test_gradients_that_the_check_did_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, *arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if not return_aux:
            q = q.detach() * 1.0 + (q - q.detach()) * 1.001
        return nsa_attention(q, *arguments, return_aux=return_aux, **options)

    caught(measured(monkeypatch, attend, "prefill-forward-backward"), CaseOutcome.INCORRECT, "dq: error")


def test_a_train_step_that_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"l": 16, "d": 8, "l_sel": 32, "n_sel": 8, "w": 64}
    the_key = key("train-step", length=96, heads=8, model="showcase", config=config)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    record = runner.measure(the_key, "cpu", PLAN, FINGERPRINT, "command").record
    caught(record, CaseOutcome.INCORRECT, "the step left every weight as it was")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64])
def test_a_digest_sees_every_element(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anti_cheat, "_CHUNK", 8)
    x = (torch.arange(35).view(5, 7) % 11).to(dtype)
    words = {anti_cheat.digest(x)}
    for i in range(35):
        other = x.clone()
        other.view(-1)[i] += 1
        words.add(anti_cheat.digest(other))
    assert len(words) == 36
    swapped = x.clone()
    swapped.view(-1)[[0, 1]] = x.view(-1)[[1, 0]]
    assert anti_cheat.digest(swapped) not in words
    assert anti_cheat.digest(x.t()) == anti_cheat.digest(x.t().contiguous())
    assert anti_cheat.digest(x) == anti_cheat.digest(x.clone())


def test_a_touch_changes_each_input_and_leaves_it_as_it_was() -> None:
    tensors = {
        "x": torch.randn(4, 3).t(),
        "scalar": torch.tensor(2.0),
        "index": torch.arange(4),
        "none": torch.zeros(0, 3),
    }
    before, versions = anti_cheat.digests(tensors), {name: x._version for name, x in tensors.items()}
    touch = anti_cheat.Touch(tensors.values())
    for _ in range(3):
        touch()
    changed = anti_cheat.digests(tensors)
    assert [name for name in tensors if changed[name] != before[name]] == ["x", "scalar"]
    touch.undo()
    touch.undo()
    anti_cheat.require_unchanged(tensors, before)
    assert tensors["x"]._version > versions["x"]


def on_a_stream_of_its_own(join: bool) -> Attend:
    side = torch.cuda.Stream()

    def attend(*arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if return_aux:
            return nsa_attention(*arguments, return_aux=True, **options)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            o = nsa_attention(*arguments, **options)
        if join:
            torch.cuda.current_stream().wait_stream(side)
        return o

    return attend


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_work_on_a_stream_that_nobody_waits_for(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"length": 2048, "cache": cache, "device": "cuda"}
    record = measured(monkeypatch, on_a_stream_of_its_own(join=False), **sizes)
    caught(record, CaseOutcome.INCORRECT, "work on another stream is not waited for")
    assert measured(monkeypatch, on_a_stream_of_its_own(join=True), **sizes).outcome is CaseOutcome.PASSED


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["warm", "cold"])
@pytest.mark.parametrize("mode", MODES)
def test_a_graph_is_checked_as_it_is_replayed(mode: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"launch": "graph", "cache": cache, "backend_asked": "auto", "dtype": "bfloat16", "device": "cuda"}
    honest = measured(monkeypatch, nsa_attention, mode, **changes)
    assert (honest.outcome, honest.reason, honest.clock) == (CaseOutcome.PASSED, None, "cuda_graph")
    empty = measured(monkeypatch, Remembering(Tensor.data_ptr, lambda o: o), mode, **changes)
    caught(empty, CaseOutcome.INCORRECT, "gave the device nothing to do when its CUDA graph was made")
    stale = measured(monkeypatch, Remembering(Tensor.data_ptr, torch.clone), mode, **changes)  # captures the copy only
    caught(stale, CaseOutcome.INCORRECT, "or a graph reads stale addresses")


def test_the_inputs_of_the_recheck_are_new_and_the_same_every_time() -> None:
    the_key = dataclasses.replace(key(), num_queries=16, num_keys=16)
    timed, fresh, again = (attention._problem(the_key, "cpu", seed).q for seed in (0, 1, 1))
    assert not torch.equal(timed, fresh)
    assert torch.equal(fresh, again)
