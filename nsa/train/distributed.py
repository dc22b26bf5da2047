"""Several ranks through torch.distributed: the process group, DDP and FSDP2, collectives, checkpoints of shards.

Under torchrun every rank runs the same program; with one rank everything here costs nothing.
"""

from __future__ import annotations

import datetime
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from nsa.train.objective import Objective

TIMEOUT = datetime.timedelta(minutes=10)
"""A collective that waits longer than this for a rank ends the run."""
ENOUGH_PARAMETERS = 2**25
"""FSDP2 gathers as many blocks at once as have this many: 128 MiB of float32 take half a millisecond over NVLink, about
as long as the host spends on the hooks of a group."""
_LOST = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "unhandled system error")


class LostRankError(RuntimeError):
    """Another rank died or stopped; the message says when this one noticed."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    context: int = 1
    """Consecutive ranks that share each sequence, and so read the same data."""

    def __post_init__(self) -> None:
        if self.ranks % self.context:
            raise ValueError(f"runtime.context_parallel must divide the {self.ranks} ranks; got {self.context}")

    @property
    def data_rank(self) -> int:
        """Which part of the data is this rank's."""
        return self.rank // self.context

    @property
    def data_ranks(self) -> int:
        """In how many parts the data is read."""
        return self.ranks // self.context

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.ranks > 1


def world_size(variables: Mapping[str, str]) -> int:
    """The number of ranks that torchrun's variables name; 1 without torchrun."""
    return int(variables.get("WORLD_SIZE", 1))


@contextmanager
def process_group(variables: Mapping[str, str], on_gpu: bool, context: int = 1) -> Iterator[Ranks]:
    """The ranks that torchrun's variables name, over NCCL on GPUs and Gloo on CPUs; a run alone has one.

    `context` of them share each sequence; ValueError where that does not divide their number.
    """
    ranks = world_size(variables)
    if ranks == 1:
        yield Ranks(context=context)
        return
    own = Ranks(int(variables["RANK"]), ranks, int(variables["LOCAL_RANK"]), context)
    if on_gpu:
        torch.cuda.set_device(own.local_rank)
        # A collective otherwise starts behind the kernel that fills the GPU, while those of the other ranks, which had
        # room, wait for it on multiprocessors that attention needs: 3 % of a step with context parallelism on two GPUs.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    elif variables.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine, whatever its name resolves to
    device = torch.device("cuda", own.local_rank) if on_gpu else None
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=device)
    yield own
    # not after an error: it would wait for ranks that may be gone
    dist.barrier()
    dist.destroy_process_group()


def exit_with_threads(code: int) -> NoReturn:
    """End this process with `code`, without taking the interpreter down under threads that cannot be joined.

    Before Python 3.14 a thread that asks for the GIL while the interpreter goes down aborts the process where it runs
    C++ ("terminate called without an active exception"), so that a run that trained to its end is reported as failed.
    A loader that waits for a silent network may do so, and Gloo's threads: they outlive `destroy_process_group`, as
    DTensor's caches keep the mesh and the mesh its group, and need the GIL to release the tensor of a collective.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def detect_lost_ranks(own: Ranks, step: int) -> Iterator[None]:
    """Turn what a backend says when a peer is gone into LostRankError, with the rank and step that noticed."""
    try:
        yield
    except RuntimeError as error:
        if (
            isinstance(error, LostRankError)
            or not own.several
            or not (isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST))
        ):
            raise
        first_line = str(error).splitlines()[0]
        raise LostRankError(
            f"rank {own.rank} of {own.ranks} lost another rank in step {step}: it died or stopped, and its own output "
            f"says why ({first_line})"
        ) from error


def wrap(objective: Objective, own: Ranks, parallel: str, device: torch.device) -> nn.Module:
    """The module that is called: DDP's, FSDP2's, or the objective itself."""
    if not own.several:
        return objective
    if parallel == "ddp":
        return DistributedDataParallel(objective, gradient_as_bucket_view=True, static_graph=False)
    from torch.distributed.fsdp import fully_shard  # here and below: a run alone does not wait for their import

    mesh = init_device_mesh(device.type, (own.ranks,))  # by default FSDP2 moves a run on CPUs to the GPUs it sees
    for blocks in group_blocks(list(objective.lm.blocks)):
        fully_shard(blocks, mesh=mesh)
    return cast(nn.Module, fully_shard(objective, mesh=mesh))


def group_blocks(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Consecutive blocks in groups of at least ENOUGH_PARAMETERS, but for the last."""
    groups: list[list[nn.Module]] = []
    room = 0
    for block in blocks:
        if room <= 0:
            groups.append([])
            room = ENOUGH_PARAMETERS
        groups[-1].append(block)
        room -= sum(x.numel() for x in block.parameters())
    return groups


@contextmanager
def gradient_sync(model: nn.Module, now: bool) -> Iterator[None]:
    """Whether DDP averages in this backward pass: in the last one of an accumulation.

    FSDP2 reduces in each pass: otherwise every rank would hold the gradients of the whole model.
    """
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not now else nullcontext():
        yield


def all_reduce(x: Tensor, own: Ranks) -> Tensor:
    """The sum over all ranks."""
    if own.several:
        x = x.clone()
        dist.all_reduce(x)
    return x


def sum_in_place(x: Tensor, own: Ranks) -> None:
    """The sum over all ranks, in place of `x`."""
    if own.several:
        dist.all_reduce(x)


def broadcast_state(module: nn.Module, own: Ranks) -> None:
    """Parameters and buffers of the first rank for all, as DDP does."""
    if own.several:
        for x in module.state_dict().values():
            dist.broadcast(x, 0)


def all_gather(x: Tensor, own: Ranks) -> Tensor:
    """x [...] -> [ranks, ...]."""
    if not own.several:
        return x[None]
    every = [torch.empty_like(x) for _ in range(own.ranks)]
    dist.all_gather(every, x)
    return torch.stack(every)


def any_rank(yes: bool, own: Ranks, device: torch.device) -> bool:
    """Whether one of the ranks says yes; all of them get the same answer."""
    return bool(all_reduce(torch.tensor(float(yes), device=device), own) > 0) if own.several else yes


def barrier(own: Ranks) -> None:
    if own.several:
        dist.barrier()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model, optimiser) as one process would hold them, on the CPU of rank 0; the others may get nothing."""
    if not dist.is_initialized():
        return model.state_dict(), optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found_model, found_optimizer = get_state_dict(model, optimizer, options=whole)
    return found_model, dict(found_optimizer)


def restore_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, model_state: dict[str, Any], optimizer_state: dict[str, Any]
) -> None:
    """The inverse of `full_state`, on every rank."""
    if type(model) is Objective:  # each rank has all of it
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    by_name = _by_name(optimizer_state, model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=by_name, options=whole)


def _by_name(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Optimiser state keyed by parameter names; a process alone saves it by the parameters' indices."""
    names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
    name_of_index = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]

    def name(key: int | str) -> str:
        return name_of_index[key] if isinstance(key, int) else key

    groups = [{**group, "params": [name(key) for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {name(key): of_one for key, of_one in state["state"].items()}, "param_groups": groups}


def gather_states(state: dict[str, Any], own: Ranks, device: torch.device) -> list[Tensor]:
    """What each rank alone knows, as bytes (uint8 [n], written by `torch.save`), on all ranks.

    One for each rank; of ranks that share sequences one, as they know the same.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    mine = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)
    sizes = all_gather(torch.tensor(mine.numel(), device=device), own).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    every = [x[:size].cpu().clone() for x, size in zip(all_gather(padded, own), sizes, strict=True)]
    return every[:: own.context]


def own_state(parts: list[Tensor], own: Ranks) -> dict[str, Any]:
    """The part of `gather_states` that this rank goes on from; those who share sequences have one.

    ValueError if the checkpoint was made by another number of ranks that read data.
    """
    if len(parts) != own.data_ranks:
        raise ValueError(
            f"the checkpoint has the data positions of {len(parts)} ranks, and this run reads data in "
            f"{own.data_ranks}: {own.ranks} ranks (torchrun --nproc_per_node) over runtime.context_parallel "
            f"{own.context}"
        )
    state: dict[str, Any] = torch.load(io.BytesIO(parts[own.data_rank].numpy().tobytes()), weights_only=True)
    return state
