"""dead-route: "sequential prefill is hard-wired to the slow path"; packed was tested before masked.

What really happened: flags were read once, in an order that nobody wrote down, and any exception fell through in
silence to another path, while the logs went on to name the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cases.inputs import Problem
from benchmarks.correctness import verify
from nsa import backends
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import calls
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="dead-route",
    symptom="sequential prefill is hard-wired to the slow path",
    cause="flags read once, precedence undocumented, silent fall-through on any exception",
    detector="the path that ran, seen from inside, is the one recorded and the one asked for",
    expects=ReproVerdict.WRONG,
)

_TOKENS = 12
_PARTS = ("compressed_attention", "select_blocks", "selected_attention", "window_attention", "combine", "attend")
"""The last one is a whole call, of a backend that has it in one function."""


def falls_through(asked: str, q: Tensor, v: Tensor) -> tuple[str, backends.Backend]:
    """Its own order of routes, whoever is asked for, and the next one at any exception; recorded is what was asked."""
    try:
        if reason := backends.why_not_triton(q, v):
            raise RuntimeError(reason)
        return asked, backends.load("triton")
    except Exception:
        return asked, backends.load("torch")


def product(step: Step) -> Evidence:
    """Ask for each backend by name, and for one that cannot serve the call."""
    x = calls.draw(_TOKENS, step.device)
    broken: list[str] = []
    recorded: list[str] = []
    for n, asked in enumerate((*step.backends, "auto"), start=1):
        with _recorded_backends(step.backends) as ran:
            path = x.whole(asked)[1].backend
        recorded.append(path)
        if ran != {path} or asked not in (path, "auto"):
            broken.append(f"asked for {asked}, recorded {path}, ran {' and '.join(sorted(ran)) or 'nothing'}")
        step(n)
    problem = Problem(x.q, x.k, x.v, x.gates)
    gated = verify.check_nsa(problem, x.config, lambda p: x.whole("torch"), rows=2).path
    if gated != "torch":
        broken.append(f"the bench's record says {gated} where torch was asked for")
    wide = calls.draw(_TOKENS, step.device, dtype=torch.float64)
    if "triton" in step.backends and not _refuses(wide, "triton"):
        broken.append("triton was asked for float64, which it cannot serve, and something else answered in silence")
    return Evidence(wrong=tuple(broken), paths=tuple(recorded))


def _refuses(call: calls.Call, backend: str) -> bool:
    try:
        call.whole(backend)
    except ValueError as error:
        return backend in str(error)
    return False


@contextmanager
def _recorded_backends(names: tuple[str, ...]) -> Iterator[set[str]]:
    """Collects the backends that are called, whole or by their parts."""
    ran: set[str] = set()
    with ExitStack() as stack:
        for name in names:
            module = backends.load(name)
            for part in filter(partial(hasattr, module), _PARTS):
                stack.enter_context(mock.patch.object(module, part, _recording_calls(name, getattr(module, part), ran)))
        yield ran


def _recording_calls(name: str, part: Callable[..., Any], ran: set[str]) -> Callable[..., Any]:
    def recorded(*arguments: Any) -> Any:
        ran.add(name)
        return part(*arguments)

    return recorded


@contextmanager
def inject() -> Iterator[None]:
    with injected(Fault(backends, "choose", falls_through)):
        yield


def faulty(step: Step) -> Evidence:
    """The same calls through such a router."""
    with inject():
        return product(step)
