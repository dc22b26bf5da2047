"""Every sample of a run, in a compressed file beside the run's: <run>.raw.jsonl.gz.

Nothing that is judged or drawn needs it, git ignores it, and CI keeps it for a while as an artefact. Each record's
samples are a gzip member of their own, so that a killed run keeps what it finished.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks import schema
from benchmarks.samples import RawSamples

SUFFIX = ".raw.jsonl.gz"
RETENTION_DAYS = 90
"""How long the workflows keep their artefacts (`retention-days`)."""


class GoneError(ValueError):
    """The samples of a run are not here."""


def path(run: Path) -> Path:
    """The file beside a run's."""
    return run.with_name(run.name.removesuffix(".jsonl") + SUFFIX)


def append(run: Path, raw: RawSamples) -> None:
    """Add the samples of one record. One process writes one run."""
    text = json.dumps(dataclasses.asdict(raw), allow_nan=False, separators=(",", ":")) + "\n"
    with path(run).open("ab") as file:
        file.write(gzip.compress(text.encode(), compresslevel=6, mtime=0))


def read(run: Path) -> Iterator[RawSamples]:
    """The samples of a run in the order measured; a torn end is left out.

    Raises GoneError where they are not here, ValueError where they are damaged.
    """
    file = path(run)
    if not file.is_file():
        raise GoneError(
            f"the raw samples of {run} are not here: {file.name} lies beside the run where it was measured, and for"
            f" {RETENTION_DAYS} days in the artefact of the workflow run that measured it; the record keeps their"
            " quantiles"
        )
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield schema.build(RawSamples, json.loads(line), "samples")
    except EOFError:
        return  # the run was killed while it wrote
    except (OSError, zlib.error) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
