"""What preflight is told: memory that was counted, the disk, the folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import preflight, profile
from nsa.train.preflight import MIB, Plan
from tests.nsa.train.runs import settings

SOUND = Plan(steps=50_000, precision="bf16", gradient_checkpointing=True, save_every=5000)


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


def test_the_state_is_sixteen_bytes_a_parameter() -> None:
    chosen = profile.load("m7c_125m_1xa100_prod_v1")
    weights = 16 * preflight.num_parameters(chosen) / MIB
    assert weights < preflight.peak_mem_mib(chosen) < 4 * weights


def test_shards_are_smaller_than_the_whole_by_more_than_what_is_gathered() -> None:
    """125M parameters in two groups of 39 million, 149 MiB each; half of 16 bytes, and of 2 for casts, for each."""
    alone = profile.load("m7c_125m_2xa100_production")
    sharded = dataclasses.replace(alone, runtime=dataclasses.replace(alone.runtime, parallel="fsdp2"))
    saved = preflight.peak_mem_mib(alone, ranks=2) - preflight.peak_mem_mib(sharded, ranks=2)
    assert saved == pytest.approx(9 * preflight.num_parameters(alone) / MIB - 4 * 149.2, abs=1.0)
    assert preflight.peak_mem_mib(sharded, ranks=1) == preflight.peak_mem_mib(alone, ranks=1)


@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputation_shows_in_the_estimate(how: bool | str, tmp_path: Path) -> None:
    plain, less = (
        settings(tmp_path, model__n_layers=8),
        settings(tmp_path, model__n_layers=8, runtime__gradient_checkpointing=how),
    )
    assert preflight.peak_mem_mib(less) < preflight.peak_mem_mib(plain)


def test_activations_grow_with_the_tokens(tmp_path: Path) -> None:
    sizes = [preflight.peak_mem_mib(settings(tmp_path, train__seq_len=n)) for n in (1000, 2000, 3000)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0])


def test_a_checkpoint_is_as_large_as_was_said(tmp_path: Path) -> None:
    from tests.nsa.train.runs import train

    chosen = settings(tmp_path, train__steps=1)
    train(chosen)
    size = (tmp_path / "run" / "checkpoints" / "step-00000001.ckpt").stat().st_size / MIB
    assert size == pytest.approx(preflight.checkpoint_mib(chosen), rel=0.3)  # headers weigh in so small a file
