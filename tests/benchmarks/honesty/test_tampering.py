"""Code that changes what measures it: the oracle, the benches, a baseline, the process. Each is refused by name."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import runner, worker
from benchmarks.baselines import BASELINES, sdpa
from benchmarks.cases.key import Key
from benchmarks.cases.work import Work
from benchmarks.correctness import integrity, known_answer, oracle, process_state, tolerance, verify
from benchmarks.correctness.verify import IncorrectError
from benchmarks.timing import rotating_inputs
from harness.repository import ROOT
from nsa import nsa_attention, reference, torch_backend
from tests.benchmarks.honesty.cheats import PLAN, accepted, measured, refused, unless_checked
from tests.benchmarks.synthetic import FINGERPRINT, key

LENIENT = 65
"""Length of the case that makes the comparison lenient."""


def prepare(the_key: Key, device: str) -> Work:
    """As always; one case changes the benches on its way."""
    if the_key.num_keys == LENIENT:
        tolerance.FORWARD_FACTOR = 1e9
    return runner.prepare(the_key, device)


def test_a_process_whose_benches_were_changed_gives_no_figure() -> None:
    keys = [key(length=64), key(length=LENIENT)]
    first, second = (
        one.record for one in worker.run(keys, "cpu", PLAN, FINGERPRINT, lambda _: "command", prepare, seed=11)
    )
    accepted(first)
    refused(second, "benchmarks.correctness.tolerance.FORWARD_FACTOR: replaced while the benches ran")


def test_nothing_is_said_of_benches_that_are_what_they_were() -> None:
    integrity.require_intact()


def holds_a_set(code: integrity.Code) -> bool:
    return any(holds_a_set(one) if isinstance(one, tuple) else one is frozenset for one in code)


def test_no_function_that_is_compared_holds_a_set_as_a_constant() -> None:
    """Constants are compared as text, and a set's order there may be another where its bytecode comes from a file."""
    files = [path for folder in ("benchmarks", "harness") for path in (ROOT / folder).rglob("*.py")]
    functions = [(path, *one) for path in files for one in integrity._read(path, 0, 0).functions.items()]
    assert len(functions) > 1000
    assert [(path, name) for path, name, codes in functions if any(map(holds_a_set, codes))] == []


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (verify, "require_finite", "benchmarks.correctness.verify.require_finite"),
        (verify.Answer, "__post_init__", "benchmarks.correctness.verify.Answer.__post_init__"),
        (runner, "anti_cheat", "benchmarks.runner.anti_cheat"),
        (tolerance, "BACKWARD_FACTOR", "benchmarks.correctness.tolerance.BACKWARD_FACTOR"),
        (reference, "_attend", "nsa.reference._attend"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.streams.Event.elapsed_time"),
        (torch.linalg, "vector_norm", "torch.linalg.vector_norm"),
        (torch.Tensor, "isfinite", "torch.Tensor.isfinite"),
        (torch.nn.functional, "scaled_dot_product_attention", "torch.nn.functional.scaled_dot_product_attention"),
        (runner.latency.time, "perf_counter", "time.perf_counter"),
    ],
)
def test_a_function_that_was_replaced(owner: Any, name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, lambda *_, **__: None)
    with pytest.raises(IncorrectError) as refusal:
        integrity.require_intact()
    assert str(refusal.value).startswith(said)
    assert "replaced while the benches ran" in str(refusal.value)


def test_a_built_in_function_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.latency.time, "perf_counter", runner.latency.time.process_time)
    with pytest.raises(IncorrectError, match=r"time\.perf_counter: replaced"):
        integrity.require_intact()


def test_a_file_of_the_benches_that_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "bench.py"
    path.write_text("LIMIT, REST = 2, 3\n\n\ndef judge(x):\n    return x < LIMIT\n")
    module = types.ModuleType("bench")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), vars(module))
    assert list(integrity.altered(module, data=True)) == []
    path.write_text("# moved\nLIMIT = 2\nREST = 3\n\n\ndef judge(x):\n    return x < LIMIT\n")
    assert list(integrity.altered(module, data=True)) == []
    path.write_text("LIMIT = 20\n\n\ndef judge(x):\n    return True\n")
    assert list(integrity.altered(module, data=True)) == ["bench.judge", "bench.LIMIT"]


ATTEND = reference._attend
ORACLES: list[tuple[Any, str, Callable[..., Any], str]] = [
    (reference, "_attend", lambda q, *rest: ATTEND(q * 0, *rest), "nsa.reference gives"),
    (reference, "combine", lambda outputs, gates: outputs[2], "nsa.reference gives"),
    (oracle, "block_scores", lambda x, config: torch.ones(2, 4), "benchmarks.correctness.oracle.block_scores gives"),
    (tolerance, "_relative_error", lambda x, truth: 0.0, "lets a head pass whose values were multiplied by 1.01"),
]


@pytest.mark.parametrize(("owner", "name", "fault", "said"), ORACLES, ids=[said for *_, said in ORACLES])
def test_an_oracle_or_a_comparison_that_was_changed(
    owner: Any, name: str, fault: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_answer.require_known_answers()
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(IncorrectError, match=said):
        known_answer.require_known_answers()


def test_a_comparison_that_nan_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    true = tolerance._relative_error
    monkeypatch.setattr(verify, "require_finite", lambda *_: None)
    known_answer.require_known_answers()  # the comparison itself refuses NaN
    monkeypatch.setattr(tolerance, "_relative_error", lambda x, truth: true(torch.where(x.isnan(), truth, x), truth))
    with pytest.raises(IncorrectError, match="lets a head pass whose values were multiplied by nan"):
        known_answer.require_known_answers()


def test_a_lenient_comparison_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance.OracleCheck, "passed", property(lambda _: True))
    tenth_off = unless_checked(lambda *arguments, **options: nsa_attention(*arguments, **options) * 1.1)
    refused(measured(monkeypatch, tenth_off), "the comparison lets a head pass")
    monkeypatch.setattr(rotating_inputs.known_answer, "require_known_answers", lambda: None)
    accepted(measured(monkeypatch, tenth_off))


def test_the_known_answers_are_those_of_numpy() -> None:
    """Written down once, they are computed here without PyTorch and without this project's attention."""
    q, k, v, gates = (x[0].numpy() for x in list(known_answer.problem(torch.float64).tensors.values())[:4])
    c = known_answer.CONFIG
    starts = range(0, len(k) - c.l + 1, c.d)

    def attend(head: int, keys: Any, values: Any) -> Any:
        s = keys @ q[-1, head] / np.sqrt(q.shape[-1])
        p = np.exp(s - s.max())
        return (p / p.sum()) @ values

    for head in range(known_answer.HEADS):
        h = head // (known_answer.HEADS // known_answer.NUM_KV_HEADS)
        chosen = [t for t in range(len(k)) if t // c.l_sel in known_answer.BLOCKS[h]]
        kc, vc = (np.stack([x[i : i + c.l, h].mean(0) for i in starts]) for x in (k, v))
        branches = (
            attend(head, kc, vc),
            attend(head, k[chosen, h], v[chosen, h]),
            attend(head, k[-c.w :, h], v[-c.w :, h]),
        )
        o = sum(gate * branch for gate, branch in zip(gates[-1, head], branches, strict=True))
        assert o[0] == pytest.approx(known_answer.NSA_ROW[head], abs=1e-12)
        assert attend(head, k[:, h], v[:, h])[0] == pytest.approx(known_answer.DENSE_ROW[head], abs=1e-12)


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "torch.get_float32_matmul_precision() from highest to high": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "torch.get_num_threads() from 1 to 2": (lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
    "torch.backends.cuda.flash_sdp_enabled() from True to False": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
    "NVIDIA_TF32_OVERRIDE from None to 1": (
        lambda: os.environ.update(NVIDIA_TF32_OVERRIDE="1"),
        lambda: os.environ.pop("NVIDIA_TF32_OVERRIDE"),
    ),
}


@pytest.mark.parametrize("said", SETTINGS)
def test_a_setting_of_the_process_that_is_changed(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, undo = SETTINGS[said]

    def attend(*arguments: Any, **options: Any) -> Any:
        change()
        return nsa_attention(*arguments, **options)

    try:
        refused(measured(monkeypatch, attend), f"the code that is measured has set {said}")
        for module in (runner.process_state, rotating_inputs.process_state):
            monkeypatch.setattr(module, "require_unchanged", lambda _: None)
        accepted(measured(monkeypatch, attend))
    finally:
        undo()


def test_tf32_that_was_on_before_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where importing the implementation turns it on."""
    torch.set_float32_matmul_precision("high")
    try:
        refused(
            measured(monkeypatch, nsa_attention), "has set torch.get_float32_matmul_precision() from highest to high"
        )
    finally:
        torch.set_float32_matmul_precision("highest")
    process_state.require_unchanged(process_state.read())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1", "the environment has TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"),
        ("0", "the code that is measured has set torch."),
    ],
)
def test_tf32_that_the_caller_turned_on_is_said_to_be_the_environment_s(
    value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a variable of the process's start did it, the code that is measured is not to blame."""
    variable = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    environment = tmp_path / "environ"
    environment.write_bytes(f"{variable}={value}\0".encode())
    for name in process_state.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(process_state, "_STARTED_WITH", environment)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(IncorrectError, match=said):
            process_state.require_unchanged(process_state.read())
    finally:
        torch.set_float32_matmul_precision("highest")
    process_state.require_unchanged(process_state.read())


def test_a_changed_setting_is_named_before_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        torch.set_num_threads(2)
        found = nsa_attention(*arguments, return_aux=return_aux, **options)
        return (found[0] * 1.1, found[1]) if return_aux else found

    try:
        refused(measured(monkeypatch, attend), "the code that is measured has set torch.get_num_threads()")
    finally:
        torch.set_num_threads(1)


def baseline(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    return measured(monkeypatch, nsa_attention, implementation=name, backend_asked=None, config=None)


def test_another_kernel_under_a_baseline_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted(baseline(monkeypatch, "sdpa-flash"))
    monkeypatch.setitem(sdpa.BACKENDS, "sdpa-flash", sdpa.BACKENDS["sdpa-math"])
    refused(baseline(monkeypatch, "sdpa-flash"), "another kernel stands under its name")
    monkeypatch.setitem(BASELINES, "sdpa-flash", dataclasses.replace(BASELINES["sdpa-flash"], kernels=()))
    accepted(baseline(monkeypatch, "sdpa-flash"))


def test_a_baseline_that_was_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By code that wraps what PyTorch's users call: the right kernel runs, twice."""
    true = torch.nn.functional.scaled_dot_product_attention

    def twice(*arguments: Any, **options: Any) -> Tensor:
        true(*arguments, **options)
        return true(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", twice)
    found = runner.measure(key(implementation="sdpa-flash"), "cpu", PLAN, FINGERPRINT, "command")
    accepted(found.record)
    checked = runner.unless_changed(found).record
    refused(checked, "torch.nn.functional.scaled_dot_product_attention")
    assert "replaced while the benches ran" in (checked.reason or "")


def test_a_part_of_the_product_may_be_anything() -> None:
    """What is measured is free to change itself; the reference is not."""
    assert not any(name.startswith(torch_backend.__name__) for name in (*integrity._ORACLE, *integrity._OWN))
    assert reference.__name__ in integrity._ORACLE
    assert reference.__name__ in sys.modules
