"""What only a GPU shows of decoding: no host sync, and one CUDA graph for every length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, PagedCache
from nsa.generate import generate
from nsa.graphed_step import GraphedStep
from nsa.model import DecoderLM, ModelConfig
from nsa.sampling import Sampling

pytestmark = pytest.mark.gpu

BATCH, LENGTH = 3, 220
STARTS = (130, 5, 64)


def make(phi: str, shared_kv: bool) -> DecoderLM:
    torch.manual_seed(0)
    config = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=40, phi=phi)
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_groups": 2, "d_k": 32, "d_v": 16}
    return DecoderLM(ModelConfig(**sizes, nsa=config, shared_kv=shared_kv)).cuda()  # type: ignore[arg-type]


def prefilled(model: DecoderLM, text: Tensor) -> tuple[PagedCache, list[int]]:
    cache = PagedCache(model.attentions(), num_pages=60, max_tokens=LENGTH, page_size=32)
    sequences = [cache.new() for _ in STARTS]
    with torch.no_grad():
        for row, start in enumerate(STARTS):
            model(text[row : row + 1, :start], cache.rows(sequences[row : row + 1]))
    return cache, sequences


def step_of(text: Tensor, first: int, size: int) -> Tensor:
    return torch.stack([text[row, start + first : start + first + size] for row, start in enumerate(STARTS)])


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.fixture
def text() -> Tensor:
    return torch.randint(256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_step_waits_for_nothing(text: Tensor, phi: str, size: int) -> None:
    model = make(phi, shared_kv=False)
    cache, sequences = prefilled(model, text)
    rows = cache.rows(sequences)
    with torch.no_grad():
        for number in range(0, 48, size):  # across pages, blocks, and the first call, which compiles
            if number == size:
                torch.cuda.set_sync_debug_mode("error")
            try:
                model(step_of(text, number, size), rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_one_graph_serves_every_length(text: Tensor, shared_kv: bool, size: int) -> None:
    model = make("avg", shared_kv)
    with torch.no_grad():
        wanted = model(text)
    cache, sequences = prefilled(model, text)
    step = GraphedStep(model, cache.rows(sequences), size)
    assert [cache.length(sequence) for sequence in sequences] == list(STARTS)
    for first in range(0, 80, size):
        check(step(step_of(text, first, size)), step_of(wanted, first, size))
        if first == 5 * size:  # a rejected step is taken back, and a fork writes to pages of its own
            for sequence in sequences:
                cache.truncate(sequence, cache.length(sequence) - size)
            cache.fork(sequences[0])
            check(step(step_of(text, first, size)), step_of(wanted, first, size))


def test_generate_says_the_same_with_a_graph() -> None:
    model = make("avg", shared_kv=False)
    prompts = [[1, 2, 3], list(range(100)), [7]]
    plain, graphed = (
        list(generate(model, prompts, max_new_tokens=40, sampling=Sampling(0), eos=5, cuda_graph=graph))
        for graph in (False, True)
    )
    assert plain == graphed
