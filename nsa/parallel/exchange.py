"""What travels between ranks: rows gathered by all, rows that a few need, and the gradients on their way back.

Everything goes as bytes over `torch.distributed`, Gloo or NCCL, and is started before it is waited for. Gradients come
back in at least float32 and are added in the order of the ranks, so that runs repeat bit for bit.

Rows are dimension 1 of [B, rows, H, D], as in every tensor of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Gather:
    """All ranks get all rows, each from the rank that owns it.

    Takes, beside its result, one buffer of the same size while it is on its way; a sum back to the owners takes two
    buffers of `total` rows in float32.
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
    order: Tensor = field(init=False)
    """int64 [owned]: the rows in the order of the ranks."""

    def __post_init__(self) -> None:
        order = torch.cat([*self.rows, torch.arange(0)])
        padded = torch.cat([i * self.most + torch.arange(len(own)) for i, own in enumerate(self.rows)])
        numbers, place = order.sort()
        object.__setattr__(self, "places", padded[place].to(self.device))
        object.__setattr__(self, "numbers", numbers.to(self.device))
        object.__setattr__(self, "order", order.to(self.device))

    @property
    def most(self) -> int:
        """Rows of the rank that has most."""
        return max(len(own) for own in self.rows)

    def start(self, x: Tensor) -> Pending:
        """x [B, own rows, H, D] -> [B, total, H, D]."""
        by_row = _by_row(x)
        mine = x.new_zeros(self.most, *by_row.shape[1:])
        mine[: by_row.shape[0]] = by_row
        every = x.new_empty(len(self.rows) * self.most, *by_row.shape[1:])
        work = _all_gather(_bytes(every), _bytes(mine), group=self.group, async_op=True)

        def finish() -> Tensor:
            if len(self.numbers) == self.total:
                return _by_batch(every[self.places])
            out = every.new_zeros(self.total, *every.shape[1:])
            out[self.numbers] = every[self.places]
            return _by_batch(out)

        return Pending(work, finish)

    def start_sum(self, partial: Tensor) -> Pending:
        """Every rank's partial [B, total, H, D], float32 or wider -> the sum of all for the own rows."""
        sent = _by_row(partial)[self.order]
        sizes = [len(own) for own in self.rows]
        own = sizes[self.rank]
        parts = sent.new_empty(len(sizes) * own, *sent.shape[1:])
        splits = [own] * len(sizes), sizes
        work = dist.all_to_all_single(_row_bytes(parts), _row_bytes(sent), *splits, group=self.group, async_op=True)

        def finish() -> Tensor:
            grid = parts.view(len(sizes), own, *parts.shape[1:])
            total = grid[0].clone()
            for part in grid[1:]:
                total += part
            return _by_batch(total)

        return Pending(work, finish)


@dataclass(frozen=True)
class Halo:
    """Each rank gets the rows that it needs, its own among them, ascending."""

    group: dist.ProcessGroup
    rank: int
    held: Sequence[Tensor]
    """int64 of each rank, ascending: the rows that it holds."""
    needed: Sequence[Tensor]
    """int64 of each rank, ascending: the rows that it needs."""
    device: torch.device
    sends: list[Tensor] = field(init=False)
    """For each rank, places among the own rows of what it needs of them."""
    receives: list[Tensor] = field(init=False)
    """From each rank, places among what is needed here."""

    def __post_init__(self) -> None:
        own, wanted = self.held[self.rank], self.needed[self.rank]
        sends = [_places(own, theirs, self.device) for theirs in self.needed]
        receives = [_places(wanted, theirs, self.device) for theirs in self.held]
        object.__setattr__(self, "sends", sends)
        object.__setattr__(self, "receives", receives)

    def start(self, x: Tensor) -> Pending:
        """x [B, own rows, H, D] -> [B, needed rows, H, D]."""
        by_row = _by_row(x)
        arrived, work = self._travel(by_row, self.sends, self.receives)

        def finish() -> Tensor:
            out = by_row.new_zeros(len(self.needed[self.rank]), *by_row.shape[1:])
            for place, part in zip(self.receives, self._parts(arrived, self.receives), strict=True):
                out[place] = part if part is not None else by_row[self.sends[self.rank]]
            return _by_batch(out)

        return Pending(work, finish)

    def start_sum(self, partial: Tensor) -> Pending:
        """Every rank's gradient [B, needed rows, H, D], float32 or wider -> the sum of all for the own rows."""
        by_row = _by_row(partial)
        arrived, work = self._travel(by_row, self.receives, self.sends)

        def finish() -> Tensor:
            total = by_row.new_zeros(len(self.held[self.rank]), *by_row.shape[1:])
            for place, part in zip(self.sends, self._parts(arrived, self.sends), strict=True):
                total[place] += part if part is not None else by_row[self.receives[self.rank]]
            return _by_batch(total)

        return Pending(work, finish)

    def _travel(self, rows: Tensor, out: list[Tensor], back: list[Tensor]) -> tuple[Tensor, dist.Work | None]:
        """Send each other rank the rows at its places in `out`; what arrives for the places in `back`."""
        others = [i for i in range(len(out)) if i != self.rank]
        sent = rows[torch.cat([out[i] for i in others])] if others else rows[:0]
        sizes = [[0 if i == self.rank else len(x[i]) for i in range(len(x))] for x in (out, back)]
        arrived = rows.new_empty(sum(sizes[1]), *rows.shape[1:])
        work = dist.all_to_all_single(
            _row_bytes(arrived), _row_bytes(sent), sizes[1], sizes[0], group=self.group, async_op=True
        )
        return arrived, work

    def _parts(self, arrived: Tensor, places: list[Tensor]) -> list[Tensor | None]:
        """What came from each rank; None stands for the own rows, which do not travel."""
        sizes = [0 if i == self.rank else len(place) for i, place in enumerate(places)]
        return [None if i == self.rank else part for i, part in enumerate(arrived.split(sizes))]


def _places(among: Tensor, wanted: Tensor, device: torch.device) -> Tensor:
    """int64: where those of `wanted` that are in `among` stand in it; both ascend."""
    place = torch.searchsorted(among, wanted)
    inside = place < len(among)
    inside[inside.clone()] = among[place[inside]] == wanted[inside]
    return place[inside].to(device)


def _by_row(x: Tensor) -> Tensor:
    """[B, rows, H, D] -> [rows, B, H, D]."""
    return x.transpose(0, 1)


def _by_batch(x: Tensor) -> Tensor:
    """[rows, B, H, D] -> [B, rows, H, D]."""
    return x.transpose(0, 1).contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _row_bytes(x: Tensor) -> Tensor:
    """[rows, …] -> uint8 [rows, bytes]."""
    return x.flatten(1).view(torch.uint8)
