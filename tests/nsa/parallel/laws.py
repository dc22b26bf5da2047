"""What must hold of attention over several ranks, against one device and against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import BRANCHES
from tests.laws import budget, cases, oracle
from tests.nsa.parallel.cases import Case, Result

FACTOR = 2.0
"""How many times PyTorch's own error in the same type dk and dv may have; of kernels without a floor `budget.BACKWARD`
times, as in the laws of one device."""
STEADY_TOKENS = 512
"""From here on the errors of a narrow type are so many that they are typical, and the budget needs no floor of the
size of single terms: of bf16 that floor is above whole gradients of keys that hundreds of queries see."""


def wrong(case: Case, got: Result, one: Result) -> dict[str, str]:
    """What differs from one device, by name: o, chosen, lse, keys_read, dq and dgates in a bit, dk and dv by more than
    their error budget."""
    exact = {
        "o": (got.o, one.o),
        "chosen": (got.chosen, one.chosen),
        "dq": (got.gradients["q"], one.gradients["q"]),
        "dgates": (got.gradients["gates"], one.gradients["gates"]),
        **{f"lse of {branch}": (got.lse[branch], one.lse[branch]) for branch in BRANCHES},
    }
    found = {name: _first_difference(ours, wanted) for name, (ours, wanted) in exact.items() if not same(ours, wanted)}
    if got.keys_read != one.keys_read:
        found["keys_read"] = f"{got.keys_read}, not {one.keys_read}"
    steady = case.dtype.itemsize < 4 and case.tokens >= STEADY_TOKENS
    factor = budget.BACKWARD if steady and case.backend == "triton" else FACTOR
    for name, (pytorch, truth, unit) in _key_gradients(case, one.chosen).items():
        try:
            unit = budget.greatest(truth) if steady else unit
            budget.within_budget(name, got.gradients[name[1:]], pytorch, truth, factor, unit=unit, steady=steady)
        except AssertionError as error:
            found[name] = str(error)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _first_difference(ours: Tensor, wanted: Tensor) -> str:
    if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        return f"{ours.dtype} {list(ours.shape)}, not {wanted.dtype} {list(wanted.shape)}"
    place = (ours != wanted).nonzero()[0].tolist()
    return f"{(ours != wanted).sum()} of {ours.numel()}, first at {place}"


def _key_gradients(case: Case, chosen: Tensor) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Of each key and value, on the CPU: (PyTorch's in the case's type, the float64 truth, the size of the terms)."""
    x, chosen = case.inputs(), chosen.to(case.device)
    if case.scale is not None:  # the oracle's is 1/sqrt(Dk): in the tests a power of two apart, so that nothing rounds
        x["q"] = x["q"] * (case.scale * case.dk**0.5)
    documents = None if case.cu_seqlens is None else tuple(case.documents().diff().tolist())  # type: ignore[union-attr]
    call = cases.Case(
        case.config, case.batch, case.num_kv_heads, case.heads // case.num_kv_heads, case.dk, case.dv, case.tokens,
        case.tokens, documents, case.dtype,
    )  # fmt: skip
    found = {}
    for i, branch in enumerate(BRANCHES if case.separate else ("all",)):
        inputs = cases.Inputs(x["q"], x[f"k{i}"], x[f"v{i}"], x["gates"], case.documents())
        of_type = []
        for dtype in (case.dtype, torch.float64):
            upstream = x["upstream"].to(dtype)
            if case.separate:
                upstream = upstream * x["gates"][..., i, None].to(dtype)
            attend = oracle.sdpa if dtype == case.dtype else oracle.dense
            of_type.append(oracle.gradients(call, inputs, branch, chosen, upstream, attend))
        unit = budget.gradient_unit(inputs, x["upstream"])
        for j, name in ((1, f"dk{i}"), (2, f"dv{i}")):
            found[name] = of_type[0][j].cpu(), of_type[1][j].cpu(), unit
    return found
