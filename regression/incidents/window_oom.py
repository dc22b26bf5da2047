"""window-oom. Reported: a 3 GB tensor in the sliding fallback at S 1024, cured by shorter sequences.

Really: the keys were repeated once per query, where each query needs w of them: 1024 · 1024 keys of 12 heads of 64
channels are 3 GiB in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend import window_attention as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors import memory
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, proofs, worst

INCIDENT = Incident(
    id="window-oom",
    symptom="3 GB tensor in the sliding fallback at S 1024",
    cause="keys repeated per query",
    detector="the peak of a forward and backward grows with S, not with S²",
    expects=ReproVerdict.OUT_OF_MEMORY,
    floor_s=COMPILING_S,
)


def _keys_per_query(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Each query as a batch row of its own, with all the keys."""
    (batch, queries, heads, _), (num_keys, kv_heads) = q.shape, k.shape[1:3]
    keys, vals = (x.repeat_interleave(queries, 0) for x in (k, v))  # [B·S, T, Hkv, D]
    rows = q.reshape(batch * queries, kv_heads, heads // kv_heads, -1)
    s = torch.einsum("bhgd,bthd->bhgt", rows, keys) * scale
    token = torch.arange(num_keys, device=q.device)
    seen = (token <= layout.tokens[:, None]) & (token > layout.tokens[:, None] - layout.config.w)
    s = s.masked_fill(~seen.repeat(batch, 1)[:, None, None], -torch.inf)
    o = torch.einsum("bhgt,bthd->bhgd", s.softmax(-1), vals)
    _, lse, read = healthy(q, k, v, layout, scale)
    return o.reshape(batch, queries, heads, -1), lse, read


def _detect(backend: str, device: str) -> Evidence:
    """The window everywhere; the whole call where memory is a promise, which of the reference it is not."""
    found = [memory.peak_growth("window", backend, device)]
    if backend != "reference" and not interpreted(backend, device):
        found.append(memory.peak_growth("whole", backend, device))
    return Evidence(memory=worst(found))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("window_attention", _keys_per_query)


faulty, product = proofs(each_backend(_detect), inject)
