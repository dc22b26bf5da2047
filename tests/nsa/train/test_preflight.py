"""Preflight lets a sound run start, names every field of one that is not, and records what was overridden.

Then what it is told of a run: the device, the disk, the folder.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import preflight
from nsa.train.preflight import Plan, RefusedError
from tests.nsa.train.runs import settings

SOUND = Plan(steps=50_000, precision="bf16", gradient_checkpointing=True, save_every=5000)
TOY = Plan(steps=50_000, precision="fp32", predicted_hours=24.5)
"""The run of 24.5 hours on two A100s that kept nothing."""


def fields(plan: Plan) -> list[str]:
    return [refusal.field for refusal in preflight.refusals(plan)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp16", "grad_scaler": True},
        {"gradient_checkpointing": False, "peak_mem_mib": 72_000.0, "device_mem_mib": 81_920.0},
        {"steps": 5000, "save_every": 500},
        {"steps": 5, "predicted_hours": 24.0, "save_every": 1},
        {"steps": 4999, "precision": "fp32", "gradient_checkpointing": False, "save_every": 0},
        {"steps": 200, "predicted_hours": 0.99, "precision": "fp32", "save_every": 0},
    ],
)
def test_lets_a_sound_run_start(changes: dict[str, Any]) -> None:
    decision = preflight.check(dataclasses.replace(SOUND, **changes))
    assert decision.overridden == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"precision": "fp32"}, "runtime.precision"),
        ({"precision": "fp16"}, "runtime.grad_scaler"),
        ({"precision": "fp16", "grad_scaler": True, "fp32_master_weights": False}, "runtime.fp32_master_weights"),
        ({"gradient_checkpointing": False}, "runtime.gradient_checkpointing"),
        ({"gradient_checkpointing": False, "peak_mem_mib": 9.0}, "runtime.gradient_checkpointing"),
        (
            {"gradient_checkpointing": False, "peak_mem_mib": 74_000.0, "device_mem_mib": 81_920.0},
            "runtime.gradient_checkpointing",
        ),
        ({"save_every": 0}, "train.save_every"),
        ({"save_every": 5001}, "train.save_every"),
        ({"save_every": 50_000}, "train.save_every"),
        ({"save_every": 50_001}, "train.save_every"),
        ({"steps": 5000, "save_every": 0}, "train.save_every"),
        ({"steps": 200, "predicted_hours": 1.0, "save_every": 0}, "train.save_every"),
    ],
)
def test_names_the_field(changes: dict[str, Any], named: str) -> None:
    plan = dataclasses.replace(SOUND, **changes)
    assert fields(plan) == [named]
    with pytest.raises(RefusedError, match=rf"{named} must be "):
        preflight.check(plan)


def test_the_run_of_the_report_is_refused_with_every_reason() -> None:
    with pytest.raises(RefusedError) as caught:
        preflight.check(TOY)
    assert str(caught.value).splitlines() == [
        "preflight refuses this run (50,000 steps, 24.5 h):",
        "  runtime.precision must be bf16, or fp16 with float32 master weights and a scaler; got fp32: "
        "tensor cores stand still in fp32",
        "  runtime.gradient_checkpointing must be true; got false: no estimate shows that the memory suffices "
        "without it",
        "  train.save_every must be between 1 and 5000; got 0: whatever stops the run takes all of it",
        "  --allow-toy runs it all the same",
    ]


def test_an_override_is_recorded() -> None:
    decision = preflight.check(TOY, allow_toy=True)
    recorded = json.loads(json.dumps(decision.record()))
    assert recorded["long"] is True
    assert len(recorded["allow_toy"]) == 3
    assert preflight.check(SOUND, allow_toy=True).record()["allow_toy"] == []


@pytest.mark.parametrize("steps", [1, 50_000])
def test_pure_fp16_is_refused_however_short_and_whatever_is_allowed(steps: int) -> None:
    plan = Plan(steps=steps, precision="fp16", fp32_master_weights=False, grad_scaler=True)
    with pytest.raises(RefusedError, match="eps of 1e-8 rounds to 0") as caught:
        preflight.check(plan, allow_toy=True)
    assert "--allow-toy" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"steps": 0}, ValueError, "train.steps must be at least 1; got 0"),
        ({"steps": 1.5}, TypeError, "train.steps must be an int; got 1.5 (float)"),
        ({"steps": True}, TypeError, "train.steps must be an int; got True (bool)"),
        ({"save_every": -1}, ValueError, "train.save_every must be at least 0; got -1"),
        (
            {"fp32_master_weights": "false"},
            TypeError,
            "runtime.fp32_master_weights must be true or false; got 'false' (str)",
        ),
        ({"grad_scaler": 1}, TypeError, "runtime.grad_scaler must be true or false; got 1 (int)"),
        (
            {"gradient_checkpointing": None},
            TypeError,
            "runtime.gradient_checkpointing must be true or false; got None (NoneType)",
        ),
        ({"precision": "tf32"}, ValueError, "runtime.precision must be one of fp32, bf16, fp16; got 'tf32'"),
        (
            {"peak_mem_mib": float("nan")},
            ValueError,
            "peak_mem_mib must be finite and above 0, or None where it is unknown; got nan",
        ),
        (
            {"predicted_hours": 0.0},
            ValueError,
            "predicted_hours must be finite and above 0, or None where it is unknown; got 0.0",
        ),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Plan(**{"steps": 1, "precision": "bf16", **wrong})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "field", "overridable"),
    [
        ({"use_flash": False}, "runtime.use_flash", True),
        ({"out_dir_taken": "runs/a, which holds metrics.json"}, "train.out_dir", False),
        ({"checkpoints_mib": 100.0, "free_disk_mib": 99.0}, "train.out_dir", False),
        ({"data_trouble": "ConnectionError"}, "data.dataset", False),
    ],
)
def test_each_refusal_names_its_field(changes: dict[str, Any], field: str, overridable: bool) -> None:
    found = preflight.refusals(dataclasses.replace(SOUND, **changes))
    assert [(refusal.field, refusal.overridable) for refusal in found] == [(field, overridable)]
    short = preflight.refusals(dataclasses.replace(SOUND, steps=5, **changes))
    assert bool(short) is not overridable  # what cannot work is refused however short


@pytest.mark.parametrize("changes", [{"checkpoints_mib": 99.0, "free_disk_mib": 100.0}, {"checkpoints_mib": 5.0}, {}])
def test_room_enough_or_unknown_is_no_refusal(changes: dict[str, Any]) -> None:
    assert preflight.refusals(dataclasses.replace(SOUND, **changes)) == ()


def test_a_device_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"runtime\.device must be one that is here; got cuda"):
        preflight.device_of(settings(tmp_path, runtime__device="cuda"))
    assert preflight.device_of(settings(tmp_path, runtime__device="auto")).type == "cpu"


def test_a_run_on_the_cpu_leaves_the_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a GPU's memory takes some of it, and seconds; what is trained on the CPU need not fit in it."""

    def asked(device: object) -> None:
        raise AssertionError("the GPU was asked for its memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    assert preflight.plan_before_start(settings(tmp_path, runtime__device="cpu")).device_mem_mib is None


@pytest.mark.parametrize(
    ("device", "has_gpu", "refused"), [("cpu", True, False), ("auto", False, False), ("auto", True, True)]
)
def test_fp32_is_a_mistake_on_a_gpu_alone(
    device: str, has_gpu: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow CPU the showcase takes more than an hour, which its own prediction found out, and ended it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    chosen = settings(
        tmp_path, runtime__device=device, runtime__precision="fp32", train__steps=200, train__save_every=20
    )
    assert fields(preflight.plan_while_running(chosen, predicted_hours=3.0)) == ["runtime.precision"] * refused
