"""Which rank holds which tokens of a sequence, so that all have the same work.

A token's work grows with the compressed keys that it sees, so equal shares of the tokens end to end would give the
last rank almost twice the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import geometry
from nsa.config import NSAConfig

TILE = 128
"""Tokens that are dealt out together where documents are packed; more of them in a long sequence."""
TILES_PER_RANK = 16
"""From so many tiles on, larger tiles balance as well, and there are fewer edges to exchange."""

Piece = tuple[int, int]
"""Tokens first <= t < last."""


@dataclass(frozen=True)
class TokenOrder:
    """The pieces of a sequence of `num_tokens` tokens that each rank holds, ascending.

    Raises ValueError naming the rank and the token where pieces overlap, leave one out or do not ascend.
    """

    num_tokens: int
    pieces: tuple[tuple[Piece, ...], ...]
    """Of each rank; a piece that follows another at once is one with it."""

    def __post_init__(self) -> None:
        for rank, own in enumerate(self.pieces):
            before = 0
            for first, last in own:
                if not before <= first < last <= self.num_tokens:
                    raise ValueError(
                        f"order: the pieces of rank {rank} must ascend between 0 and {self.num_tokens}; got "
                        f"tokens {first} to {last} behind {before}"
                    )
                before = last
        end = 0
        for (first, last), rank in sorted((piece, rank) for rank, own in enumerate(self.pieces) for piece in own):
            if first != end:
                kind = "is left out" if first > end else "is held twice"
                raise ValueError(
                    f"order: token {min(first, end)} {kind} before the piece {first}:{last} of rank {rank}"
                )
            end = last
        if end != self.num_tokens:
            raise ValueError(f"order: token {end} of {self.num_tokens} is held by no rank")
        object.__setattr__(self, "pieces", tuple(_joined(own) for own in self.pieces))

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    def length(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(last - first for first, last in self.pieces[rank])

    def tokens(self, rank: int) -> Tensor:
        """int64 [S]: the tokens of a rank in the order in which it holds them."""
        return arange_of(self.pieces[rank])

    def work(self, config: NSAConfig, cu_seqlens: Sequence[int] | None = None) -> list[int]:
        """Compressed keys that the queries of each rank see, which is what most of the time goes into."""
        total = _seen(self.num_tokens, config, cu_seqlens).cumsum(0)
        total = torch.nn.functional.pad(total, (1, 0))
        return [sum(int(total[last] - total[first]) for first, last in own) for own in self.pieces]

    def imbalance(self, config: NSAConfig, cu_seqlens: Sequence[int] | None = None) -> float:
        """By which share the most loaded rank has more work than the mean; 0 where no token sees any key."""
        work = self.work(config, cu_seqlens)
        return max(work) * len(work) / sum(work) - 1 if sum(work) else 0.0


def head_tail(num_tokens: int, ranks: int) -> TokenOrder:
    """2·ranks chunks, the first and the last for rank 0, and so on inwards: the order of PyTorch's load balancer.

    Chunks differ by a token where 2·ranks does not divide the length, which PyTorch does not allow.
    """
    bounds = [i * num_tokens // (2 * ranks) for i in range(2 * ranks + 1)]
    chunks = [(bounds[i], bounds[i + 1]) for i in range(2 * ranks)]
    return TokenOrder(num_tokens, tuple(_filled((chunks[r], chunks[-1 - r])) for r in range(ranks)))


def deal_documents(cu_seqlens: Sequence[int], ranks: int, config: NSAConfig, tile: int | None = None) -> TokenOrder:
    """Tiles of packed documents, dealt by the compressed keys that they see.

    In each round every rank takes one tile, the heaviest of those left for the rank that has least, so that ranks
    differ by one tile's tokens at most.

    Args:
        cu_seqlens: the bounds of the documents, from 0 to the number of tokens.
        ranks: that share the sequence.
        config: NSAConfig.
        tile: tokens of a tile; None for 128, more where that gives each rank more than 16 tiles, and fewer where it
            gives a rank less than two.
    """
    num_tokens = cu_seqlens[-1]
    if tile is None:
        tile = TILE * max(1, -(-num_tokens // (TILE * TILES_PER_RANK * ranks)))
        tile = max(1, min(tile, num_tokens // (2 * ranks)))
    tiles = [(first, min(first + tile, num_tokens)) for first in range(0, num_tokens, tile)]
    seen = torch.nn.functional.pad(_seen(num_tokens, config, cu_seqlens).cumsum(0), (1, 0))
    weights = [int(seen[last] - seen[first]) for first, last in tiles]
    heaviest = sorted(range(len(tiles)), key=lambda i: (-weights[i], i))
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for begin in range(0, len(tiles), ranks):
        takers = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for i, rank in zip(heaviest[begin : begin + ranks], takers, strict=False):
            held[rank].append(tiles[i])
            load[rank] += weights[i]
    return TokenOrder(num_tokens, tuple(tuple(sorted(own)) for own in held))


def from_indices(indices: Tensor, ranks: int) -> TokenOrder:
    """The order in which equal shares of `x[:, indices]` are the ranks', as PyTorch's load balancers give it.

    Args:
        indices: int [T] or [1, T], each token once.
        ranks: that share the sequence; divides T.

    Raises ValueError where a rank's tokens do not ascend.
    """
    flat = indices.flatten().tolist()
    if len(flat) % ranks:
        raise ValueError(f"order: {ranks} ranks must divide the {len(flat)} indices")
    share = len(flat) // ranks
    return TokenOrder(len(flat), tuple(tuple(_runs(flat[r * share : (r + 1) * share])) for r in range(ranks)))


def arange_of(pieces: Iterable[Piece]) -> Tensor:
    """int64 [sum of lengths]: the tokens of these pieces, one after the other."""
    ranges = [torch.arange(first, last) for first, last in pieces]
    return torch.cat(ranges) if ranges else torch.arange(0)


def _filled(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple((first, last) for first, last in pieces if first < last)


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    joined: list[Piece] = []
    for first, last in pieces:
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, last))
    return tuple(joined)


def _runs(tokens: Sequence[int]) -> Iterable[Piece]:
    """Pieces of consecutive tokens."""
    cuts = [i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1] + 1]
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        if begin < end:
            yield tokens[begin], tokens[end - 1] + 1


@functools.lru_cache(maxsize=4)
def _seen_of(num_tokens: int, config: NSAConfig, bounds: tuple[int, ...]) -> Tensor:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    layout = geometry.Layout(num_tokens, num_tokens, config, torch.device("cpu"), cu_seqlens)
    return geometry.num_visible_compressed(layout.positions, config)


def _seen(num_tokens: int, config: NSAConfig, cu_seqlens: Sequence[int] | None) -> Tensor:
    """int64 [T]: compressed keys that each token sees."""
    return _seen_of(num_tokens, config, tuple(cu_seqlens) if cu_seqlens is not None else (0, num_tokens))
