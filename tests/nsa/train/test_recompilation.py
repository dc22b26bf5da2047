"""What a training run meets compiles a block once: batches of any number of packed documents, and validations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nsa import NSAConfig, backends
from nsa.model import ModelConfig
from nsa.train import trainer
from nsa.train.data import packing
from nsa.train.data.packing import Batch
from nsa.train.distributed import Ranks
from nsa.train.settings import Runtime, Settings, Train
from nsa.train.trainer import Trainer

TOKENS = 16
MODEL = ModelConfig(16, 1, 2, 1, 16, 16, nsa=NSAConfig(l=4, d=4, l_sel=4, n_sel=3, w=4), backend="triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[list[Any]]:
    """The graphs that are made of blocks while a trainer compiles them."""
    probe = torch.zeros(1, 1, 1, 16, device=device)
    if reason := backends.why_not_triton(probe, probe):
        pytest.skip(reason)
    made: list[Any] = []

    def counted(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled(module, backend=counted))
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def batch(num_documents: int) -> Batch:
    """TOKENS tokens of two documents; as many more of them are empty."""
    bounds = torch.tensor([0, 7, TOKENS], dtype=torch.int32)
    tokens = torch.arange(TOKENS)[None] % 256
    return Batch(tokens, tokens.roll(-1), TOKENS, packing.with_empty_documents(bounds, num_documents))


def validated(device: torch.device) -> None:
    runtime = Runtime(device=device.type, precision="fp32", compile=True)
    settings = Settings("recompilation", MODEL, runtime, Train(steps=1, seq_len=TOKENS, batch_size=1))
    own = Trainer(settings, device, Ranks())
    for multiple in (1, 2, 3):
        own.validate([batch(multiple * packing.BOUNDS)])


def test_more_documents_make_no_graph_anew(device: torch.device, graphs: list[Any]) -> None:
    validated(device)
    assert len(graphs) == 1


def test_the_count_sees_what_is_made_anew(
    device: torch.device, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "_any_number_of_documents", lambda *_: None)
    validated(device)
    assert len(graphs) == 2
