"""The page allocator, page tables, and the streams of rows that a sequence keeps in them: integers alone.

A sequence keeps several streams of rows (keys per branch, compressed keys), each cut into pages of `page_size` rows
that lie anywhere. Sequences share pages until one of them writes; a page that no sequence holds is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nsa.config import NSAConfig
from nsa.geometry import num_compressed_blocks

NULL_PAGE = 0
"""Belongs to no sequence: tables hold it where they hold no page, and rows that are to be dropped are written there."""


class OutOfPagesError(ValueError):
    """More pages are wanted than are free. Nothing has changed."""


@dataclass(frozen=True)
class Stream:
    """One kind of rows that a sequence keeps."""

    name: str
    """"compressed" (blocks), or tokens: "source" of compression, "selected", "window"; "tokens" serves all three."""
    num_rows: Callable[[int], int]
    """How many rows there are once the sequence holds so many tokens."""
    reach: int | None = None
    """How many of the last rows later tokens may ask for; None for all."""

    def first_needed(self, length: int) -> int:
        """The first row that a sequence of this length, or any longer one, may still ask for."""
        return 0 if self.reach is None else max(self.num_rows(length) - self.reach, 0)

    def most_pages(self, num_tokens: int, per_call: int, page_size: int, max_rollback: int) -> int:
        """Pages that a sequence holds at most, up to `num_tokens` tokens that come `per_call` at a time."""
        whole = -(-self.num_rows(num_tokens) // page_size)
        if self.reach is None:
            return whole
        near = self.reach + max_rollback + per_call
        return min(whole, -(-near // page_size) + 1)  # one more, as they need not begin with a page


def streams(config: NSAConfig, *, shared_kv: bool) -> tuple[Stream, ...]:
    """What a sequence keeps. With keys of their own, old tokens of the window and the source are not needed again."""

    def blocks(length: int) -> int:
        return num_compressed_blocks(length, config)

    def count(length: int) -> int:
        return length

    compressed = Stream("compressed", blocks)
    if shared_kv:
        return compressed, Stream("tokens", count)
    source, window = Stream("source", count, config.l - 1), Stream("window", count, config.w - 1)
    return compressed, source, Stream("selected", count), window


class PageAllocator:
    """Counts the sequences that hold each page; a page that none holds is free."""

    def __init__(self, num_pages: int) -> None:
        self._ref_counts = [0] * num_pages
        self._ref_counts[NULL_PAGE] = 1
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._ref_counts[page]

    def allocate(self) -> int:
        """A free page, now held once."""
        page = self._free.pop()
        self._ref_counts[page] = 1
        return page

    def share(self, page: int) -> None:
        """Held once more."""
        if page != NULL_PAGE:
            self._ref_counts[page] += 1

    def free(self, page: int) -> None:
        """Held once less; a page that nobody holds is free again."""
        if page == NULL_PAGE:
            return
        if self._ref_counts[page] < 1:
            raise RuntimeError(f"page {page} is free and was given back once more")
        self._ref_counts[page] -= 1
        if not self._ref_counts[page]:
            self._free.append(page)


@dataclass
class PageTable:
    """The pages of one stream of one sequence."""

    pages: array[int]
    """The page of each `page_size` rows, as wide as the longest sequence; NULL_PAGE where there is none."""
    first_row: int = 0
    """Rows before this one were released."""
    end: int = 0
    """Pages from this one on were never taken."""
    version: int = 0
    """Changes so far, by which a copy on the device is known to be out of date."""

    def __setitem__(self, index: int, page: int) -> None:
        self.pages[index] = page
        self.version += 1

    def held(self) -> Iterator[int]:
        """Every page of it."""
        return (page for page in self.pages[: self.end] if page != NULL_PAGE)
