"""Which block covers, overlaps, is visible, is forced. Integers only; every mask comes from here.

Positions `t` count from 0 inside a document. The functions take Python ints or integer tensors alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from nsa.config import NSAConfig

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)
Value = TypeVar("Value")


def _at_least_zero(x: IntOrTensor) -> IntOrTensor:
    return x.clamp(min=0) if isinstance(x, Tensor) else max(x, 0)


def num_compressed_blocks(num_tokens: IntOrTensor, config: NSAConfig) -> IntOrTensor:
    """Full compression blocks in `num_tokens` tokens; a last block that is not full is dropped."""
    return _at_least_zero((num_tokens - config.l) // config.d + 1)


def num_visible_compressed(t: IntOrTensor, config: NSAConfig) -> IntOrTensor:
    """Compressed blocks that token `t` sees: those that end at or before it (c·d + l − 1 <= t)."""
    return num_compressed_blocks(t + 1, config)


def num_selection_blocks(num_tokens: IntOrTensor, config: NSAConfig) -> IntOrTensor:
    """Selection blocks that hold at least one of `num_tokens` tokens."""
    return (num_tokens + config.l_sel - 1) // config.l_sel


def overlap_tokens(c: int, j: int, config: NSAConfig) -> int:
    """Tokens that compression block `c` and selection block `j` share (Eq. 9, read geometrically)."""
    first = max(c * config.d, j * config.l_sel)
    last = min(c * config.d + config.l, (j + 1) * config.l_sel)
    return max(last - first, 0)


def overlap_offsets(config: NSAConfig) -> range:
    """Offsets `o` such that compression block `j·l'/d + o` shares tokens with selection block `j`."""
    return range(1 - config.l // config.d, config.l_sel // config.d)


def overlap_weights(config: NSAConfig) -> list[int]:
    """Eq. 9's weight of each of `overlap_offsets`, in strides: 1, 2, 2, 2, 1 for 32/16/64."""
    far = config.l // config.d  # a block far enough from 0 that no offset is negative
    return [
        overlap_tokens(far * config.l_sel // config.d + o, far, config) // config.d for o in overlap_offsets(config)
    ]


def is_forced(j: Any, current: Any, config: NSAConfig) -> Any:
    """Whether selection block `j` is always taken by a token that stands in block `current`."""
    local = (j > current - config.local_blocks) & (j <= current)
    return ((j < config.init_blocks) & (j <= current)) | local


class computed_once(Generic[Value]):  # noqa: N801 - used as `property` is
    """functools.cached_property without its lock, through which torch.compile cannot see before Python 3.12."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> computed_once[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object, owner: type) -> Value | computed_once[Value]:
        if instance is None:
            return self
        value = self.compute(instance)
        object.__setattr__(instance, self.compute.__name__, value)  # which is found before this descriptor from now on
        return value


@dataclass(frozen=True)
class Layout:
    """Where the queries of one call stand, and which keys each of them may see.

    S queries are the last of T keys. With `cu_seqlens` (int32 [N+1], B = 1, S = T) the tokens are N
    documents end to end; then the compressed blocks of all documents stand end to end too, in a buffer
    of `T // d` slots (a bound that needs no host sync) whose unused tail is zero.
    """

    num_queries: int
    num_keys: int
    config: NSAConfig
    device: torch.device
    cu_seqlens: Tensor | None = None
    documents_valid: Tensor | None = None
    """bool []: whether the documents given ascend from 0 to T, if that is not known; if not, `cu_seqlens` is one."""
    sequence_tokens: int | None = None
    """Tokens of the whole sequence where ranks share one and this is a part of it: kernels are chosen by these."""

    def knowing(self, **computed: object) -> Layout:
        """This layout, with what was computed of it already: its properties by name."""
        for name, value in computed.items():
            object.__setattr__(self, name, value)
        return self

    @property
    def num_slots(self) -> int:
        """Rows of the compressed keys and values."""
        if self.cu_seqlens is None:
            return num_compressed_blocks(self.num_keys, self.config)
        return self.num_keys // self.config.d

    @property
    def max_blocks(self) -> int:
        """Selection blocks of all documents together, or an upper bound that needs no host sync."""
        if self.cu_seqlens is None:
            return num_selection_blocks(self.num_keys, self.config)
        return self.num_keys // self.config.l_sel + self.cu_seqlens.numel() - 1

    @computed_once
    def tokens(self) -> Tensor:
        """int64 [S]: each query's index among the keys."""
        return torch.arange(self.num_keys - self.num_queries, self.num_keys, device=self.device)

    @computed_once
    def _documents(self) -> Tensor:
        """int64 [S]: each query's document."""
        assert self.cu_seqlens is not None
        found = torch.searchsorted(self.cu_seqlens, self.tokens, right=True) - 1
        return found.clamp(0, self.cu_seqlens.numel() - 2)

    @computed_once
    def starts(self) -> Tensor:
        """int64 [S]: the key index of the first token of each query's document."""
        if self.cu_seqlens is None:
            return torch.zeros_like(self.tokens)
        return self.cu_seqlens.long()[self._documents]

    @computed_once
    def positions(self) -> Tensor:
        """int64 [S]: `t`, each query's position inside its document."""
        return self.tokens - self.starts

    @computed_once
    def _cu_blocks(self) -> Tensor:
        """int64 [N+1]: the first slot of each document's compressed blocks."""
        assert self.cu_seqlens is not None
        blocks = num_compressed_blocks(self.cu_seqlens.long().diff(), self.config)
        return torch.nn.functional.pad(blocks.cumsum(0), (1, 0))

    @computed_once
    def slot_tokens(self) -> tuple[Tensor, Tensor]:
        """(int64 [slots], bool [slots]): the first token of the block in each slot, and whether there is one."""
        slots = torch.arange(self.num_slots, device=self.device)
        if self.cu_seqlens is None:
            return slots * self.config.d, torch.ones_like(slots, dtype=torch.bool)
        document = (torch.searchsorted(self._cu_blocks, slots, right=True) - 1).clamp(0, self.cu_seqlens.numel() - 2)
        first = self.cu_seqlens.long()[document] + (slots - self._cu_blocks[document]) * self.config.d
        used = slots < self._cu_blocks[-1]
        return torch.where(used, first, 0), used

    @computed_once
    def _cu_selection_blocks(self) -> Tensor:
        """int64 [N+1]: how many selection blocks stand before each document's."""
        assert self.cu_seqlens is not None
        blocks = num_selection_blocks(self.cu_seqlens.long().diff(), self.config)
        return torch.nn.functional.pad(blocks.cumsum(0), (1, 0))

    @computed_once
    def blocks_before(self) -> Tensor:
        """int64 [S]: selection blocks of earlier documents; plus j, it numbers block j among all documents'."""
        if self.cu_seqlens is None:
            return torch.zeros_like(self.tokens)
        return self._cu_selection_blocks[self._documents]

    @computed_once
    def block_tokens(self) -> tuple[Tensor, Tensor]:
        """(int64 [max_blocks], int64 [max_blocks]): first token of each selection block, and the first behind it."""
        number = torch.arange(self.max_blocks, device=self.device)
        if self.cu_seqlens is None:
            return number * self.config.l_sel, ((number + 1) * self.config.l_sel).clamp(max=self.num_keys)
        found = torch.searchsorted(self._cu_selection_blocks, number, right=True) - 1
        document = found.clamp(0, self.cu_seqlens.numel() - 2)
        bounds = self.cu_seqlens.long()
        first = bounds[document] + (number - self._cu_selection_blocks[document]) * self.config.l_sel
        end = torch.minimum(first + self.config.l_sel, bounds[document + 1])
        used = number < self._cu_selection_blocks[-1]
        return torch.where(used, first, 0), torch.where(used, end, 0)

    @computed_once
    def compressed_interval(self) -> tuple[Tensor, Tensor]:
        """(int32 [S], int32 [S]): each query sees the compressed slots lo <= slot < hi; both ascend."""
        lo = torch.zeros_like(self.tokens) if self.cu_seqlens is None else self._cu_blocks[self._documents]
        hi = lo + num_visible_compressed(self.positions, self.config)
        return lo.int(), hi.int()

    @computed_once
    def window_interval(self) -> tuple[Tensor, Tensor]:
        """(int32 [S], int32 [S]): each query sees the tokens lo <= s < hi, at most w of them; both ascend."""
        lo = torch.maximum(self.tokens - self.config.w + 1, self.starts)
        return lo.int(), (self.tokens + 1).int()

    @computed_once
    def compressed_queries(self) -> tuple[Tensor, Tensor]:
        """(int32 [slots], int32 [slots]): the queries from <= i < to are those that see each slot."""
        return self._seen_by(self.compressed_interval, self.num_slots)

    @computed_once
    def window_queries(self) -> tuple[Tensor, Tensor]:
        """(int32 [T], int32 [T]): the queries from <= i < to are those whose window holds each token."""
        return self._seen_by(self.window_interval, self.num_keys)

    def _seen_by(self, interval: tuple[Tensor, Tensor], num_keys: int) -> tuple[Tensor, Tensor]:
        lo, hi = interval
        key = torch.arange(num_keys, dtype=torch.int32, device=self.device)
        first = torch.searchsorted(hi, key, right=True, out_int32=True)
        return first, torch.searchsorted(lo, key, right=True, out_int32=True)

    def compressed_span(self, first: int, last: int) -> tuple[int, int]:
        """Bounds on the slots seen by the queries first <= i < last, known on the host."""
        seen = self.num_keys - self.num_queries + last
        if self.cu_seqlens is None:
            return 0, num_compressed_blocks(seen, self.config)
        return 0, seen // self.config.d

    def window_span(self, first: int, last: int) -> tuple[int, int]:
        """Bounds on the tokens in the windows of the queries first <= i < last, known on the host."""
        offset = self.num_keys - self.num_queries
        return max(offset + first - self.config.w + 1, 0), offset + last
