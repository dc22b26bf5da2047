"""Who holds which tokens: balanced, and PyTorch's order among those that are accepted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa import NSAConfig
from nsa.parallel import TokenOrder, deal_documents, from_indices, head_tail

BALANCED = 0.02
"""Above the mean work of a rank, the most that an order of a long sequence may give one."""


def _end_to_end(tokens: int, ranks: int) -> TokenOrder:
    return TokenOrder(tokens, tuple(((r * tokens // ranks, (r + 1) * tokens // ranks),) for r in range(ranks)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_head_tail_balances_and_end_to_end_does_not(ranks: int) -> None:
    """What contiguous shares cost is why there is an order at all."""
    config = NSAConfig()
    assert head_tail(65536, ranks).imbalance(config) < BALANCED
    assert _end_to_end(65536, ranks).imbalance(config) > 1 - 1 / ranks - BALANCED


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(65536,), (40000, 200, 25336), (4096,) * 16, (60000, *(8,) * 692)])
def test_documents_are_dealt_by_what_they_see(lengths: tuple[int, ...], ranks: int) -> None:
    """One long document between short ones is what head-tail order cannot balance."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    order = deal_documents(bounds, ranks, NSAConfig())
    assert order.imbalance(NSAConfig(), bounds) < BALANCED
    tokens = [order.length(rank) for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= 65536 // (16 * ranks)


def test_head_tail_of_documents_would_not_balance() -> None:
    bounds = [0, 40000, 40200, 65536]
    assert head_tail(65536, 4).imbalance(NSAConfig(), bounds) > 5 * BALANCED


def test_work_is_counted_out() -> None:
    config = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=8)
    bounds = (0, 5, 5, 17)
    seen = [
        sum(c * 2 + 3 <= t - start for c in range(9)) for start, end in ((0, 5), (5, 17)) for t in range(start, end)
    ]
    order = TokenOrder(17, (((0, 3), (9, 12)), ((3, 9), (12, 17))))
    assert order.work(config, bounds) == [sum(seen[:3] + seen[9:12]), sum(seen[3:9] + seen[12:])]


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=6))
def test_every_token_has_one_rank(tokens: int, ranks: int, tile: int, cuts: list[int]) -> None:
    bounds = sorted({0, tokens, *(cut % (tokens + 1) for cut in cuts)})
    bounds = bounds if len(bounds) > 1 else [0, tokens]
    for order in (head_tail(tokens, ranks), deal_documents(bounds, ranks, NSAConfig(), tile=tile)):
        held = torch.cat([order.tokens(rank) for rank in range(ranks)])
        assert held.sort().values.tolist() == list(range(tokens))
        assert [order.length(rank) for rank in range(ranks)] == [len(order.tokens(rank)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pytorchs_order_is_accepted(ranks: int) -> None:
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    indices = balancer._HeadTailLoadBalancer(64, ranks, "cpu")._generate_indices()
    assert from_indices(indices, ranks) == head_tail(64, ranks)


@pytest.mark.parametrize(
    ("tokens", "pieces", "message"),
    [
        (8, (((0, 4),), ((5, 8),)), "order: token 4 is left out before the piece 5:8 of rank 1"),
        (8, (((0, 5),), ((4, 8),)), "order: token 4 is held twice before the piece 4:8 of rank 1"),
        (
            8,
            (((4, 8), (0, 2)), ((2, 4),)),
            "the pieces of rank 0 must ascend between 0 and 8; got tokens 0 to 2 behind 8",
        ),
        (8, (((0, 4),), ((4, 9),)), "the pieces of rank 1 must ascend between 0 and 8; got tokens 4 to 9"),
        (8, (((0, 4),), ((4, 7),)), "order: token 7 of 8 is held by no rank"),
    ],
)
def test_what_is_no_order(tokens: int, pieces: tuple[tuple[tuple[int, int], ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenOrder(tokens, pieces)


def test_indices_that_are_no_order() -> None:
    with pytest.raises(ValueError, match="2 ranks must divide the 3 indices"):
        from_indices(torch.arange(3), 2)
    with pytest.raises(ValueError, match="the pieces of rank 0 must ascend"):
        from_indices(torch.tensor([1, 0, 2, 3]), 2)
