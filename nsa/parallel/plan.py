"""What one rank computes of a sequence, and which rows it needs for that: made once, from what the host knows.

A piece of queries first <= t < last is the last part of the problem that ends with it: queries that stand at the end
of `last` keys. So every backend serves it as it is. Compressed keys of that shorter problem stand in the same rows.

The PyTorch backend computes `GRID` queries at a time, and sums over the keys that the last of them sees. A piece that
begins or ends within such a step is padded to it, so that the sums are the same, bit for bit, however tokens are dealt.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nsa import torch_backend
from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.parallel.exchange import Gather, Halo
from nsa.parallel.order import Piece, TokenOrder, arange_of

GRID = {"torch": torch_backend.COMPRESSED_CHUNK, "triton": 128}
"""Tokens to whose multiples a backend's steps are aligned: the window's of the PyTorch backend divide them, and the
rows of every tile of the kernels divide the rows of so many tokens."""
KEYS_FROM_DOCUMENT = {"torch": False, "triton": True}
"""Whether a piece's keys may begin with its first document: the kernels read no others, and PyTorch's sums over keys
that are masked round otherwise where there are fewer of them."""


@dataclass(frozen=True)
class Queries:
    """One piece of a rank's queries, and the shorter problems at whose end they stand."""

    rows: slice
    """Of the rank's own rows."""
    before: int
    """Queries of padding in front."""
    behind: int
    layout: Layout
    """Of the padded queries at the end of `keys`: compressed and selected."""
    keys: slice
    """Tokens of the shorter problem, of the whole sequence's."""
    slots: slice
    """Its compressed rows, of the whole sequence's."""
    window: Layout
    """Of the padded queries at the end of the keys that their windows reach."""
    window_rows: slice
    """Where the keys that the windows need stand in the halo's rows."""
    window_before: int
    """Keys of padding in front of those, which no window reaches."""


@dataclass(frozen=True)
class Blocks:
    """Compression blocks that begin in one piece, and the rows that they are made of."""

    rows: slice
    """In the halo's rows."""
    layout: Layout
    """Of those rows as a problem of its own."""
    count: int
    """Blocks; the first of that layout's."""


@dataclass(frozen=True)
class Plan:
    """The part of `rank` in attention over a sequence that is dealt out by `order`."""

    order: TokenOrder
    group: dist.ProcessGroup
    rank: int
    config: NSAConfig
    device: torch.device
    grid: int
    keys_from_document: bool
    bounds: tuple[int, ...] | None = None
    """`cu_seqlens`, on the host."""

    @property
    def num_tokens(self) -> int:
        """Of this rank."""
        return self.order.length(self.rank)

    def layout(self, num_queries: int, first_key: int, end: int) -> Layout:
        """Of the last `num_queries` of the tokens first_key <= t < end."""
        documents = self._documents(first_key, end)
        return Layout(
            num_queries, end - first_key, self.config, self.device, documents, sequence_tokens=self.order.num_tokens
        )

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 [S]: where each of the rank's tokens stands in its document."""
        whole = self._whole.positions
        return whole[self.order.tokens(self.rank)].to(self.device)

    @functools.cached_property
    def num_slots(self) -> int:
        """Compressed rows of the whole sequence."""
        return self._whole.num_slots

    @functools.cached_property
    def queries(self) -> list[Queries]:
        """This rank's pieces."""
        found, row = [], 0
        needed = self._window_needs(self.rank)
        starts = torch.tensor([first for first, _ in needed])
        for first, last in self.order.pieces[self.rank]:
            begin, end = self._padded(first, last)
            first_key = self._first_key(begin)
            first_slot, _ = self._slots(first_key, first_key)
            layout = self.layout(end - begin, first_key, end)
            reach, window_begin = max(first - self.config.w + 1, 0), max(begin - self.config.w + 1, 0)
            interval = int(torch.searchsorted(starts, reach, right=True)) - 1
            offset = sum(b - a for a, b in needed[:interval]) + reach - needed[interval][0]
            found.append(
                Queries(
                    rows=slice(row, row + last - first),
                    before=first - begin,
                    behind=end - last,
                    layout=layout,
                    keys=slice(first_key, end),
                    slots=slice(first_slot, first_slot + layout.num_slots),
                    window=self.layout(end - begin, window_begin, end),
                    window_rows=slice(offset, offset + last - reach),
                    window_before=reach - window_begin,
                )
            )
            row += last - first
        return found

    @functools.cached_property
    def blocks(self) -> list[Blocks]:
        """What this rank compresses: the blocks that begin in its pieces."""
        found, row = [], 0
        needed = self._source_needs(self.rank)
        for first, last in self.order.pieces[self.rank]:
            lo, hi = self._slots(first, last)
            if lo == hi:
                continue
            begin, end = self._source(lo, hi)
            interval = next(i for i, (a, b) in enumerate(needed) if a <= begin and end <= b)
            row = sum(b - a for a, b in needed[:interval]) + begin - needed[interval][0]
            found.append(Blocks(slice(row, row + end - begin), self.layout(end - begin, begin, end), hi - lo))
        return found

    @functools.cached_property
    def tokens_gather(self) -> Gather:
        """All tokens' rows: keys and values of the selected branch."""
        rows = [self.order.tokens(rank) for rank in range(self.order.ranks)]
        return Gather(self.group, self.rank, rows, self.order.num_tokens, self.device)

    @functools.cached_property
    def slots_gather(self) -> Gather:
        """All compressed rows."""
        rows = [
            arange_of(self._slots(first, last) for first, last in self.order.pieces[rank])
            for rank in range(self.order.ranks)
        ]
        return Gather(self.group, self.rank, rows, self.num_slots, self.device)

    @functools.cached_property
    def window_halo(self) -> Halo:
        """The own tokens and the w - 1 before each piece."""
        return self._halo([self._window_needs(rank) for rank in range(self.order.ranks)])

    @functools.cached_property
    def source_halo(self) -> Halo:
        """The own tokens and those of blocks that begin in each piece: up to l - d behind it where blocks fill it."""
        return self._halo([self._source_needs(rank) for rank in range(self.order.ranks)])

    @functools.cached_property
    def _whole(self) -> Layout:
        """The whole sequence, on the CPU."""
        total = self.order.num_tokens
        cu_seqlens = None if self.bounds is None else torch.tensor(self.bounds, dtype=torch.int32)
        return Layout(total, total, self.config, torch.device("cpu"), cu_seqlens)

    @functools.cached_property
    def _block_starts(self) -> Tensor:
        """int64 [blocks]: the first token of every compression block."""
        first, used = self._whole.slot_tokens
        return first[used]

    def _halo(self, needs: Sequence[Sequence[Piece]]) -> Halo:
        held = [self.order.tokens(rank) for rank in range(self.order.ranks)]
        return Halo(self.group, self.rank, held, [arange_of(own) for own in needs], self.device)

    def _first_key(self, token: int) -> int:
        """Where the keys of a piece may begin whose first query is that token."""
        if self.bounds is None or not self.keys_from_document:
            return 0
        return max(bound for bound in self.bounds if bound <= token)

    def _documents(self, first: int, end: int) -> Tensor | None:
        """The bounds of the documents as tokens first <= t < end show them."""
        if self.bounds is None:
            return None
        return (torch.tensor(self.bounds).clamp(first, end) - first).to(torch.int32).to(self.device)

    def _padded(self, first: int, last: int) -> Piece:
        """The piece and what completes it to whole steps of the backend."""
        total, grid = self.order.num_tokens, self.grid
        return first // grid * grid, min(-(-last // grid) * grid, total)

    def _window_needs(self, rank: int) -> list[Piece]:
        return _united((max(first - self.config.w + 1, 0), last) for first, last in self.order.pieces[rank])

    def _source_needs(self, rank: int) -> list[Piece]:
        own = self.order.pieces[rank]
        slots = (self._slots(first, last) for first, last in own)
        return _united([*own, *(self._source(lo, hi) for lo, hi in slots if lo < hi)])

    def _slots(self, first: int, last: int) -> Piece:
        """The slots whose blocks begin in a piece."""
        lo, hi = torch.searchsorted(self._block_starts, torch.tensor([first, last])).tolist()
        return lo, hi

    def _source(self, lo: int, hi: int) -> Piece:
        """The tokens from the first of block lo to the last of block hi - 1."""
        return int(self._block_starts[lo]), int(self._block_starts[hi - 1]) + self.config.l


def _united(pieces: Iterable[Piece]) -> list[Piece]:
    """The same tokens, ascending and none twice."""
    united: list[Piece] = []
    for first, last in sorted(pieces):
        if united and first <= united[-1][1]:
            united[-1] = united[-1][0], max(last, united[-1][1])
        else:
            united.append((first, last))
    return united
