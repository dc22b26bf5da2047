"""Figures of attention over several ranks: counted bytes, a waiting that is seen, and nothing without agreement."""

from __future__ import annotations

import dataclasses
import shlex
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import nsa
from benchmarks.cases.key import CONTEXT_PARALLEL, Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.correctness.verify import IncorrectError
from benchmarks.history import run_file
from benchmarks.parallel import __main__ as program
from benchmarks.parallel import measure, record
from benchmarks.parallel.measure import ParallelTime
from nsa.parallel import exchange
from tests.benchmarks.synthetic import FINGERPRINT, key
from tests.nsa.parallel import faults
from tests.nsa.parallel.pool import Pool, RankError

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=24)
CASE = key(CONTEXT_PARALLEL, length=96, head_dim_k=8, head_dim_v=12, ranks=2, config=dataclasses.asdict(CONFIG))
PACKED = dataclasses.replace(CASE, documents=(30, 66))
SLEPT_S = 0.05


def _measured(mesh: DeviceMesh, case: Key, fault: str | None) -> ParallelTime:
    with faults.FAULTS[fault][0]() if fault else torch.no_grad(), torch.enable_grad():
        return measure.measure(mesh, case, samples=6)


def test_one_device_and_two_make_a_record(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, _measured, CASE, None)
    assert first == second
    made = record.passed(CASE, first, FINGERPRINT, "again", 1.5)
    assert made.outcome is CaseOutcome.PASSED
    assert first.shared.one_rank_ms is not None
    assert made.share_of_ideal == pytest.approx(first.shared.one_rank_ms / 2 / made.latency_ms)
    assert made.interval_ms is not None
    checks = {check.name: check for check in first.correctness.checks}
    assert all(checks[f"{name}, 2 ranks beside one"].error == 0 for name in measure.EXACT)
    assert {"o", "dq", "dk", "dv", "mass missed", "dv, 2 ranks beside one"} <= set(checks)
    path = run_file.create(tmp_path, FINGERPRINT)
    run_file.append(path, made)
    ((back,), damaged) = run_file.read_all(tmp_path)
    assert damaged == []
    assert back.key == CASE
    assert back.share_of_ideal == pytest.approx(made.share_of_ideal, rel=1e-6)


def test_each_time_is_that_of_its_own_call(pool: Pool) -> None:
    found, with_autograd = pool.run(2, _timed_by_name, CASE)[0]
    assert (found.shared.one_rank_ms, found.shared.forward_ms) == (9.0, 2.0)
    assert found.samples_ms == (5.0, 5.0)
    assert with_autograd == {"_forward": False, "_together": True}


def _timed_by_name(mesh: DeviceMesh, case: Key) -> tuple[ParallelTime, dict[str, bool]]:
    """Also whether autograd was on in what the ranks do together."""
    times_ms = {"_one": 9.0, "_forward": 2.0, "_together": 5.0}
    attention, samples = measure.context_parallel_attention, measure._samples
    with_autograd: dict[str, bool] = {}

    def noted(name: str, *arguments: Any, **more: Any) -> Any:
        with_autograd[name] = torch.is_grad_enabled()
        return attention(*arguments, **more)

    def by_name(calls: list[Any], count: int, group: Any) -> list[list[float]]:
        if calls[0].func.__name__ not in times_ms:  # the rate of a gather
            return samples(calls, count, group)
        for call in calls[1:]:
            patch.setattr(measure, "context_parallel_attention", partial(noted, call.func.__name__))
            call()
        patch.setattr(measure, "context_parallel_attention", attention)
        return [count * [times_ms[call.func.__name__]] for call in calls]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_samples", by_name)
        return measure.measure(mesh, case, samples=2), with_autograd


def test_calls_take_turns_and_are_not_timed_while_they_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both are timed on GPUs that are equally warm."""
    called: list[str] = []
    monkeypatch.setattr(measure.dist, "barrier", lambda **_: called.append("barrier"))
    monkeypatch.setattr(measure.dist, "get_backend", lambda _: "gloo")
    calls = [lambda: called.append("alone"), lambda: called.append("together")]
    alone_ms, together_ms = measure._samples(calls, 2, None)  # type: ignore[arg-type]
    assert called == (measure.WARM_UP + 2) * ["barrier", "alone", "barrier", "together"]
    assert len(alone_ms) == len(together_ms) == 2


def test_bytes_are_those_that_arrive(pool: Pool) -> None:
    """Of half the tokens: keys and values twice, float32 sums of the other rank's queries for the own ones once; the
    compressed rows likewise; and the rows of the halos, there and back."""
    pair = (8 + 12) * 2 * 4  # bytes of a key and a value of all kv heads
    blocks = (96 - 8) // 4 + 1
    most = -(-blocks // 2) + 1
    selected = 3 * 48 * pair
    received = pool.run(2, _measured, CASE, None)[0].shared.received_gb * 1e9
    window, source = 3 * 2 * 23, 2 * 2 * 4  # the most that two pieces' halos can hold
    assert selected + 3 * (most - 1) * pair - pair <= received <= selected + (3 * most + window + source) * pair


def _waited(mesh: DeviceMesh) -> list[float]:
    class Slow:
        def wait(self) -> None:
            time.sleep(SLEPT_S)

    with measure._waiting() as waits_ms:
        for work in (Slow(), None):
            exchange.Pending(work, lambda: torch.zeros(1)).wait()  # type: ignore[arg-type]
        return waits_ms()


def test_waiting_is_seen(pool: Pool) -> None:
    first, second = pool.run(1, _waited)[0]
    assert first >= SLEPT_S * 1e3 > second


def test_a_longer_sequence_is_checked_on_its_beginning(pool: Pool) -> None:
    found, whole_is_there = pool.run(2, _shortly_checked, PACKED)[0]
    assert not whole_is_there, "each rank timed needs its own part alone"
    assert found.shared.compared_tokens == 48
    assert found.shared.one_rank_ms is None
    assert record.passed(PACKED, found, FINGERPRINT, "again", 1.5).share_of_ideal is None


def _shortly_checked(mesh: DeviceMesh, case: Key) -> tuple[ParallelTime, bool]:
    """Also whether the whole sequence's queries are still there when a part of it is timed."""
    drawn: list[weakref.ref[torch.Tensor]] = []
    there: list[bool] = []
    draw, samples = measure.inputs.draw, measure._samples

    def noted(*arguments: Any) -> Any:
        problem = draw(*arguments)
        drawn.append(weakref.ref(problem.q))
        return problem

    def looked(*arguments: Any) -> list[list[float]]:
        there.append(drawn[-1]() is not None)
        return samples(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.inputs, "draw", noted)
        patch.setattr(measure, "_samples", looked)
        return measure.measure(mesh, case, samples=1, alone=False, check_tokens=48), there[0]


@pytest.mark.parametrize("fault", ["a dropped gather", "dk and dv never sent", "a halo of the window too short"])
def test_nothing_is_measured_of_what_is_wrong(pool: Pool, fault: str) -> None:
    with pytest.raises(RankError, match=r"IncorrectError: .* 2 ranks beside one: error"):
        pool.run(2, _measured, CASE, fault)


def test_what_both_get_wrong_float64_finds(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"IncorrectError: o, first rows: error .*; o: error"):
        pool.run(2, _wrongly_scaled, CASE)


def _wrongly_scaled(mesh: DeviceMesh, case: Key) -> None:
    """Both one rank and two compute o / 2."""
    called = measure._called

    def halved(*arguments: object, **more: object) -> tuple[dict[str, torch.Tensor], str]:
        found, path = called(*arguments, **more)  # type: ignore[arg-type]
        return {**found, "o": found["o"] / 2}, path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_called", halved)
        measure.measure(mesh, case, samples=1)


def test_the_command_of_a_record_asks_for_its_case() -> None:
    case = dataclasses.replace(PACKED, config=dataclasses.asdict(nsa.NSAConfig()))
    words = shlex.split(record.command(case, "cpu", 7, 3, alone=False, check_tokens=48))
    assert words[:4] == ["torchrun", "--nproc_per_node=2", "-m", "benchmarks.parallel"]
    asked = program.parser().parse_args(words[4:])
    assert program.cases(asked, 2) == [case]
    assert (asked.device, asked.samples, asked.seed, asked.no_alone, asked.check_tokens) == ("cpu", 7, 3, True, 48)


def test_recorded_inputs_have_no_documents() -> None:
    asked = ["--tokens", "96", "--documents", "30", "66", "--inputs", "recorded"]
    with pytest.raises(ValueError, match="recorded ones are of one document"):
        program.cases(program.parser().parse_args(asked), 2)


@pytest.mark.parametrize("wrong", [["--samples", "0"], ["--check-tokens", "0"], ["--check-tokens", "97"]], ids=" ".join)
def test_what_cannot_be_measured_is_refused_by_name(wrong: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{wrong[0]} must be .*; got {wrong[1]}"):
        program.cases(program.parser().parse_args(["--tokens", "96", "128", *wrong]), 2)


def test_a_wrong_case_is_recorded_without_a_figure() -> None:
    made = record.incorrect(CASE, IncorrectError("o: error 1 > budget 0"), FINGERPRINT, "again")
    assert made.outcome is CaseOutcome.INCORRECT
    assert made.shared is None
