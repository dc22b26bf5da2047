"""Block geometry against sets of tokens, and layouts against loops over documents."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa import NSAConfig, geometry
from nsa.geometry import Layout
from tests.laws.cases import configs, lengths

CPU = torch.device("cpu")
TOKENS = st.integers(0, 60)


def _blocks(tokens: int, config: NSAConfig) -> list[set[int]]:
    """Full compression blocks as sets of tokens."""
    starts = range(0, tokens, config.d)
    return [set(range(first, first + config.l)) for first in starts if first + config.l <= tokens]


@given(configs(), TOKENS)
def test_compressed_blocks_are_the_full_ones(config: NSAConfig, tokens: int) -> None:
    """Also as a tensor, and per token: those that end at or before it."""
    expected = len(_blocks(tokens, config))
    assert geometry.num_compressed_blocks(tokens, config) == expected
    assert geometry.num_compressed_blocks(torch.tensor([tokens]), config).tolist() == [expected]
    if tokens:
        assert geometry.num_visible_compressed(tokens - 1, config) == expected


@given(configs(), TOKENS)
def test_selection_blocks_hold_every_token(config: NSAConfig, tokens: int) -> None:
    assert geometry.num_selection_blocks(tokens, config) == len({t // config.l_sel for t in range(tokens)})


@given(configs(), st.integers(0, 20), st.integers(0, 12))
def test_overlap_counts_shared_tokens(config: NSAConfig, c: int, j: int) -> None:
    """And overlap_offsets names exactly the pairs that share one."""
    compressed = set(range(c * config.d, c * config.d + config.l))
    shared = compressed & set(range(j * config.l_sel, (j + 1) * config.l_sel))
    assert geometry.overlap_tokens(c, j, config) == len(shared)
    assert (c - j * config.l_sel // config.d in geometry.overlap_offsets(config)) == bool(shared)


@given(configs(), st.integers(0, 12), st.integers(0, 12))
def test_forced_are_the_first_and_the_last(config: NSAConfig, j: int, current: int) -> None:
    first = list(range(current + 1))[: config.init_blocks]
    last = list(range(current + 1))[max(current + 1 - config.local_blocks, 0) :]
    assert bool(geometry.is_forced(j, current, config)) == (j in {*first, *last})


@st.composite
def _documents(draw: st.DrawFn) -> tuple[NSAConfig, list[int]]:
    config = draw(configs())
    return config, draw(st.lists(lengths(config), min_size=1, max_size=4))


def _packed(config: NSAConfig, documents: list[int]) -> tuple[Layout, list[tuple[int, int]]]:
    bounds = [sum(documents[:i]) for i in range(len(documents) + 1)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return Layout(bounds[-1], bounds[-1], config, CPU, cu_seqlens), list(pairwise(bounds))


@given(_documents())
def test_packed_layout_restarts_in_each_document(drawn: tuple[NSAConfig, list[int]]) -> None:
    """Positions, windows and slots of the compressed blocks, against loops."""
    config, _ = drawn
    layout, documents = _packed(*drawn)
    rows = [(start, t) for start, end in documents for t in range(end - start)]
    slots = [start + c for start, end in documents for c in range(0, end - start - config.l + 1, config.d)]
    assert layout.positions.tolist() == [t for _, t in rows]
    assert layout.starts.tolist() == [start for start, _ in rows]
    lo, hi = (bound.tolist() for bound in layout.window_interval)
    assert lo == [start + max(t - config.w + 1, 0) for start, t in rows]
    assert hi == [start + t + 1 for start, t in rows]
    first, used = layout.slot_tokens
    assert first[used].tolist() == slots
    assert used.tolist() == [i < len(slots) for i in range(layout.num_slots)]
    assert layout.num_slots >= len(slots)


@given(_documents())
def test_compressed_interval_is_what_each_query_sees(drawn: tuple[NSAConfig, list[int]]) -> None:
    config, _ = drawn
    layout, documents = _packed(*drawn)
    lo, hi = (bound.tolist() for bound in layout.compressed_interval)
    row = first = 0
    for start, end in documents:
        for t in range(end - start):
            assert (lo[row], hi[row]) == (first, first + len(_blocks(t + 1, config)))
            row += 1
        first += len(_blocks(end - start, config))


@given(configs(), st.integers(0, 20), st.integers(0, 30))
def test_fewer_queries_stand_at_the_end(config: NSAConfig, queries: int, more: int) -> None:
    """And the spans known on the host hold every interval of their rows."""
    layout = Layout(queries, queries + more, config, CPU)
    assert layout.tokens.tolist() == layout.positions.tolist() == list(range(more, more + queries))
    for first in range(queries):
        for interval, span in (
            (layout.compressed_interval, layout.compressed_span(first, queries)),
            (layout.window_interval, layout.window_span(first, queries)),
        ):
            lo, hi = (bound[first:].tolist() for bound in interval)
            assert span[0] <= min(lo)
            assert span[1] >= max(hi)


@pytest.mark.parametrize(("tokens", "expected"), [(31, 0), (32, 1), (47, 1), (48, 2), (64, 3)])
def test_papers_blocks(tokens: int, expected: int) -> None:
    """l = 32, d = 16: a block every 16 tokens, from the 32nd token on."""
    assert geometry.num_compressed_blocks(tokens, NSAConfig()) == expected
