"""What one launch says of a layout is what `nsa.geometry.Layout` computes."""

from __future__ import annotations

import itertools

import pytest
import torch

import nsa
from nsa.geometry import Layout

pytest.importorskip("triton")

from nsa.triton_backend import places

CONFIGS = (nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=13), nsa.NSAConfig(l=6, d=6, l_sel=6, n_sel=4, w=1))
DOCUMENTS = ((30, 1, 0, 39), (0, 0, 3, 2, 0), (1,) * 37, (*range(1, 13), 0), (70,), (2, 300, 0))
CALLS = [(70, 70), (7, 90), (1, 1), (1, 300), (0, 5), (129, 129), (0, 0)]
NAMES = ("starts", "positions", "blocks_before")
PAIRS = (
    "compressed_interval", "window_interval", "block_tokens", "slot_tokens", "compressed_queries", "window_queries",
)  # fmt: skip


def agree(*arguments: object) -> None:
    found, wanted = places.located(Layout(*arguments)), Layout(*arguments)  # type: ignore[arg-type]
    for name in NAMES:
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    for name in PAIRS:
        for one, other in zip(getattr(found, name), getattr(wanted, name), strict=True):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("queries", "keys"), CALLS)
def test_of_one_document(device: torch.device, config: nsa.NSAConfig, queries: int, keys: int) -> None:
    agree(queries, keys, config, device)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_of_many_documents(device: torch.device, config: nsa.NSAConfig, lengths: tuple[int, ...]) -> None:
    documents = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    agree(sum(lengths), sum(lengths), config, device, documents)


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [0, 17, 1000])
def test_at_real_sizes(device: torch.device, mean: int) -> None:
    """65,536 tokens, as one document or as thousands."""
    tokens, config = 65536, nsa.NSAConfig()
    if mean == 0:
        agree(tokens - 5, tokens, config, device)
        return
    generator = torch.Generator().manual_seed(mean)
    cuts = torch.randint(tokens + 1, (tokens // mean,), generator=generator).sort().values
    documents = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).int().to(device)
    agree(tokens, tokens, config, device, documents)
