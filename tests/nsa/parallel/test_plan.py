"""What a rank computes is told of which sequence it is a part."""

from __future__ import annotations

import pytest
import torch

from nsa import NSAConfig
from nsa.parallel import order
from nsa.parallel.plan import Plan

CONFIG = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=24)


@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_of_a_piece_are_chosen_by_the_whole_sequence(rank: int) -> None:
    dealt = order.head_tail(512, 2)
    plan = Plan(dealt, None, rank, CONFIG, torch.device("cpu"), grid=1, keys_from_document=True)  # type: ignore[arg-type]
    layouts = [layout for piece in plan.queries for layout in (piece.layout, piece.window)]
    assert layouts
    assert {layout.sequence_tokens for layout in layouts} == {512}
