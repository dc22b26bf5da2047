"""Lines of versions 1 and 2: each stands alone, with its fingerprint, every sample and the clocks beside each.

Version 2 added fields, all optional: a line of version 1 reads as one that does not know them.
"""

from __future__ import annotations

import dataclasses
import json

from benchmarks import schema
from benchmarks.records import Record
from benchmarks.samples import RawSamples, SampleSummary

VERSIONS = (1, 2)


def read(line: bytes) -> tuple[Record, RawSamples | None]:
    """The record, and its samples where it has any. Raises ValueError or TypeError saying what is wrong with it."""
    data = json.loads(line.decode())
    if not isinstance(data, dict):
        raise TypeError(f"a record must be a JSON object; got {type(data).__name__}")
    if data.pop("schema_version", None) not in VERSIONS:
        known = " or ".join(map(str, VERSIONS))
        raise ValueError(f"schema_version must be {known}, or a run line must stand before the record; got neither")
    samples_ms, clocks = data.pop("samples_ms", None), data.pop("clocks", None)
    record = schema.build(Record, data, "record")
    if samples_ms is None and clocks is None:
        return record, None
    raw = schema.build(
        RawSamples, {"name": record.key.name, "samples_ms": samples_ms or [], "clocks": clocks}, "record"
    )
    return (
        dataclasses.replace(
            record,
            samples=SampleSummary.of(raw.samples_ms) if raw.samples_ms else None,
            clocks=raw.clocks.summary if raw.clocks and raw.clocks.sm_mhz else None,
        ),
        raw,
    )
