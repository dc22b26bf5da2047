"""The samples of one measurement: a summary, which its record keeps, and every sample in a file beside the run's.

That file, <run>.raw.jsonl.gz, is compressed. Nothing that is judged or drawn needs it, git ignores it, and CI keeps it
for a while as an artefact. Each record's samples are a gzip member of their own, so that a killed run keeps what it
finished.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing.clocks import Clocks
from harness import schema

_ENOUGH_FOR_P99 = 100


@dataclass(frozen=True)
class SampleSummary:
    """How the samples of one latency spread; each quantile is the sample that this share of them does not exceed."""

    count: int
    min_ms: float
    p25_ms: float
    p75_ms: float
    max_ms: float
    p99_ms: float | None = None
    """None for fewer than 100 samples, whose greatest says less."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"samples.count must be at least 1; got {self.count}")
        between = () if self.p99_ms is None else (self.p99_ms,)
        ordered = (0.0, self.min_ms, self.p25_ms, self.p75_ms, *between, self.max_ms)
        # a sample can be shorter than the clock's step, and is 0 then
        if not (all(map(math.isfinite, ordered)) and list(ordered) == sorted(ordered)):
            raise ValueError(f"samples must be finite, at least 0, and ascend from min_ms to max_ms; got {self}")

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> SampleSummary:
        """Of all samples of a measurement, at least one."""
        ordered = sorted(samples_ms)

        def quantile(share: float) -> float:
            return ordered[math.ceil(share * len(ordered)) - 1]

        p99_ms = quantile(0.99) if len(ordered) >= _ENOUGH_FOR_P99 else None
        return cls(len(ordered), ordered[0], quantile(0.25), quantile(0.75), ordered[-1], p99_ms)


@dataclass(frozen=True)
class RawSamples:
    """Every sample in the order taken, and the clocks beside it."""

    name: str
    """The record's key by name."""
    samples_ms: tuple[float, ...] = ()
    clocks: Clocks | None = None
    """None without NVML."""

    def __post_init__(self) -> None:
        for value in self.samples_ms:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{self.name}: samples_ms must be finite and at least 0; got {value}")
        if self.clocks is None or not self.samples_ms:
            return
        for name in ("sm_mhz", "power_w", "temperature_c"):
            readings = len(getattr(self.clocks, name))
            if readings != len(self.samples_ms):
                wanted = f"must be beside each of the {len(self.samples_ms)} samples"
                raise ValueError(f"{self.name}: clocks.{name} {wanted}; got {readings}")


RAW_SUFFIX = ".raw.jsonl.gz"
RETENTION_DAYS = 90
"""How long the workflows keep their artefacts (`retention-days`)."""


class MissingSamplesError(ValueError):
    """The samples of a run are not here."""


def raw_path(run: Path) -> Path:
    """The file beside a run's."""
    return run.with_name(run.name.removesuffix(".jsonl") + RAW_SUFFIX)


def encode_raw(raw: RawSamples) -> bytes:
    """The samples of one record as they stand in the file."""
    text = json.dumps(dataclasses.asdict(raw), allow_nan=False, separators=(",", ":")) + "\n"
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def read_raw(run: Path) -> list[RawSamples]:
    """The samples of a run in the order measured; an incomplete end is left out.

    Raises MissingSamplesError where they are not here, ValueError where they are damaged.
    """
    file = raw_path(run)
    if not file.is_file():
        raise MissingSamplesError(
            f"the raw samples of {run} are not here: where anything was timed, {file.name} lies beside the run on the"
            f" machine that measured it, and for {RETENTION_DAYS} days in the artefact of the workflow run; the records"
            " keep quantiles"
        )
    found: list[RawSamples] = []
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                found.append(schema.build(RawSamples, json.loads(line), "samples"))
    except EOFError:
        pass  # the run was killed while it wrote
    except (OSError, zlib.error, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    return found
