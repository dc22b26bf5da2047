"""Halves of detectors that the suite sees together only: each fires alone."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import nsa
from nsa import backends, torch_backend
from nsa.train import preflight
from nsa.train import run as product_run
from nsa.train.data import loader, packing
from nsa.train.data.loader import BatchFetcher, FirstBatch
from nsa.train.data.packing import Row
from nsa.train.distributed import Ranks
from nsa.train.settings import Settings
from regression.contract import Bound, Evidence, ReproVerdict, verdict
from regression.detectors import host_cost, public_api
from regression.detectors.backends import in_every_backend
from regression.incidents import (
    blind_gate,
    dead_route,
    fp16_adamw,
    grad_none_ddp,
    int32_scatter,
    loader_stall,
    mib_gb,
    step2_stall,
    strict_mode_crash,
    toy_config_run,
    unique_60x,
    workspace_inplace,
)
from regression.injection import NeverEnteredError
from tests.regression.nonfinite_gradients import fill_gradients_of_one_weight
from tests.regression.test_attention_incidents import SilentStep

STEP = SilentStep(("reference", "torch"), "cpu")
ROW = Row(torch.zeros(48, dtype=torch.int64), (48,))


def found(evidence: Evidence) -> str:
    return "; ".join(evidence.wrong or ())


def test_a_new_flag_without_a_value_is_named() -> None:
    def with_flag(x: Tensor, *, batched: bool = False, strict: bool = False) -> Tensor:
        return x

    entry = public_api.PublicCall(with_flag, (torch.ones(1),), {"batched": (False, True)})
    assert found(strict_mode_crash.run_all({"prefill": entry}, STEP)) == "prefill: no value for strict"


def test_a_new_public_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsa, "sink_attention", lambda x: x, raising=False)
    monkeypatch.setattr(nsa, "__all__", [*nsa.__all__, "sink_attention"])
    assert found(strict_mode_crash.product(STEP)) == "nsa.sink_attention is not run"


def test_every_combination_is_run() -> None:
    entry = public_api.PublicCall(print, (), {"a": (0, 1), "b": (0, 1, 2)})
    assert len(entry.combinations(all_of_them=True)) == 6
    assert entry.combinations(all_of_them=False) == [{"a": 0, "b": 0}, {"a": 1, "b": 2}]


def test_a_silent_fallback_alone_is_seen() -> None:
    """Every backend serves what it can; only what triton cannot serve goes elsewhere, with its name in the record."""
    healthy = backends.choose

    def hides(asked: str, q: Tensor, v: Tensor) -> tuple[str, backends.Backend]:
        try:
            return healthy(asked, q, v)
        except ValueError:
            return asked, backends.load("torch")

    with mock.patch.object(backends, "choose", hides):
        assert "in silence" in found(dead_route.product(SilentStep(("reference", "torch", "triton"), "cpu")))


@pytest.mark.interpreter
def test_a_backend_that_has_a_whole_call_is_seen_to_run() -> None:
    """None of its parts is called then."""
    pytest.importorskip("triton")
    assert found(dead_route.product(SilentStep(("reference", "torch", "triton"), "cpu"))) == ""


def test_a_wrong_record_alone_is_seen() -> None:
    healthy = backends.choose
    with mock.patch.object(backends, "choose", lambda asked, q, v: ("torch", healthy(asked, q, v)[1])):
        assert "asked for reference, recorded torch, ran reference" in found(dead_route.product(STEP))


def test_weights_in_fp16_that_preflight_lets_start_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "refusals", lambda plan: ())
    assert found(fp16_adamw.product(STEP)) == "preflight lets weights in fp16 start"


def test_nan_gradients_that_the_scaler_hides_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_gradients_of_one_weight(monkeypatch, float("nan"), precision="fp16")
    evidence = fp16_adamw.product(STEP)
    assert evidence.nonfinite
    assert all(name.startswith("fp16: non_finite") and "grad_norm" in name for name in evidence.nonfinite)


def test_a_field_without_a_unit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mib_gb, "_UNITS", {"gib": 2**30})
    assert "benchmarks.history.records.Record.peak_mem_mib has no unit" in found(mib_gb.product(STEP))


@pytest.mark.parametrize(
    ("shares", "seen"), [((1.0, 1.0), ""), ((2.0, 2.0), ""), ((1.0, 1.1), "the ranks disagree on their gradients")]
)
def test_ranks_that_average_wrongly_are_seen(
    shares: tuple[float, float], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ranks(chosen: Settings) -> list[Tensor]:
        one = grad_none_ddp._flat(grad_none_ddp._gradients(chosen, Ranks()))
        return [share * one for share in shares]

    monkeypatch.setattr(grad_none_ddp, "_two_ranks", ranks)
    evidence = grad_none_ddp.product(STEP)
    assert evidence.error is not None
    assert evidence.error.exceeded == (shares[0] != 1)
    assert found(evidence) == seen
    assert evidence.exception is None


@pytest.mark.parametrize(
    ("script", "loses"),
    [
        ("pytest | tee log", True),
        ("pytest 2>&1 |tee log", True),
        ("pytest |& tee log", True),
        ("# pipefail is for others\npytest | tee log", True),
        ("set -e  # no pipefail\npytest | tee log", True),
        ("set -euo pipefail\npytest | tee log", False),
        ("    shell: bash -euo pipefail {0}\n    run: pytest | tee log", False),
        ("    shell: bash\n    run: pytest | tee log", True),
        ("  - run: set -o pipefail; pytest | tee log", False),
        ("pytest | teeth", False),
    ],
)
def test_every_way_to_pipe_is_known(script: str, loses: bool) -> None:
    assert blind_gate._loses_exit_code(f"#!/bin/bash\n{script}\n") is loses


@pytest.mark.parametrize(
    ("code", "out", "seen"),
    [
        (1, "red: dup-blocks", []),
        (0, "", ["a gate: exit code 0 on an injected fault"]),
        (2, "", ["a gate: exit code 2 on an injected fault"]),
        (-11, "", ["a gate: exit code -11 on an injected fault"]),
        (1, "Traceback", ["a gate: red without dup-blocks in its output"]),
    ],
)
def test_a_gate_that_breaks_has_not_fired(code: int, out: str, seen: list[str]) -> None:
    def gate(broken: bool) -> blind_gate.GateResult:
        return blind_gate.GateResult(code, out) if broken else blind_gate.GateResult(0, "")

    assert blind_gate._blind("a gate", gate, STEP, "dup-blocks") == seen


def test_the_gates_of_a_forced_run_are_tried_unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They work on the CPU, which cannot be forced: the benches would end with 2 before any gate."""
    seen: list[str | None] = []

    def gate(name: str, *_: object) -> list[str]:
        seen.append(os.environ.get("NSA_FORCE_ARCH"))
        return []

    monkeypatch.setenv("NSA_FORCE_ARCH", "sm86")
    monkeypatch.setattr(blind_gate, "_blind", gate)
    monkeypatch.setattr(blind_gate, "_zero_for_unknown", lambda *_: [])
    assert blind_gate.product(STEP).wrong == ()
    assert seen == [None] * 3
    assert os.environ["NSA_FORCE_ARCH"] == "sm86"


def test_a_detector_of_names_that_is_blind_is_not_outvoted_by_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_60x, "_measured", lambda *_: unique_60x._record(unique_60x.KEY, 1.0, _[-1]))
    assert unique_60x.faulty(STEP).wrong
    monkeypatch.setattr(unique_60x, "_names_of_different_keys", lambda _: [])
    with pytest.raises(NeverEnteredError):
        unique_60x.faulty(STEP)


def test_a_call_that_changes_the_next_one_is_seen_without_a_crash() -> None:
    """A workspace outside of the autograd graph: nothing raises, and the numbers are those of another call."""
    healthy, calls = torch_backend.combine, itertools.count()

    def drifting(outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
        return healthy(outputs, gates) + 1e-3 * next(calls)

    with in_every_backend("combine", drifting):
        evidence = workspace_inplace._examine(STEP, ("torch",))
    assert "another result the second time" in found(evidence)
    assert evidence.exception is None


def test_index_types_that_are_taken_though_not_documented_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = nsa.selected_attention

    def lax(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, config: nsa.NSAConfig, *, backend: str) -> object:
        return healthy(q, k, v, indices.int(), config, backend=backend)

    monkeypatch.setattr(nsa, "selected_attention", lax)
    assert "torch.int16 is taken, though not documented" in found(int32_scatter._examine(STEP, ("torch",)))


def test_a_silent_switch_to_other_data_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = loader.first_batch

    def switched(
        asked: BatchFetcher[Any], deadline_s: float, fallback: BatchFetcher[Any] | None = None
    ) -> FirstBatch[Any]:
        answered = healthy(BatchFetcher("other", lambda: packing.pack([ROW], packing=False, position={})), deadline_s)
        return FirstBatch(answered.batch, asked.name, 0.0)

    monkeypatch.setattr(loader, "first_batch", switched)
    assert "a silent loader gave a batch" in found(loader_stall.product(STEP))


def test_a_deadline_that_comes_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_stall, "_MARGIN_S", -loader_stall._DEADLINE_S / 2)
    evidence = loader_stall.product(STEP)
    assert verdict(evidence) is ReproVerdict.STALLED
    assert evidence.wrong == ()


@pytest.mark.parametrize("broken", [False, True])
def test_the_gate_of_compare_is_tried_as_it_is_now(broken: bool, tmp_path: Path) -> None:
    assert blind_gate._compare(broken, tmp_path).code == int(broken)


def test_a_script_that_loses_an_exit_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blind_gate, "ROOT", tmp_path)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text("#!/bin/bash\nset -e\npytest | tee log\n")
    assert blind_gate._pipes_without_pipefail() == ["run pipes into tee without pipefail"]
    (tmp_path / ".ci" / "run").write_text("#!/bin/bash\nset -euo pipefail\npytest | tee log\n")
    assert blind_gate._pipes_without_pipefail() == []


def test_a_run_that_starts_before_preflight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_run.preflight, "check", lambda plan, **_: product_run.preflight.Decision(plan))
    assert "50,000 steps in fp32 that keep nothing were started" in found(toy_config_run.product(STEP))


@pytest.mark.parametrize(
    ("syncs", "captured", "expected"),
    [
        (1, "torch: no CUDA graph", ReproVerdict.SLOW),  # the capture fails because of them, and is not tried
        (0, "torch: no CUDA graph", ReproVerdict.WRONG),
        (0, None, ReproVerdict.PASSED),
    ],
)
def test_a_forward_that_no_graph_can_hold_is_wrong_unless_host_syncs_explain_it(
    syncs: int, captured: str | None, expected: ReproVerdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cost, "examine", lambda _step: Evidence(host_syncs=Bound(syncs, 0)))
    monkeypatch.setattr(step2_stall, "_captured", lambda _backend: captured)
    assert verdict(step2_stall.product(SilentStep(("reference", "torch"), "cuda"))) is expected
