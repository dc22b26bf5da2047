"""The trainer on a GPU: no host sync in a step, the kernels that were asked for, figures that arrive later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import profile
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.distributed import Ranks
from nsa.train.monitoring.async_metrics import AsyncMetrics, StepTimes
from nsa.train.settings import Settings
from nsa.train.trainer import Trainer
from regression.detectors.host_cost import no_waiting
from tests.nsa.train import runs
from tests.nsa.train.runs import packed, settings, train

pytestmark = pytest.mark.gpu
BF16 = {"runtime__device": "cuda", "runtime__precision": "bf16", "model__d_k": 32, "model__d_v": 32}


def _trainer(chosen: Settings) -> Trainer:
    return Trainer(chosen, torch.device("cuda"), Ranks())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("how", [False, True, "selective"])
@pytest.mark.parametrize("graphed", [False, True])
def test_a_step_waits_for_nothing(graphed: bool, how: bool | str, packing: bool, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {**BF16, "data__packing": packing, "runtime__gradient_checkpointing": how}
    trainer = _trainer(settings(tmp_path, **chosen, runtime__cuda_graph=graphed))
    source = SyntheticBatches(trainer.settings, Shard())
    batches = [source.next().pinned().to(trainer.device) for _ in range(4)]
    for batch in batches[:2]:
        trainer.step([batch])  # compiles, tunes and captures
    pending: AsyncMetrics[int] = AsyncMetrics()
    with no_waiting():
        for number, batch in enumerate(batches[2:]):
            stepped = trainer.step([batch])
            pending.submit(
                number, {"loss": stepped.loss}, StepTimes(stepped.forward_begin, stepped.forward_end, stepped.work_end)
            )
    first, second = pending.ready(wait=True)
    assert (first.context, second.context) == (0, 1)
    assert second.step_s is not None
    if graphed:
        assert second.forward_ms is None
    else:
        assert second.forward_ms is not None
        assert 0 < second.forward_ms / 1000 < second.step_s
    assert torch.isfinite(second.values["loss"])


@pytest.mark.parametrize(("precision", "graphed"), [("bf16", False), ("fp16", False), ("bf16", True)])
def test_a_run_takes_the_kernels_and_resumes(precision: str, graphed: bool, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {**BF16, "runtime__precision": precision, "runtime__cuda_graph": graphed}
    train(settings(tmp_path, **chosen, train__steps=5, train__val_every=3))
    train(settings(tmp_path, **chosen, train__val_every=3), resume=True)
    beats = [record for record in runs.records(tmp_path / "run") if "loss" in record]
    assert [beat["step"] for beat in beats] == list(range(1, 9))
    observed = [beat for beat in beats if "backends" in beat]
    assert observed
    assert all(beat["backends"] == {"triton": 2} and beat["fallbacks"] == 0 for beat in observed)
    assert all(beat["keys_read"] == beat["keys_predicted"] for beat in observed)
    assert all(beat["allocated_gib"] == pytest.approx(beat["allocated_mib"] / 1024) for beat in beats)


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own calls
@pytest.mark.parametrize("how", [False, True])
def test_compiled_trains_as_eager_does(how: bool, tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        chosen = settings(tmp_path, **BF16, runtime__compile=compiled, runtime__gradient_checkpointing=how)
        trainer, source = _trainer(chosen), SyntheticBatches(chosen, Shard())
        losses.append([float(trainer.step([source.next().to(trainer.device)]).loss) for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own calls
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("packing", "how"), [(True, False), (True, True), (False, False), (False, "selective")])
def test_a_replayed_step_is_the_step(
    packing: bool, how: bool | str, precision: str, compiled: bool, tmp_path: Path
) -> None:
    """From the same weights, where gradients are added up, around an observed step and another capture."""
    chosen: dict[str, Any] = {**BF16, "runtime__precision": precision, "runtime__compile": compiled}
    chosen |= {"data__packing": packing, "runtime__gradient_checkpointing": how}
    torch._dynamo.reset()  # which compiles no function more than so many times
    plain, replayed = (_trainer(settings(tmp_path, **chosen, runtime__cuda_graph=graphed)) for graphed in (False, True))
    source = SyntheticBatches(plain.settings, Shard())
    for number in range(6):
        batches = [source.next().to(plain.device) for _ in range(2)]
        if number == 3 and packing:
            batches[1] = packed(*[1] * 66, 30).to(plain.device)  # more documents than there was room for
        with torch.no_grad():
            for mine, other in zip(replayed.lm.parameters(), plain.lm.parameters(), strict=True):
                mine.copy_(other)
        one, other_one = (each.step(batches, observe=number == 2) for each in (plain, replayed))
        assert float(other_one.loss) == pytest.approx(float(one.loss), rel=1e-4)
        assert (other_one.forward_end is None) == (number != 2)
        for (name, mine), other in zip(replayed.lm.named_parameters(), plain.lm.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert (mine.grad - other.grad).norm() <= 1e-2 * other.grad.norm(), (number, name)


@pytest.mark.parametrize("name", ["m7c_125m_1xa100_prod_v1", "h200_125m"])
def test_the_estimate_of_memory_holds(name: str) -> None:
    """Within a third of what a step of the profile takes, at two sequences."""
    from nsa.train import memory_estimate
    from nsa.train.settings import MIB

    eager = {"runtime.compile": False, "runtime.cuda_graph": False}
    chosen = profile.load(name, overrides={"train.batch_size": 2, "data.dataset": "synthetic", **eager})
    trainer, source = _trainer(chosen), SyntheticBatches(chosen, Shard())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        trainer.step([source.next().to(trainer.device)])
    peak = torch.cuda.max_memory_allocated() / MIB
    assert memory_estimate.peak_mem_mib(chosen) == pytest.approx(peak, rel=0.33)
