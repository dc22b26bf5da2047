"""One sequence over several ranks: its time beside that of one rank alone, what communication is waited for, bytes.

The ideal is one rank's time over their number. A figure is given only after the ranks' outputs, choices and gradients
agreed with one rank's in the same process, and that one's with float64, on the sequence that is timed or, where that
does not fit on one rank, on a shorter one of the same kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import nsa
from benchmarks.cases import inputs
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import Correctness, OracleCheck
from benchmarks.correctness import long_rows, tolerance
from benchmarks.correctness.long_rows import LongComparison
from benchmarks.correctness.row_sampling import TIMED_SEED
from benchmarks.correctness.verify import Answer, require_passed
from benchmarks.history.records import SharedSequence
from harness.peak import MIB
from nsa.parallel import ContextParallel, TokenOrder, context_parallel_attention, exchange

WARM_UP = 3
EXACT = ("o", "block_indices", "dq")
"""What must be one rank's in every bit on a CPU; on a GPU within a unit in the last place."""
INPUTS = ("q", "k", "v", "gates")


@dataclass(frozen=True)
class ParallelTime:
    """Forward and backward of one case over its ranks."""

    correctness: Correctness
    samples_ms: tuple[float, ...]
    """Of the slowest rank."""
    shared: SharedSequence
    peak_mem_mib: float | None
    """Above the inputs, of the rank that takes most; None on a CPU."""


def measure(
    mesh: DeviceMesh, key: Key, *, samples: int = 10, alone: bool = True, check_tokens: int | None = None,
    seed: int = 1, say: Callable[[str], None] = print,
) -> ParallelTime:  # fmt: skip
    """Check, then time; every rank of the mesh calls it and gets the same.

    Args:
        mesh: of `key.ranks` ranks.
        key: the case; `key.backend_asked` computes it.
        samples: how many calls are timed, together and alone.
        alone: time one rank alone too, which the sequence must fit on.
        check_tokens: compare on the first tokens of the case; None for all of them.
        seed: of the rows that are compared.
        say: told by every rank how long it waited at each place.

    Raises IncorrectError where the ranks do not give what one of them does, or that one not what float64 does.
    """
    device, context = torch.device(mesh.device_type), ContextParallel(mesh)
    if context.ranks != key.ranks:
        raise ValueError(f"the mesh must have the {key.ranks} ranks of the case; got {context.ranks}")
    checked = key if check_tokens is None else _shortened(key, check_tokens)
    correctness = check(context, checked, device, seed)
    whole, cu_seqlens = inputs.draw(key, device.type, TIMED_SEED), cu_seqlens_of(key, device)
    generator = torch.Generator(device).manual_seed(TIMED_SEED)
    d_o = torch.randn(*whole.q.shape[:3], key.head_dim_v, generator=generator, device=device, dtype=whole.q.dtype)
    order = context.order(key.num_keys, _config(key), cu_seqlens)
    own, own_d_o = whole.map(lambda x: context.shard(x, order)), context.shard(d_o, order)

    together = partial(_together, key, own, own_d_o, cu_seqlens, context)
    forward = partial(_forward, key, own, cu_seqlens, context)
    # by turns: a GPU that has become warm is slower, and all are to be measured on the same one
    calls: list[Callable[[], object]] = [forward, together]
    if alone:
        calls.insert(0, partial(_one, key, whole, d_o, cu_seqlens))
    del whole, d_o  # unless one rank is timed alone, each needs no more than its own part
    *alone_ms, forward_ms, times_ms = _samples(calls, samples, context.group)
    of_forward, times = (_most(of_call, context.group, device) for of_call in (forward_ms, times_ms))
    fastest_ms, slowest_ms = _fastest_and_slowest(alone_ms[0], context, device) if alone else (None, None)
    del calls

    standing = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        standing = torch.cuda.memory_allocated()
    with _counted(context) as received:
        together()
    peak = (torch.cuda.max_memory_allocated() - standing) / MIB if device.type == "cuda" else 0.0
    waited = []
    for _ in range(samples):
        with _waiting() as waits_ms:
            together()
        waited.append(waits_ms())
    by_place = [statistics.median(place) for place in zip(*waited, strict=True)]
    say(f"rank {context.rank} waits, in order, ms: {' '.join(f'{ms:.2f}' for ms in by_place)}")
    exposed_ms, received_gb, most_mib = _most(
        [statistics.median(map(sum, waited)), received[0] / 1e9, peak], context.group, device
    )
    imbalance = order.imbalance(_config(key), context.documents(cu_seqlens))
    rate = _gather_gb_per_s(own, samples, context)
    shared = SharedSequence(
        fastest_ms, exposed_ms, received_gb, imbalance, rate, checked.num_keys, slowest_ms,
        statistics.median(of_forward),
    )  # fmt: skip
    return ParallelTime(correctness, tuple(times), shared, most_mib if device.type == "cuda" else None)


def check(context: ContextParallel, key: Key, device: torch.device, seed: int) -> Correctness:
    """The ranks beside one of them, that one beside float64, on the inputs that are timed. Raises IncorrectError."""
    problem, cu_seqlens = inputs.draw(key, device.type, TIMED_SEED), cu_seqlens_of(key, device)
    documents = list(pairwise(accumulate((0, *(key.documents or (key.num_keys,))))))
    config, most_pairs = _config(key), long_rows.MOST_PAIRS[device.type]
    rows = long_rows.rows_to_compare(documents, key.heads, config, seed, most_pairs, device)
    like_o = problem.q.new_empty(1).expand(*problem.q.shape[:3], key.head_dim_v)
    d_o = long_rows.output_gradient(like_o, rows, seed)
    order = context.order(key.num_keys, config, cu_seqlens)
    own, own_d_o = problem.map(lambda x: context.shard(x, order)), context.shard(d_o, order)
    one, _ = _one(key, problem, d_o, cu_seqlens)
    found, path = _together(key, own, own_d_o, cu_seqlens, context)
    differences = _differences(found, one, context, order, device)
    gradients = {name: x for name, x in one.items() if name.startswith("d")}
    share = range(context.rank, key.num_kv_heads, context.ranks)
    compared = long_rows.compare(
        problem, config, Answer(one["o"], d_o, gradients), one["block_indices"], rows, documents=documents,
        kv_heads=share,
    )  # fmt: skip
    every: list[LongComparison] = [compared] * context.ranks
    dist.all_gather_object(every, compared, group=context.group)
    exact = device.type == "cpu" and path == "torch"
    beside_one = tuple(_beside_one(name, error, key, exact=exact) for name, error in differences.items())
    checks = (*long_rows.worst_of(every).checks(), *beside_one)
    return require_passed(Correctness(rows.numel(), checks, path, seed, key.num_queries))


def _beside_one(name: str, difference: float, key: Key, *, exact: bool) -> OracleCheck:
    """`exact`: what is computed for each query alone is one rank's in every bit.

    Elsewhere results are rounded to their type, and float32 adds what the ranks have of dk, dv and the like in another
    order: the error of either sum grows with log2 of the number of terms (pairwise summation, Higham 1993).
    """
    ulp, of_sum = (torch.finfo(dtype).eps for dtype in (getattr(torch, key.dtype), torch.float32))
    terms = 1 if name in EXACT else key.num_queries * key.heads // key.num_kv_heads
    of_order = 2 * math.log2(max(terms, 1)) * of_sum
    allowed = 0.0 if name == "block_indices" or (exact and name in EXACT) else 4 * ulp + of_order
    return tolerance.check(f"{name}, {key.ranks} ranks beside one", difference, allowed)


def _differences(
    found: dict[str, Tensor], one: dict[str, Tensor], context: ContextParallel, order: TokenOrder, device: torch.device
) -> dict[str, float]:
    """The greatest difference of each tensor from one rank's, over its greatest entry; of choices their share."""
    differences = {}
    for name, ours in sorted(found.items()):
        theirs = context.shard(one[name], order)
        if name == "block_indices":
            difference = (ours != theirs).double().mean().item() if ours.numel() else 0.0
        else:
            most = theirs.abs().max().item() if theirs.numel() else 0.0
            difference = ((ours.double() - theirs.double()).abs().max().item() / most) if most else 0.0
        differences[name] = difference if math.isfinite(difference) else math.inf  # a maximum may pass over NaN
    return dict(zip(differences, _most(list(differences.values()), context.group, device), strict=True))


def _shortened(key: Key, tokens: int) -> Key:
    """The first tokens of it."""
    if key.documents is None:
        return dataclasses.replace(key, num_queries=tokens, num_keys=tokens)
    kept: list[int] = []
    for length in key.documents:
        kept.append(min(length, tokens - sum(kept)))
    documents = tuple(length for length in kept if length)
    return dataclasses.replace(key, num_queries=tokens, num_keys=tokens, documents=documents)


def _config(key: Key) -> nsa.NSAConfig:
    assert key.config is not None
    return nsa.NSAConfig.from_mapping(key.config)


def cu_seqlens_of(key: Key, device: torch.device) -> Tensor | None:
    """int32 [N+1], or None where nothing is packed."""
    if key.documents is None:
        return None
    return torch.tensor([0, *key.documents], device=device).cumsum(0, dtype=torch.int32)


def _one(key: Key, x: Problem, d_o: Tensor, cu_seqlens: Tensor | None) -> tuple[dict[str, Tensor], str]:
    return _called(nsa.nsa_attention, key, x, d_o, cu_seqlens)


def _together(
    key: Key, x: Problem, d_o: Tensor, cu_seqlens: Tensor | None, context: ContextParallel
) -> tuple[dict[str, Tensor], str]:
    return _called(context_parallel_attention, key, x, d_o, cu_seqlens, mesh=context)


def _forward(key: Key, x: Problem, cu_seqlens: Tensor | None, context: ContextParallel) -> None:
    with torch.no_grad():
        context_parallel_attention(
            x.q, x.k, x.v, x.gates, _config(key), mesh=context, cu_seqlens=cu_seqlens, backend=str(key.backend_asked)
        )  # fmt: skip


def _called(
    attention: Callable[..., Any], key: Key, x: Problem, d_o: Tensor, cu_seqlens: Tensor | None, **more: Any
) -> tuple[dict[str, Tensor], str]:
    """Forward and backward: every tensor by name, and the backend that ran."""
    leaves = [x.tensors[name].detach().requires_grad_() for name in INPUTS]
    o, aux = attention(*leaves, _config(key), cu_seqlens=cu_seqlens, backend=key.backend_asked, return_aux=True, **more)
    gradients = torch.autograd.grad(o, leaves, d_o)
    named = {f"d{name}": gradient for name, gradient in zip(INPUTS, gradients, strict=True)}
    return {"o": o.detach(), "block_indices": aux.block_indices, **named}, aux.backend


def _fastest_and_slowest(
    times_ms: Sequence[float], context: ContextParallel, device: torch.device
) -> tuple[float, float]:
    """The medians of the rank that is fastest alone, which the ideal goes by, and of the one that is slowest."""
    own = statistics.median(times_ms)
    slowest, fastest = _most([own, -own], context.group, device)
    return -fastest, slowest


def _gather_gb_per_s(own: Problem, samples: int, context: ContextParallel) -> float:
    """What arrives at a rank, where all gather as many keys as the shortest of them holds, and the values."""
    rows = -int(_most([-own.k.shape[1]], context.group, own.k.device)[0])
    sent = torch.cat([x[:, :rows].flatten() for x in (own.k, own.v)])
    out = sent.new_empty(context.ranks * sent.numel())
    gather = partial(exchange._all_gather, out, sent, group=context.group)
    (times,) = _samples([gather], samples, context.group)
    slowest_ms = _most([statistics.median(times)], context.group, sent.device)[0]
    return (out.nbytes - sent.nbytes) / slowest_ms / 1e6


def _samples(calls: Sequence[Callable[[], object]], count: int, group: dist.ProcessGroup) -> list[list[float]]:
    """ms of each of `count` times that all ranks begin a call together, of each of `calls`, which take turns."""
    on_gpu = torch.cuda.is_available() and dist.get_backend(group) == "nccl"
    times_ms: list[list[float]] = [[] for _ in calls]
    for number in range(WARM_UP + count):
        for call, of_call in zip(calls, times_ms, strict=True):
            dist.barrier(group=group)
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            if number >= WARM_UP:
                of_call.append((time.perf_counter() - begin) * 1e3)
    return times_ms


def _most(values: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The greatest of each over the ranks."""
    x = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    most: list[float] = x.tolist()
    return most


@contextlib.contextmanager
def _waiting() -> Iterator[Callable[[], list[float]]]:
    """Gives a function of the ms that the current stream (the host, on a CPU) waited for each thing on its way."""
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

    def waits_ms() -> list[float]:
        if not torch.cuda.is_available():
            return [(end - begin) * 1e3 for begin, end in spans]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in spans]

    with mock.patch.object(exchange.Pending, "wait", timed):
        yield waits_ms


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
