"""equal-scores-when-long. Reported of mlx-lm (#1454): the needle is found 0 times of 5 at 128k tokens.

What happened: the scores of the choice are all zero, or all equal. Of a long text the sum of exponentials leaves the
range of float16, every probability is something by infinity, and the choice is the first n blocks: for every query the
same, and without the one that it asks for. Short texts show nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

import nsa
from nsa import NSAConfig
from nsa.geometry import Layout
from regression.contract import Bound, Evidence, Incident, ReproVerdict
from regression.detectors import dense, selection
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, proofs

INCIDENT = Incident(
    id="equal-scores-when-long",
    symptom="needle 0 of 5 at 128k",
    cause="scores leave float16's range and are all equal: the choice is the first n blocks",
    detector="share of the probability mass that the choice holds, at length; choices are not a constant",
    expects=ReproVerdict.WRONG,
    fires=("error", "wrong"),
    floor_s=COMPILING_S,
)
CONFIG = NSAConfig()
"""The paper's: 128k tokens are 8191 compressed blocks, of which 16 times 4 can be chosen."""
FULL_TOKENS, FEW_TOKENS = 131072, 8192
"""The reference takes a Python step for each pair of blocks, and the interpreter one for each tile."""
NEEDLES = 0.11, 0.3, 0.52, 0.71, 0.93
"""Where they stand, as shares of the text."""
ASKS = 12.0
"""Score of the blocks that a query asks for, which have most of the mass; those of the others are about 0."""
LOST_MASS = 1e-3


@dataclass(frozen=True)
class Text:
    """Queries, the last of T keys, each of which asks for another needle."""

    q: Tensor
    """[1, 5, Hq, D]."""
    k: Tensor
    """[1, T, 1, D]."""
    blocks: list[int]
    """The selection block that holds the needle of each query."""


def _text(tokens: int, device: str) -> Text:
    generator, size = torch.Generator().manual_seed(0), 32
    k = torch.randn(1, tokens, 1, size, generator=generator)
    wanted = torch.nn.functional.normalize(torch.randn(len(NEEDLES), size, generator=generator), dim=-1)
    blocks = [int(share * tokens) // CONFIG.l_sel for share in NEEDLES]
    for block, direction in zip(blocks, wanted, strict=True):  # as long as the block, so that its mean is the needle
        k[0, block * CONFIG.l_sel : (block + 1) * CONFIG.l_sel, 0] = 6 * direction
    q = wanted[None, :, None].expand(1, -1, 2, -1) * (ASKS / 6 * size**0.5)
    return Text(q.contiguous().to(device), k.to(device), blocks)


def _in_float16(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """A softmax without its maximum taken off, in float16."""
    seen = torch.arange(k_cmp.shape[1], device=q.device) < layout.compressed_interval[1][:, None]
    weights = dense.scores(q.detach(), k_cmp.detach(), scale).exp().half() * seen
    p = (weights / weights.sum(-1, keepdim=True)).float().nan_to_num(0.0)
    p = p.unflatten(1, (k_cmp.shape[2], -1)).sum(2).transpose(1, 2)
    begun, forced = selection.candidates(layout)
    offsets = torch.arange(begun.shape[-1], device=q.device) * (layout.config.l_sel // layout.config.d)
    score = torch.nn.functional.pad(p, (0, max(int(offsets[-1]) + 1 - p.shape[-1], 0)))[..., offsets]
    score = score.masked_fill(forced, torch.inf).masked_fill(~begun, -torch.inf)
    return selection.best(score, layout.config.n_sel)


def _mass(text: Text, k_cmp: Tensor) -> Tensor:
    """float64 [5, selection blocks]: each block's score (Eq. 9) of queries that see every compressed block.

    A compressed block is two strides, and adds its probability to the selection block of each.
    """
    p = dense.scores(text.q.double(), k_cmp.double(), text.q.shape[-1] ** -0.5).softmax(-1).sum(1)[0]
    per_block, stride = CONFIG.l_sel // CONFIG.d, torch.arange(p.shape[1], device=p.device)
    mass = p.new_zeros(p.shape[0], -(-text.k.shape[1] // CONFIG.l_sel))
    return mass.index_add_(1, stride // per_block, p).index_add_(1, (stride + 1) // per_block, p)


def _detect(backend: str, device: str) -> Evidence:
    slow = backend == "reference" or interpreted(backend, device)
    text = _text(FEW_TOKENS if slow else FULL_TOKENS, device)
    tokens = text.k.shape[1]
    k_cmp = nsa.compress(text.k, CONFIG, backend=backend)
    chosen = nsa.select_blocks(text.q, k_cmp, CONFIG, tokens, backend=backend)[0, :, 0].long()
    wrong = []
    found = sum(block in row for block, row in zip(text.blocks, chosen.tolist(), strict=True))
    if found < len(text.blocks):
        wrong.append(f"{backend}: {found} of {len(text.blocks)} needles are in the choice of {tokens} tokens")
    if len({tuple(row) for row in chosen.tolist()}) == 1:
        wrong.append(f"{backend}: every query of {tokens} tokens chooses the same blocks")
    mass = _mass(text, k_cmp)
    best = mass.topk(CONFIG.n_sel - 3).values.sum(-1)  # beside three that are forced
    held = mass.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0).sum(-1)
    lost = float((1 - held / best).max())
    return Evidence(
        wrong=tuple(wrong),
        error=Bound(lost, LOST_MASS, "of the best blocks' mass is not in the choice"),
        notes=(f"{backend}: {1 - lost:.4f} of the best blocks' mass, at {tokens} tokens",),
    )


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("select_blocks", _in_float16)


faulty, product = proofs(each_backend(_detect), inject)
