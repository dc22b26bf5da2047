"""The loss of a decoder LM, in two parts that all who train share: which token is asked for, and how far off it was.

`next_tokens` is the only place where labels are shifted, `summed_cross_entropy` the only one that computes a loss.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa import checks
from nsa.config import NSAConfig

__all__ = ["IGNORED", "next_token_loss", "next_tokens", "summed_cross_entropy"]

IGNORED = -100
"""The target of a token that has no next one; cross_entropy's default ignore_index."""


def next_tokens(tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The target of each token, int64: the token at t + 1 of the same document, IGNORED at a document's end.

    tokens [B, S]; with `cu_seqlens`, int32 [N+1], B = 1 and a document may be empty.
    """
    first = checks.layout(tokens, None, NSAConfig(), cu_seqlens).positions == 0  # no token comes before these
    targets = torch.full_like(tokens, IGNORED, dtype=torch.int64)
    targets[:, :-1] = tokens.long().masked_fill(first, IGNORED)[:, 1:]
    return targets


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats summed over the targets that are not IGNORED, in at least float32: fp16 ends at 65,504.

    logits [..., vocab_size], targets int64 [...] -> [].
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def next_token_loss(logits: Tensor, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats, in at least float32: the logits at t against the token at t + 1.

    logits [B, S, vocab_size] and the same tokens [B, S] that they were made from. With `cu_seqlens` no
    document is asked for the next one's first token. ValueError for S < 2, which has no next token; NaN if
    no packed document has two tokens.
    """
    logits = checks.tensor("logits", logits, (*tokens.shape, "vocab_size"))
    if tokens.shape[1] < 2:
        raise ValueError(f"tokens must have S >= 2 for a next token; got {list(tokens.shape)}")
    vocab_size = logits.shape[2]
    known = in_vocabulary(tokens, vocab_size)
    targets = next_tokens(tokens.clamp(0, vocab_size - 1), cu_seqlens)
    loss = summed_cross_entropy(logits, targets) / (targets != IGNORED).sum()
    return torch.where(known.all(), loss, torch.nan)


def in_vocabulary(tokens: Tensor, vocab_size: int) -> Tensor:
    """Which tokens are in the vocabulary. ValueError for another on a CPU; a GPU is not waited for: NaN follows."""
    known = (tokens >= 0) & (tokens < vocab_size)
    if tokens.device.type == "cpu" and not known.all():
        raise ValueError(f"tokens must be between 0 and {vocab_size - 1}; got {tokens[~known][0].item()}")
    return known
