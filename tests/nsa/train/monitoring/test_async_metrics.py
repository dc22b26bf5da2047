"""When the figures of a step are read."""

from __future__ import annotations

import pytest
import torch

from nsa.train.monitoring.async_metrics import DEPTH, AsyncMetrics, StepTimes


@pytest.mark.parametrize("synchronous", [False, True])
def test_ranks_read_a_step_when_so_many_are_on_their_way_whatever_is_done(synchronous: bool) -> None:
    """Each rank answers some figures with a collective, so that all must read them in the same step."""
    pending: AsyncMetrics[int] = AsyncMetrics(synchronous=synchronous)
    read = []
    for step in range(5):
        pending.submit(step, {"loss": torch.tensor(float(step))}, StepTimes(0.0, 1.0, 1.0))
        read.append([host.context for host in pending.ready()])
    assert read == ([[step] for step in range(5)] if not synchronous else [[]] * (DEPTH - 1) + [[0], [1], [2], [3]])
    left = [host.context for host in pending.ready(wait=True)]
    assert left == ([4] if synchronous else [])
