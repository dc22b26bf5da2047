"""The estimate of a run's memory: its parts are as large as they are said to be, and follow the settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nsa.train import memory_estimate, profile
from nsa.train.settings import MIB
from tests.nsa.train.runs import settings, train


def test_the_state_is_sixteen_bytes_a_parameter() -> None:
    chosen = profile.load("m7c_125m_1xa100_prod_v1")
    weights = 16 * memory_estimate.num_parameters(chosen) / MIB
    assert weights < memory_estimate.peak_mem_mib(chosen) < 4 * weights


def test_shards_are_smaller_than_the_whole_by_more_than_what_is_gathered() -> None:
    """125M parameters in two groups of 39 million, 149 MiB each; half of 16 bytes, and of 2 for casts, for each."""
    alone = profile.load("m7c_125m_2xa100_production")
    sharded = dataclasses.replace(alone, runtime=dataclasses.replace(alone.runtime, parallel="fsdp2"))
    saved = memory_estimate.peak_mem_mib(alone, ranks=2) - memory_estimate.peak_mem_mib(sharded, ranks=2)
    assert saved == pytest.approx(9 * memory_estimate.num_parameters(alone) / MIB - 4 * 149.2, abs=1.0)
    assert memory_estimate.peak_mem_mib(sharded, ranks=1) == memory_estimate.peak_mem_mib(alone, ranks=1)


@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputation_shows_in_the_estimate(how: bool | str, tmp_path: Path) -> None:
    plain, less = (
        settings(tmp_path, model__n_layers=8),
        settings(tmp_path, model__n_layers=8, runtime__gradient_checkpointing=how),
    )
    assert memory_estimate.peak_mem_mib(less) < memory_estimate.peak_mem_mib(plain)


def test_activations_grow_with_the_tokens(tmp_path: Path) -> None:
    sizes = [memory_estimate.peak_mem_mib(settings(tmp_path, train__seq_len=n)) for n in (1000, 2000, 3000)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0])


def test_a_checkpoint_is_as_large_as_was_said(tmp_path: Path) -> None:
    chosen = settings(tmp_path, train__steps=1)
    train(chosen)
    size = (tmp_path / "run" / "checkpoints" / "step-00000001.ckpt").stat().st_size / MIB
    assert size == pytest.approx(memory_estimate.checkpoint_mib(chosen), rel=0.3)  # headers weigh in so small a file
