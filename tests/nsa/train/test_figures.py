"""When the figures of a step are read."""

from __future__ import annotations

import pytest
import torch

from nsa.train.figures import DEPTH, OnTheirWay


@pytest.mark.parametrize("in_step", [False, True])
def test_ranks_read_a_step_when_so_many_are_on_their_way_whatever_is_done(in_step: bool) -> None:
    """Each rank answers some figures with a collective, so that all must read them in the same step."""
    coming: OnTheirWay[int] = OnTheirWay(in_step=in_step)
    read = []
    for step in range(5):
        coming.ask(step, {"loss": torch.tensor(float(step))}, (0.0, 1.0))
        read.append([arrived.told for arrived in coming.arrived()])
    assert read == ([[step] for step in range(5)] if not in_step else [[]] * (DEPTH - 1) + [[0], [1], [2], [3]])
    left = [arrived.told for arrived in coming.arrived(all_of_them=True)]
    assert left == ([4] if in_step else [])
