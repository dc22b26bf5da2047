"""The detector of leaks: rows that change although only later tokens did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regression.detectors.calls import BRANCHES, Call

OTHER = 3.0
"""Scale of the tokens that take the place of the later ones."""


def leaks(call: Call, backend: str, cuts: Sequence[int], branches: Sequence[str] = BRANCHES) -> list[str]:
    """For each branch and cut, the rows before `cut` that are not bit for bit what they were once every token from
    `cut` on is another; S = T."""
    found = []
    for branch in branches:
        before = call.attend(branch, backend)
        for cut in cuts:
            moved = changed_rows(before[:, :cut], with_another_future(call, cut).attend(branch, backend)[:, :cut])
            if moved:
                found.append(
                    f"{backend}, {branch}, S = {call.q.shape[1]}: {len(moved)} rows change with the tokens from {cut} "
                    f"on, {min(moved)} to {max(moved)}"
                )
    return found


def with_another_future(call: Call, cut: int) -> Call:
    """The same call up to token `cut`, and other tokens from there on."""
    q, k, v, gates = (
        torch.cat([x[:, :cut], OTHER * x[:, cut:].flip(-1) + 1], 1) for x in (call.q, call.k, call.v, call.gates)
    )
    return replace(call, q=q, k=k, v=v, gates=gates)


def changed_rows(a: Tensor, b: Tensor) -> list[int]:
    """Rows (axis 1) in which two results differ; NaN is equal to NaN."""
    same = (a == b) | ((a != a) & (b != b))
    moved = ~same.transpose(0, 1).flatten(1).all(1)
    rows: list[int] = moved.nonzero().flatten().tolist()
    return rows
