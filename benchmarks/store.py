"""Queries over every run: thousands of records by their columns, and the full ones where a page shows them."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import index, schema
from benchmarks.cases import NSA
from benchmarks.fingerprint import Fingerprint
from benchmarks.records import Damaged, Record

_FULL = "SELECT f.path, r.start, r.length FROM records r JOIN files f ON f.id = r.file"
_ORDER = "ORDER BY r.utc, f.path, r.line"
_BOTH = f"""
WITH dense AS (SELECT DISTINCT machine, case_name, utc FROM records WHERE implementation != '{NSA}'),
both AS (
  SELECT machine, case_name, backend, max(utc) AS utc FROM records JOIN dense USING (machine, case_name, utc)
  WHERE implementation = '{NSA}' GROUP BY machine, case_name, backend),
alone AS (
  SELECT machine, case_name, backend, max(utc) AS utc FROM records
  WHERE implementation = '{NSA}' GROUP BY machine, case_name, backend),
oldest AS (
  SELECT machine, case_name, min(coalesce(both.utc, alone.utc)) AS utc
  FROM alone LEFT JOIN both USING (machine, case_name, backend) GROUP BY machine, case_name)
"""


@dataclass(frozen=True)
class Point:
    """One measurement of a series: what a trend needs of a record, in the record's words."""

    utc: str
    latency_ms: float
    interval_ms: tuple[float, float] | None
    tokens_per_s: float | None
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Series:
    """Measurements with the same `Record.identity`: the whole key, and the path that ran."""

    newest: Record
    """The last of them in full."""
    points: list[Point]
    """Oldest first."""


class Store:
    """An open index. Make it with `opened`."""

    def __init__(self, connection: sqlite3.Connection, runs: Path) -> None:
        self._connection = connection
        self._runs = runs
        self._fingerprints: dict[int, Fingerprint] = {}

    def __len__(self) -> int:
        """Records of all runs."""
        (count,) = self._connection.execute("SELECT count(*) FROM records").fetchone()
        return int(count)

    def machines(self) -> list[str]:
        """Every machine that has a record, the one with the newest run first."""
        rows = self._connection.execute("SELECT machine FROM records GROUP BY machine ORDER BY max(utc) DESC")
        return [machine for (machine,) in rows]

    def records(
        self, machine: str | None = None, mode: str | None = None, implementation: str | None = None, since: str = ""
    ) -> list[Record]:
        """Full records by run, oldest first. `since`: UTC of the first run wanted, as in the fingerprint."""
        wanted = {"machine": machine, "mode": mode, "implementation": implementation}
        named = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(["r.utc >= :since", *(f"r.{column} = :{column}" for column in named)])
        return self._full(f"{_FULL} WHERE {where} {_ORDER}", {**named, "since": since})

    def current(self) -> list[Record]:
        """As few records as `verdict.comparisons` needs to answer as it would for all of them, oldest run first.

        For each case the newest run with NSA and a baseline, and what came after; NSA's newest where none has both.
        """
        newer = "JOIN oldest o ON o.machine = r.machine AND o.case_name = r.case_name AND r.utc >= o.utc"
        return self._full(f"{_BOTH} {_FULL} {newer} {_ORDER}", {})

    def history(self, machine: str, implementation: str = NSA) -> list[Series]:
        """Every latency that this machine measured, by series, in the order of the cases' names."""
        rows = self._connection.execute(
            "SELECT identity, f.path, start, length, utc, latency_ms, low_ms, high_ms, tokens_per_s, fingerprint"
            " FROM records r JOIN files f ON f.id = r.file"
            " WHERE machine = ? AND implementation = ? AND latency_ms IS NOT NULL"
            " ORDER BY case_name, r.path, identity, utc, f.path, line",
            (machine, implementation),
        )
        points: dict[bytes, list[Point]] = {}
        places: dict[bytes, tuple[bytes, int, int]] = {}
        for identity, path, start, length, utc, latency_ms, low_ms, high_ms, tokens_per_s, known in rows:
            interval_ms = None if low_ms is None else (low_ms, high_ms)
            point = Point(utc, latency_ms, interval_ms, tokens_per_s, self._fingerprint(known))
            points.setdefault(identity, []).append(point)
            places[identity] = (path, start, length)
        return [Series(*pair) for pair in zip(self._read(places.values()), points.values(), strict=True)]

    def runs(self, machine: str) -> list[Fingerprint]:
        """Every run of this machine that has a record, oldest first."""
        rows = self._connection.execute(
            "SELECT DISTINCT utc, fingerprint FROM records WHERE machine = ? ORDER BY utc, fingerprint", (machine,)
        )
        return [self._fingerprint(known) for _, known in rows]

    def damaged(self) -> list[Damaged]:
        """Every line that is no record, by name."""
        rows = self._connection.execute(
            "SELECT f.path, d.line, d.why FROM damaged d JOIN files f ON f.id = d.file ORDER BY f.path, d.line"
        )
        return [Damaged(self._runs / os.fsdecode(path), line, why) for path, line, why in rows]

    def _fingerprint(self, number: int) -> Fingerprint:
        if number not in self._fingerprints:
            (text,) = self._connection.execute("SELECT json FROM fingerprints WHERE id = ?", (number,)).fetchone()
            self._fingerprints[number] = schema.build(Fingerprint, json.loads(text), "fingerprint")
        return self._fingerprints[number]

    def _full(self, query: str, values: Mapping[str, str]) -> list[Record]:
        return list(self._read(self._connection.execute(query, values)))

    def _read(self, places: Iterable[tuple[bytes, int, int]]) -> Iterator[Record]:
        """The lines themselves come from the runs, each file read once."""
        contents: dict[bytes, bytes] = {}
        for path, start, length in places:
            if path not in contents:
                contents[path] = (self._runs / os.fsdecode(path)).read_bytes()
            yield Record.from_json(contents[path][start : start + length].decode())


@contextmanager
def opened(results: Path) -> Iterator[Store]:
    """The store of results/runs, up to date with its files."""
    with index.opened(results) as connection:
        yield Store(connection, results / "runs")
