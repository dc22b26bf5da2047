"""What a wrong output looks like: a branch or a head that was left out, a gradient that was skipped, a narrower type.

It names the likely cause of what the comparison has refused already, and refuses nothing itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.cases.inputs import Problem
from benchmarks.correctness import oracle
from benchmarks.correctness.oracle import QueryRow
from nsa import NSAConfig

BRANCHES = ("compressed", "selected", "window")
"""In the order of the gates."""
_NEARER = 0.1
"""What explains an output leaves this share of its error."""
_TYPES = (torch.bfloat16, torch.float16)
_NARROW = (1 / 16, 4.0)
"""Shares of bfloat16's error between which an error is one of a narrower type's: TF32 has three bits more."""


def cause(
    problem: Problem,
    config: NSAConfig,
    o: Tensor,
    gradients: Mapping[str, Tensor],
    blocks: Tensor,
    picked: Sequence[QueryRow],
) -> str | None:
    """What the output o, and its gradients, look like on these rows; None where nothing explains them."""
    zero = [name for name, x in gradients.items() if not bool(x.any())]
    if zero:
        return f"{', '.join(zero)} is 0 everywhere, as where a backward is skipped"
    truth = oracle.compressed(problem, torch.float64, config)
    found = torch.cat([o[row.batch, row.query][None].detach().double() for row in picked])  # [R, Hq, Dv]
    expected = _rows(truth, config, blocks, picked)
    off = (found - expected).norm()
    heads = [h for h in range(found.shape[1]) if bool(expected[:, h].any()) and not bool(found[:, h].any())]
    if heads:
        return f"head {', '.join(map(str, heads))} of o is 0, as where it is skipped"
    for branch, name in enumerate(BRANCHES):
        gates = truth.gates.clone()
        gates[..., branch] = 0
        without = _rows(dataclasses.replace(truth, gates=gates), config, blocks, picked)
        if (found - without).norm() <= _NEARER * off:
            return f"o is as without the {name} branch"
    return _narrow_type(problem, config, found, o.dtype, off / expected.norm(), blocks, picked)


def _rows(problem: Problem, config: NSAConfig, blocks: Tensor, picked: Sequence[QueryRow]) -> Tensor:
    """[R, Hq, Dv] by the reference."""
    rows = [
        oracle.nsa_row(oracle.prefix(problem, row, config), oracle.own_blocks(blocks, row), config)[0] for row in picked
    ]
    return torch.cat(rows).detach()


def _narrow_type(
    problem: Problem,
    config: NSAConfig,
    found: Tensor,
    dtype: torch.dtype,
    error: Tensor,
    blocks: Tensor,
    picked: Sequence[QueryRow],
) -> str | None:
    if dtype is not torch.float32:
        return None
    for narrow in _TYPES:
        if torch.equal(found.to(narrow).double(), found):
            return f"every value of o is a {str(narrow).removeprefix('torch.')}, a narrower type than {dtype}"
    rounded = oracle.compressed(problem.map(lambda x: x.detach().bfloat16()), torch.float64, config)
    exact = oracle.compressed(problem, torch.float64, config)
    expected = _rows(exact, config, blocks, picked)
    own = (_rows(rounded, config, blocks, picked) - expected).norm() / expected.norm()
    if own * _NARROW[0] <= error <= own * _NARROW[1]:
        return "the error is of the size that a narrower type makes (TF32, float16, bfloat16)"
    return None
