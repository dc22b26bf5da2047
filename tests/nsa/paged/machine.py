"""A PagedCache beside plain lists: what each sequence holds, who owns each page, and when there are too few."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nsa import NativeSparseAttention, NSAConfig, OutOfPagesError, PagedCache
from nsa.geometry import num_compressed_blocks
from nsa.paged.allocator import NULL_PAGE, Stream
from nsa.paged.cache import PagedRows
from nsa.paged.tables import PageTables

CONFIG = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=6)
MAX_TOKENS, MAX_ROLLBACK, MAX_SEQUENCES, CHANNELS = 60, 3, 6, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCE, SELECTED, WINDOW, VALUE = 0, 1000, 2000, 5000
"""What is added to a token where it is written as a key of a branch, and as a value."""


def first_held(stream: str, length: int) -> int:
    """The first token that a stream must still have when there are so many."""
    if stream == "window":
        return max(length - CONFIG.w + 1, 0)
    return min(num_compressed_blocks(length, CONFIG) * CONFIG.d, length) if stream == "source" else 0


class PagedMachine(RuleBasedStateMachine):
    """Every operation of the cache, with keys that say which token of which branch they are."""

    backend, dtype = "auto", torch.float64
    """Who writes the rows, and their type."""

    @initialize(shared_kv=st.booleans(), page_size=st.sampled_from([8, 16]), num_pages=st.integers(4, 24))
    def make(self, shared_kv: bool, page_size: int, num_pages: int) -> None:
        sizes = (2, 1, 1, CHANNELS, CHANNELS, CONFIG)
        self.layer = NativeSparseAttention(
            *sizes, shared_kv=shared_kv, backend=self.backend, dtype=self.dtype, device=DEVICE
        )
        self.cache = PagedCache(
            self.layer, num_pages=num_pages, max_tokens=MAX_TOKENS, page_size=page_size, max_rollback=MAX_ROLLBACK
        )
        for store in self.cache.stores:  # else a row that was never written may hold what the last machine wrote there
            store.k.fill_(torch.nan)
            store.v.fill_(torch.nan)
        self.num_pages, self.page_size, self.shared_kv = num_pages, page_size, shared_kv
        self.texts: dict[int, list[int]] = {}
        self.longest: dict[int, int] = {}
        self.batches: dict[tuple[int, ...], PagedRows] = {}
        self.next_token = 1

    @property
    def tables(self) -> PageTables:
        return self.cache.tables

    @precondition(lambda self: len(self.texts) < MAX_SEQUENCES)
    @rule()
    def new(self) -> None:
        sequence = self.cache.new()
        self.texts[sequence], self.longest[sequence] = [], 0

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), num_tokens=st.integers(0, 20))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        rows = self.some(data)
        if self.refused(rows, num_tokens):
            return
        self.write(rows, num_tokens)
        rows.commit(num_tokens)
        for i, sequence in enumerate(rows.sequences):
            text = self.texts[sequence]
            text += self.new_tokens(num_tokens, len(rows.sequences), i)
            self.longest[sequence] = max(self.longest[sequence], len(text))
        self.next_token += num_tokens * len(rows.sequences)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def append_one(self, data: st.DataObject) -> None:
        self.append(data, 1)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), num_tokens=st.integers(1, 20), told=st.booleans())
    def fail_midway(self, data: st.DataObject, num_tokens: int, told: bool) -> None:
        """A call that wrote its keys and then raised; the caller may say so or just go on."""
        rows = self.some(data)
        if not self.refused(rows, num_tokens):
            self.write(rows, num_tokens)
            self.next_token += num_tokens * len(rows.sequences)
            if told:
                rows.rollback()

    @precondition(lambda self: 0 < len(self.texts) < MAX_SEQUENCES)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.one(data)
        free = self.free_after_a_failure()
        other = self.cache.fork(sequence)
        self.texts[other], self.longest[other] = self.texts[sequence].copy(), self.longest[sequence]
        assert self.cache.num_free_pages == free

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), taken_back=st.one_of(st.integers(0, MAX_ROLLBACK), st.integers(0, MAX_TOKENS)))
    def truncate(self, data: st.DataObject, taken_back: int) -> None:
        sequence = self.one(data)
        text = self.texts[sequence]
        length = max(len(text) - taken_back, 0)
        refusal = None
        try:
            self.cache.truncate(sequence, length)
        except ValueError as error:
            refusal = str(error)
        if refusal is None:
            del text[length:]
            self.longest[sequence] = min(self.longest[sequence], length + MAX_ROLLBACK)  # so far back nothing is lost
            return
        shortest = self.longest[sequence] - MAX_ROLLBACK
        assert 0 < length < shortest
        assert not self.shared_kv
        assert f"at least {shortest}, or 0" in refusal

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.one(data)
        self.cache.free(sequence)
        del self.texts[sequence]
        self.batches = {key: rows for key, rows in self.batches.items() if sequence not in key}

    @invariant()
    def every_page_has_its_owners(self) -> None:
        if not hasattr(self, "texts"):
            return
        held: Counter[int] = Counter()
        for sequence in self.texts:
            pages = [page for kind in self.tables.kinds for page in self.tables.table(sequence, kind.name).pages]
            own = [page for page in pages if page != NULL_PAGE]
            assert len(set(own)) == len(own), "a page holds two stretches of one sequence"
            held.update(own)
        counted = {page: self.tables.allocator.ref_count(page) for page in range(1, self.num_pages + 1)}
        assert {page: owners for page, owners in counted.items() if owners} == dict(held), "owners"
        assert self.cache.num_free_pages == self.num_pages - len(held), "lost pages"
        assert len(set(self.tables.allocator._free)) == self.cache.num_free_pages, "a page is free twice"

    @invariant()
    def contents_are_equal(self) -> None:
        if not hasattr(self, "texts") or not self.texts:
            return
        assert self.cache.sequences == list(self.texts)
        held = [rows.flatten(0, 1)[:, 0].cpu() for rows in (self.cache.stores[0].k, self.cache.stores[0].v)]
        offsets = {"selected": SELECTED, "window": WINDOW, "source": SOURCE, "tokens": SOURCE}
        for sequence, text in self.texts.items():
            assert self.cache.length(sequence) == len(text)
            for kind in self.tables.kinds:
                if kind.name == "compressed":
                    self.equal(held, sequence, kind, 0, self.blocks(text))
                else:
                    first = self.tables.table(sequence, kind.name).first_row
                    shortest = max(self.longest[sequence] - MAX_ROLLBACK, 0)
                    assert first <= first_held(kind.name, shortest), "released too early"
                    self.equal(held, sequence, kind, first, [token + offsets[kind.name] for token in text[first:]])

    def equal(self, held: list[torch.Tensor], sequence: int, kind: Stream, first: int, wanted: list[float]) -> None:
        """Hold the rows from `first` on of a stream to what they should be, in keys and, plus VALUE, in values."""
        pages = self.tables.table(sequence, kind.name).pages
        rows = range(first, first + len(wanted))
        place = [pages[row // self.page_size] * self.page_size + row % self.page_size for row in rows]
        for stored, offset in zip(held, (0, VALUE), strict=True):
            found = stored[place] if place else torch.empty(0, CHANNELS)
            expected = torch.tensor(wanted, dtype=torch.float64)[:, None].expand(-1, CHANNELS) + offset
            assert torch.equal(found.double(), expected), f"{kind.name} of sequence {sequence}"

    def blocks(self, text: list[int]) -> list[float]:
        """The mean of each full block of a text."""
        firsts = range(0, num_compressed_blocks(len(text), CONFIG) * CONFIG.d, CONFIG.d)
        return [sum(text[first : first + CONFIG.l]) / CONFIG.l + SOURCE for first in firsts]

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.texts)))

    def some(self, data: st.DataObject) -> PagedRows:
        """A batch, the same object for the same sequences, so that its tables on the device grow old."""
        chosen = tuple(data.draw(st.lists(st.sampled_from(sorted(self.texts)), unique=True, min_size=1, max_size=3)))
        if chosen not in self.batches:
            self.batches[chosen] = self.cache.rows(chosen)
        return self.batches[chosen]

    def refused(self, rows: PagedRows, num_tokens: int) -> bool:
        """Prepare a step; whether that was refused, which it must be just where there is no room."""
        too_long = any(len(self.texts[sequence]) + num_tokens > MAX_TOKENS for sequence in rows.sequences)
        free = self.free_after_a_failure()
        wanted = self.wanted_pages(rows, num_tokens)
        error = ValueError if too_long else OutOfPagesError
        if not too_long and wanted <= free:
            rows.prepare(num_tokens)
            assert self.cache.num_free_pages == free - wanted, "pages taken"
            return False
        with pytest.raises(error, match="max_tokens" if too_long else f"take {wanted} pages; {free} are free"):
            rows.prepare(num_tokens)
        assert self.cache.num_free_pages == free
        return True

    def free_after_a_failure(self) -> int:
        """Free pages, once those of a step that failed are given back, as the next operation does."""
        self.cache.rollback()
        return self.cache.num_free_pages

    def wanted_pages(self, rows: PagedRows, num_tokens: int) -> int:
        """Fresh pages that a step takes, counted row by row: where there is none, or where another reads it too."""
        owners: Counter[int] = Counter()
        for sequence in self.texts:
            owners.update(page for kind in self.tables.kinds for page in self.tables.table(sequence, kind.name).pages)
        wanted = 0
        for sequence in rows.sequences:
            length = len(self.texts[sequence])
            for kind in self.tables.kinds:
                written = range(kind.num_rows(length), kind.num_rows(length + num_tokens))
                pages = self.tables.table(sequence, kind.name).pages
                for index in sorted({row // self.page_size for row in written}):
                    old = pages[index] if index < len(pages) else NULL_PAGE
                    if old == NULL_PAGE or owners[old] > 1:
                        wanted += 1
                        owners[old] -= 1
        return wanted

    def new_tokens(self, num_tokens: int, batch: int, row: int) -> list[int]:
        return [self.next_token + batch * i + row for i in range(num_tokens)]

    def write(self, rows: PagedRows, num_tokens: int) -> None:
        """What a layer does with new keys and values."""
        batch = len(rows.sequences)
        new = [self.new_tokens(num_tokens, batch, row) for row in range(batch)]
        keys = torch.tensor(new, dtype=self.dtype, device=DEVICE)[..., None, None].expand(-1, -1, 1, CHANNELS)
        offsets = (SOURCE,) * 3 if self.shared_kv else (SOURCE, SELECTED, WINDOW)
        k = tuple(keys + offset for offset in offsets)
        v = tuple(keys + offset + VALUE for offset in offsets)
        with torch.no_grad():
            self.cache.stores[0].append(k, v, rows.new_tokens(num_tokens))  # type: ignore[arg-type]
