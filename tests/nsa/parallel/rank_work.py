"""What each rank does in the laws of context parallelism, besides the plain call (`cases.on_rank`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa.parallel import ContextParallel, plan
from nsa.parallel.exchange import Gather, Halo
from regression.detectors.memory import poisoned_allocations
from tests.nsa.parallel import cases, faults
from tests.nsa.parallel.cases import Case, Result, on_rank


def in_steps_of(mesh: DeviceMesh, grid: int, case: Case) -> Result:
    with mock.patch.dict(plan.GRID, {case.backend: grid}):
        return on_rank(mesh, case)


def twice(mesh: DeviceMesh, case: Case) -> bool:
    first, second = on_rank(mesh, case), on_rank(mesh, case)
    return all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


def poisoned(mesh: DeviceMesh, case: Case) -> Result:
    """With NaN in all that is allocated and not written."""
    with poisoned_allocations():
        assert torch.empty_like(torch.ones(3)).isnan().all()
        return on_rank(mesh, case)


def later_changed(mesh: DeviceMesh, case: Case, cut: int) -> tuple[bool, bool]:
    """Whether the rows before `cut`, of any rank, are the same after all later tokens of q, k, v and gates changed."""
    order = case.dealt(mesh.size())
    context = ContextParallel(mesh, order)
    outputs = []
    for spoilt in (False, True):
        x = case.inputs()
        for name, value in x.items():
            if spoilt and name != "upstream":
                value[:, cut:] = torch.nan if name[0] in "kv" else 7.0
        own = {name: context.shard(value, order) for name, value in x.items()}
        outputs.append(cases.attend(case, own, context)[0])
    before = order.tokens(mesh.get_local_rank()) < cut
    unchanged = torch.equal(outputs[0][:, before], outputs[1][:, before])
    return unchanged, bool(outputs[1][:, ~before].isnan().any()) or bool(before.all())


def faulty(mesh: DeviceMesh, name: str, case: Case) -> Result:
    with faults.FAULTS[name][0]():
        on_rank(mesh, dataclasses.replace(case, seed=99))  # an earlier call, for what goes stale
        return on_rank(mesh, case)


NUM_ROWS = 32
"""Of the whole sequence in `exchanged`."""


@dataclass
class Exchanged:
    """What `exchanged` found on a rank."""

    gathered: Tensor
    near: Tensor
    sum_of_all: Tensor
    sum_near: Tensor
    partial_unchanged: bool
    splits: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Rows that came from each rank and went to each, of every exchange but the gather."""


def drawn(rank: int, rows: int) -> Tensor:
    """float32 [2, rows, 3, 5] of a rank, of many magnitudes, so that sums in another order differ."""
    numbers = torch.Generator().manual_seed(rank)
    return torch.randn(2, rows, 3, 5, generator=numbers) * 10 ** torch.randn(2, rows, 3, 5, generator=numbers)


def exchanged(mesh: DeviceMesh, held: list[Tensor], needed: list[Tensor], dtype: torch.dtype) -> Exchanged:
    group, rank, device = mesh.get_group(), mesh.get_local_rank(), torch.device("cpu")
    gather = Gather(group, rank, held, NUM_ROWS, device)
    halo = Halo(group, rank, held, needed, device)
    own, splits, to_all = drawn(rank, len(held[rank])), [], dist.all_to_all_single

    def noting(out: Tensor, sent: Tensor, come: list[int], go: list[int], **more: Any) -> Any:
        splits.append((come, go))
        return to_all(out, sent, come, go, **more)

    with mock.patch.object(dist, "all_to_all_single", noting):
        near = halo.joined(own, halo.start(own).wait())
        partial = drawn(rank, len(needed[rank]))
        sum_near = halo.start_sum(partial, dtype).wait()
        unchanged = torch.equal(partial, drawn(rank, len(needed[rank])))
        sum_of_all = gather.start_sum(drawn(rank, NUM_ROWS), dtype).wait()
    return Exchanged(gather.start(own).wait(), near, sum_of_all, sum_near, unchanged, splits)


def halos_started_backward(mesh: DeviceMesh, case: Case) -> int:
    """How often a halo's rows are asked for in the backward pass."""
    o, _ = _attended(mesh, case)[1]
    with mock.patch.object(Halo, "start", autospec=True, side_effect=Halo.start) as start:
        o.sum().backward()
    return start.call_count


def changed_in_place(mesh: DeviceMesh, case: Case, name: str) -> str:
    """The error of a backward pass before which the own part of an input was written to."""
    own, (o, _) = _attended(mesh, case)
    with torch.no_grad():
        own[name] += 1
    try:
        o.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "none"


def _attended(mesh: DeviceMesh, case: Case) -> tuple[dict[str, Tensor], Any]:
    """The own parts of the inputs, and what attention gave for them."""
    order = case.dealt(mesh.size())
    context = ContextParallel(mesh, order)
    own = {name: context.shard(x, order).requires_grad_() for name, x in case.inputs().items() if name != "upstream"}
    return own, cases.attend(case, own, context)
