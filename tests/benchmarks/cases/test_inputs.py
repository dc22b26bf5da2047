"""Inputs are the same for every contender, of unit variance, and local ones are local."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nsa
from benchmarks.cases import inputs
from benchmarks.cases.key import Key
from nsa import NSAConfig, geometry
from tests.benchmarks.synthetic import key

CONFIG = NSAConfig(l=16, d=8, l_sel=32, n_sel=8, w=32)


def test_all_contenders_get_the_same() -> None:
    for kind in inputs.KINDS:
        mine, theirs = (
            inputs.draw(key(implementation=name, inputs=kind), "cpu").tensors for name in ("nsa", "sdpa-flash")
        )
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_seed_redraws_everything() -> None:
    for kind in inputs.KINDS:
        first, second = (inputs.draw(key(inputs=kind), "cpu", seed).tensors for seed in (0, 1))
        assert not any(torch.equal(first[name], second[name]) for name in first)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"key\.inputs must be one of random, local; got 'sorted'"):
        inputs.draw(dataclasses.replace(key(), inputs="sorted"), "cpu")


@pytest.mark.parametrize("kind", inputs.KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_q_k_and_v_have_unit_variance(kind: str, dtype: str) -> None:
    p = inputs.draw(key(length=2048, inputs=kind, dtype=dtype, heads=16, num_kv_heads=8, head_dim_k=32), "cpu")
    for x in (p.q, p.k, p.v):
        assert x.dtype == getattr(torch, dtype)
        assert x.float().mean().item() == pytest.approx(0, abs=0.05)
        assert x.float().var().item() == pytest.approx(1, abs=0.1)
    assert 0 <= p.gates.min().item() <= p.gates.max().item() <= 1


def shared_by_neighbours(the_key: Key, seed: int) -> float:
    """How many of the blocks that a token chooses freely its successor chooses too, from the middle on."""
    p = inputs.with_compressed(inputs.draw(the_key, "cpu", seed), CONFIG)
    assert p.k_compressed is not None
    blocks = nsa.select_blocks(p.q, p.k_compressed, CONFIG, backend="torch")[:, the_key.num_queries // 2 :]
    t = torch.arange(the_key.num_queries // 2, the_key.num_queries)[None, :, None, None]
    free = ~geometry.is_forced(blocks, t // CONFIG.l_sel, CONFIG)
    return _overlap(blocks[:, :-1], blocks[:, 1:], free[:, :-1])


def _overlap(mine: Tensor, theirs: Tensor, counted: Tensor) -> float:
    also = (mine[..., None] == theirs[..., None, :]).any(-1)
    return also[counted].float().mean().item()


@given(
    seed=st.integers(0, 2**31 - 1),
    length=st.sampled_from([768, 1024, 1536]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 4, 8]),
    head_dim=st.sampled_from([16, 64]),
)
def test_neighbours_choose_alike_where_inputs_are_local(
    seed: int, length: int, num_kv_heads: int, group: int, head_dim: int
) -> None:
    sizes = {
        "heads": num_kv_heads * group,
        "num_kv_heads": num_kv_heads,
        "head_dim_k": head_dim,
        "head_dim_v": head_dim,
    }
    random, local = (
        shared_by_neighbours(key(length=length, inputs=kind, **sizes), seed) for kind in ("random", "local")
    )
    assert local > random + 0.15
    assert local > 0.5
