"""What travels between ranks: rows gathered by all, rows that a few need, and the gradients on their way back.

Everything goes as bytes over `torch.distributed`, Gloo or NCCL, and is started before it is waited for. A rank's own
rows do not travel, but for those that all gather. Gradients are added in at least float32 and in an order that
depends on the ranks alone, so that runs repeat bit for bit.

Rows are dimension 1 of [B, rows, H, D], as in every tensor of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Under the name that this PyTorch has for it."""


@dataclass
class Pending:
    """A tensor on its way; `wait` gives it, once, and lets go of the buffers that it came through."""

    work: dist.Work | None
    finish: Callable[[], Tensor] | None

    def wait(self) -> Tensor:
        assert self.finish is not None, "a tensor can be waited for once"
        if self.work is not None:
            self.work.wait()
        arrived, self.work, self.finish = self.finish(), None, None
        return arrived


RowSpan = tuple[slice, slice]
"""Rows side by side in two tensors: where they stand in the one and in the other."""


@dataclass(frozen=True)
class Gather:
    """All ranks get all rows, each from the rank that owns it.

    Takes, beside its result, one buffer of the same size while it is on its way; a sum back to the owners takes two
    buffers of the rows of the other ranks, and holds what is summed until it is done.
    """

    group: dist.ProcessGroup
    rank: int
    rows: Sequence[Tensor]
    """int64 of each rank, on the CPU: the numbers of its rows, in the order in which it holds them."""
    total: int
    """Rows of the result; one that nobody owns is 0."""
    device: torch.device
    places: Tensor = field(init=False)
    """int64 [owned]: where each row of the result stands among the padded rows of all ranks."""
    numbers: Tensor = field(init=False)
    """int64 [owned]: the rows of the result that somebody owns, ascending."""
    others: Tensor = field(init=False)
    """int64: the rows of the other ranks, rank after rank."""
    runs: list[RowSpan] = field(init=False)
    """The own rows: where this rank holds them, and their numbers."""

    def __post_init__(self) -> None:
        none = torch.arange(0)
        padded = torch.cat([i * self.most + torch.arange(len(own)) for i, own in enumerate(self.rows)])
        numbers, place = torch.cat([*self.rows, none]).sort()
        others = torch.cat([none, *(own for i, own in enumerate(self.rows) if i != self.rank)])
        object.__setattr__(self, "places", padded[place].to(self.device))
        object.__setattr__(self, "numbers", numbers.to(self.device))
        object.__setattr__(self, "others", others.to(self.device))
        object.__setattr__(self, "runs", _runs(self.rows[self.rank]))

    @property
    def most(self) -> int:
        """Rows of the rank that has most."""
        return max(len(own) for own in self.rows)

    def start(self, x: Tensor) -> Pending:
        """x [B, own rows, H, D] -> [B, total, H, D]; x must not be written to before that has been waited for."""
        mine = _by_row(x)
        if mine.shape[0] < self.most:  # nobody reads what fills it up
            mine = torch.cat([mine, mine.new_empty(self.most - mine.shape[0], *mine.shape[1:])])
        every = x.new_empty(len(self.rows) * self.most, *mine.shape[1:])
        work = _all_gather(_bytes(every), _bytes(mine.contiguous()), group=self.group, async_op=True)

        def finish() -> Tensor:
            if len(self.numbers) == self.total:
                return _by_batch(every[self.places])
            out = every.new_zeros(self.total, *every.shape[1:])
            out[self.numbers] = every[self.places]
            return _by_batch(out)

        return Pending(work, finish)

    def start_sum(self, partial: Tensor, dtype: torch.dtype) -> Pending:
        """Every rank's partial [B, total, H, D], float32 or wider -> the sum of all for the own rows, in `dtype`.

        Added in the order of the ranks. `partial` is this function's from then on, to write to.
        """
        own = len(self.rows[self.rank])
        go = [0 if i == self.rank else len(rows) for i, rows in enumerate(self.rows)]
        come = [0 if i == self.rank else own for i in range(len(self.rows))]
        arrived, work = _travel(_by_row(partial)[self.others], go, come, self.group)

        def finish() -> Tensor:
            parts = _by_row(arrived).split(come, 1)
            total = partial.new_empty(partial.shape[0], own, *partial.shape[2:], dtype=dtype)
            for here, there in self.runs:
                first, *more = (partial[:, there] if i == self.rank else part[:, here] for i, part in enumerate(parts))
                for part in more[:-1]:
                    first += part
                if more:
                    torch.add(first, more[-1], out=total[:, here])
                else:
                    total[:, here] = first
            return total

        return Pending(work, finish)


@dataclass(frozen=True)
class Halo:
    """Each rank gets the rows of other ranks that it needs beside its own, and puts all in ascending order."""

    group: dist.ProcessGroup
    rank: int
    held: Sequence[Tensor]
    """int64 of each rank, ascending: the rows that it holds."""
    needed: Sequence[Tensor]
    """int64 of each rank, ascending: the rows that it needs, all that it holds among them."""
    device: torch.device
    sent: Tensor = field(init=False)
    """int64: places among the own rows of what the other ranks need of them, rank after rank."""
    arriving: Tensor = field(init=False)
    """int64: places among what is needed here of what arrives, rank after rank."""
    go: list[int] = field(init=False)
    """Rows that each rank gets from here."""
    come: list[int] = field(init=False)
    """Rows that come from each rank."""
    runs: list[RowSpan] = field(init=False)
    """The own rows: where this rank holds them, and where they stand among what is needed."""
    shared: Tensor = field(init=False)
    """int64, ascending: places among the own rows of those that other ranks need too."""
    shared_needed: Tensor = field(init=False)
    """int64: places of the same among what is needed."""
    sums: Sequence[Tensor] = field(init=False)
    """int64 for each rank: places among the shared rows of those that it needs."""

    def __post_init__(self) -> None:
        own, wanted = self.held[self.rank], self.needed[self.rank]
        none = torch.arange(0)
        sends = [none if i == self.rank else _places(own, theirs) for i, theirs in enumerate(self.needed)]
        receives = [none if i == self.rank else _places(wanted, theirs) for i, theirs in enumerate(self.held)]
        of_own = _places(wanted, own)
        assert len(of_own) == len(own), "what a rank holds is among what it needs"
        shared, places = torch.cat(sends).unique(return_inverse=True)
        go = [len(x) for x in sends]
        found = {
            "sent": torch.cat(sends).to(self.device), "arriving": torch.cat(receives).to(self.device), "go": go,
            "come": [len(x) for x in receives], "runs": _runs(of_own), "shared": shared.to(self.device),
            "shared_needed": of_own[shared].to(self.device), "sums": places.to(self.device).split(go),
        }  # fmt: skip
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def start(self, x: Tensor) -> Pending:
        """x [B, own rows, H, D] -> what arrives of other ranks [B, arriving rows, H, D], for `joined`."""
        arrived, work = _travel(_by_row(x)[self.sent], self.go, self.come, self.group)
        return Pending(work, lambda: _by_row(arrived))

    def joined(self, x: Tensor, arrived: Tensor) -> Tensor:
        """x [B, own rows, H, D] and what arrived -> [B, needed rows, H, D]."""
        out = x.new_empty(x.shape[0], len(self.needed[self.rank]), *x.shape[2:])
        for here, there in self.runs:
            out[:, there] = x[:, here]
        return out.index_copy_(1, self.arriving, arrived)

    def start_sum(self, partial: Tensor, dtype: torch.dtype) -> Pending:
        """Every rank's gradient [B, needed rows, H, D] -> the sum of all for the own rows, in `dtype`.

        Added in at least float32, the rank's own first, then the others' in the order of the ranks.
        """
        arrived, work = _travel(_by_row(partial)[self.arriving], self.come, self.go, self.group)

        def finish() -> Tensor:
            total = partial.new_empty(partial.shape[0], len(self.held[self.rank]), *partial.shape[2:], dtype=dtype)
            for here, there in self.runs:
                total[:, here] = partial[:, there]
            sums = partial[:, self.shared_needed].to(torch.promote_types(partial.dtype, torch.float32))
            for place, part in zip(self.sums, _by_row(arrived).split(self.go, 1), strict=True):
                sums.index_add_(1, place, part.to(sums.dtype))
            return total.index_copy_(1, self.shared, sums.to(dtype))

        return Pending(work, finish)


def _travel(sent: Tensor, go: list[int], come: list[int], group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    """Send so many of the rows `sent` to each rank; (what arrives, so many rows from each, when it has)."""
    arrived = sent.new_empty(sum(come), *sent.shape[1:])
    into, rows = (x.flatten(1).view(torch.uint8) for x in (arrived, sent.contiguous()))
    return arrived, dist.all_to_all_single(into, rows, come, go, group=group, async_op=True)


def _places(among: Tensor, wanted: Tensor) -> Tensor:
    """int64: where those of `wanted` that are in `among` stand in it; both ascend."""
    place = torch.searchsorted(among, wanted)
    inside = place < len(among)
    inside[inside.clone()] = among[place[inside]] == wanted[inside]
    return place[inside]


def _runs(places: Tensor) -> list[RowSpan]:
    """Where consecutive numbers stand in `places`, and the numbers."""
    cuts = ((places.diff() != 1).nonzero()[:, 0] + 1).tolist()
    bounds = [0, *cuts, len(places)]
    return [
        (slice(begin, end), slice(int(places[begin]), int(places[end - 1]) + 1))
        for begin, end in pairwise(bounds)
        if begin < end
    ]


def _by_row(x: Tensor) -> Tensor:
    """[B, rows, H, D] -> [rows, B, H, D], and back."""
    return x.transpose(0, 1)


def _by_batch(x: Tensor) -> Tensor:
    """[rows, B, H, D] -> [B, rows, H, D], contiguous."""
    return _by_row(x).contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
