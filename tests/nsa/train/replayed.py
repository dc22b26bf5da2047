"""A stand-in for a CUDA graph, on a CPU; and a run with it: `python -m tests.nsa.train.replayed run --profile FILE`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest import mock

import torch

from nsa.train import distributed, trainer
from nsa.train.__main__ import main
from nsa.train.cuda_graph import CapturedGraph, GraphedPass
from nsa.train.data.packing import Batch


class EagerReplay(GraphedPass):
    """Does each pass again, and reads and writes where a graph would."""

    captures: list[Batch]

    def _capture(self, batch: Batch) -> CapturedGraph:
        self.captures = [*getattr(self, "captures", []), batch]
        loss = torch.zeros(())
        graph = SimpleNamespace(replay=lambda: loss.copy_(self._pass(batch)))
        return CapturedGraph(cast(torch.cuda.CUDAGraph, graph), batch, loss)


if __name__ == "__main__":
    with mock.patch.object(trainer, "GraphedPass", EagerReplay), mock.patch.object(trainer, "_require_gpu"):
        distributed.exit_with_threads(main())
