"""What each rank does in the laws of context parallelism, besides the plain call (`cases.on_rank`)."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from nsa.parallel import ContextParallel, plan
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
