"""The trainer on a GPU: no host sync in a step, the kernels that were asked for, figures that arrive later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import profile
from nsa.train.batches import Share, SyntheticBatches
from nsa.train.distributed import Ranks
from nsa.train.figures import OnTheirWay
from nsa.train.settings import Settings
from nsa.train.trainer import Trainer
from regression.host_cost import no_waiting
from tests.nsa.train import runs
from tests.nsa.train.runs import settings, train

pytestmark = pytest.mark.gpu
BF16 = {"runtime__device": "cuda", "runtime__precision": "bf16", "model__d_k": 32, "model__d_v": 32}


def _trainer(chosen: Settings) -> Trainer:
    return Trainer(chosen, torch.device("cuda"), Ranks())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", [False, True, "selective"])
def test_a_step_waits_for_nothing(packed: bool, how: bool | str, tmp_path: Path) -> None:
    trainer = _trainer(settings(tmp_path, **BF16, data__packing=packed, runtime__gradient_checkpointing=how))
    source = SyntheticBatches(trainer.settings, Share())
    batches = [source.next().pinned().to(trainer.device) for _ in range(4)]
    for batch in batches[:2]:
        trainer.step([batch])  # compiles and tunes
    coming: OnTheirWay[int] = OnTheirWay()
    with no_waiting():
        for number, batch in enumerate(batches[2:]):
            stepped = trainer.step([batch])
            coming.ask(number, {"loss": stepped.loss}, (stepped.forward_begin, stepped.forward_end))
    first, second = coming.arrived(all_of_them=True)
    assert (first.told, second.told) == (0, 1)
    assert second.step_s is not None
    assert 0 < second.forward_ms / 1000 < second.step_s
    assert torch.isfinite(second.values["loss"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_takes_the_kernels_and_resumes(precision: str, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {**BF16, "runtime__precision": precision}
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
        trainer, source = _trainer(chosen), SyntheticBatches(chosen, Share())
        losses.append([float(trainer.step([source.next().to(trainer.device)]).loss) for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.parametrize("name", ["m7c_125m_1xa100_prod_v1", "h200_125m"])
def test_the_estimate_of_memory_holds(name: str) -> None:
    """Within a third of what a step of the profile takes, at two sequences."""
    from nsa.train import plan

    chosen = profile.load(
        name, overrides={"train.batch_size": 2, "data.dataset": "synthetic", "runtime.compile": False}
    )
    trainer, source = _trainer(chosen), SyntheticBatches(chosen, Share())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        trainer.step([source.next().to(trainer.device)])
    peak = torch.cuda.max_memory_allocated() / plan.MIB
    assert plan.peak_mem_mib(chosen) == pytest.approx(peak, rel=0.33)
