"""The loss: the model's own, in chunks, recomputed or not; an accumulation is one large batch."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa import NSAConfig, nsa_attention
from nsa.model import DecoderLM, next_token_loss
from nsa.train import objective
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.data.packing import Batch
from nsa.train.distributed import Ranks
from nsa.train.objective import Objective
from nsa.train.settings import Settings, Train
from nsa.train.trainer import Trainer
from tests.nsa.train.runs import settings

CPU = torch.device("cpu")


def _trainer(chosen: Settings) -> Trainer:
    return Trainer(chosen, CPU, Ranks())


def _gradients(trainer: Trainer, batch: Batch) -> torch.Tensor:
    trainer.step([batch])
    return torch.cat([p.grad.flatten() for p in trainer.lm.parameters() if p.grad is not None])


@pytest.mark.parametrize("packed", [True, False])
def test_is_the_models_own_loss_in_chunks(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tmp_path, data__packing=packed)
    lm, batch = DecoderLM(chosen.model), SyntheticBatches(chosen, Shard()).next()
    monkeypatch.setattr(objective, "CHUNK_LOGITS", 7 * chosen.model.vocab_size)
    found = Objective(lm)(batch.tokens, batch.targets, batch.cu_seqlens) / batch.num_targets
    logits = lm(batch.tokens, cu_seqlens=batch.cu_seqlens)
    expected = next_token_loss(logits, batch.tokens, batch.cu_seqlens)
    assert torch.allclose(found, expected, rtol=1e-6)
    grads = [torch.autograd.grad(loss, list(lm.parameters())) for loss in (found, expected)]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*grads, strict=True))


def test_never_holds_all_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tmp_path)
    lm, batch = DecoderLM(chosen.model), SyntheticBatches(chosen, Shard()).next()
    monkeypatch.setattr(objective, "CHUNK_LOGITS", 16 * chosen.model.vocab_size)
    sizes: list[int] = []

    def saved(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    lm.head.register_forward_hook(lambda module, given, out: sizes.append(out.numel()))
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
        Objective(lm)(batch.tokens, batch.targets, batch.cu_seqlens).backward()
    assert max(sizes) < batch.tokens.numel() * chosen.model.vocab_size * 3 / 4


def test_a_small_batch_is_one_piece_that_saves_no_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is one matrix product; saving the generator's state for its repetition makes a GPU's host wait."""
    chosen, saved = settings(tmp_path), list[str]()
    lm, batch = DecoderLM(chosen.model), SyntheticBatches(chosen, Shard()).next()
    state = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: saved.append("state") or state())  # type: ignore[func-returns-value]
    pieces = list[int]()
    lm.head.register_forward_hook(lambda module, given, out: pieces.append(out.shape[0]))
    Objective(lm)(batch.tokens, batch.targets, batch.cu_seqlens)
    assert (pieces, saved) == ([batch.tokens.numel()], [])


@pytest.mark.parametrize("use_flash", [True, False])
def test_fused_attention_is_used_where_the_run_allows_it(
    use_flash: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(chosen := settings(tmp_path, runtime__use_flash=use_flash))
    hidden, enabled = trainer.lm.hidden, list[bool]()

    def watched(*given: Any, **options: Any) -> torch.Tensor:
        enabled.append(torch.backends.cuda.flash_sdp_enabled())
        return hidden(*given, **options)

    monkeypatch.setattr(trainer.lm, "hidden", watched)
    trainer.step([SyntheticBatches(chosen, Shard()).next()])
    assert enabled == [use_flash]


@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputation_changes_no_bit(how: bool | str, tmp_path: Path) -> None:
    plain = settings(tmp_path)
    again = settings(tmp_path, runtime__gradient_checkpointing=how)
    batch = SyntheticBatches(plain, Shard()).next()
    assert torch.equal(_gradients(_trainer(plain), batch), _gradients(_trainer(again), batch))


@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputation_keeps_less(how: bool | str, tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    batch = SyntheticBatches(chosen, Shard()).next()

    def kept(which: bool | str) -> int:
        lm, sizes = DecoderLM(chosen.model), list[int]()
        objective.recompute(lm, which)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):  # type: ignore[func-returns-value]
            lm.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens)
        return sum(sizes)

    assert kept(how) < 0.8 * kept(False)


def test_an_accumulation_is_one_large_batch(tmp_path: Path) -> None:
    """Also where its parts have unequally many targets."""
    small = settings(tmp_path, train__accumulate_grad_batches=2)
    large = settings(tmp_path, train__batch_size=4)
    source, whole = SyntheticBatches(small, Shard()), SyntheticBatches(large, Shard())
    parts = [source.next(), source.next()]
    parts[1].targets[:, :20] = -100
    parts[1] = dataclasses.replace(parts[1], num_targets=int((parts[1].targets >= 0).sum()))
    batch = whole.next()
    batch.targets[:, 96:116] = -100
    batch = dataclasses.replace(batch, num_targets=int((batch.targets >= 0).sum()))
    one, two = _trainer(small), _trainer(large)
    losses = one.step(parts).loss, two.step([batch]).loss
    assert torch.allclose(*losses, rtol=1e-6)
    for a, b in zip(one.lm.parameters(), two.lm.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trains_in_every_precision_with_float32_weights(precision: str, tmp_path: Path) -> None:
    trainer = _trainer(settings(tmp_path, runtime__precision=precision))
    source = SyntheticBatches(trainer.settings, Shard())
    for _ in range(3):
        loss = float(trainer.step([source.next()]).loss)
        assert abs(loss - math.log(256)) < 0.2
    assert {p.dtype for p in trainer.lm.parameters()} == {torch.float32}


def test_learns_and_clips(tmp_path: Path) -> None:
    trainer = _trainer(settings(tmp_path, train__grad_clip=1e-3, train__lr=1e-2, train__steps=40))
    batch = SyntheticBatches(trainer.settings, Shard()).next()
    losses = []
    for _ in range(40):
        stepped = trainer.step([batch])
        norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.lm.parameters() if p.grad is not None])
        assert float(stepped.grad_norm) > float(norm)
        assert float(norm) < 1.01e-3
        losses.append(float(stepped.loss))
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "step"])
def test_a_resume_needs_each_part(forgotten: str, tmp_path: Path) -> None:
    first, second = (_trainer(settings(tmp_path, train__seed=seed)) for seed in (0, 1))
    batch = SyntheticBatches(first.settings, Shard()).next()
    first.step([batch])
    kept, other = (copy.deepcopy(trainer.state({})) for trainer in (first, second))  # as a file would keep them
    second.restore({**kept, forgotten: other[forgotten]})
    third = _trainer(settings(tmp_path, train__seed=2))
    third.restore(copy.deepcopy(kept))
    following = [[float(trainer.step([batch]).loss) for _ in range(3)] for trainer in (first, second, third)]
    assert following[0] == following[2]
    assert following[0] != following[1]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    state = _trainer(settings(tmp_path)).state({})
    with pytest.raises(ValueError, match="another model: n_layers 2 -> 1"):
        _trainer(settings(tmp_path, model__n_layers=1)).restore(state)


def test_a_checkpoint_with_the_old_name_of_the_key_value_heads_is_resumed(tmp_path: Path) -> None:
    trainer = _trainer(settings(tmp_path))
    batch = SyntheticBatches(trainer.settings, Shard()).next()
    trainer.step([batch])
    state = copy.deepcopy(trainer.state({"row": 3}))
    sizes = state["model_config"]
    sizes["n_kv_groups"] = sizes.pop("num_kv_heads")
    resumed = _trainer(settings(tmp_path, train__seed=1))
    assert resumed.restore(state) == {"row": 3}
    assert float(resumed.step([batch]).loss) == float(trainer.step([batch]).loss)
    with pytest.raises(ValueError, match="another model: num_kv_heads 2 -> 1"):
        _trainer(settings(tmp_path, model__num_kv_heads=1)).restore(state)


def test_unfused_attention_is_the_torch_backend(tmp_path: Path) -> None:
    assert _trainer(settings(tmp_path, runtime__use_flash=False)).lm.config.backend == "torch"
    with pytest.raises(ValueError, match=r"runtime\.use_flash must be true"):
        _trainer(settings(tmp_path, runtime__use_flash=False, model__backend="triton"))


@pytest.mark.parametrize(
    ("step", "share"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (99, 0.25), (54, 0.625), (1000, 0.25)]
)
def test_learning_rate(step: int, share: float) -> None:
    train = Train(steps=100, warmup_steps=10, lr=2.0, lr_end=0.25)
    assert objective.learning_rate(step, train) == pytest.approx(2.0 * share, rel=2e-2)
    constant = dataclasses.replace(train, lr_schedule="constant")
    assert objective.learning_rate(step, constant) == (2.0 * share if step < 10 else 2.0)


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_the_last_step_has_the_last_learning_rate(steps: int) -> None:
    """Also where the schedule is one step long."""
    train = Train(steps=steps, warmup_steps=1, lr=2.0, lr_end=0.1)
    assert objective.learning_rate(steps - 1, train) == pytest.approx(2.0 if steps == 2 else 0.2)


def test_only_matrices_decay(tmp_path: Path) -> None:
    optimizer = objective.adamw(DecoderLM(settings(tmp_path).model), Train(weight_decay=0.5))
    decay, none = optimizer.param_groups
    assert (decay["weight_decay"], none["weight_decay"]) == (0.5, 0.0)
    assert all(p.dim() >= 2 for p in decay["params"])
    assert all(p.dim() < 2 for p in none["params"])
    assert len(none["params"]) == 2 * 3 + 1  # two norms and the gates' bias in each layer, and the last norm


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own calls
@pytest.mark.parametrize("how", [False, True, "selective"])
def test_compiled_is_the_same(how: Any, tmp_path: Path) -> None:
    plain = settings(tmp_path, runtime__gradient_checkpointing=how)
    compiled = settings(tmp_path, runtime__gradient_checkpointing=how, runtime__compile=True)
    batch = SyntheticBatches(plain, Shard()).next()
    assert torch.allclose(
        _gradients(_trainer(plain), batch), _gradients(_trainer(compiled), batch), rtol=1e-3, atol=1e-5
    )


class _HostSyncs(TorchDispatchMode):
    """Names of the operators that read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fault", [False, True])
def test_the_trainer_itself_waits_for_nothing(fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a model that is a stand-in: the attention of a CPU may look at its tensors."""
    chosen = settings(tmp_path)
    trainer, batch = _trainer(chosen), SyntheticBatches(chosen, Shard()).next()
    monkeypatch.setattr(trainer.lm, "hidden", lambda tokens, cu_seqlens: trainer.lm.embedding(tokens))
    monkeypatch.setattr(
        trainer.optimizer, "step", lambda: None
    )  # counts its steps on the host where that is its device
    if fault:
        healthy = trainer._loss
        monkeypatch.setattr(trainer, "_loss", lambda given: healthy(given) * bool(healthy(given) > 0))
    with _HostSyncs() as syncs:
        trainer.step([batch])
    assert bool(syncs.found) is fault


def test_every_backend_can_be_recomputed(backend: str, device: torch.device) -> None:
    """torch.utils.checkpoint lets a backward pass look at what it saved once only."""
    config = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=4)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 6, 2, 16), (1, 6, 1, 16), (1, 6, 1, 16), (1, 6, 2, 3))
    inputs = [torch.rand(shape, generator=generator).to(device).requires_grad_() for shape in shapes]

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return nsa_attention(*x, config, backend=backend)  # type: ignore[no-any-return, call-overload]

    recomputed = checkpoint(attend, *inputs, use_reentrant=False)
    gradients = [torch.autograd.grad(o.square().sum(), inputs) for o in (attend(*inputs), recomputed)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
