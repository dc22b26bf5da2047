"""step1-stall. Reported: "auxiliary statistics hang at step 1"; cured by a flag that turns them off.

Really (inferred): the slowness of step5-stall against a watchdog of 180 s. The statistics themselves waited for the
GPU about seven times per token and layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa.layer import Gates
from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.detectors import host_cost
from regression.detectors.backends import COMPILING_S
from regression.detectors.calls import draw
from regression.detectors.host_cost import Operators
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="step1-stall",
    symptom="auxiliary statistics hang at step 1",
    cause="seven host syncs per token and layer, against a fixed watchdog of 180 s",
    detector="no host sync in a layer's step, nor in the statistics that a call returns",
    expects=ReproVerdict.SLOW,
    floor_s=COMPILING_S,
)

_healthy = Gates.forward


def with_statistics(gates: Gates, x: Tensor) -> Tensor:
    """Gates that describe themselves token by token, as numbers of the host."""
    values = _healthy(gates, x)
    with torch.no_grad():
        shares = values / values.sum(-1, keepdim=True)
        for t in range(x.shape[1]):
            row = shares[:, t]
            entropy = -(row * row.log()).sum(-1)
            for statistic in (entropy.mean(), row.amax(-1).mean(), *row.mean((0, 1)), (row > 0.9).float().mean()):
                statistic.item()
            float(entropy.min())
    return values


def faulty(step: Step) -> Evidence:
    """These statistics in the gates."""
    with inject():
        return product(step)


def product(step: Step) -> Evidence:
    """A layer's step; and a call that returns its statistics, which stay on the device until they are read."""
    found = host_cost.examine(step)
    call, syncs = draw(64, step.device), 0
    for backend in host_cost.fast_backends(step):
        with Operators() as operators:
            call.whole(backend)
        syncs += operators.host_syncs
    if found.host_syncs is not None and found.host_syncs.value is not None:
        syncs += int(found.host_syncs.value)
    total = Bound(syncs, 0, "host syncs of a layer's step and of a call's statistics")
    return dataclasses.replace(found, ops=None, host_syncs=total)  # operators are step5-stall's


@contextmanager
def inject() -> Iterator[None]:
    """Put them into the gates."""
    with injected(Fault(Gates, "forward", with_statistics)):
        yield
