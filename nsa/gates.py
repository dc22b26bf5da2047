"""The gates of Eq. 5: how much of each branch a query head takes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Gates(nn.Module):
    """A linear map and a sigmoid: x [B, S, dim] -> gates [B, S, Hq, 3] in the order compressed, selected, window.

    A sigmoid lets the branches add up to anything between 0 and 3; a softmax would make them compete.
    """

    def __init__(
        self, dim: int, num_heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, num_heads * 3, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits.sigmoid().unflatten(-1, (-1, 3))
