"""strict-mode-crash: `strict_asserts` was not defined in the batched prefill.

What really happened: a name that one branch binds and another uses, in a combination of flags that no test ran.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import nsa
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import public_api
from regression.detectors.backends import interpreted
from regression.detectors.public_api import Flags, PublicCall
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="strict-mode-crash",
    symptom="strict_asserts is undefined in batched prefill",
    cause="a branch that no test ran",
    detector="every public call with every combination of its flags; a flag that is missing here is a fault",
    expects=ReproVerdict.CRASHED,
    fires=("end",),
    says="strict_asserts",
)


def run_all(entries: Mapping[str, PublicCall], step: Step, *, all_of_them: bool = True) -> Evidence:
    """Call every entry in every way; the first exception is the evidence."""
    missing = [f"{name}: no value for {flag}" for name, entry in entries.items() for flag in entry.missing()]
    count = 0
    for name, entry in entries.items():
        for flags in entry.combinations(all_of_them=all_of_them):
            try:
                entry.then(entry.call(*entry.inputs, **flags))
            except Exception as error:  # whatever it is, a documented call must not raise it
                said = ", ".join(f"{flag}={_short(value)}" for flag, value in flags.items())
                return Evidence(exception=f"{name}({said}): {type(error).__name__}: {error}")
            count += 1
            step(count)
    return Evidence(wrong=tuple(missing), notes=(f"{count} calls",))


def _short(value: object) -> str:
    return f"{type(value).__name__} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def product(step: Step) -> Evidence:
    """Every public call of every backend, plain and with packed documents."""
    documents = torch.tensor([0, 0, 1, public_api.TOKENS], dtype=torch.int32, device=step.device)
    for backend in step.backends:
        for bounds in (None, documents):
            entries = {
                **public_api.functions(backend, step.device, bounds),
                **public_api.modules(backend, step.device, bounds),
            }
            if unknown := public_api.functions_missing_in(entries):
                return Evidence(wrong=tuple(f"nsa.{name} is not run" for name in unknown))
            found = run_all(entries, step, all_of_them=not interpreted(backend, step.device))
            if found.exception or found.wrong:
                return dataclasses.replace(found, paths=(backend,))
    return Evidence(wrong=(), paths=step.backends)


def prefill(x: Tensor, *, batched: bool = False, strict: bool = False) -> Tensor:
    """The fault: only one of two branches says what `strict_asserts` is."""
    if not batched:
        strict_asserts = strict
        rows = torch.stack([x[: t + 1].mean(0) for t in range(len(x))])
    else:
        rows = x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]
    if strict:
        assert not strict_asserts or rows.isfinite().all()
    return rows


def faulty(step: Step) -> Evidence:
    """The smallest prefill with such a branch."""
    flags: Flags = {"batched": (False, True), "strict": (False, True)}
    return run_all({"prefill": PublicCall(prefill, (torch.ones(4, 2),), flags)}, step)


@contextmanager
def inject() -> Iterator[None]:
    """The same branch in `nsa_attention`: packed documents with aux."""
    healthy = nsa.nsa_attention

    @functools.wraps(healthy)
    def broken(*arguments: Any, **flags: Any) -> Any:
        if flags.get("cu_seqlens") is None:
            strict_asserts = True
        if flags.get("return_aux"):
            assert strict_asserts
        return healthy(*arguments, **flags)

    with injected(Fault(nsa, "nsa_attention", broken)):
        yield
