"""Rotary position embedding (RoFormer, arXiv 2104.09864), applied to queries and keys before phi.

Channel i is paired with channel i + D//2 (the two halves). Of an odd head size the largest even part is
rotated and the last channel is left as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa import backends, checks


def rotation(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every position's angles, float64 [..., head_dim // 2]; positions are integers [S] or [B, S].

    The angles are float64 because a float32 angle of 65,536 radians is off by 0.004 already.
    """
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.is_floating_point():
        came = (
            f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        raise ValueError(f"positions must be an integer tensor of shape [S] or [B, S]; got {came}")
    pairs = head_dim // 2
    exponents = torch.arange(pairs, dtype=torch.float64, device=positions.device) / max(pairs, 1)
    angles = positions.double()[..., None] * torch.pow(base, -exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, S, H, D] by `rotation`'s angles, in float32 (float64 for float64), returned in x's dtype."""
    x = checks.tensor("x", x, ("B", "S", "H", "D"))
    pairs = x.shape[-1] // 2
    wanted = (x.shape[1], pairs)
    if any(table.shape not in (wanted, (x.shape[0], *wanted)) for table in cos_sin):
        raise ValueError(
            f"cos and sin must have shape {list(wanted)}, or that for each row of the batch; "
            f"got {[list(table.shape) for table in cos_sin]}"
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = (table.to(wide.dtype)[..., None, :] for table in cos_sin)  # [S or B, S, 1, pairs]
    first, second, rest = wide.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def rotate_both(
    q: Tensor, k: Tensor, positions: Tensor | None, base: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`rotate` of queries [B, S, Hq, D] and keys [B, S, Hk, D], which stand at `positions`, or at 0, 1, ... if None.

    By one kernel where the backend that serves them has one, in a graph of torch.compile too: Inductor computes the
    angles of what is here, in float64, anew for each head.
    """
    _, run = backends.choose(backend, q, k)
    if (rotator := backends.rotator(run)) is not None:
        return rotator(q, k, positions, base)
    positions = torch.arange(q.shape[1], device=q.device) if positions is None else positions
    cos_sin = rotation(positions, q.shape[-1], base)
    return rotate(q, cos_sin), rotate(k, cos_sin)
