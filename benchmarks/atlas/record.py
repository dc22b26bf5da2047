"""The record of an atlas: what a trained model selects, per layer and key/value head, in one small JSON file.

results/atlas/<machine>-<date>-<commit10>.json, never changed once it is written. Figures are means over the rows of the
later half of each sequence, in which every row has `n_sel` blocks. A row is one (query, key/value head); blocks are
selection blocks of `l_sel` tokens. "Free" blocks are those that are chosen by score and not forced.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness import schema as json_schema
from harness.fingerprint import Fingerprint

FOLDER = "atlas"
"""Below results/."""
SCHEMA = 1
LAGS = (1, 2, 4, 16, 64)
"""Rows between the two choices that a Jaccard index compares."""
UNIONS = (2, 4, 8, 16, 64)
"""Neighbouring queries whose choices are united."""
MAX_BYTES = 2**20
"""Of a file."""
_SHARES_TOLERANCE = 1e-3

T = TypeVar("T")


@dataclass(frozen=True)
class Trained:
    """How the model came to be."""

    tokens: int
    """Tokens trained on."""
    minutes: float
    """Of training, over all attempts."""
    loss: float
    """On the held-out text at the shortest length that was measured, nats per token."""
    seq_lens: tuple[int, ...]
    """Tokens of a training sequence, phase after phase."""
    text: str
    """What it was trained on, and where the held-out text is from."""
    seed: int

    def __post_init__(self) -> None:
        if self.tokens < 0 or not self.seq_lens:
            raise ValueError(f"trained must have tokens >= 0 and a seq_len; got {self.tokens}, {self.seq_lens}")


@dataclass(frozen=True)
class HeadCurves:
    """One key/value head of one layer at one length."""

    layer: int
    kv_head: int
    jaccard: Mapping[str, float]
    """Lag ("1", "2", "4", "16", "64") -> mean Jaccard index of the blocks chosen by rows t and t + lag."""
    jaccard_free: Mapping[str, float]
    """The same of the free blocks."""
    union: Mapping[str, float]
    """Count ("2", ..., "64") -> mean number of distinct blocks that so many queries choose; tiles of so many queries
    that stand side by side, each query in one tile."""
    distance: tuple[tuple[float, ...], ...]
    """(upper edge, share) of the free blocks' distance from the block of their query, in blocks: edges 1, 2, 4, 8, ...;
    a share counts the distances from the edge before it up to, and without, its own. Shares add up to 1."""
    sink_share: float
    """Share of the scores (Eq. 10, over all blocks that a row sees) that the first block has."""
    popularity: float
    """How often the most chosen block is chosen over the mean, free choices alone, over the blocks that at least one
    of the rows could choose freely: the load of kernels that walk blocks."""
    mass: float
    """Share of the scores (Eq. 10) that the chosen blocks hold, the forced ones included."""
    gates: tuple[float, ...]
    """Mean gate of the compressed, selected and window branch over the query heads of the group."""
    step_jaccard: float
    """Mean Jaccard index of one decode step's choice and the next one's, while the model writes its own text."""

    def __post_init__(self) -> None:
        name = f"layer {self.layer}, kv_head {self.kv_head}"
        for field, curve, points in (
            ("jaccard", self.jaccard, LAGS), ("jaccard_free", self.jaccard_free, LAGS), ("union", self.union, UNIONS),
        ):  # fmt: skip
            if set(curve) != {str(point) for point in points}:
                raise ValueError(f"{name}: {field} must have {', '.join(map(str, points))}; got {', '.join(curve)}")
            if not all(type(x) in (int, float) and math.isfinite(x) for x in curve.values()):
                raise ValueError(f"{name}: {field} must hold finite numbers; got {dict(curve)}")
        shares = {"sink_share": self.sink_share, "mass": self.mass, "step_jaccard": self.step_jaccard}
        shares |= {f"jaccard at lag {lag}": x for lag, x in self.jaccard.items()}
        shares |= {f"jaccard_free at lag {lag}": x for lag, x in self.jaccard_free.items()}
        for field, share in shares.items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: {field} must be between 0 and 1; got {share}")
        if len(self.gates) != 3:
            raise ValueError(f"{name}: gates must be three (compressed, selected, window); got {len(self.gates)}")
        if self.popularity < 1:
            raise ValueError(f"{name}: popularity must be at least 1, a maximum over a mean; got {self.popularity}")
        if any(len(point) != 2 for point in self.distance):
            raise ValueError(f"{name}: distance must hold pairs of an edge and a share")
        edges = [edge for edge, _ in self.distance]
        if edges != [2.0**i for i in range(len(edges))]:
            raise ValueError(f"{name}: distance must have the edges 1, 2, 4, 8, ...; got {edges}")
        if abs(sum(share for _, share in self.distance) - 1) > _SHARES_TOLERANCE:
            raise ValueError(f"{name}: the shares of distance must add up to 1; got {self.distance}")


@dataclass(frozen=True)
class LengthCurves:
    """Every head at one length."""

    seq_len: int
    """Tokens of a measured sequence."""
    n_sel: int
    """Blocks chosen per row (n), the forced ones included."""
    forced: int
    """How many of them are forced."""
    l_sel: int
    """Tokens of a block (l')."""
    heads: tuple[HeadCurves, ...]
    layers_jaccard: tuple[float, ...]
    """Per pair of adjacent layers: mean Jaccard index of the choices of the same query, of each kv head of the later
    layer with the head of the earlier one that is most like it."""
    later_half_rows: bool = True
    """Figures are of the later half of the rows; always true."""

    def __post_init__(self) -> None:
        if not self.heads:
            raise ValueError(f"the length {self.seq_len} must have a head")
        if not self.later_half_rows:
            raise ValueError("later_half_rows must be true: rows of the first half have fewer blocks to choose from")
        layers = 1 + max(head.layer for head in self.heads)
        kv_heads = 1 + max(head.kv_head for head in self.heads)
        found = [(head.layer, head.kv_head) for head in self.heads]
        if sorted(found) != [(layer, head) for layer in range(layers) for head in range(kv_heads)]:
            raise ValueError(f"the length {self.seq_len} must have every kv head of every layer once")
        if len(self.layers_jaccard) != layers - 1:
            raise ValueError(f"layers_jaccard must have {layers - 1} values; got {len(self.layers_jaccard)}")
        for head in self.heads:
            for count, blocks in head.union.items():
                if not self.n_sel - 1e-3 <= blocks <= self.n_sel * int(count) + 1e-3:
                    raise ValueError(
                        f"the union of {count} queries must be of {self.n_sel} blocks or more; got {blocks}"
                    )


@dataclass(frozen=True)
class Sample:
    """The choices of consecutive rows, as they were: for a replay."""

    seq_len: int
    layer: int
    kv_head: int
    first_row: int
    """Position of the first of the rows."""
    decode: bool
    """Whether the rows are decode steps of text that the model wrote, or rows of the held-out text."""
    block_indices: tuple[tuple[int, ...], ...]
    """[rows][n_sel], ascending."""


@dataclass(frozen=True)
class Atlas:
    """One file."""

    schema: int
    fingerprint: Fingerprint
    commit: str | None
    """That measured; None outside a checkout."""
    model: Mapping[str, Any]
    """`nsa.model.ModelConfig` as a mapping, with "parameters"."""
    trained: Trained
    lengths: tuple[LengthCurves, ...]
    """Ascending."""
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}; got {self.schema}")
        measured = [length.seq_len for length in self.lengths]
        if not measured or measured != sorted(set(measured)):
            raise ValueError(f"lengths must ascend, and there must be one; got {measured}")

    def at(self, seq_len: int) -> LengthCurves:
        """The curves at this length; ValueError naming the lengths there are."""
        for length in self.lengths:
            if length.seq_len == seq_len:
                return length
        raise ValueError(f"seq_len must be one of {[one.seq_len for one in self.lengths]}; got {seq_len}")


@dataclass(frozen=True)
class Band:
    """How a figure is spread over layers and kv heads."""

    p10: float
    median: float
    p90: float


def band(length: LengthCurves, figure: Callable[[HeadCurves], float]) -> Band:
    """The figure's 10th, 50th and 90th percentile over layers x kv heads (linear between the two nearest)."""
    low, middle, high = np.quantile([figure(head) for head in length.heads], (0.1, 0.5, 0.9))
    return Band(float(low), float(middle), float(high))


def read(path: Path) -> Atlas:
    """Raises ValueError naming the file and what is wrong with it; OSError if it cannot be read."""
    return read_as(path, Atlas)


def read_as(path: Path, kind: type[T]) -> T:
    """One dataclass from a file of at most `MAX_BYTES`. Raises ValueError naming the file; OSError."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path}: a file must have at most {MAX_BYTES} bytes; got {size}")
    try:
        return json_schema.build(kind, json.loads(path.read_bytes()), kind.__name__.lower())
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None


def read_all(results: Path) -> tuple[list[Atlas], list[str]]:
    """Every atlas below a folder of results, oldest first, and what is wrong with the files that are none."""
    return read_folder(results / FOLDER, Atlas, lambda one: one.fingerprint.utc)


def read_folder(folder: Path, kind: type[T], utc: Callable[[T], str]) -> tuple[list[T], list[str]]:
    """The dataclass of every .json file in a folder, by `utc`, and what is wrong with the files that are none."""
    found: list[T] = []
    damaged: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_as(path, kind))
        except (ValueError, OSError) as error:
            damaged.append(str(error))
    return sorted(found, key=utc), damaged


def write(results: Path, atlas: Atlas) -> Path:
    """Write a new file. Raises ValueError if it would be too large, OSError if there is no room."""
    return write_new(results / FOLDER, stem(atlas.fingerprint), atlas)


def stem(fingerprint: Fingerprint) -> str:
    """<machine>-<date>-<commit10>."""
    return f"{fingerprint.machine}-{fingerprint.utc[:10]}-{(fingerprint.commit or 'nocommit')[:10]}"


def write_new(folder: Path, name: str, value: Any) -> Path:
    """The dataclass in <name>.json, or <name>-2.json, ... where that exists: no file is ever replaced.

    The file appears whole or not at all, also beside another writer; a kill may leave .<name>-*.new behind.
    """
    content = json.dumps(dataclasses.asdict(value), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    if len(content) > MAX_BYTES:
        raise ValueError(f"the record must have at most {MAX_BYTES} bytes; got {len(content)}: measure fewer lengths")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{name}-{secrets.token_hex(8)}.new"
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        number = 1
        while True:
            path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
            try:
                os.link(unfinished, path)  # atomic, and refused where the name is taken
            except FileExistsError:
                number += 1
            else:
                return path
    finally:
        unfinished.unlink(missing_ok=True)
