"""square-mask. Reported: "S×S tensor explosion", avoided by short sequences.

Really: the selected branch wrote its choice out as a mask [B, G, S, S] in float32, and then once more to add it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nsa.config import BRANCHES
from nsa.geometry import Layout
from nsa.torch_backend import selected_attention as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors import dense, memory
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, proofs, worst

INCIDENT = Incident(
    id="square-mask",
    symptom="S×S tensor explosion",
    cause="[B, G, S, S] masks in float32, twice",
    detector="no tensor of a forward and backward grows with S²",
    expects=ReproVerdict.OUT_OF_MEMORY,
    floor_s=COMPILING_S,
)


def _square(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair of a query and a key has a place in the mask."""
    keys = torch.arange(layout.num_keys, device=q.device)
    allowed = torch.zeros(q.shape[0], k.shape[2], layout.num_queries, layout.num_keys, device=q.device)
    for chosen in block_indices.transpose(1, 2).unbind(-1):
        allowed = torch.where(chosen[..., None] == keys // layout.config.l_sel, 1.0, allowed)
    allowed = allowed * (keys <= layout.tokens[:, None])
    added = allowed.log().repeat_interleave(q.shape[2] // k.shape[2], 1)  # 0, or -inf for what is not allowed
    p = (dense.scores(q, k, scale) + added).softmax(-1)
    _, lse, read = healthy(q, k, v, block_indices, layout, scale)
    return dense.outputs(p, v), lse, read


def _detect(backend: str, device: str) -> Evidence:
    return Evidence(memory=worst([memory.largest_growth(branch, backend, device) for branch in BRANCHES]))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("selected_attention", _square)


faulty, product = proofs(each_backend(_detect), inject)
