"""grad-none-ddp: "DDP hangs"; 37 tokens/s on two GPUs.

What really happened: parameters without a gradient. With find_unused_parameters=False their buckets never fill, and
the next forward pass of every rank raises or waits. (The tokens/s were step1-stall.)
"""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nsa.model import DecoderLM
from nsa.train import sentinels
from regression import training
from regression.evidence import Bound, Evidence
from regression.incident import Incident, Step
from regression.training import TINY, Run, Trainer
from regression.verdict import Verdict

INCIDENT = Incident(
    id="grad-none-ddp",
    symptom="DDP hangs; 37 tokens/s on two GPUs",
    cause="parameters without gradients under find_unused_parameters=False",
    detector="every parameter gets a gradient; two ranks' gradients equal one rank's",
    expects=Verdict.CRASHED,
    says="a rank died: RuntimeError: Expected to have finished reduction",
)

_RANKS, _STEPS = 2, 2
_RUN = Run(
    steps=_STEPS,
    model=dataclasses.replace(TINY, n_layers=1, nsa=dataclasses.replace(TINY.nsa, phi="mlp")),
    batch_size=_RANKS,
)
"""All three blocks of 48 tokens are chosen, so that float32 and float64 read the same keys."""
_BUDGET = 3.0
"""Times one rank's own error against float64, as for every backward pass in this project."""
_RANK_DEADLINE = datetime.timedelta(seconds=60)


class NoGradientTrainer(Trainer):
    """The compressed keys are a constant, so that nothing reaches what makes them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        for name, module in self.model.named_modules():
            if name.endswith("compress_k"):
                module.register_forward_hook(lambda *call: call[-1].detach())


def product(step: Step) -> Evidence:
    """Over Gloo, on the CPU of any machine."""
    return compare_ranks(step, "cpu")


def compare_ranks(step: Step, device: str) -> Evidence:
    """One backward pass in one process, then two steps of two ranks: NCCL on "cuda", Gloo on "cpu"."""
    run = dataclasses.replace(_RUN, device=device)
    truth, own = (_one_rank(run, dtype) for dtype in (torch.float64, torch.float32))
    step(1)
    alarm = sentinels.missing_gradients({name: None if g is None else float(g.norm()) for name, g in own.items()})
    wrong = [] if alarm is None else [alarm.why]
    try:
        first, second = _two_ranks(training.Trainer, run)
    except RuntimeError as error:  # DistributedDataParallel's own complaint, as the rank raised it
        return Evidence(wrong=tuple(wrong), exception=f"a rank died: RuntimeError: {str(error).split('. ')[0]}")
    step(2)
    if not torch.equal(first, second):
        wrong.append("the ranks disagree on their gradients")
    exact = _flat(truth)
    found, allowed = (float((x.double() - exact).norm() / exact.norm()) for x in (first, _flat(own)))
    of = f"relative error of the gradients of {_RANKS} ranks over {'NCCL' if device == 'cuda' else 'Gloo'}"
    return Evidence(wrong=tuple(wrong), error=Bound(found, _BUDGET * allowed, of))


def _one_rank(run: Run, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Gradients of the whole batch by parameter."""
    trainer = training.Trainer(run)
    trainer.model.to(dtype)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.RMSNorm):  # its default eps is the type's, so float64 would be another function
            module.eps = torch.finfo(torch.float32).eps
    torch.autograd.backward(trainer.loss(trainer.batch()))
    return {name: p.grad for name, p in trainer.model.named_parameters()}


def _flat(gradients: dict[str, Tensor | None]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values() if g is not None]).cpu()


def _two_ranks(trainer: type[Trainer], run: Run) -> list[Tensor]:
    """The gradients of each rank, after a second step in which a bucket that never filled shows.

    Raises RuntimeError with the words of a rank that failed.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(_RANKS, mp_context=spawn) as ranks:
        futures = [ranks.submit(_rank, trainer, run, rank, str(Path(folder) / "store")) for rank in range(_RANKS)]
        return [torch.tensor(future.result()) for future in futures]


def _rank(trainer_type: type[Trainer], run: Run, rank: int, store: str) -> list[float]:
    """One process of two: its share of the batch, _STEPS times."""
    torch.set_num_threads(1)
    on_gpu = run.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both ranks are on this machine, whatever its name resolves to
    group: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": _RANKS}
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_RANK_DEADLINE, **group)
    try:
        trainer = trainer_type(run)
        replica = DistributedDataParallel(trainer.model, find_unused_parameters=False)
        trainer.model = cast(DecoderLM, replica)  # which it stands for
        batch = trainer.batch()[rank : rank + 1]
        gradients = []
        for _ in range(_STEPS):
            replica.zero_grad()
            torch.autograd.backward(trainer.loss(batch))
            gradients = [p.grad.flatten() for p in replica.parameters() if p.grad is not None]
        return torch.cat(gradients).tolist()
    finally:
        dist.destroy_process_group()


@contextmanager
def inject() -> Iterator[None]:
    with mock.patch.object(training, "Trainer", NoGradientTrainer):
        yield


def faulty(step: Step) -> Evidence:
    """The same ranks with compressed keys that are a constant."""
    with inject():
        return product(step)
