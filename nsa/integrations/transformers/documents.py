"""What a call's masks and positions say: which tokens count, and where a document begins.

NSA is causal by construction, so no mask has to say so: `attention_mask` only tells padding from tokens. Tokens of a
padded batch are packed end to end and computed as documents that do not see one another, each from position 0, so that
padding changes neither blocks nor positions of what stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The tokens of a batch [B, S] that is padded or packed."""

    valid: Tensor
    """bool [B, S]: tokens, not padding."""
    first: Tensor
    """bool [B, S]: the first token of each document."""

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, dim] -> its N tokens [1, N, dim], and `cu_seqlens`, int32 [documents + 1]."""
        begin = self.first[self.valid].nonzero()[:, 0]
        end = begin.new_tensor([int(self.valid.sum())])
        return x[self.valid][None], torch.cat([begin, end]).to(torch.int32)

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, N, dim] -> [B, S, dim], zeros where the padding stands."""
        x = packed.new_zeros(*self.valid.shape, packed.shape[-1])
        x[self.valid] = packed[0]
        return x


def documents(attention_mask: object, position_ids: Tensor | None, tokens: Tensor) -> Documents | None:
    """What a call without a cache asks for; None where every row is one document without padding.

    Args:
        attention_mask: [B, S], nonzero for tokens; those of a row stand together.
        position_ids: [B, S] or [1, S]; a row that counts from 0 anew begins another document. Ignored for padding.
        tokens: [B, S, ...], whose sizes and device count.

    Raises ValueError or TypeError naming the argument.
    """
    size = (tokens.shape[0], tokens.shape[1])
    valid = padding_mask(attention_mask, size, tokens.device)
    positions = checked_positions(position_ids, size, tokens.device)
    if valid is None and positions is None:
        return None
    if valid is None:
        valid = torch.ones(size, dtype=torch.bool, device=tokens.device)
    first = valid & ~_before(valid)
    if positions is not None:
        first = first | (valid & (positions == 0))
    column = torch.arange(size[1], device=tokens.device)
    begin = torch.where(first, column, 0).cummax(1).values
    counted = torch.ones_like(valid) if positions is None else (positions == column - begin) | ~valid
    gapped = has_gap(valid)
    facts = torch.stack([gapped.any(), counted.all(), valid.all(), first[:, 1:].any(), valid.any()])
    gaps, well_counted, whole, several, some = facts.tolist()  # the checks wait for the device here, and only here
    if gaps:
        refuse_gaps(gapped)
    if not well_counted:
        raise ValueError(
            "position_ids must count the tokens of each sequence from 0, padding aside, and begin anew at 0 where "
            "another packed document begins"
        )
    if not some:
        raise ValueError("attention_mask must leave at least one token; got zeros only")
    return Documents(valid, first) if several or not whole else None


def padding_mask(attention_mask: object, size: tuple[int, int], device: torch.device) -> Tensor | None:
    """bool [B, T], or None where no mask came. ValueError or TypeError for another shape; gaps are not looked for."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor [B, T] or None; got {type(attention_mask).__name__}")
    if tuple(attention_mask.shape) != size:
        raise ValueError(
            f"attention_mask must say which tokens are padding, {list(size)}; got {list(attention_mask.shape)}. Other "
            "masks are not served: NSA chooses what a token sees, and is causal without one"
        )
    return attention_mask.to(device) != 0


def has_gap(valid: Tensor) -> Tensor:
    """bool [B]: the rows of a mask [B, T] whose tokens do not stand side by side."""
    return (valid & ~_before(valid)).sum(1) > 1


def refuse_gaps(gapped: Tensor) -> None:
    """ValueError naming the first row that `has_gap` found."""
    if rows := gapped.nonzero()[:, 0].tolist():
        raise ValueError(
            "attention_mask must leave the tokens of a row side by side (padding left, right or both); "
            f"row {rows[0]} has a gap"
        )


def checked_positions(position_ids: object, size: tuple[int, int], device: torch.device) -> Tensor | None:
    """int64 [B, S], or None where none came. ValueError or TypeError for another shape."""
    if position_ids is None:
        return None
    if not isinstance(position_ids, Tensor) or position_ids.is_floating_point():
        raise TypeError(f"position_ids must be an integer tensor or None; got {type(position_ids).__name__}")
    if tuple(position_ids.shape) not in (size, (1, size[1])):
        raise ValueError(f"position_ids must be {list(size)} or {[1, size[1]]}; got {list(position_ids.shape)}")
    return position_ids.to(device).expand(size).long()


def _before(valid: Tensor) -> Tensor:
    """Whether the column to the left holds a token."""
    return torch.nn.functional.pad(valid[:, :-1], (1, 0))
