"""What a pass that is replayed needs, shown without a GPU: a stand-in for the graph does the pass again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import memory_estimate, profile, trainer
from nsa.train.data import packing
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.distributed import Ranks
from nsa.train.monitoring.async_metrics import AsyncMetrics, StepTimes
from nsa.train.objective import Objective
from nsa.train.profile import ProfileError
from nsa.train.settings import Settings
from nsa.train.trainer import Trainer
from tests.nsa.train import runs
from tests.nsa.train.replayed import EagerReplay
from tests.nsa.train.runs import packed, settings, train

CPU = torch.device("cpu")


def _replaying(chosen: Settings) -> tuple[Trainer, EagerReplay]:
    replayed = Trainer(chosen, CPU, Ranks())
    stand_in = replayed._graphed = EagerReplay(replayed._loss, replayed.lm.parameters())
    return replayed, stand_in


def _addresses(of: Trainer) -> list[int]:
    """Where a graph adds to the gradients."""
    return [p.grad.data_ptr() for p in of.lm.parameters() if p.grad is not None]


def _gradients(of: Trainer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in of.lm.parameters() if p.grad is not None]


@pytest.mark.parametrize("phi", ["avg", "linear", "mlp"])
def test_empty_documents_change_nothing(phi: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path, nsa__phi=phi)
    batch = packed(40, 5, 51)
    assert batch.cu_seqlens is not None
    few = batch.cu_seqlens[:4]
    many = packing.with_empty_documents(few, 130)
    assert (few.tolist(), many.tolist()) == ([0, 40, 45, 96], [0, 40, 45] + 128 * [96])
    lm = Trainer(chosen, CPU, Ranks()).lm
    found = [Objective(lm)(batch.tokens, batch.targets, bounds) for bounds in (few, many)]
    gradients = [torch.autograd.grad(loss, list(lm.parameters())) for loss in found]
    assert torch.equal(*found)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replayed_step_is_the_step(precision: str, rows: bool, tmp_path: Path) -> None:
    """Also where gradients were added up, where one step is observed between two, and in its loss."""
    chosen = settings(tmp_path, runtime__precision=precision, data__packing=not rows)
    plain, (replayed, stand_in) = Trainer(chosen, CPU, Ranks()), _replaying(chosen)
    source = SyntheticBatches(chosen, Shard())
    addresses = _addresses(replayed)
    for observe in (False, False, True, False):
        batches = [source.next() for _ in range(3)]
        one, other = (each.step(batches, observe=observe) for each in (plain, replayed))
        assert torch.equal(one.loss, other.loss)
        assert torch.equal(one.grad_norm, other.grad_norm)
        assert all(torch.equal(a, b) for a, b in zip(_gradients(plain), _gradients(replayed), strict=True))
        assert (other.observed is None, other.forward_end is None) == (not observe, not observe)
        assert one.forward_end is not None
    assert all(torch.equal(a, b) for a, b in zip(plain.lm.parameters(), replayed.lm.parameters(), strict=True))
    assert (len(stand_in.captures), _addresses(replayed)) == (1, addresses)


def test_ranks_sum_the_gradients_of_their_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks the other one has three times as many targets, and gradients three times as large."""
    chosen = settings(tmp_path, train__accumulate_grad_batches=2)
    plain, (replayed, stand_in) = Trainer(chosen, CPU, Ranks()), _replaying(chosen)
    replayed.own = Ranks(0, 2, 0)
    summed: list[int] = []

    def of_both(x: torch.Tensor) -> None:
        summed.append(x.numel())
        x *= 4

    monkeypatch.setattr(torch.distributed, "all_reduce", of_both)
    source = SyntheticBatches(chosen, Shard())
    for observe in (False, True, False):
        batches = [source.next() for _ in range(2)]
        one, other = (each.step(batches, observe=observe) for each in (plain, replayed))
        assert (torch.equal(one.loss, other.loss), float(other.targets)) == (True, 4 * float(one.targets))
        assert torch.equal(one.grad_norm, other.grad_norm)
        assert all(torch.equal(a, b) for a, b in zip(_gradients(plain), _gradients(replayed), strict=True))
    # in each step: targets and requests to stop, all gradients, the loss
    assert summed == 3 * [2, stand_in.gradients.numel(), 1]


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs a second GPU, or none: each rank takes its own")
def test_two_ranks_replay_and_resume(tmp_path: Path) -> None:
    """Without an observed step, whose forward pass is timed, until the resume; the losses are those of one rank."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    alone.mkdir()
    both.mkdir()
    train(settings(alone, train__lr_schedule="constant"))
    same = ("--set", "train.lr_schedule=constant", "--set", "runtime.device=auto", "--set", "runtime.cuda_graph=true")
    for more in (("--steps", "5", "--set", "telemetry.statistics=false"), ("--resume",)):
        child = runs.start(both, *same, *more, ranks=2, module="tests.nsa.train.replayed")
        output, _ = child.communicate(timeout=300)
        assert child.returncode == 0, output
    one, two = runs.losses(alone / "run"), runs.losses(both / "run")
    assert [two[step] for step in range(1, 9)] == pytest.approx([one[step] for step in range(1, 9)], rel=2e-5)
    beats = {beat["step"]: beat for beat in runs.records(both / "run") if "loss" in beat}
    assert {step for step, beat in beats.items() if beat["forward_ms"] is not None} == {6, 8}
    assert {step for step, beat in beats.items() if "rank_imbalance" in beat} == {1, 2, 4, 5, 6, 8}


def test_every_rank_has_the_weights_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DDP has it, whatever seeds ranks were started with."""

    def zeros_of_rank_0(x: torch.Tensor, source: int) -> None:
        assert source == 0
        x.zero_()

    monkeypatch.setattr(torch.distributed, "broadcast", zeros_of_rank_0)
    monkeypatch.setattr(trainer, "_require_gpu", lambda _: None)
    chosen = settings(tmp_path, runtime__device="auto", runtime__cuda_graph=True)
    alone, second = (Trainer(chosen, CPU, own).lm for own in (Ranks(), Ranks(1, 2, 1)))
    assert any(x.any() for x in alone.parameters())
    assert not any(x.any() for x in (*second.parameters(), *second.state_dict().values()))


def test_gradients_are_contiguous(tmp_path: Path) -> None:
    """Without overlap, and each aligned."""
    replayed, stand_in = _replaying(settings(tmp_path))
    stand_in.gradients.fill_(1.0)
    sizes = [p.numel() for p in replayed.lm.parameters()]
    assert [int(x.sum()) for x in _gradients(replayed)] == sizes
    begins = [at - stand_in.gradients.data_ptr() for at in _addresses(replayed)]
    assert all(begin % 512 == 0 for begin in begins)
    ends = [begin + 4 * size for begin, size in zip(begins, sizes, strict=True)]
    assert begins[0] == 0
    assert all(0 <= begin - end < 512 for begin, end in zip(begins[1:], ends[:-1], strict=True))


def test_room_doubles_until_the_documents_fit(tmp_path: Path) -> None:
    replayed, stand_in = _replaying(settings(tmp_path))
    plain = Trainer(replayed.settings, CPU, Ranks())  # the same weights, from the same seed
    some, many = packed(*[1] * 70, 122), packed(*[1] * 140, 52)  # 128 and 192 bounds
    for batch in (packed(192), some, packed(100, 92), many, packed(*[1] * 192), packed(50), packed(30, 20)):
        assert torch.equal(stand_in(batch, torch.ones(())), plain._loss(batch).detach())
    rooms = [held.cu_seqlens.numel() - 1 for held in stand_in.captures if held.cu_seqlens is not None]
    assert rooms == [64, 128, 256, 256]
    assert [held.tokens.numel() for held in stand_in.captures] == [192, 192, 192, 50]


def test_a_loss_outlives_the_next_replay(tmp_path: Path) -> None:
    _, stand_in = _replaying(settings(tmp_path))
    first, second = (stand_in(packed(96, seed=seed), torch.ones(())) for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_replays_and_resumes(batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logged steps, validations and checkpoints between replays; no forward pass is timed that nobody saw."""
    plain, replayed = tmp_path / "plain", tmp_path / "replayed"
    plain.mkdir()
    replayed.mkdir()
    steady = {"train__val_every": 3, "train__accumulate_grad_batches": batches, "train__lr_schedule": "constant"}
    train(settings(plain, **steady))
    healthy = trainer.Trainer.__init__

    def replaying(self: Trainer, *given: Any) -> None:
        healthy(self, *given)
        self._graphed = EagerReplay(self._loss, self.lm.parameters())

    monkeypatch.setattr(trainer.Trainer, "__init__", replaying)
    train(settings(replayed, **steady, train__steps=5))
    train(settings(replayed, **steady), resume=True)
    assert runs.losses(plain / "run") == runs.losses(replayed / "run")
    beats = {beat["step"]: beat for beat in runs.records(replayed / "run") if "loss" in beat}
    assert {step for step, beat in beats.items() if beat["forward_ms"] is not None} == {1, 2, 4, 5, 6, 8}
    assert {step for step, beat in beats.items() if "keys_read" in beat} == {1, 2, 4, 5, 6, 8}


def test_a_forward_pass_that_nobody_saw_has_no_time() -> None:
    pending: AsyncMetrics[int] = AsyncMetrics()
    pending.submit(1, {}, StepTimes(0.0, None, 0.25))
    pending.submit(2, {}, StepTimes(0.0, 0.5, 0.5))
    found = [(host.forward_ms, host.work_ms) for host in pending.ready(wait=True)]
    assert found == [(None, 250.0), (500.0, 500.0)]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"runtime.device": "cpu"}, r"runtime\.cuda_graph must be false with runtime\.device cpu; got true"),
        (
            {"runtime.precision": "fp16"},
            r"runtime\.cuda_graph must be false with runtime\.precision fp16, .*; got true",
        ),
        (
            {"runtime.parallel": "fsdp2"},
            r"runtime\.cuda_graph must be false with runtime\.parallel fsdp2, .*; got true",
        ),
        (
            {"runtime.context_parallel": 2},
            r"runtime\.cuda_graph must be false with runtime\.context_parallel 2, .*; got true",
        ),
    ],
)
def test_what_no_graph_can_hold_is_refused(overrides: dict[str, Any], says: str) -> None:
    assert profile.load("h200_125m").runtime.cuda_graph
    with pytest.raises(ProfileError, match=says):
        profile.load("h200_125m", overrides=overrides)
    profile.load("h200_125m", overrides={**overrides, "runtime.cuda_graph": False})


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    chosen = settings(tmp_path, runtime__device="auto", runtime__cuda_graph=True)
    with pytest.raises(ValueError, match=r"runtime\.cuda_graph must be false without a GPU; got true"):
        Trainer(chosen, CPU, Ranks())


def test_the_graphs_own_memory_is_estimated(tmp_path: Path) -> None:
    plain, graphed, unobserved = (
        memory_estimate.peak_mem_mib(settings(tmp_path, train__seq_len=4096, runtime__device="auto", **more))
        for more in (
            {},
            {"runtime__cuda_graph": True},
            {"runtime__cuda_graph": True, "telemetry__statistics": False},
        )
    )
    assert unobserved == plain
    assert 1.9 * plain < graphed < 2 * plain  # the weights are small here, and there once
