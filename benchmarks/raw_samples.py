"""Every sample of a run, in a compressed file beside the run's: <run>.raw.jsonl.gz.

Nothing that is judged or drawn needs it, git ignores it, and CI keeps it for a while as an artefact. Each record's
samples are a gzip member of their own, so that a killed run keeps what it finished.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from pathlib import Path

from benchmarks import schema
from benchmarks.samples import RawSamples
from nsa.io import append_bytes

SUFFIX = ".raw.jsonl.gz"
RETENTION_DAYS = 90
"""How long the workflows keep their artefacts (`retention-days`)."""


class GoneError(ValueError):
    """The samples of a run are not here."""


def path(run: Path) -> Path:
    """The file beside a run's."""
    return run.with_name(run.name.removesuffix(".jsonl") + SUFFIX)


def append(run: Path, raw: RawSamples) -> None:
    """Add the samples of one record. Raises DiskFullError, with the file as it was."""
    append_bytes(path(run), encode(raw))


def encode(raw: RawSamples) -> bytes:
    """The samples of one record as they stand in the file."""
    text = json.dumps(dataclasses.asdict(raw), allow_nan=False, separators=(",", ":")) + "\n"
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def read(run: Path) -> list[RawSamples]:
    """The samples of a run in the order measured; a torn end is left out.

    Raises GoneError where they are not here, ValueError where they are damaged.
    """
    file = path(run)
    if not file.is_file():
        raise GoneError(
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
