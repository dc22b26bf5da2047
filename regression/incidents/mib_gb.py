"""mib-gb: "memory usage: 69 GB allocated, stable".

What really happened: 69 MiB. The field was called gpu_mem_alloc, and whoever wrote the report guessed its unit.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from benchmarks.timing import memory
from benchmarks.timing.memory import PeakMemory
from harness.peak import MIB
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="mib-gb",
    symptom="69 GB allocated (69 MiB)",
    cause="the unit stood nowhere",
    detector="every field for memory names its unit, and a known allocation reads as its size in that unit",
    expects=ReproVerdict.WRONG,
)

_ALLOCATED_MIB = 4 * 69
"""Four times the report's, so that what else a process touches meanwhile, in huge pages of 2 MiB, is no matter."""
_TOLERANCE = 0.1
_UNITS = {"bytes": 1, "mib": MIB, "gib": 2**30, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MEMORY = re.compile(r"mem(ory)?|alloc(ated)?|reserved|rss|cache")
_RECORDS = (
    "harness.peak",
    "harness.nvml",
    "benchmarks.timing.clocks",
    "harness.fingerprint",
    "harness.machines",
    "benchmarks.cases.key",
    "benchmarks.cases.outcome",
    "benchmarks.timing.memory",
    "benchmarks.history.records",
    "nsa.train.preflight",
)
"""Where dataclasses hold figures that people read."""


def product(step: Step) -> Evidence:
    """Measure a known allocation, and read the names of all fields."""
    peak = _allocate(step.device)
    step(1, memory_mib=peak.mib)
    unnamed = [
        f"{name}.{field} has no unit"
        for name in _RECORDS
        for field in _fields_for_memory(name)
        if _bytes_per_unit(field) is None and not field.endswith("_mhz")  # a memory clock, and it says so
    ]
    return Evidence(wrong=(*_misread({"mib": peak.mib}), *unnamed), notes=(f"read as {peak.mib:.1f} MiB",))


def _allocate(device: str) -> PeakMemory:
    """The peak of a tensor of _ALLOCATED_MIB that is written to, as the benches read it."""

    def allocate() -> torch.Tensor:
        return torch.ones(_ALLOCATED_MIB * MIB, dtype=torch.uint8, device=device)

    torch.ones(1, device=device)  # its code and what it sets up are loaded now, and are not of the allocation
    return memory.of_cuda(allocate) if device == "cuda" else memory.of_this_process(allocate)


def _misread(figures: Mapping[str, float]) -> list[str]:
    """What a reader of these figures, who has only their names, gets wrong about the allocation."""
    wrong = []
    for name, value in figures.items():
        unit = _bytes_per_unit(name)
        if unit is None:
            wrong.append(f"{name} = {value:g} has no unit; {_ALLOCATED_MIB} MiB were allocated")
        elif abs(value * unit / (_ALLOCATED_MIB * MIB) - 1) > _TOLERANCE:
            wrong.append(f"{name} = {value:g} reads as {value * unit / MIB:,.1f} MiB; {_ALLOCATED_MIB} were allocated")
    return wrong


def _bytes_per_unit(name: str) -> int | None:
    """Of the unit in a field's name, its last word or that before "per"."""
    words = name.split("_per_")[0].split("_")
    return _UNITS.get(words[-1])


def _fields_for_memory(module: str) -> list[str]:
    """Numeric fields of its dataclasses whose name speaks of memory, as Class.field."""
    classes = [c for c in vars(importlib.import_module(module)).values() if isinstance(c, type)]
    return [
        f"{owner.__name__}.{field.name}"
        for owner in classes
        if dataclasses.is_dataclass(owner) and owner.__module__ == module
        for field in dataclasses.fields(owner)
        if _MEMORY.search(field.name) and re.search(r"\b(int|float)\b", str(field.type))
    ]


def in_gib(mib: float, source: str) -> PeakMemory:
    """One unit in another's field."""
    return PeakMemory(mib / 1024, source)


@contextmanager
def inject() -> Iterator[None]:
    with injected(Fault(memory, "PeakMemory", in_gib)):
        yield


def heartbeat(allocated_bytes: float) -> dict[str, float]:
    """As the report's trainer logged it."""
    return {"gpu_mem_alloc": allocated_bytes // (1024 * 1024)}


def faulty(step: Step) -> Evidence:
    """That heartbeat beside a real allocation; and a figure in another unit than its name says."""
    logged = _misread(heartbeat(_allocate(step.device).mib * MIB))
    step(1)
    with inject():
        converted = product(step).wrong
    return Evidence(wrong=(*logged, *converted) if logged and converted else ())
