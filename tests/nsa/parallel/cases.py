"""Sequences that several ranks share, and what one device makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import nsa
from nsa.parallel import ContextParallel, TokenOrder, context_parallel_attention, deal_documents, head_tail

SMALL = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=24)


@dataclass(frozen=True)
class Case:
    """One call, drawn from a seed."""

    tokens: int
    heads: int = 4
    num_kv_heads: int = 2
    dk: int = 8
    dv: int = 8
    config: nsa.NSAConfig = SMALL
    cu_seqlens: tuple[int, ...] | None = None
    order: TokenOrder | None = None
    """None for the default."""
    dtype: torch.dtype = torch.float32
    batch: int = 1
    separate: bool = True
    """Keys and values of their own for each branch."""
    scale: float | None = None
    backend: str = "torch"
    seed: int = 0
    device: str = "cpu"

    def documents(self) -> Tensor | None:
        return None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.device)

    def dealt(self, ranks: int) -> TokenOrder:
        """Who holds which tokens."""
        if self.order is not None:
            return self.order
        if self.cu_seqlens is not None:
            return deal_documents(self.cu_seqlens, ranks, self.config)
        return head_tail(self.tokens, ranks)

    def inputs(self) -> dict[str, Tensor]:
        """The whole sequence: q, gates, upstream, and keys and values of each branch."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(self.batch, self.tokens, heads, dim, generator=generator).to(self.device, self.dtype)

        q = draw(self.heads, self.dk)
        gates = torch.rand(self.batch, self.tokens, self.heads, 3, generator=generator)
        drawn = {
            "q": q,
            "gates": gates.to(self.device, self.dtype),
            "upstream": draw(self.heads, self.dv),
        }
        for i in range(3 if self.separate else 1):
            drawn |= {f"k{i}": draw(self.num_kv_heads, self.dk), f"v{i}": draw(self.num_kv_heads, self.dv)}
        return drawn


@dataclass
class Result:
    """What a call gave, over the whole sequence, on the CPU."""

    o: Tensor
    chosen: Tensor
    lse: dict[str, Tensor]
    keys_read: dict[str, int]
    gradients: dict[str, Tensor] = field(default_factory=dict)


def attend(case: Case, own: dict[str, Tensor], context: ContextParallel) -> tuple[Tensor, nsa.Aux]:
    """A rank's own part of the forward pass."""
    sets = range(3) if case.separate else (0, 0, 0)
    k, v = ([own[f"{name}{i}"] for i in sets] for name in "kv")
    return context_parallel_attention(
        own["q"], k, v, own["gates"], case.config, mesh=context, cu_seqlens=case.documents(), scale=case.scale,
        backend=case.backend, return_aux=True,
    )  # fmt: skip


def _call(attention: Callable[..., Any], case: Case, x: dict[str, Tensor], **more: Any) -> Result:
    leaves = {name: value.clone().requires_grad_() for name, value in x.items() if name != "upstream"}
    sets = range(3) if case.separate else (0, 0, 0)
    k, v = ([leaves[f"{name}{i}"] for i in sets] for name in "kv")
    o, aux = attention(
        leaves["q"], k, v, leaves["gates"], case.config, cu_seqlens=case.documents(), scale=case.scale,
        backend=case.backend, return_aux=True, **more,
    )  # fmt: skip
    o.backward(x["upstream"])
    return Result(
        o.detach().cpu(),
        aux.block_indices.cpu(),
        {branch: lse.detach().cpu() for branch, lse in aux.lse.items()},
        {branch: int(read) for branch, read in aux.keys_read.items()},
        {name: leaf.grad.cpu() for name, leaf in leaves.items()},
    )


def one_device(case: Case) -> Result:
    return _call(nsa.nsa_attention, case, case.inputs())


def on_rank(mesh: DeviceMesh, case: Case) -> Result:
    """Work for a rank: the rank's own part of the call."""
    order = case.dealt(mesh.size())
    context = ContextParallel(mesh, order)
    own = {name: context.shard(x, order) for name, x in case.inputs().items()}
    return _call(context_parallel_attention, case, own, mesh=context)


def joined(case: Case, order: TokenOrder, parts: list[Result]) -> Result:
    """The ranks' parts as one device has them."""
    tokens = torch.cat([order.tokens(rank) for rank in range(order.ranks)])

    def join(pick: Callable[[Result], Tensor]) -> Tensor:
        rows = torch.cat([pick(part) for part in parts], 1)
        out = torch.empty_like(rows)
        out[:, tokens] = rows
        return out

    return Result(
        join(lambda part: part.o),
        join(lambda part: part.chosen),
        {branch: join(lambda part, branch=branch: part.lse[branch]) for branch in parts[0].lse},
        {branch: sum(part.keys_read[branch] for part in parts) for branch in parts[0].keys_read},
        {name: join(lambda part, name=name: part.gradients[name]) for name in parts[0].gradients},
    )
