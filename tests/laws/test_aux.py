"""What a call reports about itself: the keys it read, the backend that ran, and what the gates did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa
from nsa.backends import MAX_DECODE_QUERIES
from nsa.config import BRANCHES
from tests.laws import oracle
from tests.laws.budget import agree, output_unit
from tests.laws.cases import Case, Inputs, cases
from tests.laws.parts import Parts, law


@law(cases())
def test_keys_read_are_those_that_were_read(parts: Parts, case: Case) -> None:
    """int64 totals over batch, tokens and groups, against masks counted key by key."""
    x = case.inputs(parts.device)
    aux = parts.whole(case, x)[1]
    rows = case.batch * case.num_kv_heads
    expected = {
        "compressed": rows * int(oracle.compressed_mask(case, parts.device).sum()),
        "selected": int(oracle.selected_mask(case, aux.block_indices).sum()),
        "window": rows * int(oracle.window_mask(case, parts.device).sum()),
    }
    assert {name: int(count) for name, count in aux.keys_read.items()} == expected
    assert all(count.dtype == torch.int64 for count in aux.keys_read.values())


@law(cases())
def test_backend_that_ran_is_recorded(parts: Parts, case: Case) -> None:
    """The name in aux is the one that was asked for; o, indices and lse have the promised form."""
    x = case.inputs(parts.device)
    o, aux = parts.whole(case, x)
    heads = case.num_kv_heads * case.group
    assert aux.backend == parts.backend
    assert o.shape == (case.batch, case.queries, heads, case.dv)
    assert o.dtype == case.dtype
    assert aux.block_indices.shape == (case.batch, case.queries, case.num_kv_heads, case.config.n_sel)
    assert aux.block_indices.dtype == torch.int32
    for lse in aux.lse.values():
        assert lse.shape == (case.batch, case.queries, heads)
        assert lse.dtype == torch.float32
        assert not lse.requires_grad


@law(cases(least_keys=1))
def test_gates_are_in_the_order_compressed_selected_window(parts: Parts, case: Case) -> None:
    """A gate of 1 for one branch and 0 for the others is that branch."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    for i, branch in enumerate(BRANCHES):
        only = torch.zeros_like(x.gates)
        only[..., i] = 1
        o = parts.forward(case, x._replace(gates=only), "all")
        _is_branch(parts, case, branch, o, parts.forward(case, x, branch), x, block_indices)


def _is_branch(
    parts: Parts, case: Case, branch: str, o: Tensor, alone: Tensor, x: Inputs, block_indices: Tensor
) -> None:
    """Bit for bit, but where a kernel of decode adds up in splits what a branch alone adds up in one go."""
    if parts.backend == "triton" and 0 < case.queries <= MAX_DECODE_QUERIES and case.queries < case.keys:
        agree(branch, o, alone, *oracle.pytorch_and_truth(case, x, branch, block_indices), unit=output_unit(x))
    else:
        assert torch.equal(o, alone), branch


@law(cases(least_keys=1))
def test_each_branch_reads_its_own_keys_and_values(parts: Parts, case: Case) -> None:
    """k and v as (compressed source, selected, window): each branch gets its own, the choice the first."""
    x, second, third = (replace(case, seed=case.seed + i).inputs(parts.device) for i in range(3))
    k, v = (x.k, second.k, third.k), (x.v, second.v, third.v)
    gates = torch.eye(3, device=parts.device, dtype=x.q.dtype)
    for i, branch in enumerate(BRANCHES):
        o, aux = nsa.nsa_attention(
            x.q,
            k,
            v,
            gates[i].expand_as(x.gates),
            case.config,
            cu_seqlens=x.cu_seqlens,
            backend=parts.backend,
            return_aux=True,
        )
        own = x._replace(k=k[i], v=v[i])
        block_indices = parts.select(case, x)
        assert torch.equal(aux.block_indices, block_indices)
        alone = parts.selected(case, own, block_indices)[0] if i == 1 else parts.forward(case, own, branch)
        _is_branch(parts, case, branch, o, alone, own, block_indices)


@law(cases(least_keys=1))
def test_given_compressed_keys_take_the_place_of_phi(parts: Parts, case: Case) -> None:
    """k_compressed and v_compressed are used as they are, and the compressed source may be None."""
    x = case.inputs(parts.device)
    k_cmp, v_cmp = parts.compress(case, x)
    o = nsa.nsa_attention(
        x.q,
        (None, x.k, x.k),
        (None, x.v, x.v),
        x.gates,
        case.config,
        k_compressed=k_cmp,
        v_compressed=v_cmp,
        cu_seqlens=x.cu_seqlens,
        backend=parts.backend,
    )
    assert torch.equal(o, parts.forward(case, x, "all"))


def test_forced_backend_that_cannot_serve_raises(device: torch.device) -> None:
    """Nothing falls back silently: float64 is not for the kernels."""
    case = Case()
    x = case.inputs(device).with_floats(tuple(a.double() for a in case.inputs(device).floats()))
    with pytest.raises(ValueError, match=r"backend 'triton' cannot serve this call: .+"):
        nsa.nsa_attention(*x.floats(), case.config, backend="triton")


def test_auto_says_what_it_chose(device: torch.device) -> None:
    x = Case().inputs(device)
    chosen = nsa.nsa_attention(*x.floats(), Case().config, return_aux=True)[1].backend
    assert chosen == ("triton" if device.type == "cuda" else "torch")
