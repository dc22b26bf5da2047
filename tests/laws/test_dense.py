"""Where nothing is left out, sparse attention is dense causal attention; where something is, it is a mask."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.laws import oracle
from tests.laws.budget import FORWARD, output_unit, within_budget
from tests.laws.cases import Case, Inputs, cases
from tests.laws.parts import Parts, law


def _probe(case: Case, x: Inputs) -> Inputs:
    """Values that are the key's own index, one-hot: the output of a row is then its attention weights [B,S,Hq,T]."""
    v = torch.eye(case.keys, device=x.k.device, dtype=x.k.dtype)[None, :, None]
    return x._replace(v=v.expand(case.batch, -1, case.num_kv_heads, -1))


@law(cases())
def test_window_as_long_as_the_text_is_dense_causal_attention(parts: Parts, case: Case) -> None:
    """w >= S: the window branch is SDPA with a causal mask."""
    case = replace(case, config=replace(case.config, w=max(case.keys, 1)))
    x = case.inputs(parts.device)
    causal = oracle.window_mask(case, parts.device)
    pytorch, truth = oracle.sdpa(*x.qkv(), causal), oracle.dense(*x.qkv(torch.float64), causal)
    within_budget("o", parts.window(case, x)[0], pytorch, truth, FORWARD, unit=output_unit(x))


@law(cases())
def test_as_many_blocks_as_there_are_is_dense_causal_attention(parts: Parts, case: Case) -> None:
    """n · l' >= S: the selected branch is SDPA with a causal mask, for the blocks that it chooses itself."""
    enough = max(-(-case.keys // case.config.l_sel), case.config.n_sel)
    case = replace(case, config=replace(case.config, n_sel=enough))
    x = case.inputs(parts.device)
    causal = oracle.window_mask(replace(case, config=replace(case.config, w=max(case.keys, 1))), parts.device)
    pytorch, truth = oracle.sdpa(*x.qkv(), causal), oracle.dense(*x.qkv(torch.float64), causal)
    within_budget("o", parts.selected(case, x)[0], pytorch, truth, FORWARD, unit=output_unit(x))


@law(cases(least_keys=1))
def test_window_is_a_band_mask(parts: Parts, case: Case) -> None:
    """Shown key by key: exactly the w tokens t−w+1 … t have a weight, and the weights sum to 1."""
    x = case.inputs(parts.device)
    weights = parts.window(case, _probe(case, x))[0]
    band = oracle.window_mask(case, parts.device)
    assert torch.equal(weights > 0, band[None, :, None].expand_as(weights))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@law(cases(least_keys=1))
def test_window_weighs_equal_keys_equally(parts: Parts, case: Case) -> None:
    """q = 0: each of the tokens in the window has the weight 1 / their number."""
    x = _probe(case, case.inputs(parts.device))
    weights = parts.window(case, x._replace(q=torch.zeros_like(x.q)))[0]
    band = oracle.window_mask(case, parts.device).float()
    uniform = (band / band.sum(-1, keepdim=True))[None, :, None]
    torch.testing.assert_close(weights, uniform.expand_as(weights))


@law(cases(least_keys=1))
def test_selected_is_a_mask_of_whole_blocks(parts: Parts, case: Case) -> None:
    """q = 0: each token of the chosen blocks at or before t counts once, and no other."""
    x = _probe(case, case.inputs(parts.device))
    x = x._replace(q=torch.zeros_like(x.q))
    block_indices = parts.select(case, x)
    weights = parts.selected(case, x, block_indices)[0]
    mask = oracle.selected_mask(case, block_indices).float()
    uniform = (mask / mask.sum(-1, keepdim=True).clamp(min=1)).repeat_interleave(case.group, 1).transpose(1, 2)
    torch.testing.assert_close(weights, uniform)


@law(cases(least_keys=1))
def test_compressed_sees_the_blocks_that_have_ended(parts: Parts, case: Case) -> None:
    """Shown token by token: q = 0 gives each full block that ends at or before t the same weight."""
    x = _probe(case, case.inputs(parts.device))
    weights = parts.compressed(case, x._replace(q=torch.zeros_like(x.q)))[0]
    mask = oracle.compressed_mask(case, parts.device).float()
    uniform = mask / mask.sum(-1, keepdim=True).clamp(min=1)  # [S, blocks]
    tokens = oracle.compress(case, x.v[:1, :, 0, None])[0, :, 0]  # [blocks, T]: a block's share of each token
    torch.testing.assert_close(weights, (uniform @ tokens)[None, :, None].expand_as(weights))
