"""NSACache: a `nsa.PagedCache` as the `past_key_values` of transformers.

Rows of the batch are sequences of the paged cache, each as long as its own tokens: padding is never stored, and rows of
unequal length decode in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from nsa.integrations.transformers.documents import checked_positions, has_gap, padding_mask, refuse_gaps
from nsa.layer import NativeSparseAttention, a_size
from nsa.paged.cache import PagedCache, PagedRows


@dataclass(frozen=True)
class NewTokens:
    """Rows of a call that bring equally many new tokens, so that one call of the layers serves them."""

    rows: list[int]
    first_column: list[int]
    """Where the new tokens of each row begin."""
    count: int

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of the new tokens in [B, S]: int64 [rows, 1] and [rows, count]."""
        rows, first = (torch.tensor(numbers, device=device)[:, None] for numbers in (self.rows, self.first_column))
        return rows, first + torch.arange(self.count, device=device)


class NSACache(Cache):
    """Keys and values of every row for `max_tokens` tokens, padding included; pages are reserved by the first call.

    For inference only. `generate` makes one of the right size; one made by hand is passed as `past_key_values`.
    Raises ValueError or TypeError naming the argument.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(layers=[])
        self.max_tokens = a_size("max_tokens", max_tokens)
        self._paged: PagedCache | None = None
        self._sequences: list[int] = []
        self._reserved_rows = 0
        self._columns = 0
        self._last: tuple[tuple[int, ...], PagedRows] | None = None

    def __len__(self) -> int:
        """Layers; 0 before the first call."""
        return len(self._paged.layers) if self._paged else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included: what transformers cuts its inputs by."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_tokens

    @property
    def lengths(self) -> list[int]:
        """Tokens held of each row, without padding."""
        return [self._paged.length(sequence) for sequence in self._sequences] if self._paged else []

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first call."""
        return len(self._sequences) if self._paged else -1

    @property
    def is_initialized(self) -> bool:
        return self._paged is not None

    @property
    def is_croppable(self) -> bool:
        return False

    def reset(self) -> None:
        """Forget every token; the pages stay reserved."""
        if self._paged is not None:
            for sequence in self._sequences:
                self._paged.free(sequence)
            self._sequences = [self._paged.new() for _ in self._sequences]
        self._columns, self._last = 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on as row `beam_idx[i]` was: beams that go on from one share its pages until they write."""
        self._choose("beam_idx", beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order: numbers, or a bool mask over the rows, as tensors are indexed."""
        self._choose("indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: pages are reserved for the rows of the first call."""
        raise ValueError("repeats is not served by an NSACache; begin with the rows that are wanted")

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what the window has left behind was released."""
        raise ValueError("an NSACache cannot be cropped, which assisted and prompt-lookup decoding ask for")

    def activate_past_recording(self) -> None:
        """Refused: it prepares `crop`."""
        self.crop(0)

    def __deepcopy__(self, memo: object) -> NSACache:
        """Refused: pages are reserved for one cache."""
        raise TypeError(
            "an NSACache cannot be copied; make another as NSACache(max_tokens=...) and call the model with the tokens"
        )

    def __reduce__(self) -> str:
        """Refused: pages belong to the process that reserved them."""
        raise TypeError(
            "an NSACache cannot be pickled; keep the tokens, and call the model with them and a new "
            "NSACache(max_tokens=...)"
        )

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> None:
        """Refused: the layers of NSA write to the cache themselves."""
        raise ValueError("past_key_values is an NSACache, which serves NSA's models alone")

    def groups(self, size: tuple[int, int], mask: object, positions: Tensor | None) -> list[NewTokens]:
        """The new tokens of a call [B, S], by their number. ValueError for masks or positions that contradict those
        before."""
        batch, columns = size
        device = next(x.device for x in (mask, positions, torch.empty(0)) if isinstance(x, Tensor))
        if self._paged is not None and batch != len(self._sequences):
            raise ValueError(f"past_key_values holds {len(self._sequences)} rows; got {batch}")
        held = self.lengths or [0] * batch
        valid = padding_mask(mask, (batch, self._columns + columns), device)
        if valid is None:
            counts, first = [columns] * batch, [0] * batch
        else:
            refuse_gaps(has_gap(valid))
            new = valid[:, self._columns :]
            before = valid[:, : self._columns].sum(1).tolist()
            if before != held:
                raise ValueError(
                    f"attention_mask must leave the tokens that past_key_values holds, {held} in its rows; "
                    f"its first {self._columns} columns leave {before}"
                )
            counts, first = new.sum(1).tolist(), new.long().argmax(1).tolist()
        found = [NewTokens(rows, [first[row] for row in rows], count) for count, rows in _by_value(counts) if count > 0]
        self._check(checked_positions(positions, size, device), found, held)
        return found

    @contextmanager
    def grow(self, layers: Sequence[NativeSparseAttention], batch: int, columns: int) -> Iterator[PagedCache]:
        """One call of `columns` more in each of `batch` rows; it grows only if nothing is raised inside.

        A call that fails leaves the cache as it was, or, where some rows had their tokens already, empty.
        """
        if self._columns + columns > self.max_tokens:
            raise ValueError(
                f"past_key_values has room for max_tokens={self.max_tokens}; it holds {self._columns} and {columns} "
                "more came. Make it as NSACache(max_tokens=...)"
            )
        if self._paged is None:
            pages = batch * PagedCache.pages(layers[0], self.max_tokens)
            self._paged = PagedCache(layers, num_pages=pages, max_tokens=self.max_tokens)
            self._sequences = [self._paged.new() for _ in range(batch)]
            self._reserved_rows = batch
        before = self.lengths
        try:
            yield self._paged
        except BaseException:
            self._paged.rollback()
            if self.lengths != before:
                self.reset()
            raise
        self._columns += columns

    def rows(self, numbers: Iterable[int]) -> PagedRows:
        """These rows as the batch of a call inside `grow`."""
        assert self._paged is not None
        sequences = tuple(self._sequences[row] for row in numbers)
        if self._last is None or self._last[0] != sequences:  # its tables on the device serve step after step
            self._last = sequences, self._paged.rows(sequences)
        return self._last[1]

    def _choose(self, name: str, chosen: Tensor) -> None:
        """ValueError, with nothing changed, for rows that are not there or more than pages were reserved for."""
        if self._paged is None:
            return
        held = len(self._sequences)
        if chosen.dtype == torch.bool:
            if tuple(chosen.shape) != (held,):
                raise ValueError(f"{name} as a mask must be [{held}], one for each row; got {list(chosen.shape)}")
            chosen = chosen.nonzero()[:, 0]
        rows = chosen.tolist()
        if len(rows) > self._reserved_rows:
            raise ValueError(
                f"{name} must choose at most the {self._reserved_rows} rows of the first call, for which pages are "
                f"reserved; got {len(rows)}"
            )
        if not all(-held <= row < held for row in rows):
            raise ValueError(f"{name} must be rows of the {held} that past_key_values holds; got {rows}")
        kept = [self._paged.fork(self._sequences[row]) for row in rows]
        for sequence in self._sequences:
            self._paged.free(sequence)
        self._sequences, self._last = kept, None

    def _check(self, positions: Tensor | None, groups: list[NewTokens], held: list[int]) -> None:
        """ValueError unless the new tokens are counted on from those held."""
        if positions is None:
            return
        for group in groups:
            rows, columns = group.index(positions.device)
            begin = torch.tensor([held[row] for row in group.rows], device=positions.device)[:, None]
            if not torch.equal(positions[rows, columns], begin + columns - columns[:, :1]):
                raise ValueError(
                    "position_ids must count on from the tokens that past_key_values holds, padding aside: "
                    f"{[held[row] for row in group.rows]} in rows {group.rows}"
                )


def _by_value(numbers: list[int]) -> list[tuple[int, list[int]]]:
    """Each number with its places."""
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number, []).append(place)
    return list(places.items())
