"""Inputs are the same for every contender, of unit variance, and those of decode steps follow one another."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.cases import inputs, recorded
from benchmarks.cases.recorded import DECODE_STEPS
from tests.benchmarks.synthetic import key


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


def test_random_inputs_are_those_of_earlier_records() -> None:
    """Their series goes on: q, k, v and gates in this order from one generator, as ever."""
    p = inputs.draw(key(), "cpu")
    found = [float(x.double().sum()) for x in (p.q, p.k, p.v, p.gates)]
    assert found == pytest.approx([-42.219, -8.427, 39.409, 396.785], abs=0.01)


@pytest.mark.parametrize("kind", ["local", "sorted"])
def test_another_kind_is_refused(kind: str) -> None:
    """ "local" is that of earlier records, which are read and not measured again."""
    known = "random, recorded, recorded-p10, recorded-p90, replayed"
    with pytest.raises(ValueError, match=rf"key\.inputs must be one of {known}; got '{kind}'"):
        inputs.draw(dataclasses.replace(key(), inputs=kind), "cpu")


@pytest.mark.parametrize("kind", inputs.KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 3, 32, 192])
def test_q_k_and_v_have_unit_variance(kind: str, dtype: str, head_dim: int) -> None:
    sizes = {"heads": 16, "num_kv_heads": 8, "head_dim_k": head_dim, "head_dim_v": 32}
    p = inputs.draw(key(length=2048, inputs=kind, dtype=dtype, **sizes), "cpu")
    for x in (p.q, p.k, p.v):
        assert x.dtype == getattr(torch, dtype)
        assert x.float().mean().item() == pytest.approx(0, abs=0.05 if head_dim > 3 else 0.3)
        assert x.float().var().item() == pytest.approx(1, abs=0.1 if head_dim > 3 else 0.4)
    assert 0 <= p.gates.min().item() <= p.gates.max().item() <= 1


def test_decode_steps_that_follow_share_their_keys_and_nearly_their_topic() -> None:
    step = key("decode", length=512, inputs="recorded", heads=4, num_kv_heads=2, head_dim_k=64, head_dim_v=64)
    drawn = [inputs.draw(step, "cpu", step=i) for i in range(DECODE_STEPS)]
    assert len({p.gates.sum().item() for p in drawn}) == len(drawn)
    for p in drawn[1:]:
        assert torch.equal(p.k, drawn[0].k)
        assert torch.equal(p.v, drawn[0].v)
    topics = torch.stack([p.q[0, 0, 0, :32] for p in drawn])
    others = torch.stack([inputs.draw(step, "cpu", seed=i).q[0, 0, 0, :32] for i in range(1, 9)])
    assert 0.3 < torch.cosine_similarity(topics[:-1], topics[1:], dim=-1).mean().item() < 0.99
    assert torch.cosine_similarity(others[:-1], others[1:], dim=-1).mean().item() < 0.2


def test_records_say_which_curves_they_follow() -> None:
    assert inputs.followed(key()) is None
    for kind in recorded.KINDS:
        law = recorded.law(kind, 32768)
        said = inputs.followed(key(length=40000, inputs=kind))
        assert said == f"at 32768 tokens: {law.target}; law {law.digest}"
