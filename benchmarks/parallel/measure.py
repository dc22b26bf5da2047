"""One sequence over several ranks: its time beside that of one rank alone, what communication is waited for, bytes.

The ideal is one rank's time over their number. A figure is given only after the ranks' outputs, choices and gradients
agreed with one rank's in the same process, on the sequence that is timed or, where that does not fit on one, on a
shorter one of the same kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import nsa
from benchmarks.correctness.verify import IncorrectError
from nsa.parallel import ContextParallel, context_parallel_attention, exchange

WARM_UP = 3
EXACT = ("o", "block_indices", "dq")
"""What must be one rank's in every bit on a CPU; on a GPU within a unit in the last place."""


@dataclass(frozen=True)
class Shape:
    """The sequence that is timed; normal inputs, uniform gates."""

    tokens: int
    heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    documents: tuple[int, ...] | None = None
    """Tokens of each packed document; None for one."""
    config: nsa.NSAConfig = dataclasses.field(default_factory=nsa.NSAConfig)

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """q, k, v, gates and the gradient of the output, the same on every rank."""
        generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, self.dtype)
        sizes = {
            "q": (self.heads, self.head_dim_k),
            "k": (self.num_kv_heads, self.head_dim_k),
            "v": (self.num_kv_heads, self.head_dim_v),
            "upstream": (self.heads, self.head_dim_v),
        }
        drawn = {
            name: torch.randn(1, self.tokens, *size, generator=generator, device=device, dtype=dtype)
            for name, size in sizes.items()
        }
        gates = torch.rand(1, self.tokens, self.heads, 3, generator=generator, device=device, dtype=dtype)
        return {**drawn, "gates": gates}

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """int32 [N+1], or None."""
        if self.documents is None:
            return None
        return torch.tensor([0, *self.documents], device=device).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class ParallelTime:
    """Forward and backward of one shape over `ranks` ranks."""

    shape: Shape
    ranks: int
    backend: str
    parallel_ms: float
    """Median over the samples of the slowest rank."""
    samples_ms: tuple[float, ...]
    one_ms: float | None
    """Of the fastest rank alone, the median; None where the sequence does not fit there."""
    share_of_ideal: float | None
    """one_ms / ranks / parallel_ms."""
    exposed_ms: float
    """For how long the slowest rank's computation stood waiting for communication, the median."""
    received_gb: float
    """Bytes that arrive at a rank / 1e9, of the rank that gets most."""
    imbalance: float
    """By which share the most loaded rank has more work than the mean."""
    peak_mem_mib: float | None
    """Of the rank that takes most; None on a CPU."""
    checked_tokens: int
    """Length at which the ranks were compared with one."""
    greatest_difference: dict[str, float]
    """From one rank, by tensor, over the greatest entry."""


def measure(
    mesh: DeviceMesh, shape: Shape, *, backend: str = "auto", samples: int = 10, alone: bool = True,
    check_tokens: int | None = None,
) -> ParallelTime:  # fmt: skip
    """Check, then time; every rank of the mesh calls it and gets the same.

    Raises IncorrectError where the ranks do not give what one of them does.
    """
    device = torch.device(mesh.device_type)
    checked = shape if check_tokens is None else _shortened(shape, check_tokens)
    differences = check(mesh, checked, device, backend)
    whole = shape.inputs(device)
    context = ContextParallel(mesh)
    cu_seqlens = shape.cu_seqlens(device)
    order = context.order(shape.tokens, shape.config, cu_seqlens)
    own = {name: context.shard(x, order) for name, x in whole.items()}
    one_ms = _alone_ms(shape, whole, cu_seqlens, backend, samples, context) if alone else None
    del whole
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    waited: list[float] = []
    with _counted(context) as received:
        _shared(shape, own, cu_seqlens, context, backend)
    times = _samples(lambda: _shared(shape, own, cu_seqlens, context, backend), samples, context.group)
    times = _most(times, context.group, device)  # a call ends when the slowest rank ends
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    for _ in range(samples):
        with _waiting() as spans:
            _shared(shape, own, cu_seqlens, context, backend)
        waited.append(spans())
    parallel_ms = statistics.median(times)
    peaks = _most([peak or 0.0], context.group, device)
    return ParallelTime(
        shape, context.ranks, backend, parallel_ms, tuple(times), one_ms,
        None if one_ms is None else one_ms / context.ranks / parallel_ms,
        _most([statistics.median(waited)], context.group, device)[0],
        _most([received[0] / 1e9], context.group, device)[0],
        order.imbalance(shape.config, context.documents(cu_seqlens)),
        peaks[0] if peak is not None else None, checked.tokens, differences,
    )  # fmt: skip


def check(mesh: DeviceMesh, shape: Shape, device: torch.device, backend: str) -> dict[str, float]:
    """The greatest difference of each tensor from one rank's. Raises IncorrectError where it is too large."""
    whole, cu_seqlens, context = shape.inputs(device, seed=1), shape.cu_seqlens(device), ContextParallel(mesh)
    order = context.order(shape.tokens, shape.config, cu_seqlens)
    own = {name: context.shard(x, order) for name, x in whole.items()}
    wanted = _one(shape, whole, cu_seqlens, backend)
    found = _shared(shape, own, cu_seqlens, context, backend)
    names, ulp = sorted(found), torch.finfo(getattr(torch, shape.dtype)).eps
    differences = []
    for name in names:
        ours, one = found[name], context.shard(wanted[name], order)
        if name == "block_indices":
            differences.append((ours != one).double().mean().item() if ours.numel() else 0.0)
        else:
            most = one.abs().max().item() if one.numel() else 0.0
            differences.append(((ours.double() - one.double()).abs().max().item() / most) if most else 0.0)
    worst = dict(zip(names, _most(differences, context.group, device), strict=True))
    for name, difference in worst.items():
        allowed = 0.0 if name in EXACT and device.type == "cpu" and backend == "torch" else ulp * 4
        allowed = 0.0 if name == "block_indices" else allowed
        if not difference <= allowed:
            raise IncorrectError(
                f"{name} of {context.ranks} ranks is {difference:.3g} from one's; allowed {allowed:.3g}"
            )
    return worst


def _shortened(shape: Shape, tokens: int) -> Shape:
    """The first tokens of it."""
    if shape.documents is None:
        return dataclasses.replace(shape, tokens=tokens)
    kept: list[int] = []
    for length in shape.documents:
        kept.append(min(length, tokens - sum(kept)))
    return dataclasses.replace(shape, tokens=tokens, documents=tuple(kept))


def _one(shape: Shape, x: dict[str, Tensor], cu_seqlens: Tensor | None, backend: str) -> dict[str, Tensor]:
    return _called(nsa.nsa_attention, shape, x, cu_seqlens, backend)


def _shared(
    shape: Shape, x: dict[str, Tensor], cu_seqlens: Tensor | None, context: ContextParallel, backend: str
) -> dict[str, Tensor]:
    return _called(context_parallel_attention, shape, x, cu_seqlens, backend, mesh=context)


def _called(
    attention: Callable[..., Any], shape: Shape, x: dict[str, Tensor], cu_seqlens: Tensor | None, backend: str,
    **more: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Forward and backward."""
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v", "gates")]
    o, aux = attention(*leaves, shape.config, cu_seqlens=cu_seqlens, backend=backend, return_aux=True, **more)
    gradients = torch.autograd.grad(o, leaves, x["upstream"])
    names = "dq", "dk", "dv", "dgates"
    return {"o": o.detach(), "block_indices": aux.block_indices, **dict(zip(names, gradients, strict=True))}


def _alone_ms(
    shape: Shape, whole: dict[str, Tensor], cu_seqlens: Tensor | None, backend: str, samples: int,
    context: ContextParallel,
) -> float:  # fmt: skip
    """The median of the rank that is fastest: the ideal is not to gain from a slow one."""
    times = _samples(lambda: _one(shape, whole, cu_seqlens, backend), samples, context.group)
    device = whole["q"].device
    return -_most([-statistics.median(times)], context.group, device)[0]


def _samples(call: Callable[[], object], count: int, group: dist.ProcessGroup) -> list[float]:
    """ms of each of `count` calls that all ranks begin together."""
    on_gpu = torch.cuda.is_available() and dist.get_backend(group) == "nccl"
    times = []
    for number in range(WARM_UP + count):
        dist.barrier(group=group)
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        if number >= WARM_UP:
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def _most(values: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The greatest of each over the ranks."""
    x = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    most: list[float] = x.tolist()
    return most


@contextlib.contextmanager
def _waiting() -> Iterator[Callable[[], float]]:
    """Gives a function of the ms for which the current stream (the host, on a CPU) waited for what was on its way."""
    spans: list[tuple[Any, Any]] = []
    wait = exchange.Pending.wait

    def now() -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(pending: exchange.Pending) -> Tensor:
        begin = now()
        if pending.work is not None:
            pending.work.wait()
        spans.append((begin, now()))
        return wait(pending)

    def total() -> float:
        if not torch.cuda.is_available():
            return sum(end - begin for begin, end in spans) * 1e3
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans))

    with mock.patch.object(exchange.Pending, "wait", timed):
        yield total


@contextlib.contextmanager
def _counted(context: ContextParallel) -> Iterator[list[int]]:
    """Counts the bytes that arrive from other ranks."""
    received = [0]
    gather, to_all = exchange._all_gather, dist.all_to_all_single

    def counting_gather(out: Tensor, own: Tensor, **more: Any) -> Any:
        received[0] += out.nbytes - own.nbytes
        return gather(out, own, **more)

    def counting_to_all(out: Tensor, sent: Tensor, come: list[int], go: list[int], **more: Any) -> Any:
        rows = sum(size for rank, size in enumerate(come) if rank != context.rank)
        received[0] += rows * (out.nbytes // max(out.shape[0], 1))
        return to_all(out, sent, come, go, **more)

    with (
        mock.patch.object(exchange, "_all_gather", counting_gather),
        mock.patch.object(dist, "all_to_all_single", counting_to_all),
    ):
        yield received
