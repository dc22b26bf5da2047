"""Which blocks are chosen: Eq. 8 to 12, the forced ones, ties, one set per group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

import nsa
from nsa import NSAConfig, geometry
from tests.laws import oracle
from tests.laws.budget import greatest
from tests.laws.cases import Case, cases
from tests.laws.parts import Parts, law


@law(cases(least_keys=1))
def test_indices_are_distinct_ascending_causal_and_padded(parts: Parts, case: Case) -> None:
    """int32 [B, S, Hkv, n]; n blocks or all that start at or before t; −1 stands at the end only."""
    indices = parts.select(case, case.inputs(parts.device))
    n = case.config.n_sel
    assert indices.dtype == torch.int32
    assert indices.shape == (case.batch, case.queries, case.num_kv_heads, n)
    used = indices >= 0
    candidates = oracle.forced_blocks(case, parts.device)[1].sum(-1).clamp(max=n)
    assert torch.equal(used.sum(-1), candidates[None, :, None].expand(indices.shape[:3]))
    assert torch.equal(used, used.sort(-1, descending=True).values)
    assert (indices[~used] == -1).all()
    assert ((indices.diff(dim=-1) > 0) | ~used[..., 1:]).all()
    tokens, starts = oracle.query_tokens(case, parts.device)
    assert (indices * case.config.l_sel <= (tokens - starts)[None, :, None, None]).all()


@law(cases(least_keys=1))
def test_forced_blocks_are_in_every_row(parts: Parts, case: Case) -> None:
    """The first blocks and those that end with the query's own, in the first rows and the last."""
    chosen = oracle.chosen_blocks(case, parts.select(case, case.inputs(parts.device)))
    forced = oracle.forced_blocks(case, parts.device)[0]
    assert (chosen | ~forced[None, :, None]).all()


@law(cases(least_keys=1))
def test_selection_follows_equation_9(parts: Parts, case: Case) -> None:
    """No block left out has a higher score than a chosen one that is not forced, but for float32's own rounding."""
    x = case.inputs(parts.device)
    follows_scores(parts, case, x.q, parts.compress(case, x)[0], x.cu_seqlens)


def follows_scores(
    parts: Parts, case: Case, q: torch.Tensor, k_cmp: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> None:
    """Against scores counted token by token in float64; what float32 itself gets wrong is what it may get wrong."""
    chosen = oracle.chosen_blocks(case, parts.select_from(case, q, k_cmp, cu_seqlens))
    score = oracle.block_scores(case, q, k_cmp)
    rounding = greatest(oracle.block_scores(case, q, k_cmp, torch.float32) - score)
    rounding += torch.finfo(torch.float32).eps * greatest(score)
    forced, candidate = (mask[None, :, None] for mask in oracle.forced_blocks(case, parts.device))
    worst_chosen = score.masked_fill(~chosen | forced, torch.inf).amin(-1)
    best_left = score.masked_fill(chosen | ~candidate, -torch.inf).amax(-1)
    assert (best_left <= worst_chosen + 2 * rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_near_uniform_softmax_over_4096_blocks_still_ranks(parts: Parts, dtype: torch.dtype) -> None:
    """One query of one head over 4,096 blocks: each weight is about 2e-4, where half precision has no digits left."""
    near_uniform_softmax_still_ranks(parts, replace(NEAR_UNIFORM, dtype=dtype))


NEAR_UNIFORM = Case(
    config=NSAConfig(l=1, d=1, l_sel=64, n_sel=8, w=8), num_kv_heads=1, group=1, queries=1, keys=4096, dk=16
)


def near_uniform_softmax_still_ranks(parts: Parts, case: Case) -> None:
    x = case.inputs(parts.device)
    follows_scores(parts, case, x.q / 512, parts.compress(case, x)[0])


def test_overlap_weights_of_the_papers_config() -> None:
    """32/16/64: weights 1, 2, 2, 2, 1, one stride before the block to its end; they sum to l · l' / d²."""
    config = NSAConfig()
    assert geometry.overlap_weights(config) == [1, 2, 2, 2, 1]
    assert list(geometry.overlap_offsets(config)) == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize(("l", "d", "l_sel"), [(32, 16, 64), (4, 2, 8), (6, 2, 8), (3, 1, 5), (4, 4, 4), (12, 3, 15)])
def test_overlap_weights_count_tokens(l: int, d: int, l_sel: int) -> None:
    """Each weight is the number of shared tokens, counted with sets, over d; their sum is l · l' / d²."""
    config = NSAConfig(l=l, d=d, l_sel=l_sel)
    far = 7 * l_sel
    block = set(range(far, far + l_sel))
    counted = {
        c - far // d: len(block & set(range(c * d, c * d + l))) // d
        for c in range(2 * far)
        if block & set(range(c * d, c * d + l))
    }
    assert dict(zip(geometry.overlap_offsets(config), geometry.overlap_weights(config), strict=True)) == counted
    assert sum(counted.values()) * d * d == l * l_sel


@st.composite
def _tied(draw: st.DrawFn) -> Case:
    """Blocks that hold one or two compression blocks each, so that equal keys give exactly equal scores."""
    d = draw(st.sampled_from([2, 3, 4]))
    config = NSAConfig(
        l=d,
        d=d,
        l_sel=d * draw(st.sampled_from([1, 2])),
        n_sel=draw(st.integers(2, 5)),
        init_blocks=draw(st.integers(0, 1)),
        local_blocks=draw(st.integers(0, 1)),
    )
    base = draw(cases(packed=False, least_keys=1))
    return replace(base, config=config)


@law(_tied())
def test_equal_scores_choose_the_lowest_index(parts: Parts, case: Case) -> None:
    """q = 0, or all keys the same: the blocks that are full come first in order, for every row of every batch.

    Keys that are the same score the same where products are of whole numbers, which no order of summing rounds: which
    order a BLAS takes depends on where a key stands (MKL on AVX-512 does so).
    """
    x = case.inputs(parts.device)
    whole = x._replace(q=x.q.round(), k=x.k[:, :1].round().expand_as(x.k))
    forced, candidate = oracle.forced_blocks(case, parts.device)
    blocks = torch.arange(forced.shape[1], device=parts.device)
    tokens = oracle.query_tokens(case, parts.device)[0][:, None]
    seen = (tokens + 1) // case.config.d  # compression blocks that have ended
    per_block = case.config.l_sel // case.config.d
    held = (seen - blocks * per_block).clamp(0, per_block)  # of them, in each block
    rank = torch.where(forced, 2 * per_block, held) * (len(blocks) + 1) - blocks
    best = rank.masked_fill(~candidate, torch.iinfo(torch.int64).min).sort(-1, descending=True).indices
    expected = torch.zeros_like(forced).scatter(-1, best[:, : case.config.n_sel], True) & candidate
    for y in (x._replace(q=torch.zeros_like(x.q)), whole):
        chosen = oracle.chosen_blocks(case, parts.select(case, y))
        assert torch.equal(chosen, expected[None, :, None].expand_as(chosen))


@pytest.mark.parametrize("tokens", [29, 64, 101, 152, 158])
def test_ties_of_many_heads_go_to_the_lowest_index_in_every_column(parts: Parts, tokens: int) -> None:
    """A sum over 16 heads in another order for the last columns makes them differ in the last bit (AVX-512)."""
    if parts.backend == "triton" and parts.device.type == "cpu" and tokens > 64:
        pytest.skip("takes seconds each in Triton's interpreter, which adds every column alike")
    config, n = NSAConfig(l=4, d=4, l_sel=4, n_sel=3, w=8, init_blocks=0, local_blocks=0), tokens // 4
    q = torch.randn(1, tokens, 16, 16, generator=torch.Generator().manual_seed(0)).to(parts.device)
    equal = torch.zeros(1, n, 1, 16, device=parts.device)
    found = nsa.select_blocks(q, equal, config, tokens, backend=parts.backend)[0, :, 0].tolist()
    for t, chosen in enumerate(found):
        begun = t // 4 + 1
        assert chosen == [j if j < begun else -1 for j in range(3)], t


@law(cases(least_keys=1))
def test_invisible_blocks_never_move_the_indices(parts: Parts, case: Case) -> None:
    """Compressed keys that end after a row are not in its normaliser: other ones, or NaN, change nothing."""
    x = case.inputs(parts.device)
    k_cmp = parts.compress(case, x)[0]
    before = parts.select_from(case, x.q, k_cmp, x.cu_seqlens)
    visible = oracle.compressed_mask(case, parts.device)
    row = case.cut % max(case.queries, 1)
    unseen = torch.ones(k_cmp.shape[1], dtype=torch.bool, device=parts.device)
    unseen[: visible.shape[1]] = ~visible[row : row + 1].any(0)
    for new in (case.noise(k_cmp) * 5, torch.full_like(k_cmp, torch.nan)):
        changed = torch.where(unseen[None, :, None, None], new, k_cmp)
        after = parts.select_from(case, x.q, changed, x.cu_seqlens)
        assert torch.equal(before[:, row : row + 1], after[:, row : row + 1])


@law(cases(least_keys=1))
def test_heads_of_a_group_share_one_set(parts: Parts, case: Case) -> None:
    """Scores are summed over the heads of a group: their order does not matter, each of them does."""
    x = case.inputs(parts.device)
    q = x.q.unflatten(2, (case.num_kv_heads, case.group)).flip(3).flatten(2, 3)
    assert torch.equal(parts.select(case, x), parts.select(case, x._replace(q=q)))


@law(cases(least_keys=1))
def test_known_lse_does_not_change_the_choice(parts: Parts, case: Case) -> None:
    """select_blocks with the compressed branch's lse chooses as it does alone, and nsa_attention as both."""
    x = case.inputs(parts.device)
    k_cmp, lse = parts.compress(case, x)[0], parts.compressed(case, x)[1]
    given = nsa.select_blocks(x.q, k_cmp, case.config, case.keys, lse, cu_seqlens=x.cu_seqlens, backend=parts.backend)
    assert torch.equal(given, parts.select(case, x))
    assert torch.equal(given, parts.whole(case, x)[1].block_indices)
