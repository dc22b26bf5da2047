"""Which page holds which rows of which sequence: the bookkeeping of a paged cache, integers alone."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nsa.paged.allocator import NULL_PAGE, OutOfPagesError, PageAllocator, PageTable, Stream


@dataclass
class SequenceState:
    """What is known of one sequence."""

    length: int = 0
    shortest: int = 0
    """Nothing was released that a sequence of this length, or of any longer one, may ask for."""
    tables: dict[str, PageTable] = field(default_factory=dict)


class PageTables:
    """Sequences by number, their lengths, and their pages.

    New rows are written in two steps: `reserve` makes room, `commit` lets the sequences grow; `rollback` in its place
    gives back what was reserved. Numbers are not used again, so that a freed sequence is never taken for another.
    """

    def __init__(
        self, kinds: Sequence[Stream], *, num_pages: int, page_size: int, max_tokens: int, max_rollback: int
    ) -> None:
        self.kinds, self.page_size = tuple(kinds), page_size
        self.max_tokens, self.max_rollback = max_tokens, max_rollback
        self.allocator = PageAllocator(num_pages)
        self._states: dict[int, SequenceState] = {}
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def length(self, sequence: int) -> int:
        """Tokens held."""
        return self._state(sequence).length

    def table(self, sequence: int, stream: str) -> PageTable:
        return self._state(sequence).tables[stream]

    def width(self, kind: Stream) -> int:
        """Pages of the longest sequence."""
        return -(-kind.num_rows(self.max_tokens) // self.page_size)

    def new(self) -> int:
        """An empty sequence. It takes no page."""
        empty = {kind.name: PageTable(array("i", [NULL_PAGE]) * self.width(kind)) for kind in self.kinds}
        return self._add(SequenceState(tables=empty))

    def fork(self, sequence: int) -> int:
        """Another sequence with the same tokens; it takes no page until one of the two writes."""
        state, tables = self._state(sequence), {}
        for name, table in state.tables.items():
            tables[name] = PageTable(table.pages[:], table.first_row, table.end)
            for page in table.held():
                self.allocator.share(page)
        return self._add(SequenceState(state.length, state.shortest, tables))

    def free(self, sequence: int) -> None:
        """Give its pages back. Its number is not valid any more."""
        for table in self._state(sequence).tables.values():
            for page in table.held():
                self.allocator.free(page)
        del self._states[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from position `length` on; ValueError if what comes before was released."""
        state = self._state(sequence)
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length must be an int; got {length!r} ({type(length).__name__})")
        if not 0 <= length <= state.length:
            raise ValueError(f"length must be between 0 and the {state.length} tokens held; got {length}")
        for kind in self.kinds:
            first, rows = kind.first_needed(length), kind.num_rows(length)
            if first < min(rows, state.tables[kind.name].first_row):
                raise ValueError(
                    f"length must be at least {state.shortest}, or 0: with max_rollback={self.max_rollback} stream "
                    f"{kind.name!r} of sequence {sequence} released what comes before; got {length}"
                )
        state.length, state.shortest = length, min(state.shortest, length)
        self._trim(state)

    def reserve(self, sequences: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
        """Make room for `num_tokens` more tokens in each of them: (from, to) of the pages to be copied first.

        Raises OutOfPagesError, or ValueError for a sequence that would grow too long, with nothing changed.
        """
        plan = self._plan(sequences, num_tokens)
        if len(plan) > self.allocator.num_free:
            raise OutOfPagesError(
                f"{num_tokens} more tokens in each of {len(sequences)} sequences take {len(plan)} pages; "
                f"{self.allocator.num_free} are free"
            )
        copies = []
        for table, index in plan:
            old, fresh = table.pages[index], self.allocator.allocate()
            if old != NULL_PAGE:
                copies.append((old, fresh))
                self.allocator.free(old)
            table[index] = fresh
            table.end = max(table.end, index + 1)
        return copies

    def commit(self, sequences: Sequence[int], num_tokens: int) -> None:
        """Let them grow by the tokens that were reserved, and release what nothing needs any more."""
        for sequence in sequences:
            state = self._state(sequence)
            state.length += num_tokens
            state.shortest = max(state.shortest, state.length - self.max_rollback)
            self._release(state)

    def rollback(self, sequences: Sequence[int]) -> None:
        """Give back what was reserved and not committed."""
        for sequence in sequences:
            self._trim(self._state(sequence))

    def _plan(self, sequences: Sequence[int], num_tokens: int) -> list[tuple[PageTable, int]]:
        """The places of tables that need a page of their own: none yet, or one that another sequence reads too."""
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"sequences must be distinct; got {list(sequences)}")
        plan: list[tuple[PageTable, int]] = []
        left: Counter[int] = Counter()  # owners that a page loses by this plan
        for sequence in sequences:
            state = self._state(sequence)
            if state.length + num_tokens > self.max_tokens:
                raise ValueError(
                    f"cache has room for max_tokens={self.max_tokens} in a sequence; "
                    f"sequence {sequence} holds {state.length} and {num_tokens} more came"
                )
            for kind in self.kinds:
                table = state.tables[kind.name]
                for index in self._written(kind, state.length, num_tokens):
                    page = table.pages[index]
                    if page == NULL_PAGE:
                        plan.append((table, index))
                    elif self.allocator.ref_count(page) - left[page] > 1:
                        left[page] += 1
                        plan.append((table, index))
        return plan

    def _written(self, kind: Stream, length: int, num_tokens: int) -> range:
        """Places in a table that `num_tokens` tokens behind `length` write to."""
        first, last = kind.num_rows(length), kind.num_rows(length + num_tokens)
        return range(first // self.page_size, -(-last // self.page_size)) if last > first else range(0)

    def _release(self, state: SequenceState) -> None:
        """Give back pages all of whose rows are older than anything that may still be asked for."""
        for kind in self.kinds:
            table = state.tables[kind.name]
            keep_from = kind.first_needed(state.shortest) // self.page_size
            for index in range(table.first_row // self.page_size, keep_from):
                self.allocator.free(table.pages[index])
                table[index] = NULL_PAGE
            table.first_row = max(table.first_row, keep_from * self.page_size)

    def _trim(self, state: SequenceState) -> None:
        """Give back pages behind the end."""
        for kind in self.kinds:
            table, rows = state.tables[kind.name], kind.num_rows(state.length)
            end = -(-rows // self.page_size)
            for index in range(end, table.end):
                self.allocator.free(table.pages[index])
                table[index] = NULL_PAGE
            table.end = min(table.end, end)
            table.first_row = min(table.first_row, rows)

    def _add(self, state: SequenceState) -> int:
        self._states[self._next] = state
        self._next += 1
        return self._next - 1

    def _state(self, sequence: int) -> SequenceState:
        if sequence not in self._states:
            raise ValueError(f"sequence must be one that was made and not freed; got {sequence!r}")
        return self._states[sequence]
