"""One detector over all backends, and a fault in the place of one of their parts.

An incident of attention writes `detect(backend, device)` and its fault; `faulty` and `product` are made of these:

    faulty, product = proofs(each_backend(_detect), inject)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from nsa import backends
from regression.contract import Bound, Evidence, Step
from regression.injection import Fault, injected

COMPILING_S = 180.0
"""Silence that is no stall where kernels may have to be compiled: on a GPU all of a call come in one step."""

Repro = Callable[[Step], Evidence]
Examine = Callable[[Step, Sequence[str]], Evidence]
"""Look at these backends, with a heartbeat after each."""


def each_backend(detect: Callable[[str, str], Evidence]) -> Examine:
    """`detect(backend, device)` on one backend after another, its evidence merged."""

    def examine(step: Step, names: Sequence[str]) -> Evidence:
        found = []
        for n, backend in enumerate(names):
            found.append(detect(backend, step.device))
            step(n)
        return merged(found, names)

    return examine


def merged(parts: Sequence[Evidence], paths: Iterable[str]) -> Evidence:
    """All findings and notes in order, and of each bound the one that is missed by most."""

    def joined(name: str) -> tuple[str, ...] | None:
        lists = [getattr(part, name) for part in parts]
        return None if all(one is None for one in lists) else tuple(item for one in lists for item in one or ())

    def worst_of(name: str) -> Bound | None:
        bounds = [bound for part in parts if (bound := getattr(part, name)) is not None]
        return worst(bounds) if bounds else None

    return Evidence(
        nonfinite=joined("nonfinite"),
        future_seen=joined("future_seen"),
        wrong=joined("wrong"),
        error=worst_of("error"),
        memory=worst_of("memory"),
        paths=tuple(paths),
        notes=joined("notes") or (),
    )


def proofs(examine: Examine, inject: Callable[[], AbstractContextManager[None]]) -> tuple[Repro, Repro]:
    """(faulty, product): the torch backend with the fault in it, and every backend without."""

    def faulty(step: Step) -> Evidence:
        with inject():
            return examine(step, ("torch",))

    def product(step: Step) -> Evidence:
        return examine(step, step.backends)

    return faulty, product


def worst(bounds: Sequence[Bound]) -> Bound:
    """The bound that is missed by most, or met by least."""
    return max(bounds, key=lambda bound: float("inf") if bound.value is None else bound.value / bound.limit)


def nonfinite(where: str, named: Mapping[str, Tensor]) -> list[str]:
    """'torch, window: dk' for each that holds NaN or infinity."""
    return [f"{where}: {name}" for name, x in named.items() if not bool(x.isfinite().all())]


def interpreted(backend: str, device: str) -> bool:
    """Whether the kernels run in Triton's interpreter, where a call takes 0.1 to 1 s."""
    return backend == "triton" and device == "cpu"


@contextmanager
def in_every_backend(part: str, fault: Callable[..., Any]) -> Iterator[None]:
    """Put `fault` in the place of one part of `nsa.backends.Backend`, in each backend that can be imported."""
    with injected(*replacing(part, fault)):
        yield


def replacing(part: str, fault: Callable[..., Any]) -> list[Fault]:
    """The fault for each backend that can be imported; a call that is one function there is made of parts again."""
    found = [Fault(backends, "whole_call", backends.by_parts, proves=False)]
    for name in backends.NAMES[1:]:
        try:
            found.append(Fault(backends.load(name), part, fault))
        except ImportError:  # no Triton on this machine
            continue
    return found
