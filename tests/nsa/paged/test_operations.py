"""The paged cache against plain lists, at random; and the faults that this must find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from nsa.paged import allocator, store
from nsa.paged.allocator import NULL_PAGE, PageAllocator
from nsa.paged.tables import PageTables
from tests.nsa.paged.machine import CONFIG, PagedMachine

NIGHTLY_EXAMPLES, STEPS = 300, 50  # four of five steps are one operation of the cache: 10,000 at least

TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(settings.default, max_examples=100, stateful_step_count=STEPS)


@pytest.mark.nightly
def test_ten_thousand_operations_lose_nothing() -> None:
    run_state_machine_as_test(PagedMachine, settings=settings(max_examples=NIGHTLY_EXAMPLES, stateful_step_count=STEPS))


def _forgotten_copy(patch: pytest.MonkeyPatch) -> None:
    """A page that another sequence reads too is written all the same."""
    healthy = PageTables._plan

    def plan(self: PageTables, *arguments: Any) -> list[tuple[allocator.PageTable, int]]:
        return [(table, index) for table, index in healthy(self, *arguments) if table.pages[index] == NULL_PAGE]

    patch.setattr(PageTables, "_plan", plan)


def _empty_copy(patch: pytest.MonkeyPatch) -> None:
    """The copy of a page is listed and never made."""
    patch.setattr(store.PageStore, "copy", lambda self, pages: None)


def _leak_at_truncate(patch: pytest.MonkeyPatch) -> None:
    """Pages behind the end leave the table and never get back to the pool."""

    def trim(self: PageTables, state: Any) -> None:
        for kind in self.kinds:
            table = state.tables[kind.name]
            end = -(-kind.num_rows(state.length) // self.page_size)
            for index in range(end, table.end):
                table[index] = NULL_PAGE
            table.end = min(table.end, end)
            table.first_row = min(table.first_row, kind.num_rows(state.length))

    patch.setattr(PageTables, "_trim", trim)


def _double_free(patch: pytest.MonkeyPatch) -> None:
    """A truncated sequence still lists what it gave back, and gives it back again when it ends."""

    def trim(self: PageTables, state: Any) -> None:
        for kind in self.kinds:
            table = state.tables[kind.name]
            for index in range(-(-kind.num_rows(state.length) // self.page_size), table.end):
                self.allocator.free(table.pages[index])

    patch.setattr(PageTables, "_trim", trim)


def _unshared_fork(patch: pytest.MonkeyPatch) -> None:
    """A fork does not count as an owner."""
    patch.setattr(PageAllocator, "share", lambda self, page: None)


def _early_release(patch: pytest.MonkeyPatch) -> None:
    """The window's pages go before the last query that looks at them."""
    healthy = allocator.streams

    def streams(*arguments: Any, **options: Any) -> tuple[allocator.Stream, ...]:
        found = healthy(*arguments, **options)
        return tuple(replace(stream, reach=0) if stream.name == "window" else stream for stream in found)

    patch.setattr("nsa.paged.cache.streams", streams)


def _old_tables(patch: pytest.MonkeyPatch) -> None:
    """The device is told of a table once, and not when it changes."""
    patch.setattr(allocator.PageTable, "__setitem__", lambda self, index, page: self.pages.__setitem__(index, page))


def _late_blocks(patch: pytest.MonkeyPatch) -> None:
    """A step compresses one block at most."""
    healthy = store.next_blocks

    def next_blocks(*arguments: Any) -> tuple[Tensor, Tensor]:
        source, blocks = healthy(*arguments)
        return source[:, : CONFIG.l], blocks[:, :1]

    patch.setattr(store, "next_blocks", next_blocks)


FAULTS = {
    _forgotten_copy: "pages taken|take [0-9]+ pages",
    _empty_copy: "of sequence",
    _leak_at_truncate: "owners",
    _double_free: "owners|given back once more|free twice|free$",
    _unshared_fork: "owners",
    _early_release: "released too early",
    _old_tables: "of sequence",
    _late_blocks: "compressed of sequence",
}


@pytest.mark.parametrize("inject", FAULTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, inject: Any) -> None:
    inject(monkeypatch)
    effort = settings(
        max_examples=500,
        stateful_step_count=30,
        derandomize=True,
        phases=[Phase.generate],  # it need not be small
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises((AssertionError, RuntimeError), match=FAULTS[inject]):
        run_state_machine_as_test(PagedMachine, settings=effort)
