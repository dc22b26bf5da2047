"""How far float32 gradients on a GPU are from float64, in times of what eager PyTorch's own are.

    python -m tests.laws.float32_backward [BACKEND ...]

For each branch and length: the greatest and the Euclidean error of dq, dk and dv over those of dense attention in
float32 on the same GPU. "eager" is PyTorch's softmax and its own backward pass. "flash" is the same dense attention
with the backward pass of our kernels written in PyTorch (lse and rowsum(do · o) are kept, probabilities computed
again, dk and dv one product over the rows of all heads of a group): what it adds to eager is the algorithm's, what a
backend adds to it is its kernels' arithmetic. A row that sees one key shows the difference: eager's gradient of its
score is 0, flash's is the rounding error of dp - rowsum(do · o).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from tests.laws import oracle
from tests.laws.cases import Case
from tests.laws.parts import Parts

LENGTHS = (64, 290, 300, 310, 700)
HEADS = ((4, 1, 64), (4, 1, 128), (8, 1, 128), (2, 4, 128))
"""Hkv, G and both head sizes; without groups first."""


class Flash(torch.autograd.Function):
    """`oracle.attend` with the backward pass of FlashAttention for grouped queries, in dense PyTorch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        o, lse, _ = oracle.attend(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, mask, o, lse = ctx.saved_tensors
        scale, num_kv_heads = q.shape[-1] ** -0.5, k.shape[2]
        mask = oracle._per_query_head(q, k, v, mask)[2].expand(q.shape[0], q.shape[2], -1, -1)
        delta = (do * o).sum(-1, keepdim=True)
        q, do, delta, lse = (_by_group(x, num_kv_heads) for x in (q, do, delta, lse[..., None]))  # [B, Hkv, G·S, D]
        mask = mask.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        p = (q @ k.mT * scale - lse.masked_fill(lse == -torch.inf, 0)).exp().masked_fill(~mask, 0)
        ds = p * (do @ v.mT - delta) * scale
        dq = (ds @ k).unflatten(2, (-1, o.shape[1])).flatten(1, 2)  # [B, Hq, S, Dk]
        return dq.transpose(1, 2), (ds.mT @ q).transpose(1, 2), (p.mT @ do).transpose(1, 2), None


def _by_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hkv, G·S, D] of [B, S, Hq, D]."""
    return x.transpose(1, 2).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    o: Tensor = Flash.apply(q, k, v, mask)
    return o


def errors(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[tuple[float, float]]:
    """(greatest, Euclidean) of dq, dk, dv."""
    both = []
    for a, b in zip(found[:3], truth[:3], strict=True):
        difference = (a.double() - b).flatten()
        both.append((float(difference.abs().max()), float(difference.norm())))
    return both


def compare(backend: str, case: Case, branch: str) -> dict[str, list[tuple[float, float]]]:
    """Errors of the backend, of "eager" and of "flash", over one choice of blocks."""
    parts = Parts(backend, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    x = case.inputs(parts.device)
    blocks = parts.select(case, x)
    upstream = case.noise(x.q[..., : case.dv])
    truth = oracle.gradients(case, x, branch, blocks, upstream.double(), oracle.dense)
    found = {"eager": oracle.gradients(case, x, branch, blocks, upstream, oracle.dense)}
    found["flash"] = oracle.gradients(case, x, branch, blocks, upstream, flash)
    found[backend] = parts.gradients(case, x, branch, upstream)
    return {name: errors(gradients, truth) for name, gradients in found.items()}


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    print("branch      Hkv  G   D    S  who        times eager's error, greatest (Euclidean): dq, dk, dv")
    for backend in sys.argv[1:] or ["torch", "triton"]:
        for num_kv_heads, group, dim in HEADS:
            for tokens in LENGTHS:
                case = Case(NSAConfig(), 1, num_kv_heads, group, dim, dim, tokens, tokens, seed=tokens)
                for branch in BRANCHES:
                    measured = compare(backend, case, branch)
                    own = measured["eager"]
                    for who in ("flash", backend):
                        times = [
                            f"{a / max(b, 1e-30):6.2f} ({c / max(d, 1e-30):5.2f})"
                            for (a, c), (b, d) in zip(measured[who], own, strict=True)
                        ]
                        print(f"{branch:11} {num_kv_heads:3} {group:2} {dim:3} {tokens:4}  {who:9}", *times, flush=True)


if __name__ == "__main__":
    main()
