"""Does the model see what comes later? Asked of the model itself, on the run's own text.

On real text no loss is known to be too good, so the cause is looked for: later tokens are changed, and no row before
them may move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.model import DecoderLM

ALLOWED = 1e-2
"""Relative, of hidden states: rounding that falls the other way; a leak is of order 1."""


@torch.no_grad()
def leak(lm: DecoderLM, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """float32 []: the largest relative change of rows before a cut, where every token from it on is another.

    tokens int64 [B, S]. Two cuts: in the middle, where much changes, and before the last token, which a leak of one
    token reaches.
    """
    return torch.stack(
        [_moved(lm, tokens, cu_seqlens, cut) for cut in (tokens.shape[1] // 2, tokens.shape[1] - 1)]
    ).max()


def _moved(lm: DecoderLM, tokens: Tensor, cu_seqlens: Tensor | None, cut: int) -> Tensor:
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % lm.config.vocab_size
    was, now = (lm.hidden(x, cu_seqlens=cu_seqlens)[:, :cut].float() for x in (tokens, changed))
    return (was - now).norm(dim=-1).max() / was.norm(dim=-1).mean()
