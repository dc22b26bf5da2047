"""inverted-mask. Reported: "boolean masks give NaN in some PyTorch versions", cured by float masks.

Really: polarity. True means attend; the mask said what to leave out. Rows attended to the future and to what they had
not chosen, on every version; the NaN, of a last row that may attend to nothing, shows on PyTorch 2.4 and older only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.geometry import Layout
from nsa.torch_backend import selected_attention as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, proofs
from regression.detectors.calls import draw
from regression.detectors.causality import leaks
from regression.detectors.dense import per_query_head

INCIDENT = Incident(
    id="inverted-mask",
    symptom="boolean masks give NaN in some PyTorch versions",
    cause="polarity: True means attend; rows attended to the future",
    detector="other tokens from any cut on leave every row before it bit for bit",
    expects=ReproVerdict.LEAK,
    floor_s=COMPILING_S,
)


def _inverted(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The selected branch by PyTorch's attention, with a mask of what is forbidden."""
    keys, heads = torch.arange(layout.num_keys, device=q.device), q.shape[2]
    chosen = (block_indices.transpose(1, 2)[..., None] == keys // layout.config.l_sel).any(-2)
    forbidden = per_query_head(~(chosen & (keys <= layout.tokens[:, None])), heads)
    k_all, v_all = per_query_head(k, heads), per_query_head(v, heads)
    o = scaled_dot_product_attention(q.transpose(1, 2), k_all, v_all, attn_mask=forbidden, scale=scale)
    _, lse, read = healthy(q, k, v, block_indices, layout, scale)
    return o.transpose(1, 2), lse, read


def _detect(backend: str, device: str) -> Evidence:
    tokens, cuts = (20, (7,)) if interpreted(backend, device) else (40, (1, 2, 7, 20, 39))
    return Evidence(future_seen=tuple(leaks(draw(tokens, device), backend, cuts)))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("selected_attention", _inverted)


faulty, product = proofs(each_backend(_detect), inject)
