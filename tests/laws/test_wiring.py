"""What a call is given reaches every part of it: the scale, the caller's own blocks, the precision, each gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa
from nsa import NSAConfig, geometry
from nsa.config import BRANCHES
from tests.laws.cases import Case, Inputs
from tests.laws.parts import Parts

FREE = Case(
    config=NSAConfig(l=4, d=2, l_sel=4, n_sel=2, w=6, init_blocks=0, local_blocks=0),
    group=2,
    num_kv_heads=1,
    dk=16,
    dv=8,
    queries=10,
    keys=16,
    seed=5,
)
"""No block is forced, so that another scale chooses otherwise; 1/sqrt(Dk) is 1/4."""
STEP = replace(FREE, queries=2)
"""Few enough queries for a fused step."""


def _call(parts: Parts, case: Case, x: Inputs, **more: object) -> tuple[Tensor, nsa.Aux]:
    return nsa.nsa_attention(*x.floats(), case.config, backend=parts.backend, return_aux=True, **more)  # type: ignore[call-overload]


@pytest.mark.parametrize(("case", "scale"), [(FREE, 1.0), (FREE, -0.5), (STEP, -0.5), (STEP, 0.0), (STEP, 1e-9)])
def test_a_scale_reaches_every_branch_and_the_choice(parts: Parts, case: Case, scale: float) -> None:
    """Scores by a scale are those of queries that were multiplied before, by powers of two and so exactly."""
    x = case.inputs(parts.device)
    factor = scale * math.sqrt(case.dk)
    if scale == 1e-9:
        factor = 0.0  # no score differs in float32
    wanted_o, wanted = _call(parts, case, x._replace(q=x.q * factor))
    o, aux = _call(parts, case, x, scale=scale)
    torch.testing.assert_close(o, wanted_o, rtol=1e-5, atol=1e-6)
    assert torch.equal(aux.block_indices, wanted.block_indices)
    if abs(scale) > 0.1:  # else there is nothing to choose by
        assert not torch.equal(aux.block_indices, _call(parts, case, x)[1].block_indices)
    for branch, lse in aux.lse.items():
        torch.testing.assert_close(lse, wanted.lse[branch], rtol=1e-5, atol=1e-6)


def test_a_scale_reaches_each_part(parts: Parts) -> None:
    x, config, more = FREE.inputs(parts.device), FREE.config, {"backend": parts.backend}
    k_cmp, v_cmp = parts.compress(FREE, x)
    blocks = parts.select(FREE, x)

    def run(q: Tensor, **scale: float) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            "compressed": nsa.compressed_attention(q, k_cmp, v_cmp, config, FREE.keys, **scale, **more),
            "selected": nsa.selected_attention(q, x.k, x.v, blocks, config, **scale, **more),
            "window": nsa.window_attention(q, x.k, x.v, config, **scale, **more),
            "choice": (nsa.select_blocks(q, k_cmp, config, FREE.keys, **scale, **more),) * 2,
        }

    for part, found in run(x.q, scale=1.0).items():
        torch.testing.assert_close(found, run(x.q * 4)[part], rtol=1e-5, atol=1e-6, msg=part)


@pytest.mark.parametrize("case", [FREE, STEP], ids=["many queries", "few queries"])
def test_compressed_keys_and_values_of_the_caller_come_before_a_source(parts: Parts, case: Case) -> None:
    """One tensor for all branches is a source too, and is not compressed where the caller has done so."""
    x, other = case.inputs(parts.device), replace(case, seed=6).inputs(parts.device)
    k_cmp, v_cmp = parts.compress(case, other)
    o, aux = _call(parts, case, x, k_compressed=k_cmp, v_compressed=v_cmp)
    config, more = case.config, {"backend": parts.backend}
    o_cmp, _ = nsa.compressed_attention(x.q, k_cmp, v_cmp, config, case.keys, **more)
    blocks = nsa.select_blocks(x.q, k_cmp, config, case.keys, **more)
    assert torch.equal(aux.block_indices, blocks)
    branches = o_cmp, parts.selected(case, x, blocks)[0], parts.window(case, x)[0]
    torch.testing.assert_close(o, nsa.combine(branches, x.gates, **more), rtol=1e-5, atol=1e-6)


NAMES = ("q", "k", "k selected", "k window", "v selected", "v window", "k_compressed", "v_compressed", "gates")


def _gradients(parts: Parts, case: Case, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Of the inputs that want one, where no other does; "k" is the source that k_compressed replaces."""
    draws = [replace(case, seed=i).inputs(parts.device) for i in range(3)]
    k_cmp, v_cmp = parts.compress(case, draws[0])
    given = {
        "q": draws[0].q, "k selected": draws[1].k, "k window": draws[2].k, "v selected": draws[1].v,
        "v window": draws[2].v, "k_compressed": k_cmp, "v_compressed": v_cmp, "gates": draws[0].gates,
    }  # fmt: skip
    given = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in given.items()}
    o = nsa.nsa_attention(
        given["q"],
        (None, given["k selected"], given["k window"]),
        (None, given["v selected"], given["v window"]),
        given["gates"],
        case.config,
        k_compressed=given["k_compressed"],
        v_compressed=given["v_compressed"],
        backend=parts.backend,
    )
    found = torch.autograd.grad(o, [given[name] for name in wanted], case.noise(o))
    return dict(zip(wanted, found, strict=True))


def test_each_input_gets_its_gradient_where_no_other_wants_one(parts: Parts) -> None:
    """Also of a step that a backend would fuse, which knows no gradients."""
    names = tuple(name for name in NAMES if name != "k")
    together = _gradients(parts, STEP, names)
    for name in names:
        alone = _gradients(parts, STEP, (name,))[name]
        assert torch.equal(alone, together[name]), name
        assert alone.any(), name


LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_a_mean_is_rounded_once(parts: Parts, dtype: torch.dtype, packed: bool) -> None:
    """phi = avg of 64 tokens: as near to float64 as the type allows, which no sum in that type is."""
    config, tokens = NSAConfig(l=64, d=32, l_sel=64, n_sel=3), 200
    x = torch.rand(1, tokens, 2, 16, generator=torch.Generator().manual_seed(0)).to(parts.device, dtype)
    documents = torch.tensor([0, 70, tokens], dtype=torch.int32, device=parts.device) if packed else None
    found = nsa.compress(x, config, cu_seqlens=documents, backend=parts.backend).double()
    starts = [0, 70, 102, 134] if packed else range(0, tokens - 63, 32)
    truth = torch.stack([x[:, a : a + 64].double().mean(1) for a in starts], 1)
    assert (found[:, : truth.shape[1]] - truth).abs().max() <= 0.51 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_gated_sum_is_rounded_once(parts: Parts, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    *branches, gates = (
        torch.rand(1, 50, 2, size, generator=generator).to(parts.device, dtype) for size in (16, 16, 16, 3)
    )
    found = nsa.combine(branches, gates, backend=parts.backend).double()
    truth = sum(gates[..., i, None].double() * o.double() for i, o in enumerate(branches))
    assert ((found - truth).abs() <= 0.51 * torch.finfo(dtype).eps * torch.as_tensor(truth).abs()).all()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("branch", BRANCHES)
def test_attention_is_rounded_once(dtype: torch.dtype, branch: str) -> None:
    """The torch backend computes in float32: of values that are all near 1, half precision would lose the digits."""
    parts = Parts("torch", torch.device("cpu"))
    case = replace(FREE, config=NSAConfig(l=2, d=2, l_sel=64, n_sel=4, w=300), queries=4, keys=300, dtype=dtype)
    x = case.inputs(parts.device)
    x = x._replace(v=x.v.abs() / 8 + 1)
    wide = x.with_floats(tuple(a.double() for a in x.floats()))
    blocks = parts.select(case, x)

    def run(y: Inputs) -> Tensor:
        if branch == "selected":
            return parts.selected(case, y, blocks)[0]
        if branch == "window":
            return parts.window(case, y)[0]
        keys, values = (a.to(y.q.dtype) for a in parts.compress(case, x))
        return nsa.compressed_attention(y.q, keys, values, case.config, case.keys, backend="torch")[0]

    truth = run(wide)
    assert ((run(x).double() - truth).abs() <= 0.51 * torch.finfo(dtype).eps * 2 * truth.abs()).all()


def test_autocast_leaves_the_parts_alone(parts: Parts) -> None:
    """What was given in float32 is computed in float32, output and gradients, whatever a model around it casts."""
    x = FREE.inputs(parts.device)
    upstream = FREE.noise(x.q[..., : FREE.dv])
    gradients = parts.backend != "reference"  # its products are PyTorch's, which casts them in a backward pass

    def run() -> list[Tensor]:
        more = parts.gradients(FREE, x, "all", upstream) if gradients else ()
        return [parts.whole(FREE, x)[0], *more]

    wanted = run()
    with torch.autocast(parts.device.type, torch.bfloat16):
        found = run()
        alone = parts.window(FREE, x)[0], parts.selected(FREE, x)[0], parts.compressed(FREE, x)[0]
        together = nsa.combine((alone[2], alone[1], alone[0]), x.gates, backend=parts.backend)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(together, wanted[0], rtol=1e-5, atol=1e-6)


def test_gates_are_read_through_their_strides(parts: Parts) -> None:
    """Gates cut out of a wider tensor, and one number for all rows; in a fused step too."""
    x = replace(STEP, batch=2).inputs(parts.device)
    wide = torch.full((2, STEP.queries, 5, 7), torch.nan, device=parts.device)
    wide[:, :, 1:5:2, 2:5] = x.gates
    expanded = x.gates[:1, :1, :1].expand_as(x.gates)
    branches = [x.q[..., i : i + 8] for i in range(3)]
    for strided, plain in ((wide[:, :, 1:5:2, 2:5], x.gates), (expanded, expanded.contiguous())):
        found, wanted = (_call(parts, STEP, x._replace(gates=gates))[0] for gates in (strided, plain))
        assert torch.equal(found, wanted)
        found, wanted = (nsa.combine(branches, gates, backend=parts.backend) for gates in (strided, plain))
        assert torch.equal(found, wanted)


def test_bytes_read_are_keys_times_both_sizes(parts: Parts) -> None:
    x = FREE.inputs(parts.device)
    aux = _call(parts, FREE, x)[1]
    found = aux.bytes_read(x.k.to(torch.bfloat16), x.v.to(torch.bfloat16))
    assert {name: int(n) for name, n in found.items()} == {n: int(r) * 2 * 24 for n, r in aux.keys_read.items()}


@pytest.mark.parametrize("tokens", [0, 3, 4, 23])
def test_compressed_rows_of_few_tokens_are_as_many_as_there_are_blocks(parts: Parts, tokens: int) -> None:
    x = torch.randn(2, tokens, 2, 16, device=parts.device)
    found = nsa.compress(x, FREE.config, backend=parts.backend)
    assert found.shape == (2, geometry.num_compressed_blocks(tokens, FREE.config), 2, 16)
