"""Rotary position embedding (RoFormer, arXiv 2104.09864), applied to queries and keys before phi.

Channel i is paired with channel i + D//2 (the two halves). Of an odd head size the largest even part is
rotated and the last channel is left as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa import backends, checks


def frequencies(pairs: int, base: float, device: torch.device) -> Tensor:
    """float64 [pairs]: by how much each pair of channels turns from one position to the next, radians."""
    exponents = torch.arange(pairs, dtype=torch.float64, device=device) / max(pairs, 1)
    return torch.pow(base, -exponents)


def rotation(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every position's angles, float64 [..., head_dim // 2]; positions are integers [S] or [B, S].

    The angles are float64 because a float32 angle of 65,536 radians is off by 0.004 already.
    """
    _check_positions(positions)
    angles = positions.double()[..., None] * frequencies(head_dim // 2, base, positions.device)
    return angles.cos(), angles.sin()


def _check_positions(positions: object) -> None:
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.is_floating_point():
        came = (
            f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        raise ValueError(f"positions must be an integer tensor of shape [S] or [B, S]; got {came}")


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
    """`rotate` of queries [B, S, Hq, D] and keys [B, S, Hk, D].

    `positions`: integers [S] or [B, S], where the tokens stand; None for 0, 1, ... A backend's own kernel serves where
    it has one, in a graph of torch.compile too: Inductor computes the angles of what is here anew for each head.

    Raises ValueError or TypeError naming the argument, what came and what is wanted.
    """
    q = checks.tensor("q", q, ("B", "S", "Hq", "D"))
    k = checks.tensor("k", k, (*q.shape[:2], "Hk", q.shape[3]), like=q)
    if positions is not None:
        _check_positions(positions)
        if positions.shape not in (q.shape[1:2], q.shape[:2]) or positions.device != q.device:
            raise ValueError(
                f"positions must have shape [{q.shape[1]}] or {list(q.shape[:2])} and be on {q.device}, as q;"
                f" got {list(positions.shape)} on {positions.device}"
            )
    _, run = backends.choose(backend, q, k)
    if (rotator := backends.rotator(run)) is not None:
        return rotator(q, k, positions, _kept_frequencies(q.shape[3] // 2, base, q.device))
    positions = torch.arange(q.shape[1], device=q.device) if positions is None else positions
    cos_sin = rotation(positions, q.shape[-1], base)
    return rotate(q, cos_sin), rotate(k, cos_sin)


_FREQUENCIES: dict[tuple[int, float, torch.device], Tensor] = {}
"""By the arguments of `frequencies`."""


def _kept_frequencies(pairs: int, base: float, device: torch.device) -> Tensor:
    """`frequencies`, computed once; anew in a graph, to whose memory a tensor belongs that is made in it."""
    if torch.compiler.is_compiling():
        return frequencies(pairs, base, device)
    key = pairs, base, device
    if (found := _FREQUENCIES.get(key)) is not None:
        return found
    found = frequencies(pairs, base, device)
    if type(found) is not Tensor or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return found
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # for other streams, which do not wait for this one
    _FREQUENCIES[key] = found
    return found
