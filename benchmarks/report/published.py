"""Figures that others published: results/baselines/published.toml, checked.

They are reference lines with their source's name. Nothing here is a `Record`, so that no ratio can be taken between one
of them and a measurement by mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import suite
from harness import machines, schema

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BACKWARD = "backward"
"""The one mode that is published and not measured here: the backward pass alone."""
RATIO = "ratio"
UNITS = ("ms", "GiB", "tokens/s", RATIO)


@dataclass(frozen=True)
class PublishedSource:
    """Where figures come from."""

    id: str
    title: str
    gpu: str
    """As the source names it."""
    machine: str | None = None
    """Its name in machines.toml, a family or a board; None where that board is not listed."""
    software: str | None = None


@dataclass(frozen=True)
class PublishedSeries:
    """One published curve."""

    source: PublishedSource
    mode: str
    """As in a `Key`, or "backward"."""
    of: str
    """What was measured, by the name of a baseline here where it is one."""
    unit: str
    tokens: tuple[int, ...]
    """Keys of one sequence, ascending."""
    values: tuple[tuple[float, ...], ...]
    """(low, high) for each of `tokens`; equal where the source gives one number."""
    against: str | None = None
    """The baseline of a ratio; None with any other unit."""
    shape: tuple[int, ...] | None = None
    """Hq, Hkv, Dk, Dv; None where the source does not say."""
    dtype: str | None = None
    batch: int | None = None
    """Sequences; None where unknown, or where `cached_tokens` are shared among them."""
    cached_tokens: int | None = None
    """Decode with batch · length fixed."""
    model: str | None = None
    launch: str | None = None
    expected: bool = False
    """Computed by the source, not measured."""

    def __post_init__(self) -> None:
        if self.mode not in (*suite.MODES, BACKWARD):
            raise ValueError(f"mode must be one of {', '.join((*suite.MODES, BACKWARD))}; got {self.mode!r}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}; got {self.unit!r}")
        if (self.unit == RATIO) != (self.against is not None):
            raise ValueError(f"against must be given with unit 'ratio' and only there; got {self.against!r}")
        if not self.tokens or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ValueError(f"tokens must ascend from at least 1; got {self.tokens}")
        if len(self.values) != len(self.tokens):
            raise ValueError(f"values must be as many as the {len(self.tokens)} tokens; got {len(self.values)}")
        for value in self.values:
            if len(value) != 2 or not 0 < value[0] <= value[1]:
                raise ValueError(f"values must be numbers above 0 or [low, high]; got {list(value)}")
        if self.shape is not None and (len(self.shape) != 4 or min(self.shape) < 1 or self.shape[0] % self.shape[1]):
            raise ValueError(f"shape must be [Hq, Hkv, Dk, Dv] with Hkv dividing Hq; got {list(self.shape)}")


def path(results: Path) -> Path:
    """Where the figures are under a folder of results."""
    return results / "baselines" / "published.toml"


def read(file: Path) -> list[PublishedSeries]:
    """Every series of the file, in its order. Raises ValueError naming the file, the table and what is wrong."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        sources = {name: _source(name, entry) for name, entry in table.pop("sources", {}).items()}
        series = [_series(i, entry, sources) for i, entry in enumerate(table.pop("series", []))]
        if table:
            raise ValueError(f"unknown table {next(iter(table))!r}; known: sources, series")
    except (ValueError, TypeError) as error:  # TOML and Unicode errors are ValueErrors
        raise ValueError(f"{file}: {error}") from error
    return series


def _source(name: str, entry: Any) -> PublishedSource:
    where = f"sources.{name}"
    source = schema.build(PublishedSource, {"id": name, **_table(entry, where)}, where)
    if source.machine is not None and source.machine not in machines.known_ids():
        raise ValueError(f"{where}.machine must be one of {', '.join(machines.known_ids())}; got {source.machine!r}")
    return source


def _series(number: int, entry: Any, sources: Mapping[str, PublishedSource]) -> PublishedSeries:
    where = f"series[{number}]"
    entry = dict(_table(entry, where))
    source = entry.get("source")
    if source not in sources:
        raise ValueError(f"{where}.source must be one of {', '.join(sources)}; got {source!r}")
    values = entry.get("values")
    if isinstance(values, list):
        entry["values"] = [value if isinstance(value, list) else [value, value] for value in values]
    try:
        return schema.build(PublishedSeries, {**entry, "source": vars(sources[source])}, where)
    except ValueError as error:
        raise ValueError(f"{where} ({source}, {entry.get('of')}): {error}") from error


def _table(entry: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise TypeError(f"{where} must be a table; got {entry!r}")
    return entry
