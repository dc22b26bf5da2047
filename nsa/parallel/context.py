"""One rank among those that share a sequence: its part of tensors, and the plan of each sequence, made once."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa.config import NSAConfig
from nsa.parallel import order as orders
from nsa.parallel.order import TokenOrder
from nsa.parallel.plan import GRID, KEYS_FROM_DOCUMENT, Plan

PLANS = 4
"""Plans that are kept: of the batches of an accumulation, and of a validation."""


class ContextParallel:
    """The ranks of a mesh that share each sequence.

    Args:
        mesh: of one dimension; of a mesh of several, the one that sequences are spread over: `mesh["context"]`.
        order: who holds which tokens; None for `head_tail`, and `deal_documents` for packed documents.

    Raises TypeError or ValueError naming the argument, what came and what is wanted.
    """

    def __init__(self, mesh: DeviceMesh, order: TokenOrder | None = None) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh; got {type(mesh).__name__}")
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one dimension, over which sequences are spread; got {mesh.ndim} dimensions: pass one "
                "of them, as in mesh['context']"
            )
        self.group = mesh.get_group()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if order is not None and order.ranks != self.ranks:
            raise ValueError(f"order must be of the {self.ranks} ranks of the mesh; got one of {order.ranks}")
        self.given_order = order
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._last_documents: tuple[Tensor, int, tuple[int, ...]] | None = None

    def order(self, num_tokens: int, config: NSAConfig, cu_seqlens: Tensor | Sequence[int] | None = None) -> TokenOrder:
        """Who holds which of `num_tokens` tokens, the same on every rank."""
        if self.given_order is not None:
            if self.given_order.num_tokens != num_tokens:
                raise ValueError(f"order must be of {num_tokens} tokens; got one of {self.given_order.num_tokens}")
            return self.given_order
        bounds = self.documents(cu_seqlens)
        if bounds is None:
            if num_tokens % self.ranks:
                raise ValueError(
                    f"{num_tokens} tokens are no multiple of the {self.ranks} ranks, so that no rank could tell how "
                    f"many there are: give order=head_tail({num_tokens}, {self.ranks})"
                )
            return orders.head_tail(num_tokens, self.ranks)
        return _dealt(bounds, self.ranks, config)

    def documents(self, cu_seqlens: Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
        """The bounds of the documents on the host; one tensor is read once, however many layers ask."""
        if cu_seqlens is None:
            return None
        if not isinstance(cu_seqlens, Tensor):
            return tuple(cu_seqlens)
        version = _version(cu_seqlens)
        known = self._last_documents
        if known is None or known[0] is not cu_seqlens or known[1] != version or version < 0:
            if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
                came = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
                raise TypeError(f"cu_seqlens must be int32 of shape [N+1]; got {came}")
            bounds = tuple(cu_seqlens.tolist())
            if len(bounds) < 2 or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
                raise ValueError(f"cu_seqlens must ascend from 0; got {list(bounds[:8])}")
            self.remember(cu_seqlens, bounds)
            return bounds
        return known[2]

    def remember(self, cu_seqlens: Tensor, bounds: tuple[int, ...]) -> None:
        """`cu_seqlens` holds these bounds: a tensor on a GPU need not be read then, which would wait for it."""
        self._last_documents = cu_seqlens, _version(cu_seqlens), bounds

    def shard(self, x: Tensor, order: TokenOrder, dim: int = 1) -> Tensor:
        """This rank's rows of x along `dim`, which has all tokens of the sequence."""
        if x.shape[dim] != order.num_tokens:
            raise ValueError(f"x must have {order.num_tokens} tokens in dimension {dim}; got {x.shape[dim]}")
        return x.index_select(dim, order.tokens(self.rank).to(x.device))

    def unshard(self, x: Tensor, order: TokenOrder) -> Tensor:
        """The inverse on every rank, without gradients: x [B, S, …] of each -> [B, T, …]."""
        rows = [order.tokens(rank) for rank in range(order.ranks)]
        plan = Plan(order, self.group, self.rank, NSAConfig(), x.device, 1, False)
        self.fits("x", x, rows[self.rank].numel())
        flat = x.detach().reshape(*x.shape[:2], 1, -1)
        return plan.tokens_gather.start(flat).wait().reshape(x.shape[0], -1, *x.shape[2:])

    def plan(self, x: Tensor, config: NSAConfig, cu_seqlens: Tensor | None, backend: str, *, name: str = "x") -> Plan:
        """The plan for this rank's part of a sequence, x [B, S, …].

        At the first call for an order and documents all ranks compare theirs. Raises ValueError naming the rank and
        the tensor that do not fit.
        """
        bounds = self.documents(cu_seqlens)
        total = bounds[-1] if bounds is not None else self._total(x.shape[1])
        order = self.order(total, config, bounds)
        if bounds is not None and x.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs one packed row, B = 1; got B = {x.shape[0]} on rank {self.rank}")
        self.fits(name, x, order.length(self.rank))
        key = order, bounds, config, backend, x.device, x.shape[0], x.shape[2:], x.dtype
        plan = self._plans.get(key)
        if plan is None:
            self._compare(
                {"order": order, "cu_seqlens": bounds, "config": config, f"shape and dtype of {name}": key[5:]}
            )
            grid, from_document = GRID.get(backend, 1), KEYS_FROM_DOCUMENT.get(backend, False)
            plan = Plan(order, self.group, self.rank, config, x.device, grid, from_document, bounds)
            self._plans[key] = plan
            while len(self._plans) > PLANS:
                self._plans.popitem(last=False)
        return plan

    def _total(self, own: int) -> int:
        """Tokens of a sequence without documents of which this rank holds `own`."""
        return self.given_order.num_tokens if self.given_order is not None else own * self.ranks

    def fits(self, name: str, x: Tensor, tokens: int) -> None:
        if x.shape[1] != tokens:
            raise ValueError(
                f"{name} must hold the {tokens} tokens of rank {self.rank} of {self.ranks}; got {x.shape[1]}: "
                "ContextParallel.shard cuts a tensor as the order says"
            )

    def _compare(self, values: dict[str, object]) -> None:
        """ValueError on every rank, naming those that differ from rank 0 and what differs."""
        digests = [int.from_bytes(hashlib.sha256(repr(x).encode()).digest()[:7], "big") for x in values.values()]
        mine = torch.tensor(digests, dtype=torch.int64)
        if dist.get_backend(self.group) == "nccl":
            mine = mine.cuda()
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine, group=self.group)
        table = torch.stack(every).tolist()
        for i, name in enumerate(values):
            if differing := [rank for rank in range(self.ranks) if table[rank][i] != table[0][i]]:
                raise ValueError(f"{name} must be the same on all ranks; rank {differing[0]} has another than rank 0")


@functools.lru_cache(maxsize=PLANS)
def _dealt(bounds: tuple[int, ...], ranks: int, config: NSAConfig) -> TokenOrder:
    """`deal_documents`, once for all layers."""
    return orders.deal_documents(bounds, ranks, config)


def _version(x: Tensor) -> int:
    """How often x was written to in place; -1 where PyTorch does not count it."""
    return -1 if x.is_inference() else x._version


def as_context(mesh: DeviceMesh | ContextParallel, order: TokenOrder | None) -> ContextParallel:
    """The ranks of a mesh, or those that are given already."""
    return mesh if isinstance(mesh, ContextParallel) else ContextParallel(mesh, order)
