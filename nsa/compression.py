"""phi: one key (value) for each compression block (Eq. 7), with or without weights.

Each module maps x [B, T, H, D] to [B, blocks, H, D] in the rows of `nsa.compress`: with `cu_seqlens` the
blocks of all documents stand end to end in T // d rows whose unused tail is zero. The heads share the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from nsa import attention, checks
from nsa.config import NSAConfig
from nsa.geometry import Layout


def compressor(
    config: NSAConfig,
    head_dim: int,
    *,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The module for `config.phi`; keys and values take one each. `backend` is who computes the mean."""
    if config.phi == "avg":
        return MeanCompression(config, backend)
    learned = {"linear": LinearCompression, "mlp": MLPCompression}[config.phi]
    return learned(config, head_dim, device=device, dtype=dtype)


class MeanCompression(nn.Module):
    """phi = avg: the mean of the block, without weights."""

    def __init__(self, config: NSAConfig, backend: str = "auto") -> None:
        super().__init__()
        self.config, self.backend = config, backend

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return attention.compress(x, self.config, cu_seqlens=cu_seqlens, backend=self.backend)


class LinearCompression(nn.Module):
    """phi = linear: one map from the l·D numbers of a block to D. It starts as the mean."""

    def __init__(
        self,
        config: NSAConfig,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.linear = nn.Linear(config.l * head_dim, head_dim, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Be the mean again, as a new module is; for weights made on the meta device, shards of FSDP2 among them."""
        weight: Tensor = self.linear.weight
        mean = torch.eye(self.head_dim).repeat(1, self.config.l) / self.config.l
        if hasattr(weight, "device_mesh"):
            from torch.distributed.tensor import DTensor, distribute_tensor  # here: few need it, and it takes a while

            shards = cast(DTensor, weight)
            mean = distribute_tensor(mean.to(shards.device), shards.device_mesh, shards.placements)
        with torch.no_grad():
            weight.copy_(mean)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return _compress(self._phi, x, self.head_dim, self.config, cu_seqlens)

    def _phi(self, blocks: Tensor) -> Tensor:
        compressed: Tensor = self.linear(blocks.flatten(-2))
        return compressed


class MLPCompression(nn.Module):
    """phi = mlp, the paper's (section 3.3.1): a position embedding inside the block, then an MLP.

    l·D -> 2·D -> D with GELU; the paper names no hidden size, 2·D is chosen here.
    The last map has no bias: the same vector added to every key moves no softmax, so it would never be trained.
    """

    def __init__(
        self,
        config: NSAConfig,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.position = nn.Parameter(torch.empty(config.l, head_dim, device=device, dtype=dtype))
        self.reset_parameters()
        self.mlp = nn.Sequential(
            nn.Linear(config.l * head_dim, 2 * head_dim, device=device, dtype=dtype),
            nn.GELU(),
            nn.Linear(2 * head_dim, head_dim, bias=False, device=device, dtype=dtype),
        )

    def reset_parameters(self) -> None:
        """Draw the position embedding anew; for weights that were made on the meta device."""
        nn.init.normal_(self.position, std=0.02)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return _compress(self._phi, x, self.head_dim, self.config, cu_seqlens)

    def _phi(self, blocks: Tensor) -> Tensor:
        compressed: Tensor = self.mlp((blocks + self.position).flatten(-2))
        return compressed


def _compress(
    phi: Callable[[Tensor], Tensor], x: Tensor, head_dim: int, config: NSAConfig, cu_seqlens: Tensor | None
) -> Tensor:
    """Apply phi [B, blocks, H, l, D] -> [B, blocks, H, D] to the blocks of x [B, T, H, D], in x's dtype."""
    x = checks.tensor("x", x, ("B", "T", "H", head_dim))
    layout = checks.layout(x, None, config, cu_seqlens)
    x = checks.packed(x, layout)
    if cu_seqlens is None:
        return phi(_blocks(x, layout)).to(x.dtype)
    blocks, used = _packed_blocks(x, layout)
    return phi(blocks).masked_fill(~used[:, None, None], 0).to(x.dtype)


def _blocks(x: Tensor, layout: Layout) -> Tensor:
    """View x [B, T, H, D] as its overlapping blocks [B, blocks, H, l, D]."""
    if layout.num_slots == 0:
        # an empty view of x, so that phi and what made x still get a (zero) gradient
        return x[:, :0, :, None].expand(-1, -1, -1, layout.config.l, -1)
    return x.unfold(1, layout.config.l, layout.config.d).mT


def _packed_blocks(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The blocks of every document [1, slots, H, l, D], and which slots hold one, bool [slots].

    An unused slot is filled with zeros before phi, lest a NaN in token 0 reach phi's weights through it.
    """
    first, used = layout.slot_tokens
    tokens = first[:, None] + torch.arange(layout.config.l, device=x.device)  # [slots, l]
    blocks = x[:, tokens.clamp(max=layout.num_keys - 1)].transpose(2, 3)
    return blocks.masked_fill(~used[:, None, None, None], 0), used
