"""workspace-inplace. Not reported; found beside the others.

What happened: a buffer kept for the next call was written in place inside the autograd graph. The first length works;
the second hangs the buffer on the first one's graph, which its backward pass has freed already.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

import nsa
from nsa import NSAConfig
from nsa.torch_backend import combine as healthy
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors.backends import COMPILING_S, in_every_backend, interpreted, proofs
from regression.detectors.calls import SMALL, Call, draw

INCIDENT = Incident(
    id="workspace-inplace",
    symptom="none was reported",
    cause="a persistent workspace written in place inside the autograd graph",
    detector="long, short, long again, and two configs in turn: each gives what it gave, bit for bit",
    expects=ReproVerdict.CRASHED,
    fires=("end",),
    says="backward through the graph a second time",
    floor_s=COMPILING_S,
)
OTHER = replace(SMALL, w=5)


class _Workspace:
    """An output buffer that grows when it must and is used again when it can."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
        o = healthy(outputs, gates)
        if self.kept is None or self.kept.shape[1] < o.shape[1] or self.kept.shape[2:] != o.shape[2:]:
            self.kept = torch.empty_like(o)
        self.kept[:, : o.shape[1]] = o
        return self.kept[:, : o.shape[1]]


def _run(call: Call, backend: str) -> tuple[Tensor, ...]:
    """Output and gradients."""
    leaves = call.leaves()
    o = leaves.attend("whole", backend)
    o.square().sum().backward()  # as training does: through all that hangs on it, not to these leaves only
    gradients = [x.grad for x in (leaves.q, leaves.k, leaves.v, leaves.gates) if x.grad is not None]
    return o.detach(), *gradients


def _calls(backend: str, tokens: int, device: str) -> list[str]:
    """Calls in turn that share nothing but the process."""
    long = draw(tokens, device)
    turns = {"long": long, "short": draw(tokens // 2, device), "another config": replace(long, config=OTHER)}
    first = {name: _run(call, backend) for name, call in turns.items()}
    kept = {name: [x.clone() for x in results] for name, results in first.items()}
    again = {name: _run(call, backend) for name, call in reversed(turns.items())}
    found = []
    for name in turns:
        if not all(map(torch.equal, kept[name], again[name])):
            found.append(f"{backend}, {name}: another result the second time")
        if not all(map(torch.equal, kept[name], first[name])):
            found.append(f"{backend}, {name}: a result that was given has changed")
    return found


def _layer(config: NSAConfig, device: str) -> nsa.NativeSparseAttention:
    torch.manual_seed(0)
    return nsa.NativeSparseAttention(32, 4, 2, 16, 16, config, backend="torch", device=device)


def _layers(device: str) -> list[str]:
    """Two layers with different configs, in one graph and in turn, give what each gives alone."""
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0)).to(device)
    layers = [_layer(config, device) for config in (SMALL, OTHER)]
    alone = [layer(x) for layer in layers]
    sum(o.square().sum() for o in (*alone, layers[0](layers[1](x)))).backward()
    again = [layer(x) for layer in layers]
    return [] if all(map(torch.equal, alone, again)) else ["two layers in turn: another result the second time"]


def _examine(step: Step, backends: Sequence[str]) -> Evidence:
    wrong: list[str] = []
    try:
        for n, backend in enumerate(backends):
            wrong += _calls(backend, 8 if interpreted(backend, step.device) else 32, step.device)
            step(n)
        wrong += _layers(step.device)
    except RuntimeError as error:
        return Evidence(exception=f"RuntimeError: {error}", paths=tuple(backends))
    return Evidence(wrong=tuple(wrong), paths=tuple(backends))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("combine", _Workspace())


faulty, product = proofs(_examine, inject)
