"""What only long texts reach, on short ones: several chunks, steps, splits and tiles, in each fast backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa import NSAConfig, torch_backend
from nsa.torch_backend import grouping, selected
from nsa.torch_backend import scores as torch_scores
from tests.laws import test_aux, test_lse, test_memory, test_selection
from tests.laws.cases import Case
from tests.laws.parts import BRANCHES_AND_ALL, Parts
from tests.laws.test_precision import values_and_gradients_within_budget

pytestmark = pytest.mark.usefixtures("device")  # on a GPU, where there is one
PLAIN = Case(
    config=NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=13),
    num_kv_heads=2,
    group=2,
    dk=24,
    dv=16,
    queries=61,
    keys=61,
    seed=33,
)
CASES = {
    "plain": PLAIN,
    "packed": replace(PLAIN, documents=(17, 0, 1, 30, 13)),
    "chunk": replace(PLAIN, queries=29, keys=61),
    "batch": replace(PLAIN, batch=2, queries=41, keys=41),
}
TORCH: list[tuple[Any, str, int]] = [
    (torch_backend, "COMPRESSED_CHUNK", 16),
    (torch_backend, "WINDOW_CHUNK", 9),
    (torch_scores, "CHUNK", 16),
    (grouping, "MIN_TOKENS_PER_STEP", 8),  # eight steps, none of which begins at a block
    (grouping, "ROWS_PER_TILE", 6),  # several tiles of one block
    (grouping, "BATCH_ELEMENTS", 2**10),  # several batches of tiles
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
class TestTorchInPieces:
    @pytest.fixture(autouse=True)
    def pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name, value in TORCH:
            monkeypatch.setattr(module, name, value)

    @pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
    def test_values_and_gradients(self, case: Case, branch: str) -> None:
        parts = Parts("torch", torch.device("cpu"))
        values_and_gradients_within_budget(parts, case, branch)
        test_lse.gradients_through_lse(parts, case, branch, alone=False)

    def test_choices_and_counts(self, case: Case) -> None:
        parts = Parts("torch", torch.device("cpu"))
        test_selection.test_selection_follows_equation_9.check(parts, case)
        test_aux.test_keys_read_are_those_that_were_read.check(parts, case)

    def test_few_pairs_read_keys_one_by_one(self, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
        """A step of decoding does not prepare every key; what it reads is the same, also through strides."""
        for many in (0, 10**9):
            monkeypatch.setattr(selected, "MANY", many)
            parts = Parts("torch", torch.device("cpu"))
            values_and_gradients_within_budget(parts, case, "selected")
        test_memory.test_strides_do_not_matter.check(parts, case, "selected")


def interpreted() -> Parts:
    pytest.importorskip("triton")
    return Parts("triton", torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.parametrize("documents", [None, (9, 0, 15)], ids=["plain", "packed"])
def test_programs_share_the_queries_of_a_tile_of_keys(
    monkeypatch: pytest.MonkeyPatch, documents: tuple[int, ...] | None
) -> None:
    """The compressed branch, backward: partial sums of several programs, some of which have no query."""
    parts = interpreted()
    from nsa.triton_backend import compressed_window

    monkeypatch.setattr(compressed_window, "MIN_TOKENS_PER_SPLIT", 2)
    case = replace(
        PLAIN, num_kv_heads=1, group=8, queries=24, keys=24, documents=documents
    )  # tiles of 8 tokens or fewer
    for dtype in (torch.float32, torch.bfloat16):
        values_and_gradients_within_budget(parts, replace(case, dtype=dtype), "compressed")


def test_partial_sums_of_programs_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 they give what one program gives, but for the last rounding, also where they nearly cancel."""
    parts = interpreted()
    from nsa.triton_backend import compressed_window

    case = replace(PLAIN, num_kv_heads=1, group=8, queries=24, keys=24, dtype=torch.bfloat16)
    x = case.inputs(parts.device)
    upstream = case.noise(x.q[..., : case.dv])
    whole = parts.gradients(case, x, "compressed", upstream)
    monkeypatch.setattr(compressed_window, "MIN_TOKENS_PER_SPLIT", 2)
    for one, other in zip(whole[1:3], parts.gradients(case, x, "compressed", upstream)[1:3], strict=True):
        torch.testing.assert_close(other, one, rtol=2**-7, atol=1e-5 * one.abs().max().item())


@pytest.mark.parametrize("queries", [3, 17])
def test_programs_share_the_scores_of_a_tile_of_queries(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """Many blocks for few queries: each program has some tiles of blocks, and a chunk has some of the queries."""
    parts = interpreted()
    from nsa.triton_backend import scores

    monkeypatch.setattr(scores, "TILES_PER_SPLIT", 1)
    monkeypatch.setattr(scores, "CHUNK", 8)
    config = NSAConfig(l=1, d=1, l_sel=4, n_sel=6, w=8, init_blocks=0, local_blocks=1)
    case = replace(PLAIN, config=config, num_kv_heads=1, group=3, queries=queries, keys=300)
    test_selection.test_selection_follows_equation_9.check(parts, case)
    x = case.inputs(parts.device)
    reference = Parts("reference", parts.device)
    assert torch.equal(parts.select(case, x), reference.select(case, x))


@pytest.mark.parametrize("documents", [None, (11, 1, 9, 3)], ids=["plain", "packed"])
def test_a_chunk_of_the_choice_begins_anywhere(
    monkeypatch: pytest.MonkeyPatch, documents: tuple[int, ...] | None
) -> None:
    """Chunks of 5 queries, also by the memory that scores may take, and few rows of the choice per program."""
    parts = interpreted()
    from nsa.triton_backend import scores, topk

    case = replace(PLAIN, queries=24, keys=24, documents=documents)
    wanted = Parts("reference", parts.device).select(case, case.inputs(parts.device))
    for name, value in (("CHUNK", 5), ("SCRATCH", 1)):
        monkeypatch.setattr(scores, name, value)
        monkeypatch.setattr(topk, "ELEMENTS", 16)
        assert torch.equal(parts.select(case, case.inputs(parts.device)), wanted)
