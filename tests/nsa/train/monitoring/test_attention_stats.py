"""What is observed of gates and selection: true on the product, and each fault moves its figure."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import torch_backend
from nsa.config import BRANCHES
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.distributed import Ranks
from nsa.train.monitoring.attention_stats import AttentionStats
from nsa.train.monitoring.health import Health
from nsa.train.trainer import Trainer
from tests.nsa.train.runs import settings


def _trainer(folder: Path, **overrides: object) -> Trainer:
    return Trainer(settings(folder, **overrides), torch.device("cpu"), Ranks())


def _observed(trainer: Trainer) -> AttentionStats:
    batch = SyntheticBatches(trainer.settings, Shard()).next()
    figures = trainer.step([batch], observe=True).observed
    assert figures is not None
    return trainer.observer.read(figures)


def _health() -> Health:
    return Health(random_vocab_size=None, fp16=False, warmup_steps=0, fused_backend="torch")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", [True, False])
def test_what_is_read_is_what_the_lengths_dictate(packed: bool, how: bool, tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, data__packing=packed, runtime__gradient_checkpointing=how, train__seq_len=101)
    found = _observed(trainer)
    assert found.keys_read == found.keys_predicted
    assert found.at_maximum == pytest.approx(found.at_maximum_expected)
    assert 0 < found.at_maximum < 1
    assert len(found.gate_entropy_nats) == 2 * 4
    assert sum(found.gate_shares) == pytest.approx(1)
    assert found.backends == {"torch": 2}
    assert _health().logged(found, 100) == []


def test_what_the_lengths_do_not_dictate_is_unknown(tmp_path: Path) -> None:
    found = _observed(_trainer(tmp_path, nsa__local_blocks=0))
    assert found.keys_predicted["selected"] is None
    assert found.record()["keys_predicted"] == found.keys_predicted


def test_nothing_is_observed_unasked(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    _observed(trainer)
    assert trainer.step([SyntheticBatches(trainer.settings, Shard()).next()]).observed is None
    dense = _trainer(tmp_path, model__attention="dense")
    assert dense.step([SyntheticBatches(dense.settings, Shard()).next()], observe=True).observed is None


def _losing(original: object) -> object:
    def select_blocks(*call: object) -> Tensor:
        found: Tensor = original(*call)  # type: ignore[operator]
        return torch.where(found == 0, -1, found).sort(-1, descending=True).values

    return select_blocks


def test_lost_blocks_are_seen(tmp_path: Path) -> None:
    with mock.patch.object(torch_backend, "select_blocks", _losing(torch_backend.select_blocks)):
        found = _observed(_trainer(tmp_path, train__seq_len=101))
    alarms = {alarm.monitor for alarm in _health().logged(found, 100)}
    assert {"selection_at_maximum", "keys_read"} <= alarms


@pytest.mark.parametrize(("bias", "sentinel"), [([9.0, -9.0, -9.0], "gates_collapsed"), ([0.0] * 3, "gates_uniform")])
def test_gates_are_seen(bias: list[float], sentinel: str, tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    for block in trainer.lm.blocks:
        linear = block.attention.gates.linear  # type: ignore[union-attr]
        torch.nn.init.zeros_(linear.weight)
        linear.bias.data.copy_(torch.tensor(bias).repeat(4))
    found = _observed(trainer)
    assert [alarm.monitor for alarm in _health().logged(found, 100)] == [sentinel]
    assert _health().logged(found, 0) == []  # nothing has been trained yet
    if sentinel == "gates_uniform":
        assert found.gate_entropy_nats[0] == pytest.approx(math.log(len(BRANCHES)))


def test_a_fallback_is_counted(tmp_path: Path) -> None:
    found = _observed(_trainer(tmp_path))
    health = Health(random_vocab_size=None, fp16=False, warmup_steps=0, fused_backend="triton")
    assert health.fallbacks(found) == 2
    assert [alarm.monitor for alarm in health.logged(found, 100)] == ["fallbacks"]
    assert health.fallbacks(None) is None
