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
from regression.detectors.host_cost import no_waiting

pytestmark = pytest.mark.gpu

BATCH, LENGTH = 3, 220
STARTS = (130, 5, 64)


def make(phi: str, shared_kv: bool, n_sel: int = 4) -> DecoderLM:
    torch.manual_seed(0)
    config = NSAConfig(l=8, d=4, l_sel=16, n_sel=n_sel, w=40, phi=phi)
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 8, "num_kv_heads": 2, "d_k": 32, "d_v": 16}
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


def differing(found: Tensor, wanted: Tensor) -> float:
    """Share of the rows [B, S, V] that differ by more than rounding."""
    return float((~torch.isclose(found, wanted, rtol=2e-3, atol=2e-3)).any(-1).double().mean())


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
        model(step_of(text, 0, size), rows)  # compiles, which may wait
        steps = [step_of(text, first, size) for first in range(size, 48, size)]  # across pages and blocks
        with no_waiting():
            for step in steps:
                model(step, rows)


@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(("n_sel", "flips"), [(14, 0.0), (4, 0.02)], ids=["all blocks", "a choice"])
def test_one_graph_serves_every_length(text: Tensor, shared_kv: bool, size: int, n_sel: int, flips: float) -> None:
    """A prefill's products round otherwise than a step's: where scores nearly tie, another block may be chosen."""
    model = make("avg", shared_kv, n_sel)
    with torch.no_grad():
        wanted = model(text)
    cache, sequences = prefilled(model, text)
    step = GraphedStep(model, cache.rows(sequences), size)
    assert [cache.length(sequence) for sequence in sequences] == list(STARTS)
    shares = []
    for first in range(0, 80, size):
        shares.append(differing(step(step_of(text, first, size)), step_of(wanted, first, size)))
        if first == 5 * size:  # a rejected step is taken back, and a fork writes to pages of its own
            for sequence in sequences:
                cache.truncate(sequence, cache.length(sequence) - size)
            cache.fork(sequences[0])
            shares.append(differing(step(step_of(text, first, size)), step_of(wanted, first, size)))
    assert sum(shares) / len(shares) <= flips


def test_generate_says_the_same_with_a_graph() -> None:
    model = make("avg", shared_kv=False)
    prompts = [[1, 2, 3], list(range(100)), [7]]
    plain, graphed = (
        list(generate(model, prompts, max_new_tokens=40, sampling=Sampling(0), eos=5, cuda_graph=graph))
        for graph in (False, True)
    )
    assert plain == graphed
