"""Which blocks whole sequences chose, of a few heads, for the inputs `replayed`: a small file beside the record.

results/atlas/choices/<name of the record>-<tokens>.json, below 1 MiB, never changed. The choice of a head is a bit for
every block and row, block after block, compressed: neighbouring rows choose alike, so that a row takes some five bytes.
"""

from __future__ import annotations

import base64
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.atlas import record
from nsa import NSAConfig
from nsa.geometry import is_forced

FOLDER = Path(record.FOLDER) / "choices"
"""Below results/."""
SCHEMA = 1
_ROOM = record.MAX_BYTES - 1024
"""Of a file, for the heads: the rest is names."""
MOST_TOKENS = 65536
"""Beyond, not even one head fits, and it would take half a minute to find that out."""
_UNLIKE = 0.75
"""Share of the head before it that a head takes at least: where less is left, none is tried."""


@dataclass(frozen=True)
class HeadChoices:
    """One key/value head of one layer."""

    layer: int
    kv_head: int
    blocks: str
    """Base85 of the LZMA of bits [blocks, rows]: whether the row chose the block; rows are padded to whole bytes."""


@dataclass(frozen=True)
class Choices:
    """One file: a sequence of held-out text as heads of the model chose its blocks."""

    schema: int
    seq_len: int
    n_sel: int
    """Blocks of a row (n), fewer where it sees fewer."""
    l_sel: int
    """Tokens of a block (l')."""
    heads: tuple[HeadChoices, ...]
    """The one whose neighbouring rows choose nearest to the median of all heads first."""

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}; got {self.schema}")
        if not self.heads or min(self.seq_len, self.n_sel, self.l_sel) < 1:
            raise ValueError("choices must have a head, and seq_len, n_sel and l_sel above 0")

    def indices(self, head: HeadChoices, config: NSAConfig) -> NDArray[np.int32]:
        """block_indices [seq_len, n_sel] of one of the heads: ascending, padded with -1.

        Raises ValueError where they are no choice that NSA makes with these settings: too few or too many blocks, one
        after the row's own, or a forced one left out.
        """
        name = f"layer {head.layer}, kv_head {head.kv_head}"
        try:
            bits = np.frombuffer(lzma.decompress(base64.b85decode(head.blocks)), np.uint8)
            chosen = np.unpackbits(bits.reshape(self._num_blocks, -1), axis=1, count=self.seq_len).T.astype(bool)
        except (ValueError, lzma.LZMAError) as error:
            raise ValueError(f"{name}: blocks hold no choice of {self.seq_len} rows ({error})") from None
        rows, blocks = chosen.nonzero()
        counts = chosen.sum(1)
        own = np.arange(self.seq_len) // config.l_sel
        all_blocks = np.arange(self._num_blocks)
        forced = is_forced(all_blocks, own[:, None], config) & (all_blocks <= own[:, None])
        if (
            (counts != np.minimum(self.n_sel, own + 1)).any()
            or (blocks > own[rows]).any()
            or (forced & ~chosen).any()
            or (self.n_sel, self.l_sel) != (config.n_sel, config.l_sel)
        ):
            raise ValueError(f"{name}: blocks are no choice of n = {config.n_sel} blocks of {config.l_sel} tokens")
        found = np.full((self.seq_len, self.n_sel), -1, np.int32)
        found[rows, np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)] = blocks
        return found

    @property
    def _num_blocks(self) -> int:
        return math.ceil(self.seq_len / self.l_sel)


def encode(layer: int, kv_head: int, indices: NDArray[np.integer], l_sel: int) -> HeadChoices:
    """block_indices [seq_len, n_sel] of one head."""
    seq_len = len(indices)
    chosen = np.zeros((math.ceil(seq_len / l_sel), seq_len), bool)
    rows, places = (indices >= 0).nonzero()
    chosen[indices[rows, places], rows] = True
    packed = lzma.compress(np.packbits(chosen, axis=1).tobytes())
    return HeadChoices(layer, kv_head, base64.b85encode(packed).decode())


def of_heads(indices: Sequence[NDArray[np.integer]], order: Sequence[tuple[int, int]], l_sel: int) -> Choices | None:
    """The heads (layer, kv_head) in this order, as many as a file holds, of every layer's [seq_len, Hkv, n_sel].

    None where not even one fits.
    """
    seq_len, _, n_sel = indices[0].shape
    kept: list[HeadChoices] = []
    room = _ROOM
    for layer, kv_head in order if seq_len <= MOST_TOKENS else ():
        if kept and room < _UNLIKE * len(kept[-1].blocks):
            break
        head = encode(layer, kv_head, indices[layer][:, kv_head], l_sel)
        room -= len(head.blocks) + 64
        if room < 0:
            break
        kept.append(head)
    return Choices(SCHEMA, seq_len, n_sel, l_sel, tuple(kept)) if kept else None


def path_of(results: Path, atlas: str, seq_len: int) -> Path:
    """Where the choices at one length stand, of the atlas in this file of results/atlas."""
    return results / FOLDER / f"{Path(atlas).stem}-{seq_len}.json"


def write(results: Path, atlas: Path, choices: Choices) -> Path:
    """Beside the record in `atlas`. Raises OSError if there is no room."""
    path = path_of(results, atlas.name, choices.seq_len)
    return record.write_new(path.parent, path.stem, choices)


def read(results: Path, atlas: str, seq_len: int) -> Choices:
    """Raises ValueError naming the file and what is wrong with it; OSError if it cannot be read."""
    return record.read_as(path_of(results, atlas, seq_len), Choices)
