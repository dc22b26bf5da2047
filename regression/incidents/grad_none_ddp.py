"""grad-none-ddp: "DDP hangs"; 37 tokens/s on two GPUs.

What really happened: parameters without a gradient. With find_unused_parameters=False their buckets never fill, and
the next forward pass of every rank raises or waits. (The tokens/s were step1-stall.)
"""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.model import DecoderLM
from nsa.train import distributed
from nsa.train.data.loader import Loader, Shard
from nsa.train.distributed import Ranks
from nsa.train.monitoring import monitors
from nsa.train.settings import Settings
from nsa.train.trainer import Trainer
from regression import training
from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected
from regression.training import TINY

INCIDENT = Incident(
    id="grad-none-ddp",
    symptom="DDP hangs; 37 tokens/s on two GPUs",
    cause="parameters without gradients under find_unused_parameters=False",
    detector="every parameter gets a gradient; two ranks' gradients equal one rank's",
    expects=ReproVerdict.CRASHED,
    says="a rank died: RuntimeError: Expected to have finished reduction",
    floor_s=120.0,  # two ranks start, import and train between two heartbeats, and may wait 60 s for each other
)

_RANKS, _STEPS = 2, 2
_MODEL = dataclasses.replace(TINY, n_layers=1, nsa=dataclasses.replace(TINY.nsa, phi="mlp"))
"""All three blocks of 48 tokens are chosen, so that float32 and float64 read the same keys."""
_BUDGET = 3.0
"""Times one rank's own error against float64, as for every backward pass in this project."""
_RANK_DEADLINE = datetime.timedelta(seconds=60)
_healthy = DecoderLM.__init__
_standing = False
"""Whether the fault is in the product of this process; ranks are new processes and must be told."""


def with_constant_keys(lm: DecoderLM, *given: Any) -> None:
    """The compressed keys are a constant, so that nothing reaches what makes them."""
    _healthy(lm, *given)
    for name, module in lm.named_modules():
        if name.endswith("compress_k"):
            module.register_forward_hook(lambda *call: call[-1].detach())


def product(step: Step) -> Evidence:
    """Over Gloo, on the CPU of any machine."""
    return compare_ranks(step, "cpu")


def compare_ranks(step: Step, device: str) -> Evidence:
    """Steps of the trainer in one process, then in two ranks: NCCL on "cuda", Gloo on "cpu"."""
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"batch_size": _RANKS, "packing": False, "grad_clip": 0.0, "steps": _STEPS}
        chosen = training.settings(Path(folder), device, model=_MODEL, **sizes)
    truth, own = (_gradients(chosen, Ranks(), dtype) for dtype in (torch.float64, torch.float32))
    step(1)
    alarm = monitors.missing_gradients({name: None if g is None else float(g.norm()) for name, g in own.items()})
    wrong = [] if alarm is None else [alarm.why]
    try:
        first, second = _two_ranks(chosen)
    except RuntimeError as error:  # DistributedDataParallel's own complaint, as the rank raised it
        return Evidence(wrong=tuple(wrong), exception=f"a rank died: RuntimeError: {str(error).split('. ')[0]}")
    step(2)
    if not torch.equal(first, second):
        wrong.append("the ranks disagree on their gradients")
    exact = _flat(truth)
    found, allowed = (float((x.double() - exact).norm() / exact.norm()) for x in (first, _flat(own)))
    of = f"relative error of the gradients of {_RANKS} ranks over {'NCCL' if device == 'cuda' else 'Gloo'}"
    return Evidence(wrong=tuple(wrong), error=Bound(found, _BUDGET * allowed, of))


def _gradients(chosen: Settings, own: Ranks, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """By parameter, of the first step on this rank's share; a bucket that never filled shows in the second step."""
    device = torch.device(chosen.runtime.device, own.local_rank)
    trainer = Trainer(chosen, device, own)
    trainer.lm.to(dtype)
    for module in trainer.lm.modules():
        if isinstance(module, torch.nn.RMSNorm):  # its default eps is the type's, so float64 would be another function
            module.eps = torch.finfo(torch.float32).eps
    loader = Loader(chosen, Shard(own.rank, own.ranks))
    gradients: dict[str, Tensor | None] = {}
    for n in range(_STEPS):
        trainer.step([next(loader).to(device)])
        if n == 0:
            named = trainer.lm.named_parameters()
            gradients = {name: None if p.grad is None else p.grad.cpu().clone() for name, p in named}
    loader.close()
    return gradients


def _flat(gradients: dict[str, Tensor | None]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values() if g is not None])


def _two_ranks(chosen: Settings) -> list[Tensor]:
    """The gradients of each rank. Raises RuntimeError with the words of a rank that failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_RANKS, mp_context=spawn) as ranks:
        futures = [ranks.submit(_rank, chosen, rank, port, _standing) for rank in range(_RANKS)]
        return [torch.tensor(future.result()) for future in futures]


def _rank(chosen: Settings, rank: int, port: int, fault: bool) -> list[float]:
    """One process of two, as torchrun would start it."""
    torch.set_num_threads(1)
    own = {"RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    distributed.TIMEOUT = _RANK_DEADLINE
    with (
        inject() if fault else nullcontext(),
        distributed.process_group(os.environ, chosen.runtime.device == "cuda") as ranks,
    ):
        return _flat(_gradients(chosen, ranks)).tolist()


@contextmanager
def inject() -> Iterator[None]:
    global _standing
    with injected(Fault(DecoderLM, "__init__", with_constant_keys)):
        _standing = True
        try:
            yield
        finally:
            _standing = False


def faulty(step: Step) -> Evidence:
    """The same ranks with compressed keys that are a constant."""
    with inject():
        return product(step)
