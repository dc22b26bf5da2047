"""One long sequence against float64: output, choice, mass, dq and dgates on sampled rows, dk and dv on all.

The gradient of the output is 0 outside the sampled rows, so that dk and dv are known from these alone. Over several
ranks every rank has the whole inputs and outputs, and compares its part of the key/value heads. What there is of each
query then waits on the host: 1,048,576 queries of 64 heads of 128 are 16 GiB, with o, do and dq 64.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import nsa
from benchmarks.cases import inputs
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import OracleCheck
from benchmarks.correctness import long_rows, tolerance
from benchmarks.correctness.long_rows import Document, LongComparison
from benchmarks.correctness.verify import Answer
from benchmarks.long_truth import sizes
from nsa.parallel import ContextParallel, context_parallel_attention

Say = Callable[[str], object]
_OF_KEYS = ("dk", "dv")
"""What an answer has of each key; the rest is of each query."""


@dataclass(frozen=True)
class LongTruth:
    """What float64 says of one case."""

    case: str
    path: str
    """The backend that ran."""
    rows: int
    """Query rows compared."""
    checks: tuple[OracleCheck, ...]
    mass: float
    """The least share of the best choice's scores that a row's chosen blocks hold."""
    crossed: tuple[str, ...]
    """Tensors with elements past 2³¹."""
    call_s: float
    """Of the call, compilation included."""
    truth_s: float
    peak_gib: float | None
    """Of the call, inputs included, on the rank that reports; None on a CPU."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def check(
    key: Key,
    device: torch.device,
    *,
    backward: bool = True,
    compared: Sequence[Document] | None = None,
    seed: int = 1,
    most_pairs: float | None = None,
    context: ContextParallel | None = None,
    say: Say = print,
) -> LongTruth:
    """Run the case and compare it.

    Args:
        key: the case; `key.backend_asked` computes it.
        device: where.
        backward: whether gradients are computed and compared.
        compared: documents that are compared; None for all.
        seed: of the inputs, the rows and the gradient of the output.
        most_pairs: (query, key) pairs of the compared rows; None for `long_rows.MOST_PAIRS`.
        context: the ranks that share the sequence; None for this process alone.
        say: gets a line for each step.

    Raises NonFiniteError where a tensor is not finite.
    """
    config, documents = nsa.NSAConfig.from_mapping(key.config or {}), _documents(key)
    compared = documents if compared is None else compared
    most_pairs = long_rows.MOST_PAIRS[device.type] if most_pairs is None else most_pairs
    rows = long_rows.rows_to_compare(compared, key.heads, config, seed, most_pairs, device)
    say(f"{key.case}: draw inputs")
    problem = inputs.draw(key, device.type, seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    d_o = None
    if backward:
        like_o = problem.q.new_empty(1).expand(*problem.q.shape[:3], key.head_dim_v)
        d_o = long_rows.output_gradient(like_o, rows, seed)
    bounds = _bounds(key, device)
    if context is None:
        found, path = _attend(nsa.nsa_attention, key, config, problem, d_o, bounds)
    else:
        order = context.order(key.num_keys, config, bounds)
        own = problem.map(lambda whole: context.shard(whole, order))
        own_d_o = None if d_o is None else context.shard(d_o, order)
        # from here on nothing holds the whole q and do on the device
        problem, d_o = dataclasses.replace(problem, q=_on_host(problem.q)), None if d_o is None else _on_host(d_o)
        parts, path = _attend(context_parallel_attention, key, config, own, own_d_o, bounds, mesh=context)
        del own, own_d_o
        found = {}
        for name in list(parts):
            whole = context.unshard(parts.pop(name), order)
            found[name] = whole if name in _OF_KEYS else _on_host(whole)
    call_s, peak_gib = time.perf_counter() - begin, None
    if device.type == "cuda":
        torch.cuda.synchronize()
        call_s, peak_gib = time.perf_counter() - begin, torch.cuda.max_memory_allocated() / 2**30
    say(f"{key.case}: called in {call_s:.1f} s; compare {rows.numel()} of {key.num_queries} rows")
    begin = time.perf_counter()
    gradients = {name: x for name, x in found.items() if name.startswith("d")}
    answer = Answer(found["o"], d_o, gradients)
    heads = list(range(key.num_kv_heads)) if context is None else _own_heads(key, context)
    comparison = long_rows.compare(
        problem, config, answer, found["block_indices"], rows, documents=compared, kv_heads=heads,
        progress=lambda head: say(f"{key.case}: key/value head {head} compared, {time.perf_counter() - begin:.0f} s"),
    )  # fmt: skip
    if context is not None:
        every: list[LongComparison] = [comparison] * context.ranks
        dist.all_gather_object(every, comparison, group=context.group)
        comparison = long_rows.worst_of(every)
    checks = [*comparison.checks(), *_untouched(gradients, compared)]
    return LongTruth(
        key.case, path, rows.numel(), tuple(checks), comparison.mass, tuple(sizes.crossed(key, backward=backward)),
        call_s, time.perf_counter() - begin, peak_gib,
    )  # fmt: skip


def _documents(key: Key) -> list[Document]:
    found, first = [], 0
    for length in key.documents or (key.num_keys,):
        found.append((first, first + length))
        first += length
    return found


def _own_heads(key: Key, context: ContextParallel) -> list[int]:
    """Every P-th; the first where there are fewer heads than ranks, since each must say something."""
    return list(range(context.rank, key.num_kv_heads, context.ranks)) or [0]


def _bounds(key: Key, device: torch.device) -> Tensor | None:
    """int32, where each document begins, and the end; None for one document."""
    if key.documents is None:
        return None
    return torch.tensor([0, *key.documents], device=device).cumsum(0, dtype=torch.int32)


def _on_host(x: Tensor) -> Tensor:
    return x.cpu()


def _attend(
    attention: Callable[..., Any], key: Key, config: nsa.NSAConfig, x: Problem, d_o: Tensor | None,
    documents: Tensor | None, **more: Any,
) -> tuple[dict[str, Tensor], str]:  # fmt: skip
    """Every tensor by name, and the backend that ran."""
    names = sizes.GRADIENTS
    leaves = [x.tensors[name].detach().requires_grad_(d_o is not None) for name in names]
    o, aux = attention(
        *leaves, config, cu_seqlens=documents, backend=key.backend_asked, return_aux=True, **more
    )  # fmt: skip
    found = {"o": o.detach(), "block_indices": aux.block_indices}
    if d_o is not None:
        gradients = torch.autograd.grad(o, leaves, d_o)
        found |= {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return found, aux.backend


def _untouched(gradients: Mapping[str, Tensor], compared: Sequence[Document]) -> list[OracleCheck]:
    """Before the first compared document no gradient is anything but 0, since no row there has one of the output."""
    first = min(begin for begin, _ in compared)
    if first == 0:
        return []
    return [
        tolerance.check(f"{name}, documents without a gradient", x[:, :first].abs().amax().item(), 0.0)
        for name, x in gradients.items()
    ]
